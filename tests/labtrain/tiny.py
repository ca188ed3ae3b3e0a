"""The small run that tests of the trainer and of checkpoints share."""

from contextlib import nullcontext
from itertools import groupby
from unittest.mock import patch

from labkit.groups import init_groups
from labtrain import TrainConfig

TINY = TrainConfig(
    steps=10, batch_size=8, micro_batch_size=2, seq_length=8, hidden_size=16, num_attention_heads=8, num_layers=4,
    precision="float64", warmup_steps=3, learning_rate=0.01, min_learning_rate=0.001, eval_interval=5,
)  # fmt: skip
TODAY = dict(norm="rmsnorm", mlp="swiglu", positions="rope", num_query_groups=4, bias=False, tied=False)
"""What makes it a model of today instead of GPT-2's form."""


def numbers(all_steps):
    """What must be the same in every layout."""
    return [value for step in all_steps for value in (step.loss, step.grad_norm, step.evaluation_loss or 0.0)]


def one_after_the_other(function, calls):
    """On a rank: the results of a function for several arguments, whose first one is a config; all have one layout.

    Process groups are made once: that takes longer than two steps of a tiny model.
    """
    results, groups = [], None

    def init_once(layout, shard_size=None):
        nonlocal groups
        groups = groups or init_groups(layout, shard_size)
        return nullcontext(groups)

    with patch("labtrain.trainer.init_groups", init_once):
        for args in calls:
            try:
                results.append(function(*args))
            except Exception as error:
                raise RuntimeError(f"{args[0]}: {error}") from error
    if groups is not None:
        groups.close()
    return results


def in_few_launches(on_ranks, function, runs):
    """Yield each of ``runs`` (world size, arguments, whatever) with the results of all ranks, layout by layout."""

    def layout_of(run):
        world_size, (config, *_), _ = run
        return world_size, repr(config.layout(world_size)), str(config.shard_size)

    for (world_size, *_), same in groupby(sorted(runs, key=layout_of), layout_of):
        same = list(same)
        for few in (same[start : start + 20] for start in range(0, len(same), 20)):
            ranks = on_ranks(one_after_the_other, function, [args for _, args, _ in few], world_size=world_size)
            yield from zip(few, zip(*ranks))
