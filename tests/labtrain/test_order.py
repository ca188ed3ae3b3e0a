"""All ranks of a group call the same collectives in the same order; and a run in which they do not is found.

`test_experts` looks at this too, in all its runs. These have options that it lacks.
"""

from dataclasses import replace

import pytest
import torch.distributed as dist

from labkit.data_parallel import DataParallel
from labtrain import train
from tests.labtrain.test_experts import BALANCES, MOE
from tests.labtrain.tiny import in_few_launches
from tests.support.collectives import check_order, recorded

pytestmark = pytest.mark.gloo  # what records the calls hears torch's own groups only

BASE = replace(MOE, steps=2, eval_interval=2, num_layers=2, ep_size=2, micro_batch_size=1, **BALANCES["global"])
RUNS = [
    dict(zero_stage=3, recompute="full", dropout=0.1, async_save=True),
    dict(zero_stage=2, capacity_factor=0.5, moe_layer_freq=2, precision="bfloat16"),
    dict(tp_size=2, expert_tp_size=1, sequence_parallel=True, dropout=0.1, async_save=True),
    dict(cp_size=2, context_parallel="ulysses", zero_stage=3),
    dict(pp_size=2, schedule="v-min", num_layers=4, zero_stage=1, recompute="full", expert_bias_update_rate=0.1),
]


def calls_of(config):
    with recorded() as calls:
        train(config)
    return calls


def test_every_rank_calls_the_same_collectives(on_ranks, tmp_path):
    saved = [dict(checkpoint_dir=str(tmp_path / str(number)), save_interval=1) for number in range(len(RUNS))]
    runs = [(4, [replace(BASE, **(options | where))], options) for options, where in zip(RUNS, saved)]
    for *_, ranks in in_few_launches(on_ranks, calls_of, runs):
        check_order(ranks)


def late_on_the_first(config):
    """On rank 0 all buckets leave after backward: gloo runs that, and the numbers are right."""
    right = DataParallel.__init__

    def init(self, *args, **options):
        right(self, *args, **options, overlap=dist.get_rank() > 0)

    init.__kwdefaults__, DataParallel.__init__ = right.__kwdefaults__, init
    try:
        return calls_of(config)
    finally:
        DataParallel.__init__ = right


def test_buckets_that_leave_later_on_one_rank_are_found(on_ranks):
    ranks = on_ranks(late_on_the_first, BASE, world_size=4)
    with pytest.raises(AssertionError, match=r"ranks wait for each other in a circle: .*all_to_all.*all_reduce"):
        check_order(ranks)


@pytest.mark.parametrize(("ranks", "says"), [
    (["ab", "ba"], "call 0 of group 0"),
    (["aba", "ab"], "calls of group 0 .*: {2, 3}"),
    (["ab", ""], "group 0 of ranks .* is used by ranks .0."),
])  # fmt: skip
def test_what_nccl_would_mistake_is_found(ranks, says):
    def calls(text):
        return [(1, ("0", (0, 1)), f"all_reduce {letter}", ()) for letter in text]

    check_order([calls("abc"), calls("abc")])
    with pytest.raises(AssertionError, match=says):
        check_order([*map(calls, ranks)])
