"""Where the boxes of GPUs go."""

from hypothesis import given
from hypothesis import strategies as st

from course.pictures.floor_plan import floor_plan


@given(
    gpus_per_node=st.integers(1, 20),
    num_gpus=st.integers(1, 300),
    width=st.floats(1, 10),
    height=st.floats(1, 10),
)
def test_floor_plan_keeps_boxes_apart_and_inside(gpus_per_node, num_gpus, width, height):
    plan = floor_plan(num_gpus, gpus_per_node, width, height)
    box = plan.box_length(width, height)
    centres = [plan.centre(rank) for rank in range(num_gpus)]
    assert len({(round(x, 6), round(y, 6)) for x, y in centres}) == num_gpus
    for rank, (x, y) in enumerate(centres):
        assert (x + 0.5) * box <= width + 1e-9 and (y + 0.5) * box <= height + 1e-9
        left, top = plan.corner(rank // gpus_per_node)
        assert 0.5 <= x - left <= plan.frame[0] - 0.5 and 0.5 <= y - top <= plan.frame[1] - 0.5
