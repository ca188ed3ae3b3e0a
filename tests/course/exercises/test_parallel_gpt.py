"""The exercise of notebook 08: its formula counts what a layer on real ranks has."""

import pytest
import torch.distributed as dist

from course.exercises.parallel_gpt import my_layer_parameters
from labkit.launch import launch
from labkit.model import TransformerLayer
from labkit.shape import GPT


def parameters_on_rank():
    shape = GPT(num_layers=1, hidden_size=16, seq_length=8, vocab_size=10, num_attention_heads=4)
    layer = TransformerLayer(shape, dist.group.WORLD, "layer", 0, 0.0, sequence_parallel=False)
    return sum(parameter.numel() for parameter in layer.parameters())


@pytest.mark.parametrize("tp_size", [1, 4])
def test_ranks_hold_as_many_parameters_as_the_solution_says(tp_size):
    assert launch(parameters_on_rank, world_size=tp_size) == [my_layer_parameters(16, tp_size)] * tp_size
