"""The Llama that notebook 10 parallelises: its variants are the same model on one GPU."""

import torch

from course.plain_llama import MLP, FusedMLP, Llama


def test_counted_heads_are_the_same_model_in_one_process():
    model, counted = Llama().double(), Llama(heads=(4, -1), kv_heads=(2, -1)).double()
    counted.load_state_dict(model.state_dict())
    ids = torch.randint(27, (2, 32), generator=torch.Generator().manual_seed(0))
    assert torch.equal(model(ids), counted(ids))


def test_a_token_sees_none_after_it():
    model = Llama().double()
    ids = torch.arange(8)[None]
    assert torch.allclose(model(ids)[:, :5], model(ids[:, :5]), rtol=0, atol=1e-12)


def test_a_fused_mlp_is_the_same_in_one_process():
    mlp, fused = MLP().double(), FusedMLP().double()
    both = torch.cat((mlp.gate_proj.weight, mlp.up_proj.weight))
    fused.load_state_dict({"gate_up_proj.weight": both, "down_proj.weight": mlp.down_proj.weight})
    x = torch.ones(3, 64, dtype=torch.float64)
    assert torch.allclose(mlp(x), fused(x), rtol=0, atol=1e-12)
