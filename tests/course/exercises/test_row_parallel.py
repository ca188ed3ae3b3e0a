"""The row-parallel exercises of notebook 04: solutions agree with torch, and rules say what was sent for nothing."""

import pytest
import torch.distributed as dist
import torch.nn.functional as F

from course.exercises import row_parallel
from course.exercises.on_ranks import gathered
from course.exercises.values import same
from labkit.launch import launch


def own(tensor, dim):
    return tensor.chunk(dist.get_world_size(), dim)[dist.get_rank()]


def row_layer_by_torch():
    """The solution's values and those of torch's own linear layer on the whole tensors, on one rank."""
    x, weight, bias = row_parallel.row_inputs(2, 3)
    grad_y, *_ = row_parallel.row_gradient_inputs(2, 3)
    whole_x, whole_weight = (gathered(tensor, 1).requires_grad_() for tensor in (x, weight))
    whole_bias = bias.clone().requires_grad_()
    y = F.linear(whole_x, whole_weight, whole_bias)
    y.backward(grad_y)
    ours = [row_parallel.my_row_forward(x, weight, bias), *row_parallel.my_row_backward(grad_y, x, weight)]
    return ours, [y, own(whole_x.grad, 1), own(whole_weight.grad, 1), whole_bias.grad]


@pytest.mark.parametrize("world_size", [2, 4])
def test_row_solutions_agree_with_torch(world_size):
    for ours, torchs in launch(row_layer_by_torch, world_size=world_size):
        assert same(ours, torchs)
