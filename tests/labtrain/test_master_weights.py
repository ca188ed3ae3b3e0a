"""Master weights against a loop by hand, and resumed."""

import copy

import torch
from torch import nn

from labtrain.master_weights import MasterWeights


def a_model(dtype):
    torch.manual_seed(5)
    return nn.Sequential(nn.Linear(6, 8), nn.GELU(), nn.Linear(8, 3)).to(dtype)


def some_rows(number):
    return torch.randn(10, 6, generator=torch.Generator().manual_seed(number)).bfloat16()


def give_gradients(model, number):
    model.zero_grad()
    model(some_rows(number)).square().mean().backward()


def test_master_weights_against_a_loop_by_hand():
    model, by_hand = a_model(torch.bfloat16), a_model(torch.bfloat16)
    optimizer = MasterWeights(model.parameters(), torch.optim.AdamW, lr=1e-3)
    masters = [p.detach().float().requires_grad_() for p in by_hand.parameters()]
    inner = torch.optim.AdamW(masters, lr=1e-3)
    for number in range(20):
        for each in (optimizer, inner):
            each.param_groups[0]["lr"] = 1e-3 / (number + 1)  # what a schedule does
        give_gradients(model, number)
        optimizer.step()
        give_gradients(by_hand, number)
        for master, parameter in zip(masters, by_hand.parameters()):
            master.grad = parameter.grad.float()
        inner.step()
        for master, parameter in zip(masters, by_hand.parameters()):
            parameter.data.copy_(master.data)
    for parameter, expected, master in zip(model.parameters(), by_hand.parameters(), masters):
        assert torch.equal(parameter, expected)
        assert parameter.dtype == torch.bfloat16
        state = optimizer.state[parameter]
        assert torch.equal(state["master_weight"], master) and not torch.equal(master, parameter.float())
        assert {value.dtype for value in state.values()} == {torch.float32}


def test_master_weights_are_resumed_bit_by_bit():
    model, other = a_model(torch.bfloat16), a_model(torch.bfloat16)
    optimizer = MasterWeights(model.parameters(), torch.optim.AdamW, lr=1e-2)
    resumed = MasterWeights(other.parameters(), torch.optim.AdamW, lr=1.0)
    for number in range(6):
        if number == 3:
            resumed.load_state_dict(copy.deepcopy(optimizer.state_dict()))
        give_gradients(model, number)
        optimizer.step()
        if number >= 3:
            give_gradients(other, number)
            resumed.step()
    assert all(map(torch.equal, model.parameters(), other.parameters()))
