"""Which published runs are like a plan, and what is said of the estimate for it."""

from dataclasses import replace

import pytest

from course.sizing import FITTED, RUNS, how_sure, runs_like
from course.sizing.runs import LLAMA_8B

BY_NAME = {run.name: run for run in RUNS}


@pytest.mark.parametrize("name", ["D9", "D17a", "D59d", "D48", "D71c"])
def test_a_published_run_is_like_itself(name):
    run = BY_NAME[name]
    found = runs_like(run.plan, run.hardware)
    assert run in found and {each.plan.precision for each in found} == {run.plan.precision}
    assert {each.plan.model.num_experts is None for each in found} == {run.plan.model.num_experts is None}


def test_a_sequence_that_is_much_longer_is_not_like_them():
    plan = BY_NAME["D6"].plan
    longer = replace(plan, model=replace(LLAMA_8B, seq_length=2**20))
    assert runs_like(plan, FITTED["H100"]) and not runs_like(longer, FITTED["H100"])
    others = [abs(run.error) for run in RUNS if not run.fits]
    share = f"{sum(others) / len(others):.0%}"
    assert how_sure(longer, FITTED["H100"]) == f"perhaps {share} off: no run like this one was published"


def test_the_largest_error_is_that_of_the_runs_for_which_all_is_stated():
    plan = BY_NAME["D9"].plan
    stated = [run for run in runs_like(plan, FITTED["H100"]) if run.fits]
    assert (
        how_sure(plan, FITTED["H100"]) == f"within {max(abs(run.error) for run in stated):.0%}: 18 runs like this one"
    )
    guessed = BY_NAME["D84"].plan
    assert how_sure(guessed, FITTED["H200"]).endswith("1 run like this one, of which something was guessed")
