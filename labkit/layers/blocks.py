"""The two halves of a transformer layer on a tensor group: column parallel, then row parallel, one sum each.

Between the two layers of a pair every rank works on its own slice and needs nobody. Source: arXiv 1909.08053,
section 3; with ``sequence_parallel``, arXiv 2205.05198, section 4.2.
"""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from labkit.layers.linear import ColumnParallelLinear, RowParallelLinear
from labkit.layers.shards import check_divides


class ParallelMLP(nn.Module):
    """GeLU(X A) B with A cut by columns and B by rows: one all-reduce forward, one backward.

    x and the output: [..., seq, hidden], replicated; with ``sequence_parallel`` [..., seq/t, hidden], and the
    all-reduces become an all-gather and a reduce-scatter each.
    """

    def __init__(
        self,
        hidden_size: int,
        ffn_hidden_size: int,
        group: dist.ProcessGroup,
        *,
        sequence_parallel: bool = False,
        **options,
    ):
        super().__init__()
        options |= {"sequence_parallel": sequence_parallel}
        self.up = ColumnParallelLinear(hidden_size, ffn_hidden_size, group, gather_output=False, **options)
        self.down = RowParallelLinear(ffn_hidden_size, hidden_size, group, input_is_parallel=True, **options)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(F.gelu(self.up(x)[0]))[0]


class ParallelSelfAttention(nn.Module):
    """Causal self-attention with the heads divided among the ranks: one all-reduce forward, one backward.

    x and the output: [batch, seq, hidden], or [batch, seq/t, hidden] with ``sequence_parallel``. Q, K and V are
    one fused column-parallel layer, [Q; K; V] with stride 3, so that each rank gets all three for its own heads.

    Raises:
        ValueError: the number of heads does not divide hidden_size, or t not the number of heads.
    """

    def __init__(
        self,
        hidden_size: int,
        num_attention_heads: int,
        group: dist.ProcessGroup,
        *,
        sequence_parallel: bool = False,
        **options,
    ):
        super().__init__()
        check_divides(group.size(), "num_attention_heads", num_attention_heads)
        if hidden_size % num_attention_heads:
            wider = (hidden_size // num_attention_heads + 1) * num_attention_heads
            raise ValueError(
                f"num_attention_heads={num_attention_heads} does not divide hidden_size={hidden_size}: "
                f"use hidden_size {wider}, or a number of heads that divides {hidden_size}"
            )
        options |= {"sequence_parallel": sequence_parallel}
        self.head_size = hidden_size // num_attention_heads
        self.qkv = ColumnParallelLinear(hidden_size, 3 * hidden_size, group, gather_output=False, stride=3, **options)
        self.out = RowParallelLinear(hidden_size, hidden_size, group, input_is_parallel=True, **options)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        qkv, _ = self.qkv(x)  # [batch, seq, 3 * hidden/t]
        q, k, v = (part.unflatten(-1, (-1, self.head_size)).transpose(-3, -2) for part in qkv.chunk(3, -1))
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)  # [batch, heads/t, seq, head_size]
        return self.out(attended.transpose(-3, -2).flatten(-2))[0]
