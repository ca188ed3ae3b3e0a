"""Training on any number of ranks, in any layout: at each step the loss and the gradient norm of one process.

`make test` runs each layout and each option at least once. `make sweep-layouts` runs every two options together, and
takes hours. A part of it: ``SWEEP=1 pytest -s -o faulthandler_timeout=7200 tests/labtrain/test_trainer.py -k eight``
takes minutes; ``-k everything`` is each schedule beside all else, ``-k product`` all with all.
"""

import os
from dataclasses import replace
from itertools import combinations, product

import pytest
import torch

from course.stream import stream
from labkit.groups import local_device
from labkit.launch import RankFailed, World, launch
from labkit.parallel_config import SCHEDULES, V_SHAPED
from labtrain import steps, train, training
from tests.labtrain.tiny import TINY, TODAY, in_few_launches, numbers
from tests.support.plain import train_plainly
from tests.support.sweep import IS_SWEEP

TOGETHER = 2 if IS_SWEEP else 1
"""How many options meet in some run, whichever they are."""
TOLERANCE = {"float64": 1e-10, "float32": 1e-5}

# -- one process, against torch alone ----------------------------------------------------------------------------------


@pytest.mark.parametrize("clip_norm", [0.0, 0.7, 100.0])
def test_one_process_trains_as_torch_does(on_ranks, clip_norm):
    config = replace(TINY, clip_norm=clip_norm)
    expected, _ = train_plainly(config)
    assert numbers(on_ranks(train, config, world_size=1)[0]) == pytest.approx(expected, rel=1e-10, abs=0)
    norms = expected[1::3]
    assert all(norm > 0.7 for norm in norms[:3]), "0.7 would clip nothing"
    assert expected[0] - expected[-3] > 0.2, "nothing was learned"


def test_clipping_changes_the_training():
    clipped, free = (train_plainly(replace(TINY, steps=4, clip_norm=clip_norm))[0] for clip_norm in (0.01, 0.0))
    assert abs(clipped[-3] - free[-3]) > 1e-8


# -- every layout, against one process ---------------------------------------------------------------------------------

LAYOUTS = [
    (world_size, t, c, p)
    for world_size in (1, 2, 4, 8)
    for t, c, p in product((1, 2, 4, 8), repeat=3)
    if world_size % (t * c * p) == 0
    if world_size < 8 or (t * c * p > 2 and max(t, c, p) == 2) or IS_SWEEP  # eight share two cores
]
OPTIONS = {
    "schedule": ("1f1b", "gpipe", "interleaved", "zero-bubble", "zero-bubble-v"),
    "sequence_parallel": (False, True),
    "zero_stage": (0, 1, 2, 3),
    "recompute": ("none", "full"),
    "precision": ("float64", "float32"),
    "tied": (True, False),  # False: and all else that makes it a model of today
    "context_parallel": ("ring", "contiguous ring", "ulysses", "all_gather"),
}

# Step 2 shows what step 1 has left behind; the evaluation after it shows its update too, at twice the rate.
SHORT = replace(TINY, steps=2, warmup_steps=2, eval_interval=2)


def all_choices():
    """Every layout with every combination of options that means something there."""
    for layout, values in product(LAYOUTS, product(*OPTIONS.values())):
        (world_size, t, c, p), options = layout, dict(zip(OPTIONS, values))
        kv_heads = SHORT.num_attention_heads if options["tied"] else TODAY["num_query_groups"]
        attention = options["context_parallel"]
        if (
            (t > 1 or not options["sequence_parallel"])
            and (world_size > t * p or not options["zero_stage"])
            and (options["zero_stage"] < 2 or not options["schedule"].startswith("zero-bubble"))
            and (p > 1 or options["schedule"] == "1f1b")
            and (c > 1 or attention == "ring")
            and SHORT.seq_length % (c if c == 1 or attention == "contiguous ring" else 2 * c) == 0
            and (not options["sequence_parallel"] or SHORT.seq_length // c % t == 0)
            and kv_heads % (t * c if attention == "ulysses" else t) == 0
            and p * num_chunks_of(options["schedule"]) <= 8
        ):
            yield layout, values


def num_chunks_of(schedule):
    return 2 if schedule in ("interleaved", *V_SHAPED) else 1


def run_of(layout, values):
    """The world size and the config of a choice."""
    (world_size, t, c, p), options = layout, dict(zip(OPTIONS, values))
    num_chunks = num_chunks_of(options["schedule"])
    sizes = {"tp_size": t, "cp_size": c, "pp_size": p, "num_chunks": num_chunks}
    replicas = world_size // (t * c * p)
    sizes["micro_batch_size"] = 2
    if options["zero_stage"] and world_size // (t * p) == 4:
        sizes["shard_size"] = 2  # hybrid
    sizes["num_layers"] = min(2 * p, 8)  # two on a rank: one may be sent while the next computes
    if p == 1 or (p == 2 and world_size == 8):
        sizes["micro_batch_size"] = max(1, 4 // replicas)  # two micro-batches
    if p == 2 and world_size == 8:
        sizes["num_layers"] = p * num_chunks  # eight ranks share two cores; and four show it with two layers each
    if options["context_parallel"] == "contiguous ring":
        options |= {"context_parallel": "ring", "zigzag": False}
    return world_size, replace(SHORT, **sizes, **options | ({} if options["tied"] else TODAY))


def some_choices():
    """A few of all, which cover every layout and every option; in a sweep, every two options.

    The next is always one that adds most. But a layout of eight ranks comes only once.
    """
    covers = {(layout, v): {layout, *combinations(zip(OPTIONS, v), TOGETHER)} for layout, v in all_choices()}
    uncovered = set().union(*covers.values())

    def adds(choice):
        layout, _ = choice
        return len(covers[choice] & uncovered) if layout[0] < 8 or layout in uncovered else 0, -layout[0]

    while uncovered:
        best = max(covers, key=adds)
        uncovered -= covers[best]
        yield best


def compare_with_one_process(on_ranks, runs):
    def kind_of(config):
        form = {name: getattr(config, name) for name in TODAY}
        sizes = {name: getattr(config, name) for name in ("batch_size", "micro_batch_size", "num_layers")}
        return replace(SHORT, precision=config.precision, **sizes, **form)

    alone = {kind: on_ranks(train, kind, world_size=1)[0] for kind in {kind_of(config) for _, config in runs}}
    worst = dict.fromkeys(OPTIONS["precision"], 0.0)
    all_runs = [(world_size, (config,), None) for world_size, config in runs]
    for (world_size, (config,), _), ranks in in_few_launches(on_ranks, train, all_runs):
        for rank, got in enumerate(ranks):
            expected, rel = numbers(alone[kind_of(config)]), TOLERANCE[config.precision]
            assert numbers(got) == pytest.approx(expected, rel=rel, abs=0), f"rank {rank} of {world_size}, {config}"
            worst[config.precision] = max(
                [worst[config.precision], *(abs(a - b) / b for a, b in zip(numbers(got), expected) if b)]
            )
    return worst


def test_every_layout(on_ranks):
    chosen = list(some_choices())
    assert {layout for layout, _ in chosen} == set(LAYOUTS)
    assert len(LAYOUTS) == 19
    assert len(chosen) < 40
    one_rank_two_chunks = 1, replace(SHORT, schedule="interleaved", num_chunks=2)  # it has the first and the last stage
    # Here the layers are computed once more for the gradients of the weights, when their backward seems to be over.
    again = 4, replace(SHORT, pp_size=2, schedule="zero-bubble", zero_stage=1, recompute="full", micro_batch_size=2)
    compare_with_one_process(on_ranks, [*(run_of(*each) for each in chosen), one_rank_two_chunks, again])


IN_A_PIPELINE = {  # every schedule beside every other axis; m, the number of micro-batches, is so much for p ranks
    "schedule": tuple(SCHEDULES),
    "pp_size": (2, 4),
    "m": (lambda p: p, lambda p: p + 1, lambda p: 3 * p),
    "tp_size": (1, 2),
    "cp_size": (1, 2),
    "dp_size": (1, 2),
    "zero_stage": (0, 1, 2, 3),
    "sequence_parallel": (False, True),
    "recompute": ("none", "full"),
    "tied": (True, False),  # False: and all else that makes it a model of today
}


def in_a_pipeline(most_ranks):
    """The world size and the config of each choice that is possible on so many ranks, and what it covers."""
    for values in product(*IN_A_PIPELINE.values()):
        options = dict(zip(IN_A_PIPELINE, values))
        p, t, c, d = (options[f"{axis}_size"] for axis in ("pp", "tp", "cp", "dp"))
        m, schedule = options.pop("m")(p), options["schedule"]
        if (
            p * t * c * d <= most_ranks
            and (schedule != "dualpipe-v" or m >= 2 * p)
            and (options["zero_stage"] == 0 or c * d > 1)
            and (options["zero_stage"] < 2 or schedule not in ("zero-bubble", *V_SHAPED))
            and (t > 1 or not options["sequence_parallel"])
        ):
            del options["dp_size"]
            sizes = dict(num_layers=2 * p, num_chunks=num_chunks_of(schedule), batch_size=m * d, micro_batch_size=1)
            config = replace(SHORT, **sizes, **options | ({} if options["tied"] else TODAY))
            yield (p * t * c * d, config), {*combinations(zip(IN_A_PIPELINE, values), TOGETHER)}


def test_every_schedule_beside_every_axis(on_ranks):
    covers = dict(in_a_pipeline(most_ranks=4))
    runs, uncovered = [], set().union(*covers.values())
    while uncovered:
        runs.append(max(covers, key=lambda run: (len(covers[run] & uncovered), -run[0])))
        uncovered -= covers[runs[-1]]
    assert len(runs) < 60
    compare_with_one_process(on_ranks, runs)


@pytest.mark.skipif(not IS_SWEEP, reason="takes an hour")
@pytest.mark.parametrize("p", [2, 4])
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_a_schedule_beside_everything(on_ranks, schedule, p):
    every = [run for run, _ in in_a_pipeline(most_ranks=8) if (run[1].schedule, run[1].pp_size) == (schedule, p)]
    print(f"{schedule} on {p} ranks: {len(every)} runs, worst {compare_with_one_process(on_ranks, every)}", flush=True)


UNEVEN = [  # with the layers of each rank, chunk by chunk
    (dict(pp_size=2, stage_layers=(1, 4)), [["0"], ["1234"]]),
    (dict(pp_size=2, first_stage_layers=2, schedule="zero-bubble", zero_stage=1, **TODAY), [["01"], ["234"]]),
    (dict(pp_size=2, stage_layers=(1, 2, 1, 1), schedule="zero-bubble-v", recompute="full"), [["0", "4"], ["12", "3"]]),
    (
        dict(pp_size=2, first_stage_layers=2, schedule="interleaved", num_chunks=2, zero_stage=3),
        [["01", "3"], ["2", "4"]],
    ),
    (
        dict(pp_size=4, account_for_loss_in_pipeline_split=True, batch_size=8, micro_batch_size=1),
        [["0"], ["12"], ["3"], ["4"]],
    ),
]


def trained_with_its_layers(config):
    with training(config) as trainer:
        layers = ["".join(model.layers) for model in trainer.models]
        return trainer.groups.coords.pp, layers, list(trainer.steps())


@pytest.mark.nccl_rules
@pytest.mark.parametrize(("options", "layers"), UNEVEN, ids=str)
def test_stages_of_different_numbers_of_layers(on_ranks, options, layers):
    config = replace(SHORT, num_layers=5, **options)
    alone = replace(SHORT, num_layers=5, **{name: getattr(config, name) for name in TODAY})
    expected = numbers(on_ranks(train, alone, world_size=1)[0])
    for pp_rank, held, got in on_ranks(trained_with_its_layers, config, world_size=4):
        assert held == layers[pp_rank]
        assert numbers(got) == pytest.approx(expected, rel=1e-10, abs=0)


@pytest.mark.parametrize("zero_stage", [0, 1, 2, 3])
def test_replicas_of_one_rank_with_the_first_stage_and_the_last(on_ranks, zero_stage):
    config = replace(SHORT, schedule="interleaved", num_chunks=2, zero_stage=zero_stage)
    compare_with_one_process(on_ranks, [(2, config)])


def parameters_with_the_vocabulary(config):
    with training(config) as trainer:
        vocabulary = config.shape.vocab_size
        held = [
            name for model in trainer.models for name, p in model.named_parameters() if p.shape[:1] == (vocabulary,)
        ]
        return held, len(trainer.tied)


@pytest.mark.parametrize("schedule", ["1f1b", "v-half"])
def test_in_a_v_a_tied_weight_is_one_parameter_and_needs_no_message(on_ranks, schedule):
    config = replace(SHORT, pp_size=2, schedule=schedule)
    found = on_ranks(parameters_with_the_vocabulary, config)
    one_each = [(["embedding.weight"], 1)] * 2
    assert found == ([(["embedding.weight"], 0), ([], 0)] if schedule == "v-half" else one_each)


@pytest.mark.skipif(not IS_SWEEP, reason="takes minutes")
@pytest.mark.parametrize("layout", [layout for layout in LAYOUTS if layout[0] == 8], ids=str)
def test_every_attention_in_every_layout_of_eight(on_ranks, layout):
    varied = {"sequence_parallel", "tied", "context_parallel"}
    plain = [(name, known[0]) for name, known in OPTIONS.items() if name not in varied]
    runs = [
        run_of(*choice) for choice in all_choices() if choice[0] == layout and {*plain} <= {*zip(OPTIONS, choice[1])}
    ]
    print(f"{layout}: {len(runs)} runs, worst {compare_with_one_process(on_ranks, runs)}")


@pytest.mark.skipif(not IS_SWEEP, reason="takes hours")
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_whole_product(on_ranks, layout):
    runs = [run_of(*choice) for choice in all_choices() if choice[0] == layout]
    print(f"{layout}: {len(runs)} runs, worst {compare_with_one_process(on_ranks, runs)}")


@pytest.mark.nccl_rules
@pytest.mark.parametrize("order", ["tp-pp-dp", "pp-dp-tp"])
def test_another_order_of_the_axes(on_ranks, order):
    two_layers = replace(SHORT, num_layers=2)
    alone = on_ranks(train, two_layers, world_size=1)[0]
    config = replace(two_layers, tp_size=2, pp_size=2, order=order)
    for got in on_ranks(train, config, world_size=8):
        assert numbers(got) == pytest.approx(numbers(alone), rel=1e-10)


@pytest.mark.parametrize(
    "options",
    [{}, {"zero_stage": 1}, {"zero_stage": 3}, {"tp_size": 2, "sequence_parallel": True, "micro_batch_size": 4}],
    ids=str,
)
def test_bfloat16_learns_as_float32_does(on_ranks, options):
    config = replace(TINY, precision="bfloat16", num_layers=2, **options)
    got = [step.loss for step in on_ranks(train, config)[0]]
    expected = [step.loss for step in on_ranks(train, replace(config, precision="float32", tp_size=1), world_size=1)[0]]
    assert got == pytest.approx(expected, rel=0.01)
    assert got[-1] < got[0] - 0.2
    assert got != expected


def test_gradients_of_bfloat16_add_up_in_float32(on_ranks):
    """Added in bfloat16, the sum over 64 micro-batches would be wrong by 2 percent."""

    def error(config):
        with training(config) as trainer:
            trainer.compute_gradients()
            got = [p.grad.double() for p in trainer.parameters]
            exact = [torch.zeros_like(p, dtype=torch.float64) for p in trainer.parameters]
            [model], batch = trainer.models, trainer.micro_batches(0)
            for tokens, targets in zip(*batch, strict=True):
                trainer.optimizer.zero_grad()
                (model.loss(model(tokens), targets) / 64).backward()
                for total, p in zip(exact, trainer.parameters):
                    total += p.grad
            off = torch.stack([(x - y).norm() for x, y in zip(got, exact)]).norm()
            return (off / torch.stack([x.norm() for x in exact]).norm()).item()

    config = replace(TINY, precision="bfloat16", num_layers=1, batch_size=64, micro_batch_size=1)
    [worst] = on_ranks(error, config, world_size=1)
    assert worst < 1e-6


def test_a_world_that_does_not_fit_is_reported_by_launch():
    with pytest.raises(RankFailed, match=r"raised Misfit: dp_size=3 \* micro_batch_size=2 = 6 does not divide"):
        launch(train, TINY, world_size=3)


def test_ranks_compute_where_the_world_is(on_ranks):
    def devices(config):
        with training(config) as trainer:
            return {parameter.device.type for parameter in trainer.parameters} == {local_device().type}

    assert on_ranks(devices, TINY) == [True, True]


# -- data, dropout -----------------------------------------------------------------------------------------------------


def samples_of(config):
    with training(config) as trainer:
        batches = [trainer.micro_batches(first)[0] for first in (0, config.batch_size)]
    return [[row.tolist() for rows in batch for row in rows] for batch in batches]


def test_each_sample_is_seen_once_and_in_one_order(on_ranks):
    config = replace(TINY, num_layers=1, micro_batch_size=1, tp_size=2)
    text = config.make_dataset()
    expected = [text.sample(number, config.seq_length + 1)[:-1].tolist() for number in range(16)]
    ranks = on_ranks(samples_of, config, world_size=8)
    first_of_each_replica = ranks[::2]
    assert ranks[1::2] == first_of_each_replica  # tensor-parallel ranks see the same
    for step in range(2):
        seen = [row for replica in first_of_each_replica for row in replica[step]]
        assert seen == expected[8 * step : 8 * step + 8]


def test_a_file_that_is_too_short_says_so(tmp_path):
    file = tmp_path / "short.txt"
    file.write_text("short")
    with pytest.raises(RankFailed, match=r"short.txt has 5 bytes, but a sample takes 9, and one more is"):
        launch(train, replace(TINY, text=str(file)), world_size=2)


def seeds_of(config):
    seeds = []
    with training(config) as trainer:
        for _ in trainer.steps():
            seeds.append(torch.initial_seed())
    return seeds


def test_dropout_masks_differ_by_step_and_replica(on_ranks):
    ranks = on_ranks(seeds_of, replace(TINY, steps=4, tp_size=2, num_layers=1), world_size=4)
    assert ranks[0] == ranks[1], "tensor-parallel ranks must draw alike"
    assert ranks[2] == ranks[3]
    assert len({*ranks[0], *ranks[2]}) == 8


@pytest.mark.parametrize("options", [{}, {"tp_size": 2, "sequence_parallel": True}, {"pp_size": 2}], ids=str)
def test_dropout_is_the_same_again_and_with_recomputation(on_ranks, options):
    config = replace(TINY, steps=2, warmup_steps=2, dropout=0.2, num_layers=2, **options)
    once, again = on_ranks(train, config)[0], on_ranks(train, config)[0]
    assert numbers(once) == numbers(again)
    without = on_ranks(train, replace(config, dropout=0.0))[0]
    assert abs(once[0].loss - without[0].loss) > 1e-4
    recomputed = on_ranks(train, replace(config, recompute="full"))[0]
    assert numbers(recomputed) == pytest.approx(numbers(once), rel=1e-10)


def test_the_highest_seed_trains(on_ranks):
    assert len(on_ranks(train, replace(TINY, seed=(1 << 63) - 1, steps=1, dropout=0.1))[0]) == 1


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


@pytest.mark.parametrize("why", [KeyboardInterrupt, ZeroDivisionError])
def test_a_cell_that_stops_between_two_steps_leaves_nothing(why):
    """The stop button, or a mistake in what draws the loss."""
    endless = replace(TINY, steps=10**6)
    seen = []
    with pytest.raises(why), World(2) as world:  # noqa: PT012 - as a cell does it
        pids = world.run(os.getpid)
        for ranks in stream(world, steps, endless):
            seen.append(ranks[0].loss)
            if len(seen) == 3:
                raise why
    assert len(seen) == 3
    for pid in pids:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)
