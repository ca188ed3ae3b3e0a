"""The two halves of a transformer layer on a tensor group: column parallel, then row parallel, one sum each.

Between the two layers of a pair every rank works on its own slice and needs nobody. Source: arXiv 1909.08053,
section 3; with ``sequence_parallel``, arXiv 2205.05198, section 4.2.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from labkit.cuts import check_divides
from labkit.tensor_parallel.dropout import own_random_stream
from labkit.tensor_parallel.linear import ColumnParallelLinear, RowParallelLinear


class ParallelMLP(nn.Module):
    """GeLU(X A) B with A cut by columns and B by rows: one all-reduce forward, one backward.

    x and the output: [..., seq, hidden], replicated; with ``sequence_parallel`` [..., seq/t, hidden], and the
    all-reduces become an all-gather and a reduce-scatter each. ``init_method`` fills the first layer's weight,
    ``output_layer_init_method`` the second's.
    """

    def __init__(
        self,
        hidden_size: int,
        ffn_hidden_size: int,
        group: dist.ProcessGroup,
        *,
        init_method: Callable[[torch.Tensor], object] = nn.init.xavier_normal_,
        output_layer_init_method: Callable[[torch.Tensor], object] = nn.init.xavier_normal_,
        sequence_parallel: bool = False,
        **options,
    ):
        super().__init__()
        options |= {"sequence_parallel": sequence_parallel}
        inner: dict[str, Any] = options | {"init_method": init_method}
        outer: dict[str, Any] = options | {"init_method": output_layer_init_method}
        self.up = ColumnParallelLinear(hidden_size, ffn_hidden_size, group, gather_output=False, **inner)
        self.down = RowParallelLinear(ffn_hidden_size, hidden_size, group, input_is_parallel=True, **outer)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(F.gelu(self.up(x)[0]))[0]


class ParallelSelfAttention(nn.Module):
    """Causal self-attention with the heads divided among the ranks: one all-reduce forward, one backward.

    x and the output: [batch, seq, hidden], or [batch, seq/t, hidden] with ``sequence_parallel``. Q, K and V are
    one fused column-parallel layer, [Q; K; V] with stride 3, so that each rank gets all three for its own heads.
    ``dropout`` acts on the attention weights; the init methods are as in `ParallelMLP`.

    Raises:
        ValueError: the number of heads does not divide hidden_size, or t not the number of heads.
    """

    def __init__(
        self,
        hidden_size: int,
        num_attention_heads: int,
        group: dist.ProcessGroup,
        *,
        dropout: float = 0.0,
        init_method: Callable[[torch.Tensor], object] = nn.init.xavier_normal_,
        output_layer_init_method: Callable[[torch.Tensor], object] = nn.init.xavier_normal_,
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
        inner: dict[str, Any] = options | {"init_method": init_method}
        outer: dict[str, Any] = options | {"init_method": output_layer_init_method}
        self.head_size, self.group, self.dropout = hidden_size // num_attention_heads, group, dropout
        self.qkv = ColumnParallelLinear(hidden_size, 3 * hidden_size, group, gather_output=False, stride=3, **inner)
        self.out = RowParallelLinear(hidden_size, hidden_size, group, input_is_parallel=True, **outer)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        qkv, _ = self.qkv(x)  # [batch, seq, 3 * hidden/t]
        q, k, v = (part.unflatten(-1, (-1, self.head_size)).transpose(-3, -2) for part in qkv.chunk(3, -1))
        if self.dropout and self.training:
            with own_random_stream(self.group, x.device):  # other heads, other masks
                attended = F.scaled_dot_product_attention(q, k, v, dropout_p=self.dropout, is_causal=True)
        else:
            attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)  # [batch, heads/t, seq, head_size]
        return self.out(attended.transpose(-3, -2).flatten(-2))[0]
