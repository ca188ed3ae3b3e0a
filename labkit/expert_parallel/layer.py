"""Sends tokens to the ranks of the experts that they chose, computes there, and brings the outputs back.

    rank 0   a0 a1 a2 a3       a0 a2 b1       a0 b1 | a2       a0 a1 a2 a3
                      dispatch           experts       combine
    rank 1   b0 b1 b2 b3       a1 a3 b0 b2 b3          ...     b0 b1 b2 b3

A rank has ``num_experts / ep_size`` experts, of each the hidden units that its expert_tp rank has. So a token goes to
all ranks of an expert's expert_tp group, and their outputs, partial sums, are added up where it came from. That is as
many bytes as an all-to-all over ep, and an all-gather and a reduce-scatter over expert_tp, in one message each way.
Source: arXiv 2006.16668, section 3; Megatron-LM's all-to-all dispatcher.
"""

import math
from collections.abc import Callable
from itertools import accumulate, pairwise
from numbers import Real
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import nn

from labkit.collectives import all_to_all
from labkit.expert_parallel.router import Load, Router, drop_tokens
from labkit.groups import ProcessGroups
from labkit.partition import check_divides
from labkit.placement import PlacedModule, Placement, Shard
from labkit.sizes import check_size
from labkit.tensor_parallel import ParallelMLP
from labkit.tensor_parallel.blocks import activation
from labkit.tensor_parallel.linear import needed_gradients
from labkit.tensor_parallel.operators import SEQUENCE_DIM, copy_to_tp, reduce_from_tp
from labkit.tensor_parallel.shards import draw


class Exchange(NamedTuple):
    """What `dispatch` has sent, so that `combine` can send the outputs back."""

    slots: torch.Tensor  # of the rows sent: slot token * k + j has the j-th choice of a token
    send_splits: list[int]  # how many rows each rank of tp_ep gets from this one
    recv_splits: list[int]  # how many this one gets from each
    by_expert: torch.Tensor  # the order by experts of the rows that were received
    ends: torch.Tensor  # [experts of the rank], where the rows of each end


def dispatch(
    x: torch.Tensor, experts: torch.Tensor, num_experts: int, groups: ProcessGroups
) -> tuple[torch.Tensor, Exchange]:
    """Return the rows of all ranks that this rank's experts compute, sorted by expert.

    x: [tokens, hidden]; experts: [tokens, k] the choices of each token, `num_experts` for none. Every rank of ``tp_ep``
    calls it, also without tokens. On a GPU the host waits to learn how many rows will come.
    """
    flat, layout = experts.flatten(), groups.layout
    chosen = flat.new_zeros(num_experts + 1).scatter_add_(0, flat, torch.ones_like(flat))[:-1]
    ranges = [layout.experts_of(rank, num_experts) for rank in layout.group_of(groups.rank, "expert_tp", "ep")]
    send = torch.stack([chosen[each.start : each.stop] for each in ranges])  # [ranks, experts of a rank]
    recv = all_to_all(send, groups.tp_ep)
    by_expert = flat.argsort(stable=True)  # those that chose none come last
    counts = torch.cat([chosen, recv.sum(1)]).tolist()  # here the host waits for a GPU, once
    starts, recv_splits = [*accumulate(counts[:num_experts], initial=0)], counts[num_experts:]
    bounds = [slice(starts[each.start], starts[each.stop]) for each in ranges]
    slots, splits = torch.cat([by_expert[each] for each in bounds]), [each.stop - each.start for each in bounds]
    experts_here = torch.arange(recv.size(1), device=x.device).repeat(len(recv))
    by_row = experts_here.repeat_interleave(recv.flatten(), output_size=sum(recv_splits)).argsort(stable=True)
    exchange = Exchange(slots, splits, recv_splits, by_row, recv.sum(0).cumsum(0, dtype=torch.int32))
    rows = all_to_all(x[slots // max(1, experts.size(-1))], groups.tp_ep, splits, recv_splits)
    return rows[exchange.by_expert], exchange


def combine(rows: torch.Tensor, exchange: Exchange, probs: torch.Tensor, groups: ProcessGroups) -> torch.Tensor:
    """Return, [tokens, hidden], the sum of the outputs of each token's experts, weighted by probs [tokens, k].

    ``rows`` are the outputs for the rows of `dispatch`. A choice that was dropped adds nothing.
    """
    mine = all_to_all(rows[exchange.by_expert.argsort()], groups.tp_ep, exchange.recv_splits, exchange.send_splits)
    by_slot, tp_size = exchange.slots.argsort(stable=True), groups.expert_tp.size()
    outputs = mine[by_slot].unflatten(0, (len(by_slot) // tp_size, tp_size)).sum(1)  # each came from all of expert_tp
    slots = outputs.new_zeros(probs.numel(), rows.size(-1)).index_copy(0, exchange.slots[by_slot][::tp_size], outputs)
    return (slots.unflatten(0, probs.shape) * probs.unsqueeze(-1)).sum(1).to(rows.dtype)


class Experts(PlacedModule):
    """The MLPs of a rank's experts, without biases: weights [experts of the rank, out, in].

    ``forward(rows, ends)`` takes rows [n, hidden] sorted by expert, those of expert e before ``ends[e]``, and returns
    partial sums of outputs, to be added up over expert_tp. ``up`` is [experts/ep, ffn/etp, hidden], fused twice with
    ``gated``; ``down`` is [experts/ep, hidden, ffn/etp]. Gradients are added up over expert_dp, and divided by the
    number of dense replicas, whose losses are averaged.
    """

    def __init__(self, sizes: tuple[int, int, int], groups: ProcessGroups, gated, approximate, init_methods, **factory):
        super().__init__()
        num_experts, hidden_size, ffn_hidden_size = sizes
        self.gated, self.approximate, self.init_methods, fused = gated, approximate, init_methods, 2 if gated else 1
        num_own, own_width = num_experts // groups.ep.size(), ffn_hidden_size // groups.expert_tp.size()
        self.up = nn.Parameter(torch.empty(num_own, fused * own_width, hidden_size, **factory))
        self.down = nn.Parameter(torch.empty(num_own, hidden_size, own_width, **factory))
        of_experts = Shard(0, num_experts, groups.ep)
        of_up = Shard(1, fused * ffn_hidden_size, groups.expert_tp, fused)
        of_down = Shard(2, ffn_hidden_size, groups.expert_tp)
        own = groups.expert_dp is not groups.dp_cp  # otherwise they are averaged as all else is
        replicas: Any = dict(replica_group=groups.expert_dp, grad_divisor=groups.dp_cp.size()) if own else {}
        self.place(up=Placement((of_experts, of_up), **replicas), down=Placement((of_experts, of_down), **replicas))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        for weight, init_method in zip((self.up, self.down), self.init_methods):
            draw(weight, init_method)

    def forward(self, rows: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
        hidden = activation(_GroupedLinear.apply(rows, self.up, ends), self.gated, self.approximate)  # pyright: ignore
        return _GroupedLinear.apply(hidden, self.down, ends)  # pyright: ignore[reportReturnType]


class _GroupedLinear(torch.autograd.Function):
    """Y_e = X_e A_e^T for each expert e. x: [n, in], sorted by expert; weight: [experts, out, in]."""

    @staticmethod
    def forward(ctx, x, weight, ends):
        ctx.save_for_backward(x := x.contiguous(), weight, ends)
        return _grouped_product(x, weight.mT, ends)

    @staticmethod
    def backward(ctx, grad):  # pyright: ignore[reportIncompatibleMethodOverride]
        (x, weight, ends), (need_x, need_weight, *_) = ctx.saved_tensors, needed_gradients(ctx)
        grad = grad.contiguous()  # as a sum's is not
        grad_x = _grouped_product(grad, weight, ends) if need_x else None
        return grad_x, _grouped_product(grad.mT, x, ends) if need_weight else None, None


def _grouped_product(a: torch.Tensor, b: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
    """Return a_e @ b_e for each expert e: rows [n, out] if b is [experts, in, out], else matrices [experts, out, in].

    The groups of a are rows, or columns where those of b are rows. One kernel computes all, where torch has it.
    """
    widths = b.shape[-2:] if b.dim() == 3 else (len(a), b.size(1))  # rows start at multiples of 16 bytes
    fits = a.dtype == torch.bfloat16 or (a.dtype == torch.float32 and a.device.type == "cpu")
    if hasattr(F, "grouped_mm") and fits and a.numel() and not any(size * a.element_size() % 16 for size in widths):
        product, num_rows = F.grouped_mm(a, b, offs=ends), ends.diff(prepend=ends.new_zeros(1))
        # On Blackwell an expert without rows would get what the memory held: pytorch/pytorch#172439.
        return product if b.dim() == 3 else product.masked_fill_((num_rows == 0)[:, None, None], 0)
    bounds = [slice(*pair) for pair in pairwise([0, *ends.tolist()])]
    if b.dim() == 3:
        return torch.cat([a[rows] @ matrix for rows, matrix in zip(bounds, b)])
    return torch.stack([a[:, rows] @ b[rows] for rows in bounds])


def _xavier(weight: torch.Tensor) -> None:
    for matrix in weight.view(-1, *weight.shape[-2:]):
        nn.init.xavier_normal_(matrix)


class MoELayer(nn.Module):
    """A mixture of experts in the place of an MLP: each token is computed by the ``top_k`` experts that it chooses.

    ``forward(x)`` returns the output, like x, and the `Load`, whose losses are ``router.loss(load)``. x is replicated
    over the tensor ranks, [..., seq, hidden], or [..., seq/t, hidden] with ``sequence_parallel``. In both cases each of
    them routes its own slice. Experts lie in the layout's expert grid (`labkit.layout`), in which ep may cross dp, cp
    and tp; on ranks of one expert_dp group they are the same.

    Args:
        capacity_factor: each expert keeps at most ceil(tokens * k / num_experts * factor) of a rank's tokens, so what
            is dropped depends on the layout; the least probable are. By default nothing is.
        num_shared_experts: how many experts compute all tokens: one `ParallelMLP`, that many times as wide.
        init_method, output_layer_init_method: fill all experts' weights [experts, out, in], and a shared [out, in].
        router: options of the `Router`.

    Raises:
        ValueError: a size or an option does not fit; nothing was sent.
    """

    def __init__(
        self,
        hidden_size: int,
        ffn_hidden_size: int,
        num_experts: int,
        top_k: int,
        groups: ProcessGroups,
        *,
        capacity_factor: float | None = None,
        num_shared_experts: int = 0,
        gated: bool = False,
        approximate: str = "none",
        sequence_parallel: bool = False,
        defer_grad_reduce: bool = False,
        init_method: Callable[[torch.Tensor], object] = _xavier,
        output_layer_init_method: Callable[[torch.Tensor], object] = _xavier,
        router: dict[str, Any] | None = None,
        **factory: Any,
    ):
        super().__init__()
        inits, sizes = (init_method, output_layer_init_method), (num_experts, hidden_size, ffn_hidden_size)
        check_divides(groups.ep.size(), "num_experts", num_experts, parts_name="ep_size")
        check_divides(groups.expert_tp.size(), "ffn_hidden_size", ffn_hidden_size, parts_name="expert_tp_size")
        factor = 1.0 if capacity_factor is None else capacity_factor
        if not isinstance(factor, Real) or not 0 < float(factor) < math.inf:
            raise ValueError(f"capacity_factor={capacity_factor!r} must be a number above 0, or None to drop no token")
        self.groups, self.num_experts = groups, num_experts
        self.capacity_factor, self.sequence_parallel = capacity_factor, sequence_parallel
        options = factory | dict(defer_grad_reduce=defer_grad_reduce)
        self.router = Router(hidden_size, num_experts, top_k, groups, **options, **(router or {}))
        self.experts = Experts(sizes, groups, gated, approximate, inits, **factory)
        if check_size("num_shared_experts", num_shared_experts, least=0):
            shared: Any = options | dict(gated=gated, approximate=approximate, init_method=init_method, bias=False)
            shared |= dict(sequence_parallel=sequence_parallel, output_layer_init_method=output_layer_init_method)
            self.shared = ParallelMLP(hidden_size, num_shared_experts * ffn_hidden_size, groups.tp, **shared)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, Load]:
        tp, num_rows = self.groups.tp, x.size(SEQUENCE_DIM)
        own, seq_length = x, num_rows * tp.size()
        if not self.sequence_parallel:
            bounds = [num_rows * rank // tp.size() for rank in (tp.rank(), tp.rank() + 1)]
            own, seq_length = copy_to_tp(x, tp)[..., slice(*bounds), :], num_rows
        routing, load = self.router(own.reshape(math.prod(x.shape[:-2]), *own.shape[-2:]), seq_length)
        if self.capacity_factor is not None:
            capacity = math.ceil(routing.experts.numel() / self.num_experts * self.capacity_factor)
            routing = drop_tokens(routing, self.num_experts, capacity)
        experts, probs = (each.flatten(0, -2) for each in routing)  # [tokens, k]
        rows, exchange = dispatch(own.flatten(0, -2), experts, self.num_experts, self.groups)
        output = combine(self.experts(rows, exchange.ends), exchange, probs, self.groups).view(own.shape)
        if not self.sequence_parallel:
            output = reduce_from_tp(F.pad(output, (0, 0, bounds[0], num_rows - bounds[1])), tp)
        return output + self.shared(x) if hasattr(self, "shared") else output, load
