"""Master weights against a loop by hand, resumed, and divided among ranks."""

import copy
from functools import partial

import torch
import torch.distributed as dist
from torch import nn

from course.sharded_optimizer import ShardedOptimizer
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
    rounded_only = a_model(torch.bfloat16)
    naive = torch.optim.AdamW(rounded_only.parameters(), lr=1e-3)
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
        give_gradients(rounded_only, number)
        naive.step()
    for parameter, expected, master in zip(model.parameters(), by_hand.parameters(), masters):
        assert torch.equal(parameter, expected)
        assert parameter.dtype == torch.bfloat16
        state = optimizer.state[parameter]
        assert torch.equal(state["master_weight"], master)
        assert {value.dtype for value in state.values()} == {torch.float32}
    different = [not torch.equal(a, b) for a, b in zip(model.parameters(), rounded_only.parameters())]
    assert any(different), "without master weights it is the same: this test shows nothing"


def test_master_weights_are_resumed_bit_by_bit():
    model = a_model(torch.bfloat16)
    optimizer = MasterWeights(model.parameters(), torch.optim.AdamW, lr=1e-2)
    for number in range(3):
        give_gradients(model, number)
        optimizer.step()
    other = a_model(torch.bfloat16)
    resumed = MasterWeights(other.parameters(), torch.optim.AdamW, lr=1.0)
    resumed.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    for number in range(3, 6):
        for each, its_optimizer in ((model, optimizer), (other, resumed)):
            give_gradients(each, number)
            its_optimizer.step()
    assert all(map(torch.equal, model.parameters(), other.parameters()))


def sharded_master_weights():
    """On a rank: against the same optimizer undivided, also after loading; and what is kept here."""
    models = [a_model(torch.bfloat16) for _ in range(3)]
    make = partial(MasterWeights, optimizer_class=torch.optim.AdamW)
    plain = make(models[0].parameters(), lr=1e-2)
    sharded = ShardedOptimizer(models[1].parameters(), make, dist.group.WORLD, lr=1e-2)
    for number in range(3):
        for model, optimizer in zip(models, (plain, sharded)):
            give_gradients(model, number)
            optimizer.step()
    models[2].load_state_dict(models[0].state_dict())
    loaded = ShardedOptimizer(models[2].parameters(), make, dist.group.WORLD, lr=1.0)
    loaded.load_state_dict(copy.deepcopy(plain.state_dict()))
    for number in range(3, 6):
        for model, optimizer in zip(models, (plain, sharded, loaded)):
            give_gradients(model, number)
            optimizer.step()
    for values in zip(*(model.parameters() for model in models)):
        assert torch.equal(values[0], values[1])
        assert torch.equal(values[0], values[2])
    kinds = {x.dtype for state in loaded.state.values() for x in state.values()}
    return kinds, [sum(x.nbytes for s in o.state.values() for x in s.values() if x.dim()) for o in (plain, loaded)]


def test_master_weights_in_a_sharded_optimizer(on_ranks):
    num_parameters = sum(p.numel() for p in a_model(torch.float32).parameters())
    ranks = on_ranks(sharded_master_weights)
    assert [kinds for kinds, _ in ranks] == [{torch.float32}] * 2
    assert {whole for _, (whole, _) in ranks} == {12 * num_parameters}  # master weight, two averages: 4 bytes each
    assert sum(own for _, (_, own) in ranks) == 12 * num_parameters
