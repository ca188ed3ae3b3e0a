"""The plain GPT: its stages together are the model, under its names."""

import torch

from course.plain_gpt import PlainGPT, stage_of


def test_stages_one_after_the_other_compute_what_the_model_computes():
    torch.manual_seed(0)
    model = PlainGPT(num_layers=3).double()
    tokens = torch.randint(32, (2, 5))
    x = tokens
    for stage in range(2):
        x = stage_of(model, stage, 2)(x)
    assert torch.equal(x, model(tokens))


def test_each_parameter_is_on_one_stage_under_its_name():
    model = PlainGPT(num_layers=3)
    names = [name for stage in range(3) for name, _ in stage_of(model, stage, 3).named_parameters()]
    assert sorted(names) == sorted(name for name, _ in model.named_parameters())


def test_a_token_sees_those_before_it_and_none_after():
    torch.manual_seed(0)
    model = PlainGPT(num_layers=1).double()
    tokens = torch.randint(32, (1, 6))
    changed = tokens.clone()
    changed[0, 3] = (changed[0, 3] + 1) % 32
    apart = (model(tokens) - model(changed)).abs().amax(-1)[0]
    assert apart[:3].max() == 0 < apart[3:].min()
