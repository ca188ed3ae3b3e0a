"""Steps on real ranks: every op is there, the shares are those of the spans, predictions agree with formulas."""

from dataclasses import replace

import pytest
import torch.distributed as dist

from course.measure.utilisation import Pace, Shares, TimedStep, measure_step, predict_step, table
from course.measure.utilisation import step as steps
from course.measure.utilisation.step import _pace_of, memory_bytes
from course.sizing import Plan, fullest
from course.timeline import Timeline
from labkit.launch import World
from labkit.schedules import Op, gpipe, one_f_one_b
from labkit.shape import GPT
from labkit.timeline.spans import Span

MODEL = GPT(num_layers=8, hidden_size=256, seq_length=32, vocab_size=64, num_attention_heads=4)
NAIVE = Plan(MODEL, 4, 8, pp_size=4, micro_batch_size=8, recompute="none")
QUICK = Pace(0.0005)


@pytest.fixture(scope="module")
def world():
    with World(4) as four_ranks:
        yield four_ranks


def test_the_naive_run_has_one_rank_at_work_at_a_time():
    step = predict_step(NAIVE)
    assert [shares.computing for shares in step.shares] == pytest.approx([1 / 4] * 4)
    assert step.mean_shares == pytest.approx(Shares(1 / 4, 0, 3 / 4))
    assert step.seconds == pytest.approx(4 * 3 * 2 * 8 * 0.003)  # ranks, forward and backward, layers, sequences


@pytest.mark.parametrize(("b", "v"), [(8, 1), (2, 1), (1, 1), (1, 2), (2, 2)])
def test_the_predicted_bubble_is_the_formulas(b, v):
    plan = replace(NAIVE, micro_batch_size=b, num_chunks=v)
    step = predict_step(plan)
    assert step.timeline.bubble_over_ideal == pytest.approx(plan.bubble_over_ideal)


@pytest.mark.parametrize(("changes", "factor"), [
    ({"recompute": "full"}, 4 / 3), ({"recompute": "selective"}, 1 + 32 / (6 * 256 + 32) / 3),
    ({"tp_size": 2, "world_size": 8}, 1 / 2), ({"num_chunks": 2, "micro_batch_size": 2}, None),
])  # fmt: skip
def test_a_rank_s_work_follows_the_plan(changes, factor):
    base, plan = predict_step(NAIVE), predict_step(replace(NAIVE, **changes))
    assert plan.timeline.ranks == list(range(plan.plan.world_size))
    work = plan.timeline.computing_seconds(0) / base.timeline.computing_seconds(0)
    assert work == pytest.approx(factor or 1)


@pytest.mark.parametrize("changes", [
    {"micro_batch_size": 2}, {"micro_batch_size": 2, "num_chunks": 2}, {"pp_size": 2, "micro_batch_size": 2},
    {"tp_size": 2, "pp_size": 2, "micro_batch_size": 4}, {"recompute": "full"},
    {"tp_size": 2, "pp_size": 1, "micro_batch_size": 4},
])  # fmt: skip
def test_real_ranks_do_every_op_of_the_plan_in_order(world, changes):
    plan = replace(NAIVE, **changes)
    step = measure_step(plan, pace=QUICK, world=world, num_steps=1)
    assert step.timeline.source == "paced: 0.5 ms a layer"
    assert step.timeline.ranks == [0, 1, 2, 3]
    for rank in range(4):
        done = [span.label for span in step.timeline.of(rank, "forward", "backward")]
        assert done == [str(op) for op in step.schedule.ranks[plan.layout.coords(rank).pp]]
    assert step.seconds >= 0.999 * predict_step(plan, pace=QUICK).seconds  # sleep is never shorter
    collectives = [span.label for span in step.timeline.of(0, "wait") if span.label == "all_reduce"]
    if plan.tp_size > 1:  # two forward and two backward for each layer; the first has no gradient to send
        assert len(collectives) >= 4 * 8 // plan.pp_size - 1
    else:
        assert len(collectives) == (plan.dp_size > 1)


def test_shares_of_a_measured_step_add_up(world):
    step = measure_step(replace(NAIVE, micro_batch_size=2), pace=QUICK, world=world, num_steps=1)
    for shares in step.shares:
        assert sum(shares) == pytest.approx(1)
        assert min(shares) >= 0
        assert shares.computing > 0


def test_a_different_schedule_can_be_run():
    plan = replace(NAIVE, micro_batch_size=2)
    step = measure_step(plan, gpipe(4, 4), QUICK, num_steps=1)  # without a world: it launches its own ranks
    assert [span.label for span in step.timeline.of(0, "forward", "backward")][:4] == ["F0", "F1", "F2", "F3"]


def test_gpipe_holds_the_whole_batch_on_each_stage():
    plan, many = replace(NAIVE, micro_batch_size=2), replace(NAIVE, micro_batch_size=1)
    assert memory_bytes(plan, one_f_one_b(4, 4)) == fullest(plan).total
    whole = pytest.approx(memory_bytes(NAIVE, gpipe(4, 1)))
    assert memory_bytes(plan, gpipe(4, 4)) == whole  # m micro-batches of B/m sequences
    assert memory_bytes(many, gpipe(4, 8)) == whole
    assert memory_bytes(many, one_f_one_b(4, 8)) < whole.expected


F0, B0 = Op("forward", 0), Op("backward", 0)


def step_of(*spans):
    plan = replace(NAIVE, world_size=2, pp_size=2)
    return TimedStep(plan, one_f_one_b(2, 1), Timeline([Span(*span) for span in spans], "measured"))


def test_a_wait_is_idle_until_the_other_has_computed_and_communication_from_then_on():
    step = step_of(
        (0, "forward", "F0", 0, 3, F0), (1, "wait", "for F0", 0, 4, F0), (1, "forward", "F0", 4, 5, F0),
        (1, "backward", "B0", 5, 7, B0), (0, "wait", "for B0", 3, 7.5, B0), (0, "backward", "B0", 7.5, 10, B0),
    )  # fmt: skip
    assert step.shares == [pytest.approx((0.55, 0.05, 0.4)), pytest.approx((0.3, 0.1, 0.6))]
    assert [(span.rank, span.start, span.end) for span in step.waits_for_messages] == [(0, 7, 7.5), (1, 3, 4)]


def test_a_wait_for_what_was_there_already_is_all_communication():
    step = step_of(
        (0, "forward", "F0", 0, 3, F0), (1, "wait", "for F0", 5, 6, F0), (1, "forward", "F0", 6, 7, F0),
        (1, "backward", "B0", 7, 9, B0), (0, "wait", "for B0", 8, 8.5, B0), (0, "backward", "B0", 9, 10, B0),
    )  # fmt: skip
    assert step.shares[1].communication == pytest.approx(0.1)
    assert step.shares[0].communication == 0  # what it waited for came after it had stopped waiting


def test_a_wait_in_a_collective_is_no_computing():
    step = step_of(
        (0, "forward", "F0", 0, 10), (0, "wait", "all_reduce", 2, 5), (1, "forward", "F0", 0, 10),
    )  # fmt: skip
    assert step.shares == [pytest.approx((0.7, 0.3, 0)), pytest.approx((1, 0, 0))]


def test_the_pace_of_a_run_is_found_again():
    step = predict_step(replace(NAIVE, num_chunks=2, micro_batch_size=2), pace=Pace(0.007))
    assert _pace_of(step).layer_seconds == pytest.approx(0.007)


def test_the_table_has_a_row_for_each_step():
    text = table({"naive": predict_step(NAIVE), "1F1B": predict_step(replace(NAIVE, micro_batch_size=1))})
    assert [line.split()[0] for line in text.splitlines()[1:]] == ["naive", "1F1B"]
    assert text.splitlines()[1].split()[3:6] == ["25%", "0%", "75%"]
    assert "rank" in str(predict_step(NAIVE))


def kept_groups():
    return {str(layout): [id(group) for group in groups.made()] for layout, groups in steps._kept_groups.items()}


def close_some_groups():
    if dist.get_rank() == 0:
        next(iter(steps._kept_groups.values())).close()


def test_groups_are_kept_for_a_layout_until_a_rank_has_lost_them():
    plan = replace(NAIVE, tp_size=2, pp_size=2, micro_batch_size=4)
    with World(4) as world:

        def measure():
            measure_step(plan, pace=QUICK, world=world, num_steps=1)
            return world.run(kept_groups)

        first = measure()
        assert measure() == first
        world.run(close_some_groups)
        assert all(new != old for new, old in zip(measure(), first))
