"""The explorer of plans, driven as a reader drives it: by changing the values of its controls."""

import re
from dataclasses import replace

import pytest

from course.explorers.sizing import MODELS, sizing_explorer
from course.sizing import DGX_A100, fullest, memory, step_time
from labkit.shape import GPT


@pytest.fixture
def explorer():
    return sizing_explorer()


def table(explorer):
    return dict(explorer.picture.scenes[0].table.rows)


def picture(explorer):
    return explorer.picture.scenes[0].svg()


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
        ("fused_attention", True),
        ("cp_size", 2),
        ("billion_tokens", 450),
    ],
)
def test_every_control_changes_what_is_said_and_drawn(explorer, control, value):
    if control == "cp_size":
        explorer.fused_attention.value = True
    if control == "model":
        explorer.pp_size.value = 4
        explorer.world_size.value = 512
    before = explorer.says.value, picture(explorer), table(explorer)
    getattr(explorer, control).value = value
    assert getattr(explorer.choice, control) == value
    assert "moved" not in explorer.says.value or "This does not fit" in explorer.says.value
    assert all(now != old for now, old in zip((explorer.says.value, picture(explorer), table(explorer)), before))


def test_sequence_parallelism_saves_activations_where_they_are_kept(explorer):
    explorer.recompute.value = "selective"
    before = table(explorer)["first stage"]
    explorer.sequence_parallel.value = True
    assert table(explorer)["first stage"] != before


def test_the_facts_are_those_of_the_plan(explorer):
    plan = explorer.shown
    estimate = step_time(plan, DGX_A100)
    assert f"<b>{estimate.days(300e9):.3g} days</b>" in explorer.says.value
    assert f"{estimate.flops_per_gpu / 1e12:.0f} teraFLOP/s" in explorer.says.value
    assert table(explorer)["bubble"].startswith(f"{plan.bubble_over_ideal:.3g} idle / ideal")
    assert f"p = 8: {estimate.days(300e9):.3g}" in table(explorer)["t = 8"]
    assert "8 · 8 · 16, m = 96" in explorer.says.value


def test_sizes_that_do_not_fit_together_move_on_and_the_task_stays(explorer):
    task = explorer.choice[:2]
    explorer.pp_size.value = 12
    assert explorer.shown.pp_size == 16
    assert "pipeline p is 16 now, not 12" in explorer.says.value
    assert "does not divide GPUs n = 1024" in explorer.says.value
    explorer.tp_size.value = 1
    explorer.sequence_parallel.value = True
    assert explorer.choice[:2] == task


def test_a_plan_that_is_too_large_says_by_how_much_and_names_one_that_fits(explorer):
    explorer.pp_size.value = 2
    assert "This does not fit." in explorer.says.value and 'role="alert"' in explorer.says.value
    assert "203 GB for a GPU of 80 GB" in explorer.says.value
    [changes] = re.findall("The nearest plan that fits has (.*?)[.]<", explorer.says.value)
    assert changes == "sharded optimizer = on"
    explorer.sharded_optimizer.value = True
    assert "This does not fit." not in explorer.says.value
    assert fullest(explorer.shown).total <= DGX_A100.memory_bytes


def test_context_ranks_need_fused_attention_and_send_what_they_send(explorer):
    explorer.cp_size.value = 4
    assert explorer.fused_attention.value and "fused attention is on now, not off" in explorer.says.value
    assert "p · t · c · d = 8 · 8 · 4 · 4" in explorer.says.value
    assert explorer.shown.cp_size == 4
    assert "GB a step from each GPU" in table(explorer)["context-parallel traffic"]
    assert "context messages: " in table(explorer)["a step"]
    explorer.cp_size.value = 1
    assert "context-parallel traffic" not in table(explorer)
    assert "context messages: 0," in table(explorer)["a step"]  # there were some before
    explorer.micro_batch_size.value = 2
    assert "context messages" not in table(explorer)["a step"]


def test_a_long_sequence_of_llama_fits_with_context_ranks():
    divided = dict(sequence_parallel=True, sharded_optimizer=True)
    alone = sizing_explorer(
        "Llama 3, 70 billion, s = 131072", batch_size=128, recompute="none", fused_attention=True, **divided
    )
    assert "This does not fit." in alone.says.value
    alone.cp_size.value = 8
    assert "This does not fit." not in alone.says.value


def test_where_no_plan_fits_more_gpus_are_asked_for():
    assert "Use more GPUs" in sizing_explorer(world_size=8, batch_size=8, tp_size=8, pp_size=1).says.value


def test_a_click_on_the_days_chooses_that_plan(explorer):
    [cell] = [key for key in explorer.picture.scenes[0].by_key if key.endswith("t4.p16")]
    explorer.picture._hear(None, {"click": cell}, [])
    assert (explorer.shown.tp_size, explorer.shown.pp_size) == (4, 16)
    assert explorer.picture.scenes[0].by_key[cell].text.startswith("▸")
    explorer.picture._hear(None, {"click": "1.memory.limit"}, [])
    assert (explorer.tp_size.value, explorer.pp_size.value) == (4, 16)


def test_a_start_that_does_not_fit_is_refused():
    with pytest.raises(ValueError, match="tp_size=7"):
        sizing_explorer(tp_size=7)


def test_a_machine_of_ones_own_can_be_chosen():
    explorer = sizing_explorer(cluster=replace(DGX_A100, name="mine", peak_flops=1e12))
    assert explorer.picture.scenes[0].title == "mine, estimated"


def test_a_model_of_ones_own_can_be_chosen():
    mine = GPT(80, 8192, 4096, 128256, 64)
    explorer = sizing_explorer(mine)
    assert explorer.shown.model == mine
    assert explorer.choice.model == "yours, 65.5 billion"
    explorer.pp_size.value = 4
    explorer.model.value = "GPT-3, 175 billion"
    assert explorer.shown.model == MODELS["GPT-3, 175 billion"]


@pytest.mark.parametrize(
    ("start", "says"),
    [
        ({"model": "70 billion"}, r"model='70 billion' is unknown: use one of yours, or 1.7 billion, .*175 billion"),
        ({"cluster": "mine"}, "cluster='mine' is unknown: use one of yours, or DGX A100 80GB, DGX H100"),
    ],
)
def test_an_unknown_name_is_refused_with_those_that_are_known(start, says):
    with pytest.raises(ValueError, match=says):
        sizing_explorer(**start)


def test_its_repr_is_short_and_could_be_typed(explorer):
    assert eval(repr(explorer), {"sizing_explorer": sizing_explorer}).choice == explorer.choice
    assert len(repr(explorer)) < 120


@pytest.mark.parametrize("model", MODELS)
def test_every_model_can_be_started_with(model):
    explorer = sizing_explorer(model, world_size=64, batch_size=64, tp_size=1, pp_size=1)
    assert "ays for 300 billion tokens" in picture(explorer)


def test_controls_stand_in_three_groups_and_bars_remember_what_was_before(explorer):
    groups = [group.children for group in explorer.children[0].children]
    assert [group[0].value for group in groups] == ["<b>Model</b>", "<b>Cluster</b>", "<b>Plan</b>"]
    assert {control for group in groups for control in group[1:]} == {*explorer.controls.values()}
    scene = explorer.picture.scenes[0]
    assert len(scene.panels) == 3 and not [key for key in scene.by_key if key.endswith(".before")]
    before = explorer.shown
    explorer.tp_size.value = 4
    behind = explorer.picture.scenes[0].by_key["1.memory.0.weights.before"]
    assert behind.fact == f"before: weights {memory(before).weights / 1e9:.3g} GB"
