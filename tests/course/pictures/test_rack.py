"""One rack that regroups: the same boxes in every step, each inside the frame of its group."""

import pytest

from course.explorers.layout import BATCH_SIZE, MODEL
from course.pictures.layout import axes_in_use, describe_groups
from course.pictures.rack import MOST_GPUS, rack_steps
from course.sizing import step_traffic
from labkit.layout import ParallelLayout
from tests.support.pictures import faults

LAYOUTS = [
    ParallelLayout(16, 2, 4),
    ParallelLayout(64, 8, 2),
    ParallelLayout(64, 1, 4),
    ParallelLayout(12, 2, 3, order="pp-dp-tp"),
    ParallelLayout(16, 2, 2, 2, "tp-cp-dp-pp", ep_size=4, expert_tp_size=1),
    ParallelLayout(1, 1, 1),
]


def inside(frame, gpu):
    return frame.x <= gpu.x and gpu.right <= frame.right and frame.y <= gpu.y and gpu.bottom <= frame.bottom


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_a_frame_has_the_gpus_of_its_group_and_nobody_else(layout):
    nodes, *steps = rack_steps(layout, gpus_per_node=8)
    for axis, scene in zip(axes_in_use(layout), steps, strict=True):
        gpus = {rank: scene.by_key[f"gpu{rank}"] for rank in range(layout.world_size)}
        for index, group in enumerate(layout.groups(axis)):
            frame = scene.by_key.get(f"{axis}{index}.frame")
            assert (frame is None) == (layout.size(axis) == 1)
            if frame:
                assert tuple(rank for rank, gpu in gpus.items() if inside(frame, gpu)) == tuple(group)
                assert frame.dashed == (len({rank // 8 for rank in group}) > 1)
        assert describe_groups(layout, axis, 8) in scene.says
        assert {(gpu.width, gpu.fill) for gpu in gpus.values()} == {
            (mark.width, mark.fill) for mark in nodes.marks if mark.key.startswith("gpu")
        }  # nothing but its place changes


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_all_of_it_is_on_the_paper_and_can_be_read(layout):
    traffic = step_traffic(MODEL, layout, gpus_per_node=8, batch_size=BATCH_SIZE) if layout.ep_size == 1 else None
    steps = rack_steps(layout, 8, traffic)
    assert not [fault for scene in steps for fault in faults(scene)]
    assert len({scene.view for scene in steps}) == 1  # nothing below it moves


def test_the_axis_that_sends_most_has_the_thickest_frames():
    layout = LAYOUTS[0]
    traffic = step_traffic(MODEL, layout, gpus_per_node=8, batch_size=BATCH_SIZE)
    marks = [mark for scene in rack_steps(layout, 8, traffic) for mark in scene.marks if mark.key.endswith(".frame")]
    widths = {mark.key[:2]: mark.edge_width for mark in marks}
    assert traffic["tp"].total_bytes > traffic["pp"].total_bytes > traffic["dp"].total_bytes
    assert widths["tp"] > widths["pp"] > widths["dp"]


def test_more_gpus_than_a_rack_has_room_for_are_refused():
    with pytest.raises(ValueError, match=f"too large for one rack: use up to {MOST_GPUS}"):
        rack_steps(ParallelLayout(128, 8))
