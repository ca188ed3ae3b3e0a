"""The explorer of plans, driven as a reader drives it: by changing the values of its controls."""

import pytest
from matplotlib import pyplot

from course.explorers.sizing import MODELS, sizing_explorer
from course.sizing import DGX_A100, step_time
from labkit.shape import GPT


@pytest.fixture
def explorer():
    return sizing_explorer()


@pytest.mark.parametrize(
    ("control", "value"),
    [
        ("model", "145.6 billion"),
        ("cluster", "DGX H100"),
        ("world_size", 512),
        ("batch_size", 3072),
        ("tp_size", 4),
        ("pp_size", 16),
        ("micro_batch_size", 2),
        ("num_chunks", 2),
        ("recompute", "selective"),
        ("sharded_optimizer", True),
        ("billion_tokens", 450),
    ],
)
def test_every_control_changes_what_is_said(explorer, control, value):
    before = explorer.says.value, explorer.facts.value, explorer.picture.value
    if control == "model":
        explorer.pp_size.value = 4
        explorer.world_size.value = 512
    getattr(explorer, control).value = value
    assert getattr(explorer.choice, control) == value
    assert explorer.fits
    assert explorer.says.value != before[0]
    if control != "billion_tokens":
        assert explorer.facts.value != before[1]
        assert explorer.picture.value != before[2]


def test_sequence_parallelism_saves_activations_where_they_are_kept(explorer):
    explorer.recompute.value = "selective"
    before = explorer.facts.value
    explorer.sequence_parallel.value = True
    assert explorer.facts.value != before


def test_the_facts_are_those_of_the_plan(explorer):
    plan = explorer.choice.plan()
    estimate = step_time(plan, DGX_A100)
    assert f"<b>{estimate.days(300e9):.3g} days</b>" in explorer.says.value
    assert f"{estimate.flops_per_gpu / 1e12:.0f} teraFLOP/s" in explorer.says.value
    assert f"{plan.bubble_over_ideal:.3g} idle / ideal" in explorer.facts.value
    assert "8 · 8 · 16, m = 96" in explorer.says.value


def test_sizes_that_do_not_fit_together_are_explained_and_the_last_plan_stays(explorer):
    shown, picture = explorer.shown, explorer.picture.value
    explorer.pp_size.value = 35
    assert not explorer.fits
    assert "does not divide world_size=1024" in explorer.says.value
    assert 'role="alert"' in explorer.says.value
    assert "labkit-stale" in explorer.facts.value
    assert (explorer.shown, explorer.picture.value) == (shown, picture)
    explorer.pp_size.value = 8
    assert explorer.fits
    assert "labkit-stale" not in explorer.facts.value


def test_a_plan_that_is_too_large_says_by_how_much(explorer):
    explorer.pp_size.value = 2
    assert "This does not fit." in explorer.says.value
    assert "for a GPU of 80 GB" in explorer.says.value


def test_a_start_that_does_not_fit_is_refused():
    with pytest.raises(ValueError, match="tp_size=7"):
        sizing_explorer(tp_size=7)


def test_a_machine_of_ones_own_can_be_chosen():
    from dataclasses import replace

    explorer = sizing_explorer(cluster=replace(DGX_A100, name="mine", peak_flops=1e12))
    assert "mine, estimated" in explorer.facts.value


def test_a_model_of_ones_own_can_be_chosen():
    mine = GPT(80, 8192, 4096, 128256, 64)
    explorer = sizing_explorer(mine)
    assert explorer.shown.model == mine
    assert explorer.choice.model == "yours, 65.5 billion"
    explorer.pp_size.value = 4
    assert explorer.fits
    explorer.model.value = "GPT-3, 175 billion"
    assert explorer.shown.model == MODELS["GPT-3, 175 billion"]


@pytest.mark.parametrize(
    ("start", "says"),
    [
        ({"model": "70 billion"}, r"model='70 billion' is unknown: use a GPT of yours, or 1.7 billion, .*175 billion"),
        ({"cluster": "mine"}, "cluster='mine' is unknown: use a Hardware of yours, or DGX A100 80GB, DGX H100"),
    ],
)
def test_an_unknown_name_is_refused_with_those_that_are_known(start, says):
    with pytest.raises(ValueError, match=says):
        sizing_explorer(**start)


def test_its_repr_is_short_and_could_be_typed(explorer):
    assert eval(repr(explorer), {"sizing_explorer": sizing_explorer}).choice == explorer.choice
    assert len(repr(explorer)) < 120
    assert pyplot.get_fignums() == []


@pytest.mark.parametrize("model", MODELS)
def test_every_model_can_be_started_with(model):
    explorer = sizing_explorer(model, world_size=64, batch_size=64, tp_size=1, pp_size=1)
    assert bytes(explorer.picture.value).startswith(b"\x89PNG")
