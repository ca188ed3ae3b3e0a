"""The two halves of a transformer layer on a tensor group: each a column-parallel layer, then a row-parallel one.

Between the two layers of a pair every rank works on its own slice and sends nothing. Source: arXiv 1909.08053,
section 3; with ``sequence_parallel``, arXiv 2205.05198, section 4.2.
"""

from collections.abc import Callable

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from labkit.cuts import check_divides
from labkit.sizes import check_probability, check_size
from labkit.tensor_parallel.dropout import own_random_stream
from labkit.tensor_parallel.linear import ColumnParallelLinear, RowParallelLinear


class ParallelMLP(nn.Module):
    """GeLU(X A) B with A cut by columns and B by rows: one all-reduce forward, one backward.

    x and the output are replicated, [..., seq, hidden]. With ``sequence_parallel`` they are [..., seq/t, hidden], and
    each all-reduce becomes an all-gather and a reduce-scatter. ``init_method`` fills the first layer's weight and
    ``output_layer_init_method`` the second's; both layers get the ``options``.
    """

    def __init__(
        self,
        hidden_size: int,
        ffn_hidden_size: int,
        group: dist.ProcessGroup,
        *,
        init_method: Callable[[torch.Tensor], object] = nn.init.xavier_normal_,
        output_layer_init_method: Callable[[torch.Tensor], object] = nn.init.xavier_normal_,
        **options,
    ):
        super().__init__()
        first, second = options | {"init_method": init_method}, options | {"init_method": output_layer_init_method}
        self.up = ColumnParallelLinear(hidden_size, ffn_hidden_size, group, gather_output=False, **first)
        self.down = RowParallelLinear(ffn_hidden_size, hidden_size, group, input_is_parallel=True, **second)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(F.gelu(self.up(x)[0]))[0]


class ParallelSelfAttention(nn.Module):
    """Causal self-attention with the heads divided among the ranks: one all-reduce forward, one backward.

    x and the output are [batch, seq, hidden], or [batch, seq/t, hidden] with ``sequence_parallel``. Q, K and V are
    one fused column-parallel layer, [Q; K; V] with stride 3, so that each rank gets all three for its own heads.
    ``dropout`` acts on the attention weights; the init methods and ``options`` are as in `ParallelMLP`.

    Raises:
        ValueError: the heads do not divide hidden_size, t does not divide the heads, or dropout is not from 0 to 1.
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
        **options,
    ):
        super().__init__()
        num_heads = check_size("num_attention_heads", num_attention_heads)
        check_divides(group.size(), "num_attention_heads", num_heads)
        check_divides(num_heads, "hidden_size", hidden_size, parts_name="num_attention_heads")
        first, second = options | {"init_method": init_method}, options | {"init_method": output_layer_init_method}
        self.head_size, self.group = hidden_size // num_heads, group
        self.dropout = check_probability("dropout", dropout)
        self.qkv = ColumnParallelLinear(hidden_size, 3 * hidden_size, group, gather_output=False, stride=3, **first)
        self.out = RowParallelLinear(hidden_size, hidden_size, group, input_is_parallel=True, **second)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        qkv, _ = self.qkv(x)  # [batch, seq, 3 * hidden/t]
        q, k, v = (part.unflatten(-1, (-1, self.head_size)).transpose(-3, -2) for part in qkv.chunk(3, -1))
        if self.dropout and self.training:
            with own_random_stream(self.group, x.device):  # each rank's heads need masks of their own
                attended = F.scaled_dot_product_attention(q, k, v, dropout_p=self.dropout, is_causal=True)
        else:
            attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)  # [batch, heads/t, seq, head_size]
        return self.out(attended.transpose(-3, -2).flatten(-2))[0]
