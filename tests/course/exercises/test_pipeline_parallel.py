"""The exercises of notebook 07: solutions agree with labkit, and a row is right or wrong by what it does."""

import pytest
import torch

from course.exercises.pipeline_parallel import (
    RowExercise,
    mended_row,
    my_bubble,
    my_order,
    my_step,
    run_small,
    step_cases,
    stuck_schedule,
)
from course.sizing import simulate
from labkit.launch import Deadlock, launch
from labkit.schedules import check, gpipe, interleaved, one_f_one_b


@pytest.mark.parametrize(("p", "m"), [(1, 1), (2, 5), (4, 8), (5, 3), (8, 16)])
def test_the_order_is_that_of_the_library(p, m):
    for rank, ops in enumerate(one_f_one_b(p, m).ranks):
        assert my_order(rank, p, m) == list(map(str, ops))


@pytest.mark.parametrize(("p", "m", "v"), [(1, 1, 1), (4, 8, 1), (4, 8, 2), (3, 7, 4)])
def test_the_formula_of_the_bubble_is_what_a_simulation_gives(p, m, v):
    timeline = simulate(interleaved(p, m, v))
    assert my_bubble(p, m, v) == pytest.approx((timeline.bubble_over_ideal, timeline.bubble_share))
    plain = simulate(gpipe(p, m))
    assert my_bubble(p, m, 1) == pytest.approx((plain.bubble_over_ideal, plain.bubble_share))


def test_the_gradient_is_that_of_the_whole_batch():
    for weight, micro_batches in step_cases():
        loss, grad = my_step(weight.detach().clone().requires_grad_(), micro_batches)
        expected = (torch.cat(micro_batches) @ weight).square().mean()
        expected.backward()
        assert loss == pytest.approx(expected.item())
        torch.testing.assert_close(grad, weight.grad)


def test_the_rows_to_be_mended_do_deadlock_and_between_ranks_1_and_2():
    with pytest.raises(ValueError, match="rank 1 waits at B0 for B0 of rank 2; rank 2 waits at F1 for F1 of rank 1"):
        check(stuck_schedule())
    with pytest.raises(Deadlock, match=r"rank 2: waits in recv from rank 1 .* for F1"):
        launch(run_small, stuck_schedule(), world_size=3)


@pytest.mark.parametrize("row", ["F1 F0 B0 F2 B1 B2", "F0 F1 B0 B1 F2 B2", ["F0", "F1", "B0", "F2", "B1", "B2"]])
def test_any_row_that_runs_on_little_memory_is_right(row):
    assert isinstance(mended_row, RowExercise)
    assert mended_row.verdict(lambda: row).status == "passed"


@pytest.mark.parametrize(
    ("row", "says"),
    [
        ("F0 X1", "'X1' is not an op"),
        (5, "5 is not a row of ops"),
        ("F0 F1 F2 B1 B2", "rank 1 lacks B0"),
        ("F0 F1 B0 B1 B2 F2", "rank 1 has B2 before F2, whose result it needs"),
        ("F0 B0 F1 B1 F2 B2", "deadlock: rank 1 waits at B0 for B0 of rank 2"),
        ("F0 F1 F2 B0 B1 B2", "all ranks finish; rank 1 holds 3 micro-batches"),
    ],
)
def test_a_wrong_row_is_told_what_it_does(row, says):
    verdict = mended_row.verdict(lambda: row)
    assert verdict.status == "wrong"
    assert says in verdict.text
