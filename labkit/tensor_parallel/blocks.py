"""Builds the parts of a transformer layer: an MLP, self-attention with rotary positions, and norms.

MLP and attention are each a column-parallel layer followed by a row-parallel one; between the two
nothing is sent.
Source: arXiv 1909.08053, section 3; with ``sequence_parallel``, arXiv 2205.05198, section 4.2.
"""

from collections.abc import Callable
from contextlib import nullcontext

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from labkit.partition import check_divides
from labkit.placement import Placement
from labkit.sizes import check_number, check_size
from labkit.tensor_parallel.dropout import local_random_stream
from labkit.tensor_parallel.linear import ColumnParallelLinear, RowParallelLinear
from labkit.tensor_parallel.operators import copy_to_tp


class ParallelMLP(nn.Module):
    """GeLU(X A) B with A split by columns and B by rows.

    Communication, if x [..., seq, hidden] has n bytes:

    - forward: the ranks' products with B are all-reduced; each rank sends 2 (t - 1)/t n.
    - backward: their gradients of x are all-reduced, while the rank computes that of A; as many
      bytes.
    - with ``sequence_parallel``: forward all-gathers x before A, and reduce-scatters after B.
      Backward all-gathers the output's gradient before B, and x once more before A, and then
      reduce-scatters the gradient of x. Each of these five sends (t - 1)/t n. The bias of B is as
      in `RowParallelLinear`.

    With ``gated`` it is SwiGLU (arXiv 2002.05202), (SiLU(X G) * X A) B, where [G; A] is one fused
    layer with stride 2, so that each rank gets the same columns of both.

    x and the output are replicated, [..., seq, hidden]. With ``sequence_parallel`` they are
    [..., seq/t, hidden]. ``approximate`` is that of `torch.nn.GELU`. ``options`` go to both layers,
    except ``init_method``, which is the first layer's.
    """

    def __init__(
        self,
        hidden_size: int,
        ffn_hidden_size: int,
        group: dist.ProcessGroup,
        *,
        gated: bool = False,
        approximate: str = "none",
        output_layer_init_method: Callable[[torch.Tensor], object] = nn.init.xavier_normal_,
        **options,
    ):
        super().__init__()
        self.gated = gated
        self.approximate = approximate
        fused = 2 if gated else 1
        width = fused * check_size("ffn_hidden_size", ffn_hidden_size)
        self.up = ColumnParallelLinear(
            hidden_size, width, group, gather_output=False, stride=fused, **options
        )
        options["init_method"] = output_layer_init_method
        self.down = RowParallelLinear(
            ffn_hidden_size, hidden_size, group, input_is_parallel=True, **options
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden, _ = self.up(x)  # [..., ffn/t], with gated [..., 2 * ffn/t]
        output, _ = self.down(activation(hidden, self.gated, self.approximate))
        return output


def activation(x: torch.Tensor, gated: bool, approximate: str) -> torch.Tensor:
    """Return GeLU(x), or with ``gated`` SiLU of its first half times the second."""
    if gated:
        gate, x = x.chunk(2, -1)
        return F.silu(gate) * x
    return F.gelu(x, approximate=approximate)


class ParallelSelfAttention(nn.Module):
    """Causal self-attention with the heads divided among the ranks.

    Communication: that of `ParallelMLP`, with Q, K and V in the place of A, and the output layer in
    that of B. Heads need nothing of each other, so nothing is sent between the two, except what
    ``attend`` sends.

    x and the output are [batch, seq, hidden], or [batch, seq/t, hidden] with ``sequence_parallel``.
    Q, K and V are one fused column-parallel layer, [Q; K; V] with stride 3, so that each rank gets
    all three for its own heads. With grouped queries (arXiv 2305.13245), g heads of queries share
    one head of keys and values, and the g + 2 blocks are [Q_1; ...; Q_g; K; V]: Q_j is the j-th
    query head of every group.

    Args:
        num_query_groups: how many heads the keys and values have; by default as many as the
            queries.
        dropout: acts on the attention weights.
        attend: replaces torch's causal attention, for example by ring attention; takes q
            [batch, heads/t, seq, head_size], and k and v like it, with fewer heads if grouped. It
            does not work with dropout.
        output_layer_init_method, options: as in `ParallelMLP`.

    Raises:
        ValueError: heads do not divide hidden_size, groups the heads, or t the groups; or dropout
            is not in [0, 1].
    """

    def __init__(
        self,
        hidden_size: int,
        num_attention_heads: int,
        group: dist.ProcessGroup,
        *,
        num_query_groups: int | None = None,
        dropout: float = 0.0,
        attend: Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor] | None = None,
        output_layer_init_method: Callable[[torch.Tensor], object] = nn.init.xavier_normal_,
        **options,
    ):
        super().__init__()
        num_heads = check_size("num_attention_heads", num_attention_heads)
        check_divides(num_heads, "hidden_size", hidden_size, parts_name="num_attention_heads")
        check_divides(group.size(), "num_attention_heads", num_heads)
        kv_heads = num_heads
        if num_query_groups is not None:
            kv_heads = check_size("num_query_groups", num_query_groups)
        check_divides(kv_heads, "num_attention_heads", num_heads, parts_name="num_query_groups")
        check_divides(group.size(), "num_query_groups", kv_heads)
        if attend is not None and dropout:
            fault = f"dropout={dropout} acts on attention weights, which attend= never has"
            raise ValueError(f"{fault}: use dropout=0")
        self.group = group
        self.head_size = hidden_size // num_heads
        self.heads_per_group = num_heads // kv_heads
        self.dropout = check_number("dropout", dropout, most=1)
        self.attend = attend
        fused = self.heads_per_group + 2
        width = fused * kv_heads * self.head_size
        self.qkv = ColumnParallelLinear(
            hidden_size, width, group, gather_output=False, stride=fused, **options
        )
        options["init_method"] = output_layer_init_method
        self.out = RowParallelLinear(
            hidden_size, hidden_size, group, input_is_parallel=True, **options
        )

    def forward(self, x: torch.Tensor, rotation: torch.Tensor | None = None) -> torch.Tensor:
        """Attend to x; ``rotation`` [2, seq, head_size/2] is for `apply_rotary`."""
        qkv, _ = self.qkv(x)
        # [batch, heads/t, seq, head_size], k and v with fewer heads if grouped
        q, k, v = self._heads(qkv)
        if rotation is not None:
            q = apply_rotary(q, rotation)
            k = apply_rotary(k, rotation)
        attend = self.attend or self._attend
        heads = attend(q, k, v)
        output, _ = self.out(heads.transpose(-3, -2).flatten(-2))
        return output

    def _heads(self, qkv: torch.Tensor) -> tuple[torch.Tensor, ...]:
        g = self.heads_per_group
        # [batch, seq, g + 2, kv heads/t, head_size]
        blocks = qkv.unflatten(-1, (g + 2, -1, self.head_size))
        by_head = blocks.permute(0, 3, 2, 1, 4)  # [batch, kv heads/t, g + 2, seq, head_size]
        q, k, v = by_head.split([g, 1, 1], 2)
        return q.flatten(1, 2), k.flatten(1, 2), v.flatten(1, 2)

    def _attend(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        dropout_p = self.dropout if self.training else 0.0
        grouped = self.heads_per_group > 1
        # The heads differ from rank to rank, and so must the masks.
        local_masks = local_random_stream(self.group, q.device) if dropout_p else nullcontext()
        with local_masks:
            return F.scaled_dot_product_attention(
                q, k, v, dropout_p=dropout_p, is_causal=True, enable_gqa=grouped
            )


def rotation(
    positions: torch.Tensor, head_size: int, dtype: torch.dtype, base: float = 10_000.0
) -> torch.Tensor:
    """Return the cosines and sines, [2, seq, head_size/2], for tokens at these positions, in
    float32 or better.

    Elements i and i + d/2 of a head are rotated as a pair, by position * base^(-2i/d): then the dot
    product of a query and a key depends on their distance. Source: arXiv 2104.09864, section 3.4;
    pairs as in Hugging Face's Llama.
    """
    evens = torch.arange(0, head_size, 2, device=positions.device, dtype=torch.float64)  # 2i
    frequencies = base ** -(evens / head_size)
    # In float64: position 100,000 in float32 has an error of 0.01.
    angles = positions[:, None] * frequencies
    return torch.stack([angles.cos(), angles.sin()]).to(torch.promote_types(dtype, torch.float32))


def apply_rotary(x: torch.Tensor, rotation: torch.Tensor) -> torch.Tensor:
    """Return queries or keys, [batch, heads, seq, head_size], rotated by the angles of their
    positions.
    """
    cos, sin = rotation
    first, second = x.chunk(2, -1)
    rotated = torch.cat([first * cos - second * sin, second * cos + first * sin], -1)
    return rotated.to(x.dtype)


class _ReplicatedNorm(nn.Module):
    """A norm with all of its weights on every rank.

    Communication: none, because a token's norm needs that token alone. With ``sequence_parallel`` a
    rank sees only its tokens, so the gradients of its weights are partial: every backward
    all-reduces them in one message, of the hidden_size numbers of each weight, unless
    ``defer_grad_reduce`` leaves that to the end of the step.
    """

    normalise: Callable[..., torch.Tensor]

    def __init__(
        self,
        hidden_size: int,
        group: dist.ProcessGroup,
        sequence_parallel: bool = False,
        *,
        eps: float = 1e-5,
        defer_grad_reduce: bool = False,
        **factory,
    ):
        super().__init__(hidden_size, eps=eps, **factory)
        self.group = group
        self.reduces_in_backward = sequence_parallel and not defer_grad_reduce
        deferred = sequence_parallel and defer_grad_reduce
        replicated = Placement(copy_groups=(group,), defer_grad_reduce=deferred)
        self.placements = dict.fromkeys(self._parameters, replicated)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weights = tuple(self.parameters())
        if self.reduces_in_backward:
            weights = copy_to_tp(torch.stack(weights), self.group).unbind()  # one message for all
        return self.normalise(x, self.normalized_shape, *weights, eps=self.eps)


class ReplicatedLayerNorm(_ReplicatedNorm, nn.LayerNorm):
    """LayerNorm with its weight and bias on every rank."""

    normalise = staticmethod(F.layer_norm)


class ReplicatedRMSNorm(_ReplicatedNorm, nn.RMSNorm):
    """RMSNorm with its weight on every rank: weight * x / sqrt(mean of x^2 + eps).

    Source: arXiv 1910.07467.
    """

    normalise = staticmethod(F.rms_norm)
