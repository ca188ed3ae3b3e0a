"""The exercises of notebook 03: solutions agree with torch, and the rules say what was sent for nothing."""

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F

from course.exercises.column_parallel import column_backward, stride_shard
from labkit.launch import launch
from labkit.tensor_parallel import local_shard

pytestmark = pytest.mark.usefixtures("launches_on_kept_ranks")


def test_backward_is_that_of_autograd_through_the_whole_layer():
    def by_autograd(x, weight, grad_output):
        def gathered(shard, dim):
            shards = [torch.empty_like(shard) for _ in range(dist.get_world_size())]
            dist.all_gather(shards, shard)
            return torch.cat(shards, dim)

        whole_x, whole_weight = x.clone().requires_grad_(), gathered(weight, 0).requires_grad_()
        bias = torch.zeros(len(whole_weight), requires_grad=True)
        F.linear(whole_x, whole_weight, bias).backward(gathered(grad_output, -1))
        gradients = whole_x.grad, whole_weight.grad, bias.grad
        assert all(gradient is not None for gradient in gradients)
        rank, tp_size = dist.get_rank(), dist.get_world_size()
        return gradients[0], gradients[1].chunk(tp_size)[rank], gradients[2].chunk(tp_size)[rank]

    verdict = column_backward.verdict(by_autograd)
    assert "the values are right" in verdict.text
    assert "It calls all_gather" in verdict.text


@pytest.mark.parametrize("stride", [1, 3])
def test_the_stride_rule_is_the_layers(stride):
    def by_layer(rank, master):
        return local_shard(master, dist.group.WORLD, 0, stride).tolist()

    master = torch.arange(24).view(12, 2)
    got = launch(lambda: by_layer(dist.get_rank(), master), world_size=2)
    assert got == [stride_shard.solution_function(master, rank, 2, stride).tolist() for rank in range(2)]
