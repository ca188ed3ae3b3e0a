"""Training on any number of ranks, in any layout: at each step the loss and the gradient norm of one process.

`make test` runs each layout and each option at least once, `make sweep-layouts` every two options together.
"""

from dataclasses import replace
from itertools import combinations, product
from math import prod

import pytest
import torch

from course.stream import stream
from labkit.launch import World
from labkit.parallel_config import SCHEDULES, V_SHAPED
from labtrain import steps, train, training
from tests.labtrain.layouts import compare, drawn, in_few_launches
from tests.labtrain.tiny import SHORT, TINY, TODAY, numbers
from tests.support.plain import train_plainly
from tests.support.sweep import IS_SWEEP

# -- one process, against torch alone ----------------------------------------------------------------------------------


@pytest.mark.parametrize("clip_norm", [0.0, 0.7, 100.0])
def test_one_process_trains_as_torch_does(on_ranks, clip_norm):
    config = replace(TINY, clip_norm=clip_norm)
    expected, _ = train_plainly(config)
    assert numbers(on_ranks(train, config, world_size=1)[0]) == pytest.approx(expected, rel=1e-10, abs=0)
    norms = expected[1::3]
    assert all(norm > 0.7 for norm in norms[:3]), "0.7 would clip nothing"
    assert expected[0] - expected[-3] > 0.2, "nothing was learned"


# -- every layout, against one process ---------------------------------------------------------------------------------

LAYOUTS = [  # of dp, tp, cp and pp; eight ranks share two cores
    sizes
    for sizes in product((1, 2, 4, 8), repeat=4)
    if prod(sizes) <= 4 or (prod(sizes) == 8 and (IS_SWEEP or max(sizes) == 2))
]
VARIED = ("schedule", "batch_size", "micro_batch_size", "zero_stage", "shard_size", "sequence_parallel", "recompute")
VARIED += ("precision", "tied", "context_parallel", "zigzag", "order")


def draw(choose):
    """A run of random options; those that mean nothing in its layout keep their defaults."""
    sizes = choose(LAYOUTS)
    dp_size, tp_size, cp_size, pp_size = sizes
    is_large = prod(sizes) == 8
    schedule = choose(["1f1b", "interleaved"] if is_large else [*SCHEDULES]) if pp_size > 1 else "1f1b"
    num_chunks = 2 if schedule in ("interleaved", *V_SHAPED) else 1
    batch_size, micro_batch_size = choose([(8, 2)] if is_large else [(8, 2), (8, 4), (12, 2)])
    options = dict(
        tp_size=tp_size,
        cp_size=cp_size,
        pp_size=pp_size,
        order=choose(["tp-cp-dp-pp", "tp-cp-dp-pp", "pp-dp-cp-tp"]),
        schedule=schedule,
        num_chunks=num_chunks,
        num_layers=num_chunks * pp_size if is_large else 2 * pp_size,
        batch_size=batch_size,
        micro_batch_size=micro_batch_size,
        recompute=choose(["none", "full"]),
        precision=choose(["float64", "float64", "float32"]),
    )
    if tp_size > 1:
        options |= dict(sequence_parallel=choose([False, True]))
    if dp_size * cp_size > 1:
        zero_stage = choose([0, 1, 2, 3])
        options |= dict(zero_stage=zero_stage, shard_size=choose([None, 2]) if zero_stage else None)
    if cp_size > 1:
        options |= dict(context_parallel=choose(["ring", "ulysses", "all_gather"]), zigzag=choose([False, True]))
    return prod(sizes), replace(SHORT, **options, **choose([{}, TODAY]))


def parts(world_size, config):
    found = {(name, getattr(config, name)) for name in VARIED}
    found.add((world_size, config.tp_size, config.cp_size, config.pp_size))
    return found | {*combinations(sorted(found, key=str), 2)} if IS_SWEEP else found


MORE = [
    (1, dict(schedule="interleaved", num_chunks=2)),  # one rank has the first stage and the last
    *((2, dict(schedule="interleaved", num_chunks=2, zero_stage=stage)) for stage in range(4)),
    # Layers are computed once more for the gradients of the weights, when their backward seems to be over
    (4, dict(pp_size=2, schedule="zero-bubble", zero_stage=1, recompute="full")),
]


def test_every_layout(on_ranks):
    chosen = [*drawn(draw, parts, num_tried=20_000 if IS_SWEEP else 600)]
    sizes = {(config.layout(n).dp_size, config.tp_size, config.cp_size, config.pp_size) for n, config in chosen}
    assert sizes == {*LAYOUTS}
    more = [(world_size, replace(SHORT, **options)) for world_size, options in MORE]
    compare(on_ranks, [*chosen, *more], with_tensors=False)


UNEVEN = [  # with the layers of each rank, chunk by chunk
    (dict(pp_size=2, stage_layers=(1, 4)), [["0"], ["1234"]]),
    (dict(pp_size=2, first_stage_layers=2, schedule="zero-bubble", zero_stage=1, **TODAY), [["01"], ["234"]]),
    (dict(pp_size=2, stage_layers=(1, 2, 1, 1), schedule="zero-bubble-v", recompute="full"), [["0", "4"], ["12", "3"]]),
    (
        dict(pp_size=2, first_stage_layers=2, schedule="interleaved", num_chunks=2, zero_stage=3),
        [["01", "3"], ["2", "4"]],
    ),
    (dict(pp_size=4, account_for_loss_in_pipeline_split=True, micro_batch_size=1), [["0"], ["12"], ["3"], ["4"]]),
]


def held(config):
    """On a rank: the layers of its chunks, which of them have parameters of the vocabulary, and how many are tied."""
    with training(config) as trainer:
        layers = ["".join(model.layers) for model in trainer.models]
        parameters = [named for model in trainer.models for named in model.named_parameters()]
        vocabulary = [name for name, value in parameters if value.shape[:1] == (config.shape.vocab_size,)]
        return trainer.groups.coords.pp, layers, vocabulary, len(trainer.tied)


@pytest.mark.nccl_rules
def test_stages_of_different_numbers_of_layers(on_ranks):
    runs = [(4, replace(SHORT, num_layers=5, **options)) for options, _ in UNEVEN]
    compare(on_ranks, runs, with_tensors=False)


def test_each_stage_has_its_layers(on_ranks):
    for options, expected in UNEVEN:
        for pp_rank, layers, *_ in on_ranks(held, replace(SHORT, num_layers=5, **options), world_size=4):
            assert layers == expected[pp_rank]


def test_in_a_v_a_tied_weight_is_one_parameter_and_needs_no_message(on_ranks):
    for schedule, expected in (("1f1b", [1, 1]), ("v-half", [0, 0])):
        found = on_ranks(held, replace(SHORT, pp_size=2, schedule=schedule))
        assert [num_tied for *_, num_tied in found] == expected
        assert [names for *_, names, _ in found] == [["embedding.weight"], ["embedding.weight"] * expected[1]]


@pytest.mark.parametrize(
    "options",
    [{"zero_stage": 1}, {"zero_stage": 3}, {"tp_size": 2, "sequence_parallel": True, "micro_batch_size": 4}],
    ids=str,
)
def test_bfloat16_learns_as_float32_does(on_ranks, options):
    config = replace(TINY, precision="bfloat16", num_layers=2, **options)
    got = [step.loss for step in on_ranks(train, config)[0]]
    expected = [step.loss for step in on_ranks(train, replace(config, precision="float32", tp_size=1), world_size=1)[0]]
    assert got == pytest.approx(expected, rel=0.01)
    assert got[-1] < got[0] - 0.2
    assert got != expected


def error_of_sums(config):
    """On a rank: how far the gradients of a batch are from sums in float64 of those of its micro-batches."""
    with training(config) as trainer:
        trainer.compute_gradients()
        got = [p.grad.double() for p in trainer.parameters]
        exact = [torch.zeros_like(p, dtype=torch.float64) for p in trainer.parameters]
        [model] = trainer.models
        for tokens, targets in zip(*trainer.micro_batches(0), strict=True):
            trainer.optimizer.zero_grad()
            (model.loss(model(tokens), targets) / config.batch_size).backward()
            for total, p in zip(exact, trainer.parameters):
                total += p.grad
        off = torch.stack([(x - y).norm() for x, y in zip(got, exact)]).norm()
        return (off / torch.stack([x.norm() for x in exact]).norm()).item()


def test_gradients_of_bfloat16_add_up_in_float32(on_ranks):
    """Added in bfloat16, the sum over 64 micro-batches would be wrong by 2 percent."""
    config = replace(TINY, precision="bfloat16", num_layers=1, batch_size=64, micro_batch_size=1)
    [worst] = on_ranks(error_of_sums, config, world_size=1)
    assert worst < 1e-6


# -- dropout, evaluation -----------------------------------------------------------------------------------------------


def seeds_of(config):
    with training(config) as trainer:
        return [torch.initial_seed() for _ in trainer.steps()]


def test_dropout_masks_differ_by_step_and_replica(on_ranks):
    ranks = on_ranks(seeds_of, replace(TINY, steps=4, tp_size=2, num_layers=1), world_size=4)
    assert ranks[0] == ranks[1], "tensor-parallel ranks must draw alike"
    assert ranks[2] == ranks[3]
    assert len({*ranks[0], *ranks[2]}) == 8


@pytest.mark.parametrize("options", [{"tp_size": 2, "sequence_parallel": True}, {"pp_size": 2}], ids=str)
def test_dropout_is_the_same_again_and_with_recomputation(on_ranks, options):
    """With the highest seed there is."""
    config = replace(SHORT, dropout=0.2, num_layers=2, seed=(1 << 63) - 1, **options)
    variants = {"once": {}, "again": {}, "without": {"dropout": 0.0}, "recomputed": {"recompute": "full"}}
    runs = [(2, (replace(config, **changes),), name) for name, changes in variants.items()]
    got = {name: numbers(ranks[0]) for (*_, name), ranks in in_few_launches(on_ranks, train, runs)}
    assert got["once"] == got["again"]
    assert got["recomputed"] == pytest.approx(got["once"], rel=1e-10)
    assert abs(got["once"][0] - got["without"][0]) > 1e-4


def test_evaluation_leaves_the_training_alone(on_ranks):
    config = replace(TINY, steps=4, dropout=0.1, num_layers=2)
    evaluated, not_evaluated = (on_ranks(train, replace(config, eval_interval=interval))[0] for interval in (1, 0))
    assert [step.loss for step in evaluated] == [step.loss for step in not_evaluated]
    assert {step.evaluation_loss for step in not_evaluated} == {None}
    assert len({step.evaluation_loss for step in evaluated}) == 4
    assert [step.step for step in evaluated] == [1, 2, 3, 4]


# -- steps as they come ------------------------------------------------------------------------------------------------


def test_steps_arrive_one_by_one_and_are_those_of_train(on_ranks):
    config = replace(TINY, steps=3, tp_size=2, num_layers=1)
    expected = numbers(on_ranks(train, config)[0])
    with World(2) as world:
        arrived = [ranks[0] for ranks in stream(world, steps, config)]
        assert numbers(arrived) == pytest.approx(expected, rel=1e-12)
        assert numbers(world.run(train, config)[0]) == pytest.approx(expected, rel=1e-12)  # the ranks are free again
