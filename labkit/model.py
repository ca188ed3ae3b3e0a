"""A small GPT made of the sharded layers: one definition for one process and for many ranks.

Pre-norm, causal attention, learned positions, the output layer tied to the embedding. Each weight is drawn from a
generator of its own, seeded by the weight's name. So every layout of ranks starts from the same model, and has the same
names in its state_dict.
"""

import hashlib
import math
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from labkit.cuts import check_divides, layers_of_stage
from labkit.shape import GPT
from labkit.tensor_parallel import (
    ParallelMLP,
    ParallelSelfAttention,
    ShardedDropout,
    VocabParallelEmbedding,
    column_linear,
    vocab_parallel_cross_entropy,
)
from labkit.tensor_parallel.operators import copy_to_tp, scatter_to_sequence

STD = 0.02  # the standard deviation of a new weight, as in GPT-2


class ParallelGPT(nn.Module):
    """A GPT, or one stage of it, on the ranks of a tensor-parallel group.

    ``forward(x)`` takes token ids [batch, seq] on the first stage, and hidden states after it; it gives logits
    [batch, seq, V'/t] of this rank's words on the last stage, and hidden states before it. Hidden states are
    [batch, seq, hidden], with ``sequence_parallel`` this rank's [batch, seq/t, hidden].

    Args:
        shape: the number of layers and heads, and the widths. The MLPs are 4 hidden wide.
        group: the tensor-parallel group; `labkit.groups.group_of_one()` where no world is up.
        stage, num_stages: which of the model's consecutive parts this is; some have one layer more than others. The
            first and the last stage both hold the tied embedding, equal at the start: add up their gradients.
        seed: decides the weights, together with their names.
        recompute: keep only each layer's input, and compute the rest again in backward.

    Raises:
        ValueError: the sizes do not fit together; raised before any communication.
    """

    def __init__(
        self,
        shape: GPT,
        group: dist.ProcessGroup,
        *,
        stage: int = 0,
        num_stages: int = 1,
        seed: int = 0,
        dropout: float = 0.0,
        sequence_parallel: bool = False,
        recompute: bool = False,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ):
        super().__init__()
        if shape.num_attention_heads is None:
            raise ValueError(f"{shape} has no num_attention_heads: give a number that divides hidden_size")
        if not 1 <= num_stages <= shape.num_layers:
            raise ValueError(f"num_stages={num_stages} must be between 1 and num_layers={shape.num_layers}")
        if not 0 <= stage < num_stages:
            raise ValueError(f"stage={stage} is not one of num_stages={num_stages}: use 0 to {num_stages - 1}")
        if not 0.0 <= dropout < 1.0:
            raise ValueError(f"dropout={dropout} must be in [0, 1)")
        if sequence_parallel:
            check_divides(group.size(), "seq_length", shape.seq_length)
        self.shape, self.group, self.stage = shape, group, stage
        self.is_first, self.is_last = stage == 0, stage == num_stages - 1
        self.recompute, self.sequence_parallel = recompute, sequence_parallel
        place: dict[str, Any] = dict(dtype=dtype, device=device)
        options = place | {"sequence_parallel": sequence_parallel}
        if self.is_first or self.is_last:
            self.embedding = VocabParallelEmbedding(
                shape.vocab_size, shape.hidden_size, group, init_method=normal("embedding", seed), **options
            )
        if self.is_first:
            self.positions = nn.Parameter(torch.empty(shape.seq_length, shape.hidden_size, **place))
            normal("positions", seed)(self.positions)
            self.dropout = _dropout(dropout, group, sequence_parallel)
        layers = layers_of_stage(shape.num_layers, stage, num_stages)
        self.layers = nn.ModuleDict(
            {str(i): TransformerLayer(shape, group, f"layers.{i}", seed, dropout, **options) for i in layers}
        )
        if self.is_last:
            self.norm = ReplicatedLayerNorm(shape.hidden_size, group, **options)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.is_first:
            if x.size(-1) > self.shape.seq_length:
                raise ValueError(f"{x.size(-1)} tokens are more than seq_length={self.shape.seq_length}: give fewer")
            positions = self.positions[: x.size(-1)]  # [seq, hidden]
            if self.sequence_parallel:
                positions = scatter_to_sequence(positions, self.group)
            x = self.dropout(self.embedding(x) + positions)
        for layer in self.layers.values():
            x = checkpoint(layer, x, use_reentrant=False) if self.recompute and self.training else layer(x)
        if self.is_last:
            x = column_linear(self.norm(x), self.embedding.weight, None, self.group, self.sequence_parallel)
        return x

    def loss(self, logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """Return the mean cross-entropy in nats; targets: [batch, seq], the tokens that come next, on every rank."""
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32))  # bfloat16 would round a loss of 3 to 0.02
        return vocab_parallel_cross_entropy(logits, targets, self.group, vocab_size=self.shape.vocab_size)


class TransformerLayer(nn.Module):
    """x + attention(norm(x)), then the same with an MLP: two all-reduces in forward, two in backward."""

    def __init__(self, shape: GPT, group, name: str, seed: int, dropout: float, **options):
        super().__init__()
        assert shape.num_attention_heads is not None
        h, outer_std = shape.hidden_size, STD / math.sqrt(2 * shape.num_layers)  # many layers add up to x

        def init_methods(inner: str, outer: str) -> dict:
            inner_init, outer_init = normal(f"{name}.{inner}", seed), normal(f"{name}.{outer}", seed, outer_std)
            return options | {"init_method": inner_init, "output_layer_init_method": outer_init}

        self.attention_norm = ReplicatedLayerNorm(h, group, **options)
        self.attention = ParallelSelfAttention(
            h, shape.num_attention_heads, group, dropout=dropout, **init_methods("attention.qkv", "attention.out")
        )
        self.mlp_norm = ReplicatedLayerNorm(h, group, **options)
        self.mlp = ParallelMLP(h, 4 * h, group, **init_methods("mlp.up", "mlp.down"))
        self.dropout = _dropout(dropout, group, options["sequence_parallel"])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.dropout(self.attention(self.attention_norm(x)))
        return x + self.dropout(self.mlp(self.mlp_norm(x)))


class ReplicatedLayerNorm(nn.LayerNorm):
    """LayerNorm with its weight on every rank. If each rank sees only some tokens, the ranks add up their gradients."""

    def __init__(self, hidden_size: int, group, sequence_parallel: bool, **place):
        super().__init__(hidden_size, **place)
        self.group, self.sequence_parallel = group, sequence_parallel

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not self.sequence_parallel:
            return super().forward(x)
        weight, bias = copy_to_tp(torch.stack([self.weight, self.bias]), self.group)  # one message for both
        return F.layer_norm(x, self.normalized_shape, weight, bias, self.eps)


def normal(name: str, seed: int, std: float = STD) -> Callable[[torch.Tensor], object]:
    """Return an init method that draws normally distributed values, by name and seed, the same in every precision."""
    key = hashlib.blake2b(f"{seed} {name}".encode(), digest_size=7).digest()

    def fill(weight: torch.Tensor) -> None:
        generator = torch.Generator().manual_seed(int.from_bytes(key, "big"))
        with torch.no_grad():
            weight.copy_(torch.randn(weight.shape, generator=generator, dtype=torch.float32) * std)

    return fill


def _dropout(p: float, group, sequence_parallel: bool) -> nn.Module:
    """Return the dropout of hidden states: a mask per rank if ranks have different tokens, else one for all ranks."""
    return ShardedDropout(p, group) if sequence_parallel else nn.Dropout(p)
