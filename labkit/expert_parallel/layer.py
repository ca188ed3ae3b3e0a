"""Sends tokens to the ranks of the experts that they chose, computes there, and brings the outputs
back.

    rank 0   a0 a1 a2 a3       a0 a2 b1       a0 b1 | a2       a0 a1 a2 a3
                      dispatch           experts       combine
    rank 1   b0 b1 b2 b3       a1 a3 b0 b2 b3          ...     b0 b1 b2 b3

A rank has ``num_experts / ep_size`` experts, of each the hidden units that its expert_tp rank has.
So a token goes to all ranks of an expert's expert_tp group, and their outputs, partial sums, are
added up where it came from. That is as many bytes as an all-to-all over ep, and an all-gather and a
reduce-scatter over expert_tp, in one message each way. But where ep crosses nodes, expert_tp times
as many of them take the slow links.
Source: arXiv 2006.16668, section 3; Megatron-LM's all-to-all dispatcher.
"""

import math
from collections.abc import Callable, Sequence
from itertools import accumulate, pairwise
from numbers import Real
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import nn

from labkit.autograd import first_derivative_only, refuse_autocast
from labkit.collectives import all_to_all
from labkit.expert_parallel.router import Load, Router, drop_tokens
from labkit.groups import ProcessGroups
from labkit.partition import check_divides
from labkit.placement import Placement, Shard
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

    x: [tokens, hidden]; experts: [tokens, k] the choices of each token, `num_experts` for none.
    Every rank of ``tp_ep`` calls it, also without tokens. On a GPU the host waits to learn how many
    rows will come.
    """
    layout = groups.layout
    members = layout.group_of(groups.rank, "expert_tp", "ep")
    experts_of_ranks = [layout.experts_of(member, num_experts) for member in members]

    # How many rows go to each expert, and how many come from each rank.
    choices = experts.flatten()  # [tokens * k], by slot
    counts = choices.new_zeros(num_experts + 1).scatter_add_(0, choices, torch.ones_like(choices))
    chosen = counts[:-1]  # without those that chose none
    send_counts = torch.stack([chosen[local.start : local.stop] for local in experts_of_ranks])
    recv_counts = all_to_all(send_counts, groups.tp_ep)  # [ranks, experts of a rank]
    # One copy for both, because here the host waits for a GPU.
    numbers = torch.cat([chosen, recv_counts.sum(1)]).tolist()
    slots_of_expert = numbers[:num_experts]
    recv_splits = numbers[num_experts:]

    # Sorted by expert, the slots for each rank lie side by side. Ranks of one expert_tp group get
    # the same ones.
    slots_by_expert = choices.argsort(stable=True)  # those that chose none come last
    starts = [0, *accumulate(slots_of_expert)]
    slots_of_ranks = []
    for local in experts_of_ranks:
        slots_of_ranks.append(slots_by_expert[starts[local.start] : starts[local.stop]])
    send_splits = [len(slots) for slots in slots_of_ranks]
    slots = torch.cat(slots_of_ranks)
    tokens = slots // max(1, experts.size(-1))
    rows = all_to_all(x[tokens], groups.tp_ep, send_splits, recv_splits)

    # They come sorted by rank, and there by expert: sort them by expert.
    num_ranks, num_local = recv_counts.shape
    local_experts = torch.arange(num_local, device=x.device).repeat(num_ranks)
    expert_of_row = local_experts.repeat_interleave(recv_counts.flatten(), output_size=len(rows))
    by_expert = expert_of_row.argsort(stable=True)
    ends = recv_counts.sum(0).cumsum(0, dtype=torch.int32)
    return rows[by_expert], Exchange(slots, send_splits, recv_splits, by_expert, ends)


def combine(
    rows: torch.Tensor, exchange: Exchange, probs: torch.Tensor, groups: ProcessGroups
) -> torch.Tensor:
    """Return, [tokens, hidden], the sum of the outputs of each token's experts, weighted by probs
    [tokens, k].

    ``rows`` are the outputs for the rows of `dispatch`. A choice that was dropped adds nothing.
    """
    as_received = rows[exchange.by_expert.argsort()]  # as the ranks sent them
    partial = all_to_all(as_received, groups.tp_ep, exchange.recv_splits, exchange.send_splits)

    # Each slot has come from all of expert_tp: side by side, if sorted by slot.
    tp_size = groups.expert_tp.size()
    by_slot = exchange.slots.argsort(stable=True)
    num_slots = len(by_slot) // tp_size
    outputs = partial[by_slot].unflatten(0, (num_slots, tp_size)).sum(1)
    slots = exchange.slots[by_slot][::tp_size]

    every_slot = outputs.new_zeros(probs.numel(), rows.size(-1)).index_copy(0, slots, outputs)
    weighted = every_slot.unflatten(0, probs.shape) * probs.unsqueeze(-1)  # [tokens, k, hidden]
    return weighted.sum(1).to(rows.dtype)


class Experts(nn.Module):
    """The MLPs of a rank's experts, without biases: weights [experts of the rank, out, in].

    Communication: none in forward and backward; `dispatch` brings the rows, and `combine` takes the
    outputs back. The data-parallel wrapper sums the gradients over expert_dp.

    ``forward(rows, ends)`` takes rows [n, hidden] sorted by expert, those of expert e before
    ``ends[e]``, and returns partial sums of outputs, to be added up over expert_tp. ``up`` is
    [experts/ep, ffn/etp, hidden], fused twice with ``gated``; ``down`` is
    [experts/ep, hidden, ffn/etp]. The sum of gradients is divided by the number of dense replicas,
    whose losses are averaged.
    """

    def __init__(
        self,
        sizes: tuple[int, int, int],
        groups: ProcessGroups,
        gated,
        approximate,
        init_methods,
        **factory,
    ):
        super().__init__()
        num_experts, hidden_size, ffn_hidden_size = sizes
        self.gated = gated
        self.approximate = approximate
        self.init_methods = init_methods
        fused = 2 if gated else 1
        num_local = num_experts // groups.ep.size()
        local_width = ffn_hidden_size // groups.expert_tp.size()
        self.up = nn.Parameter(torch.empty(num_local, fused * local_width, hidden_size, **factory))
        self.down = nn.Parameter(torch.empty(num_local, hidden_size, local_width, **factory))

        of_experts = Shard(0, num_experts, groups.ep)
        of_up = Shard(1, fused * ffn_hidden_size, groups.expert_tp, fused)
        of_down = Shard(2, ffn_hidden_size, groups.expert_tp)
        replicas: Any = {}
        if groups.expert_dp is not groups.dp_cp:  # otherwise they are averaged as all else is
            replicas = dict(replica_group=groups.expert_dp, grad_divisor=groups.dp_cp.size())
        self.placements = {
            "up": Placement((of_experts, of_up), **replicas),
            "down": Placement((of_experts, of_down), **replicas),
        }
        self.reset_parameters()

    def reset_parameters(self) -> None:
        init_up, init_down = self.init_methods
        draw(self, "up", init_up)
        draw(self, "down", init_down)

    def forward(self, rows: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
        refuse_autocast("Experts", rows.device)
        hidden: Any = _GroupedLinear.apply(rows, self.up, ends)
        hidden = activation(hidden, self.gated, self.approximate)
        output: Any = _GroupedLinear.apply(hidden, self.down, ends)
        return output


class _GroupedLinear(torch.autograd.Function):
    """Y_e = X_e W_e^T for each expert e. x: [n, in], sorted by expert; weight W:
    [experts, out, in].
    """

    @staticmethod
    def forward(ctx, x, weight, ends):
        x = x.contiguous()
        ctx.save_for_backward(x, weight, ends)
        return _grouped_product(x, weight.mT, ends)

    @staticmethod
    @first_derivative_only
    def backward(ctx, grad):  # pyright: ignore[reportIncompatibleMethodOverride]
        x, weight, ends = ctx.saved_tensors
        need_x, need_weight, _ = needed_gradients(ctx)
        grad = grad.contiguous()  # as a sum's is not
        grad_x = _grouped_product(grad, weight, ends) if need_x else None
        grad_weight = _grouped_product(grad.mT, x, ends) if need_weight else None
        return grad_x, grad_weight, None


def _grouped_product(a: torch.Tensor, b: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
    """Return a_e @ b_e for each expert e: rows [n, out] if b is [experts, in, out], else matrices
    [experts, out, in].

    The groups of a are rows, or columns where those of b are rows. One kernel computes all, where
    torch has it.
    """
    gives_rows = b.dim() == 3
    widths = b.shape[-2:] if gives_rows else (len(a), b.size(1))
    if _has_kernel(a, widths):
        product = F.grouped_mm(a, b, offs=ends)
        if not gives_rows:
            # On Blackwell an expert without rows would get what the memory held:
            # pytorch/pytorch#172439.
            num_rows = ends.diff(prepend=ends.new_zeros(1))
            product.masked_fill_((num_rows == 0)[:, None, None], 0)
        return product
    groups = [slice(start, end) for start, end in pairwise([0, *ends.tolist()])]
    if gives_rows:
        return torch.cat([a[rows] @ matrix for rows, matrix in zip(groups, b)])
    return torch.stack([a[:, rows] @ b[rows] for rows in groups])


def _has_kernel(a: torch.Tensor, widths: Sequence[int]) -> bool:
    """Return whether torch has a kernel for this; it wants rows that start at multiples of 16
    bytes.
    """
    if not hasattr(F, "grouped_mm") or a.numel() == 0:
        return False
    if any(width * a.element_size() % 16 for width in widths):
        return False
    return a.dtype == torch.bfloat16 or (a.dtype == torch.float32 and a.device.type == "cpu")


def _xavier(weight: torch.Tensor) -> None:
    for matrix in weight.view(-1, *weight.shape[-2:]):
        nn.init.xavier_normal_(matrix)


class MoELayer(nn.Module):
    """A mixture of experts in the place of an MLP: each token is computed by the ``top_k`` experts
    that it chooses.

    Communication of a forward pass, on the ranks of a ``tp_ep`` group; rank i has T_i tokens:

    - an all-to-all of how many rows each expert gets from whom: ``num_experts`` integers per
      expert_tp rank.
    - an all-to-all of the rows: T_i * k * expert_tp rows of ``hidden`` numbers, if none is dropped.
    - an all-to-all of the experts' outputs, the same rows back.
    - without ``sequence_parallel``, an all-reduce of the output over the tensor ranks.
    - what a `ParallelMLP` sends, if there are shared experts.

    Backward sends the gradients of the rows the same ways, in two all-to-alls, and all-reduces that
    of x without ``sequence_parallel``. Gradients of experts are summed over expert_dp by the
    data-parallel wrapper.

    ``forward(x)`` returns the output, like x, and the `Load`, whose losses are
    ``router.loss(load)``. x is replicated over the tensor ranks, [..., seq, hidden], or
    [..., seq/t, hidden] with ``sequence_parallel``. In both cases each of them routes its own
    slice. Experts lie in the layout's expert grid (`labkit.layout`), in which ep may cross dp, cp
    and tp; on ranks of one expert_dp group they are the same.

    Args:
        capacity_factor: each expert keeps at most ceil(tokens * k / num_experts * factor) of a
            rank's tokens, so what is dropped depends on the layout; the least probable are. By
            default nothing is.
        num_shared_experts: how many experts compute all tokens: one `ParallelMLP`, that many times
            as wide.
        init_method, output_layer_init_method: fill all experts' weights [experts, out, in], and a
            shared [out, in].
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
        check_divides(groups.ep.size(), "num_experts", num_experts, parts_name="ep_size")
        check_divides(
            groups.expert_tp.size(), "ffn_hidden_size", ffn_hidden_size, parts_name="expert_tp_size"
        )
        factor = 1.0 if capacity_factor is None else capacity_factor
        if not isinstance(factor, Real) or not 0 < float(factor) < math.inf:
            rule = "must be a number above 0, or None to drop no token"
            raise ValueError(f"capacity_factor={capacity_factor!r} {rule}")
        self.groups = groups
        self.num_experts = num_experts
        self.capacity_factor = capacity_factor
        self.sequence_parallel = sequence_parallel
        options = factory | dict(defer_grad_reduce=defer_grad_reduce)
        self.router = Router(hidden_size, num_experts, top_k, groups, **options, **(router or {}))
        sizes = (num_experts, hidden_size, ffn_hidden_size)
        init_methods = (init_method, output_layer_init_method)
        self.experts = Experts(sizes, groups, gated, approximate, init_methods, **factory)
        if check_size("num_shared_experts", num_shared_experts, least=0):
            shared_width = num_shared_experts * ffn_hidden_size
            shared: Any = options | dict(
                gated=gated,
                approximate=approximate,
                bias=False,
                sequence_parallel=sequence_parallel,
                init_method=init_method,
                output_layer_init_method=output_layer_init_method,
            )
            self.shared = ParallelMLP(hidden_size, shared_width, groups.tp, **shared)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, Load]:
        refuse_autocast("MoELayer", x.device)
        if self.sequence_parallel:
            output, load = self._routed(x, x.size(SEQUENCE_DIM) * self.groups.tp.size())
        else:
            output, load = self._routed_in_slices(x)
        if hasattr(self, "shared"):
            output = output + self.shared(x)
        return output, load

    def _routed_in_slices(self, x: torch.Tensor) -> tuple[torch.Tensor, Load]:
        """Let each tensor rank process its own slice of the sequence; the sum of all slices,
        padded, is the whole.
        """
        tp = self.groups.tp
        seq_length = x.size(SEQUENCE_DIM)
        start = seq_length * tp.rank() // tp.size()
        end = seq_length * (tp.rank() + 1) // tp.size()
        x_slice = copy_to_tp(x, tp)[..., start:end, :]
        output, load = self._routed(x_slice, seq_length)
        padded = F.pad(output, (0, 0, start, seq_length - end))
        return reduce_from_tp(padded, tp), load

    def _routed(self, x: torch.Tensor, seq_length: int) -> tuple[torch.Tensor, Load]:
        """Return what the experts make of this rank's own tokens."""
        num_sequences = math.prod(x.shape[:-2])
        routing, load = self.router(x.reshape(num_sequences, *x.shape[-2:]), seq_length)
        if self.capacity_factor is not None:
            capacity = math.ceil(routing.experts.numel() / self.num_experts * self.capacity_factor)
            routing = drop_tokens(routing, self.num_experts, capacity)
        experts = routing.experts.flatten(0, -2)  # [tokens, k]
        probs = routing.probs.flatten(0, -2)
        rows, exchange = dispatch(x.flatten(0, -2), experts, self.num_experts, self.groups)
        outputs = self.experts(rows, exchange.ends)
        output = combine(outputs, exchange, probs, self.groups)
        return output.view(x.shape), load
