"""A small GPT as one writes it for one GPU, in PyTorch's own modules, for PyTorch's own parallel API to cut.

It computes what `labtrain.model` computes; its linear layers have no bias.
"""

import copy
from collections.abc import Callable

import torch
from torch import nn
from torch.nn import functional as F

from labkit.partition import layers_of_stage


class Attention(nn.Module):
    """Causal self-attention. How many heads there are follows from the projections, so it may have a part of them."""

    def __init__(self, hidden_size: int, head_size: int):
        super().__init__()
        self.head_size = head_size
        self.q, self.k, self.v, self.out = (nn.Linear(hidden_size, hidden_size, bias=False) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:  # [batch, tokens, hidden]
        q, k, v = (self.heads(projection(x)) for projection in (self.q, self.k, self.v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(y.transpose(1, 2).flatten(2))

    def heads(self, x: torch.Tensor) -> torch.Tensor:
        """Return [batch, heads, tokens, head_size] of [batch, tokens, heads * head_size]."""
        return x.unflatten(-1, (-1, self.head_size)).transpose(1, 2)


class Block(nn.Module):
    """x + attention(norm(x)), then the same with an MLP.

    Args:
        attention: makes the attention, of the two sizes.
    """

    def __init__(self, hidden_size: int, head_size: int, attention: Callable[[int, int], nn.Module] = Attention):
        super().__init__()
        self.attention_norm = nn.LayerNorm(hidden_size)
        self.attention = attention(hidden_size, head_size)
        self.mlp_norm = nn.LayerNorm(hidden_size)
        self.up = nn.Linear(hidden_size, 4 * hidden_size, bias=False)
        self.down = nn.Linear(4 * hidden_size, hidden_size, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:  # [batch, tokens, hidden]
        x = x + self.attention(self.attention_norm(x))
        return x + self.down(F.gelu(self.up(self.mlp_norm(x))))


class PlainGPT(nn.Module):
    """Embedding, blocks, norm and output. What a stage of a pipeline does not have is None, or not among the blocks."""

    def __init__(self, vocab_size: int = 32, hidden_size: int = 32, head_size: int = 8, num_layers: int = 4):
        super().__init__()
        self.embedding: nn.Embedding | None = nn.Embedding(vocab_size, hidden_size)
        self.blocks = nn.ModuleDict({str(number): Block(hidden_size, head_size) for number in range(num_layers)})
        self.norm: nn.LayerNorm | None = nn.LayerNorm(hidden_size)
        self.output: nn.Linear | None = nn.Linear(hidden_size, vocab_size, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Token ids [batch, tokens] on the first stage, hidden states on the others; logits from the last."""
        if self.embedding:
            x = self.embedding(x)
        for block in self.blocks.values():
            x = block(x)
        return self.output(self.norm(x)) if self.norm and self.output else x


def stage_of(model: PlainGPT, stage: int, num_stages: int) -> PlainGPT:
    """Return a copy with what this stage has. Its parameters keep their names.

    >>> [name for name, _ in stage_of(PlainGPT(num_layers=2), 1, 2).named_children()]
    ['blocks', 'norm', 'output']
    """
    part = copy.deepcopy(model)
    numbers = layers_of_stage(len(model.blocks), stage, num_stages)
    part.blocks = nn.ModuleDict({str(number): part.blocks[str(number)] for number in numbers})
    if stage > 0:
        part.embedding = None
    if stage < num_stages - 1:
        part.norm = part.output = None
    return part
