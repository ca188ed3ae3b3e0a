"""The exercises of notebook 10: a formula counts what a layer on real ranks has; words are those that labkit draws."""

import pytest
import torch
import torch.distributed as dist

from course.exercises.parallel_gpt import my_layer_parameters, my_next_word
from labkit.groups import init_groups
from labkit.launch import launch
from labkit.layout import ParallelLayout
from labkit.shape import GPT
from labtrain.generation import choose_word
from labtrain.model import ParallelGPT, TransformerLayer


def parameters_on_rank():
    shape = GPT(num_layers=1, hidden_size=16, seq_length=8, vocab_size=10, num_attention_heads=4)
    layer = TransformerLayer(shape, dist.group.WORLD, "layer", 0, 0.0, sequence_parallel=False)
    return sum(parameter.numel() for parameter in layer.parameters())


@pytest.mark.parametrize("tp_size", [1, 4])
def test_ranks_hold_as_many_parameters_as_the_solution_says(tp_size):
    assert launch(parameters_on_rank, world_size=tp_size) == [my_layer_parameters(16, tp_size)] * tp_size


def words_of_both():
    t = dist.get_world_size()
    with init_groups(ParallelLayout(t, tp_size=t)) as groups:
        model = ParallelGPT(GPT(1, 8, 4, 12, num_attention_heads=4), groups.tp)
        logits = torch.randn(200, 12, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
        own = logits.chunk(t, 1)[dist.get_rank()]
        return choose_word(own, model, 0.7, None, seed=5), my_next_word(own, 0.7, 5)


def test_the_words_are_those_of_labkit_for_every_t():
    results = [pair for t in (1, 2, 4) for pair in launch(words_of_both, world_size=t)]
    for mine, labkits in results:
        assert torch.equal(mine, labkits) and torch.equal(mine, results[0][0])
    assert len(results[0][0].unique()) > 6
