"""The explorer of plans, driven as a reader drives it: by changing the values of its controls."""

import re
from dataclasses import replace

import pytest

from course.explorers.sizing import MODELS, sizing_explorer
from course.pictures.style import three_digits
from course.sizing import DGX_A100, fullest, goodput, memory, step_time
from labkit.shape import GPT


@pytest.fixture
def explorer():
    return sizing_explorer()


def table(explorer):
    return dict(explorer.steps[0].table.rows)


def words(explorer):
    return re.sub("<[^>]*>", "", explorer.says)


def picture(explorer):
    return explorer.steps[0].svg()


def test_sequence_parallelism_saves_activations_where_they_are_kept(explorer):
    explorer.choose(recompute="selective")
    before = table(explorer)["first stage"]
    explorer.choose(sequence_parallel=True)
    assert table(explorer)["first stage"] != before


def test_the_facts_are_those_of_the_plan(explorer):
    plan = explorer.shown
    estimate = step_time(plan, DGX_A100)
    assert f"<b>{estimate.days(300e9):.3g} days</b>" in explorer.says
    assert f"{estimate.flops_per_gpu / 1e12:.0f} teraFLOP/s" in explorer.says
    assert table(explorer)["bubble"].startswith(f"{plan.bubble_over_ideal:.3g} idle / ideal")
    assert f"p = 8: {estimate.days(300e9):.3g}" in table(explorer)["t = 8"]
    assert "8 · 8 · 16, m = 96" in words(explorer)


def test_sizes_that_do_not_fit_together_move_on_and_the_task_stays(explorer):
    task = explorer.choice[:2]
    explorer.choose(pp_size=12)
    assert explorer.shown.pp_size == 16
    assert "pipeline p is 16 now, not 12" in explorer.says
    assert "does not divide GPUs n = 1024" in explorer.says
    explorer.choose(tp_size=1)
    explorer.choose(sequence_parallel=True)
    assert explorer.choice[:2] == task


def test_a_plan_that_is_too_large_says_by_how_much_and_names_one_that_fits(explorer):
    explorer.choose(pp_size=2)
    assert "This does not fit." in explorer.says and 'role="alert"' in explorer.says
    assert "203 GB for a GPU of 80 GB" in explorer.says
    [changes] = re.findall("The nearest plan that fits has (.*?)[.]<", explorer.says)
    assert changes == "ZeRO stage = 1"
    explorer.choose(zero_stage=1)
    assert "This does not fit." not in explorer.says
    assert fullest(explorer.shown).total <= DGX_A100.memory_bytes


def test_context_ranks_need_fused_attention_and_send_what_they_send(explorer):
    explorer.choose(cp_size=4)
    assert explorer.choice.fused_attention and "fused attention is on now, not off" in explorer.says
    assert "p · t · c · d = 8 · 8 · 4 · 4" in words(explorer)
    assert explorer.shown.cp_size == 4
    assert "GB a step from each GPU" in table(explorer)["context-parallel traffic"]
    assert "context messages: " in table(explorer)["a step"]
    explorer.choose(cp_size=1)
    assert "context-parallel traffic" not in table(explorer)
    assert "context messages: 0," in table(explorer)["a step"]  # there were some before
    explorer.choose(micro_batch_size=2)
    assert "context messages" not in table(explorer)["a step"]


def test_a_long_sequence_of_llama_fits_with_context_ranks():
    divided = dict(sequence_parallel=True, zero_stage=1)
    alone = sizing_explorer(
        "Llama 3, 70 billion, s = 131072", batch_size=128, recompute="none", fused_attention=True, **divided
    )
    assert "This does not fit." in alone.says
    alone.choose(cp_size=8)
    assert "This does not fit." not in alone.says


def test_where_no_plan_fits_more_gpus_are_asked_for():
    explorer = sizing_explorer(world_size=8, batch_size=8, tp_size=8, pp_size=1)
    assert "Use more GPUs" in explorer.says and "0.best" not in explorer.steps[0].by_key


def test_a_click_on_the_days_chooses_that_plan(explorer):
    [cell] = [key for key in explorer.steps[0].by_key if key.endswith("t4.p16")]
    explorer.click(cell)
    assert (explorer.shown.tp_size, explorer.shown.pp_size) == (4, 16)
    assert explorer.steps[0].by_key[cell].text.startswith("▸")
    explorer.click("1.memory.limit")
    assert (explorer.choice.tp_size, explorer.choice.pp_size) == (4, 16)


def test_a_machine_of_ones_own_can_be_chosen():
    explorer = sizing_explorer(cluster=replace(DGX_A100, name="mine", peak_flops=1e12))
    assert explorer.steps[0].title == "mine, estimated"


def test_a_model_of_ones_own_can_be_chosen():
    mine = GPT(80, 8192, 4096, 128256, 64)
    explorer = sizing_explorer(mine)
    assert explorer.shown.model == mine
    assert explorer.choice.model == "yours, 65.5 billion"
    explorer.choose(pp_size=4)
    explorer.choose(model="GPT-3, 175 billion")
    assert explorer.shown.model == MODELS["GPT-3, 175 billion"]


@pytest.mark.parametrize("model", MODELS)
def test_every_model_can_be_started_with(model):
    explorer = sizing_explorer(model, world_size=64, batch_size=64, tp_size=1, pp_size=1)
    assert "ays for 300 billion tokens" in picture(explorer)


def test_controls_are_in_three_groups_and_bars_remember_what_was_before(explorer):
    assert {name for names in explorer.groups.values() for name in names} == {*explorer.controls}
    scene = explorer.steps[0]
    assert len(scene.panels) == 3 and not [key for key in scene.by_key if key.endswith(".before")]
    before = explorer.shown
    explorer.choose(tp_size=4)
    behind = explorer.steps[0].by_key["1.memory.0.weights.before"]
    assert behind.fact == f"before: weights {memory(before).weights / 1e9:.3g} GB"
    assert repr(explorer) == "sizing_explorer(tp_size=4)"  # what was changed


def test_what_does_not_apply_is_disabled_and_left_out_of_the_plan(explorer):
    off = {name for name, control in explorer.controls.items() if control.disabled}
    assert off == {"ep_size", "expert_tp_size", "fp8"}
    explorer.choose(model="Mixtral 8x22B", pp_size=1)
    explorer.choose(ep_size=8)
    assert {name for name, control in explorer.controls.items() if control.disabled} == {
        "fp8", "num_chunks", "schedule", "uneven"
    }  # fmt: skip
    assert explorer.shown.ep_size == 8 and "of experts etp · ep · edp = 1 · 8 · 128" in explorer.says
    explorer.choose(model="GPT-3, 175 billion")
    assert explorer.choice.ep_size == 8 and explorer.shown.ep_size == 1


@pytest.mark.parametrize("start", [
    {}, dict(model="Mixtral 8x22B", zero_stage=1, world_size=128, fused_attention=True), dict(zero_stage=3),
    dict(model="Llama 3, 405 billion", cluster="DGX H100", pp_size=16, zero_stage=1, sequence_parallel=True,
         uneven=True, world_size=4096, batch_size=4096),
])  # fmt: skip
def test_a_click_takes_the_fastest_plan_that_a_search_finds_and_no_other_is_faster(start):
    explorer = sizing_explorer(**start)
    line = explorer.steps[0].by_key["0.best"]
    explorer.click("0.best")
    best = step_time(explorer.shown, explorer.clusters[explorer.choice.cluster])
    days = f"{best.days(300e9):.3g}"
    assert f"{days} days: " in line.text and f"<b>{days} days</b>" in explorer.says
    assert "moved" not in explorer.says
    fitting = [fact for key, mark in explorer.steps[0].by_key.items() if re.search(r"t\d+[.]p\d+$", key)
               for fact in re.findall(r": ([\d.]+) days", mark.fact)]  # fmt: skip
    assert min(map(float, fitting)) == float(days)


def test_failures_make_it_take_longer(explorer):
    explorer.choose(failures="6.5, as on RSC-1")
    kept = goodput(1024, 6.5e-3, 30, 600)
    days = step_time(explorer.shown, DGX_A100).days(300e9) / kept.share
    assert f"({days:.3g} with a failure every 28.8 hours" in explorer.says
    assert f"{kept.share:.0%} are new work" in table(explorer)["failures"]


def test_stages_may_be_uneven_where_layers_do_not_divide():
    explorer = sizing_explorer(
        "DeepSeek-V3", "DGX H100", batch_size=4096, tp_size=1, pp_size=1, ep_size=64, zero_stage=1
    )
    assert [key for key in explorer.steps[0].by_key if key.endswith("t1.p8")] == []
    explorer.choose(uneven=True)
    explorer.choose(pp_size=8)
    assert explorer.shown.stage_layers == (6, 8, 8, 8, 8, 8, 8, 7)
    [cell] = [mark for key, mark in explorer.steps[0].by_key.items() if key.endswith("t1.p16")]
    assert "sizes do not divide" not in cell.fact and "GB" in cell.fact


def test_a_slider_says_the_days_and_the_memory_of_its_next_options():
    explorer = sizing_explorer("Llama 3, 70 billion", world_size=512, batch_size=1024, tp_size=8, pp_size=8)
    control = explorer.controls["tp_size"]
    less, more = (control.options[control.index + way] for way in (-1, 1))
    hints = dict(zip(control.options, control.hints))
    assert {option for option, hint in hints.items() if hint} == {less, more}
    assert hints[more].startswith("16: ") and "does not divide" in hints[more]
    explorer.choose(tp_size=less)
    days = step_time(explorer.shown, explorer.clusters[explorer.choice.cluster]).days(300e9)
    held = f"{three_digits(fullest(explorer.shown).total / 1e9)} GB"
    assert hints[less].startswith(f"4: {three_digits(days)} days, {held}")
    assert ("too much" in hints[less]) == (fullest(explorer.shown).total > 80e9)
