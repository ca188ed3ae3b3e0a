"""A small Llama in plain PyTorch: two layers for one GPU, without a word about ranks, in Hugging Face's names.

Notebook 10 parallelises it by a plan, as torchtitan does with its models.
"""

from functools import partial

import torch
import torch.nn.functional as F
from torch import nn

HEAD_SIZE = 16
Linear = partial(nn.Linear, bias=False)
Norm = partial(nn.RMSNorm, 64, eps=1e-5)


class Attention(nn.Module):
    """Four heads of queries, and two of keys and values.

    Args:
        heads, kv_heads: how queries, and keys and values, are divided. -1 leaves open how many heads there are: on a
            rank of a tensor group it is a part of them.
    """

    def __init__(self, heads: tuple[int, int] = (-1, HEAD_SIZE), kv_heads: tuple[int, int] = (-1, HEAD_SIZE)):
        super().__init__()
        self.q_proj = Linear(64, 64)
        self.k_proj = Linear(64, 32)
        self.v_proj = Linear(64, 32)
        self.o_proj = Linear(64, 64)
        self.heads = heads
        self.kv_heads = kv_heads

    def forward(self, x: torch.Tensor) -> torch.Tensor:  # [batch, tokens, 64]
        q = rotate(self.q_proj(x).unflatten(-1, self.heads))
        k = rotate(self.k_proj(x).unflatten(-1, self.kv_heads))
        v = self.v_proj(x).unflatten(-1, self.kv_heads)
        q, k, v = (part.transpose(1, 2) for part in (q, k, v))  # [batch, heads, tokens, head size]
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return self.o_proj(y.transpose(1, 2).flatten(2))


def rotate(x: torch.Tensor) -> torch.Tensor:
    """Rotate each head by RoPE: elements i and i + d/2 are a pair. x is [batch, tokens, heads, head size]."""
    head_size = x.size(-1)
    frequencies = 10_000 ** -(torch.arange(0, head_size, 2, device=x.device, dtype=x.dtype) / head_size)
    angles = torch.outer(torch.arange(x.size(1), device=x.device), frequencies)[:, None]  # the same for all heads
    first, second = x.chunk(2, dim=-1)
    turned = first * angles.cos() - second * angles.sin()
    turned_too = second * angles.cos() + first * angles.sin()
    return torch.cat((turned, turned_too), dim=-1)


class MLP(nn.Module):
    """SwiGLU: the gate and the other factor are two layers."""

    def __init__(self):
        super().__init__()
        self.gate_proj = Linear(64, 176)
        self.up_proj = Linear(64, 176)
        self.down_proj = Linear(176, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class FusedMLP(nn.Module):
    """The same with both factors in one layer, as many models have it: the gate is the first half."""

    def __init__(self):
        super().__init__()
        self.gate_up_proj = Linear(64, 352)
        self.down_proj = Linear(176, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gate, up = self.gate_up_proj(x).chunk(2, dim=-1)
        return self.down_proj(F.silu(gate) * up)


class Layer(nn.Module):
    """A transformer layer: attention and an MLP, each after a norm and added to what came in."""

    def __init__(self, **attention: tuple[int, int]):
        super().__init__()
        self.input_layernorm = Norm()
        self.self_attn = Attention(**attention)
        self.post_attention_layernorm = Norm()
        self.mlp = MLP()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.self_attn(self.input_layernorm(x))
        return x + self.mlp(self.post_attention_layernorm(x))


class Llama(nn.Module):
    """The whole model: from token ids [batch, tokens] to logits [batch, tokens, 27].

    >>> Llama()(torch.zeros(1, 5, dtype=torch.int64)).shape
    torch.Size([1, 5, 27])
    """

    def __init__(self, **attention: tuple[int, int]):
        super().__init__()
        layers = nn.ModuleList(Layer(**attention) for _ in range(2))
        self.model = nn.ModuleDict({"embed_tokens": nn.Embedding(27, 64), "layers": layers, "norm": Norm()})
        self.lm_head = Linear(64, 27)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.model["embed_tokens"](ids)
        for layer in self.model["layers"].children():
            x = layer(x)
        return self.lm_head(self.model["norm"](x))
