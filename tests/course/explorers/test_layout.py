"""The layout explorer, driven as a reader drives it: by changing the values of its controls."""

import re

import pytest

from course.explorers.layout import BATCH_SIZE, MODEL, WITH_EXPERTS, layout_explorer
from course.pictures.layout import axes_in_use, draw_layout
from course.pictures.style import bytes_text
from course.sizing import step_traffic
from labkit.layout import ParallelLayout


@pytest.fixture
def explorer():
    return layout_explorer(16, tp_size=2, pp_size=4)


def scene(explorer):
    return explorer.steps[0]


def test_the_picture_is_that_of_the_layout_with_its_bytes(explorer):
    layout = ParallelLayout(16, 2, 4, order="tp-dp-pp")
    traffic = step_traffic(MODEL, layout, gpus_per_node=8, batch_size=BATCH_SIZE)
    assert list(scene(explorer).marks) == list(draw_layout(layout, 8, traffic=traffic).marks)
    for axis, row in zip(axes_in_use(layout), scene(explorer).table.rows, strict=True):
        assert row[3:5] == [bytes_text(volume) for volume in traffic[axis]]
    assert traffic["tp"].crossing_bytes == 0 < traffic["pp"].crossing_bytes
    assert "7.5 billion parameters" in scene(explorer).table.caption


def test_context_parallelism_has_a_grid_of_its_own(explorer):
    explorer.choose(cp_size=2)
    assert explorer.shown == ParallelLayout(16, 2, 4, 2, order="tp-cp-dp-pp")
    assert [row[0] for row in scene(explorer).table.rows][1] == "context (cp 2)"


def hidden(explorer):
    return {name for name, control in explorer.controls.items() if control.hidden}


def test_axes_of_later_notebooks_stay_out_of_sight_until_they_are_asked_for(explorer):
    later = {"cp_size", "ep_size", "expert_tp_size"}
    assert hidden(explorer) == later
    for n, t, p in [(24, 3, 4), (48, 16, 3), (64, 8, 8), (12, 5, 2)]:
        explorer.choose(world_size=n, tp_size=t, pp_size=p)
        assert hidden(explorer) == later and (explorer.shown.cp_size, explorer.shown.ep_size) == (1, 1)
    explorer.choose(world_size=16, tp_size=2, pp_size=1)
    explorer.choose(more_axes=True)
    explorer.choose(cp_size=2)
    explorer.choose(ep_size=4)
    assert not hidden(explorer) and (explorer.shown.cp_size, explorer.shown.ep_size) == (2, 4)
    explorer.choose(more_axes=False)
    assert hidden(explorer) == later and explorer.shown == ParallelLayout(16, 2, 1, order="tp-dp-pp")


def test_whoever_gives_a_size_of_a_later_axis_sees_its_control():
    assert hidden(layout_explorer(16, 2, 2, cp_size=2)) == hidden(layout_explorer(16, more_axes=True)) == set()
    explorer = layout_explorer(16, 2, 2)
    explorer.choose(ep_size=2)
    assert hidden(explorer) == set() and "more_axes" not in repr(explorer)
    explorer.choose(ep_size=1)
    assert "more_axes=True" in repr(explorer)


def test_a_size_that_does_not_fit_goes_on_to_the_next_that_does_and_says_why(explorer):
    explorer.choose(tp_size=3)
    assert explorer.choice.tp_size == 4 and explorer.shown == ParallelLayout(16, 4, 4, order="tp-dp-pp")
    assert 'role="alert"><b>tensor t is 4 now, not 3.</b>' in explorer.says
    assert "tensor t = 3 * pipeline p = 4 = 12 does not divide world size n = 16." in explorer.says
    explorer.choose(tp_size=2)
    assert "alert" not in explorer.says


def test_where_no_size_fits_that_way_the_others_give_way(explorer):
    explorer.choose(tp_size=8)
    assert (explorer.choice.tp_size, explorer.choice.pp_size, explorer.choice.world_size) == (8, 2, 16)
    assert "<b>pipeline p is 2 now, not 4.</b>" in explorer.says


def test_a_click_on_a_node_shows_its_gpus_and_back(explorer):
    explorer.choose(world_size=1024)
    explorer.click("tp.block5")
    assert "tp.node5" in scene(explorer).by_key and "all nodes" in scene(explorer).by_key
    explorer.choose(world_size=32)  # which has no node 5
    assert "all nodes" not in scene(explorer).by_key
    explorer.click("tp.gpu0")
    assert explorer.node is None


def test_sizes_beyond_the_usual_are_taken_as_they_are():
    explorer = layout_explorer(40, tp_size=20, pp_size=2, gpus_per_node=20, order="tp-cp-dp-pp")
    assert explorer.shown == ParallelLayout(40, 20, 2)
    assert explorer.choice.gpus_per_node == 20


def test_one_gpu_is_not_gpus():
    assert "2 copies of the model, each on 1 GPU" in layout_explorer(world_size=2, tp_size=1, pp_size=1).says
    assert "1 GPUs" not in layout_explorer(world_size=2, tp_size=1, pp_size=1).says


@pytest.fixture
def sixteen():
    return layout_explorer(16, 2, 2, 2, ep_size=4, expert_tp_size=1)


def test_experts_have_a_grid_beside_the_dense_one_with_its_bytes(sixteen):
    layout = ParallelLayout(16, 2, 2, 2, "tp-cp-dp-pp", ep_size=4, expert_tp_size=1)
    assert sixteen.shown == layout and scene(sixteen).panels
    traffic = step_traffic(WITH_EXPERTS, layout, gpus_per_node=8, batch_size=BATCH_SIZE)
    assert traffic["ep"].total_bytes > 0
    for axis, row in zip(axes_in_use(layout), scene(sixteen).table.rows, strict=True):
        assert row[3:5] == [bytes_text(volume) for volume in traffic[axis]]
    assert "157 billion parameters, of which 7.5 billion process a token" in scene(sixteen).table.caption
    assert "2 · 1 · 4 · 2 = n: a GPU has 16 of 64 experts, and 2 GPUs have the same" in sixteen.says
    sixteen.choose(expert_tp_size=2)
    assert "a GPU has 16 of 64 experts (1/2 of each), and no two GPUs have the same" in sixteen.says


def test_with_one_expert_group_there_is_one_grid_and_the_dense_model(explorer):
    before = scene(explorer)
    explorer.choose(ep_size=2)
    assert "expert (ep 2)" in [row[0] for row in scene(explorer).table.rows]
    explorer.choose(ep_size=1)
    assert list(scene(explorer).marks) == list(before.marks) and scene(explorer).table == before.table
    explorer.choose(expert_tp_size=2)  # as t
    assert list(scene(explorer).marks) == list(before.marks)


@pytest.mark.parametrize(
    ("control", "value", "moved"),
    [
        ("ep_size", 8, "<b>pipeline p is 1 now, not 4.</b> expert_tp = 2 * experts ep = 8 = 16 does not divide "
         "the expert grid&#x27;s n/p = 4."),
        ("expert_tp_size", 8, "<b>pipeline p is 2 now, not 4.</b> expert_tp = 8 * experts ep = 1 = 8 does not "
         "divide the expert grid&#x27;s n/p = 4."),
    ],
)  # fmt: skip
def test_sizes_that_do_not_fit_the_expert_grid_move_others_and_name_it(explorer, control, value, moved):
    explorer.choose(**{control: value})
    assert getattr(explorer.choice, control) == value and moved in explorer.says


def test_an_order_with_other_pipelines_gives_way_to_experts():
    explorer = layout_explorer(16, 2, 2, order="tp-pp-dp", expert_tp_size=2)
    explorer.choose(expert_tp_size=1)
    assert "moved" in explorer.says and "in the dense grid" in explorer.says


def test_one_rack_regroups_step_by_step_and_follows_the_controls(explorer):
    explorer.choose(one_rack=True)
    assert [step.title for step in explorer.steps] == [
        "16 GPUs in 2 nodes", "Tensor groups", "Data groups", "Pipeline groups",
    ]  # fmt: skip
    explorer.choose(tp_size=4)
    assert "4 groups of 4, each inside a node" in explorer.steps[1].says
    assert repr(explorer).endswith("one_rack=True)")


def test_what_is_too_large_for_one_rack_is_shown_as_grids(explorer):
    explorer.choose(one_rack=True, world_size=128)
    assert len(explorer.steps) == 1 and explorer.controls["one_rack"].disabled
    explorer.choose(world_size=64)
    assert len(explorer.steps) == 4 and not explorer.controls["one_rack"].disabled


def test_each_number_of_the_product_moves_its_control(explorer):
    numbers = re.findall(r'aria-label="([^"]*)" aria-valuenow="(\d+)".*? data-control="([^"]*)"', explorer.says)
    assert numbers == [
        ("pipeline p", "4", "pipeline p"), ("tensor t", "2", "tensor t"), ("data d", "2", "world size n"),
        ("world size n", "16", "world size n"),
    ]  # fmt: skip
    assert {control for *_, control in numbers} <= {each.description for each in explorer.controls.values()}
