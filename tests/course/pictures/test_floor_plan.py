"""Where the boxes of GPUs go."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from course.pictures.floor_plan import box_length, floor_plan


@given(
    gpus_per_node=st.integers(1, 20),
    num_gpus=st.integers(1, 300),
    width=st.floats(1, 10),
    height=st.floats(1, 10),
)
def test_floor_plan_keeps_boxes_apart_and_inside(gpus_per_node, num_gpus, width, height):
    plan = floor_plan(num_gpus, gpus_per_node, width, height)
    centres, corners = plan.gpu_centres(), plan.node_corners()
    box = box_length(plan, width, height)
    assert (centres.max(axis=0) + 0.5) @ [box, 0] <= width + 1e-9
    assert (centres.max(axis=0) + 0.5) @ [0, box] <= height + 1e-9
    assert len({tuple(np.round(centre, 6)) for centre in centres}) == num_gpus
    node = np.arange(num_gpus) // gpus_per_node
    inside = centres - corners[node]
    assert (inside >= 0.5).all()
    assert (inside <= np.array(plan.frame) - 0.5).all()
