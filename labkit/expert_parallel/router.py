"""Chooses experts for each token, in float32, and balances their loads: by auxiliary losses, or by
a bias.

A rank routes its own tokens only: those of its context rank, and of its slice of the sequence among
the tensor ranks.
Source: arXiv 2101.03961 (auxiliary loss), 2202.08906 (z-loss), 2501.11873 (global batch),
2408.15664 (bias).
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from numbers import Real
from typing import Any, Literal, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from labkit.autograd import first_derivative_only, refuse_autocast
from labkit.fields import check_fields
from labkit.groups import ProcessGroups
from labkit.placement import Placement
from labkit.sizes import check_size
from labkit.tensor_parallel.operators import all_reduce, copy_to_tp
from labkit.tensor_parallel.shards import draw


@dataclass(frozen=True)
class LoadBalancing:
    """How the loads of experts are kept even. By default they are not.

    The auxiliary loss is coefficient * E * the sum over experts of f_i P_i, which is the
    coefficient if all is even: f_i is the fraction of all choices that expert i gets, P_i the mean
    of its scores. Choices are counted by the scores alone, as in Megatron-core and in DeepSeek-V3
    (arXiv 2412.19437, equation 18): biases that even out the loads would hide from the loss what it
    is there to correct.

    That is not linear in the batch. Counted per sequence, it does not depend on how a batch is
    divided; per micro-batch it depends on their rows, and no other choice of layout. "global"
    counts a step's micro-batches so far, and which rows those are depends on dp too, unless a step
    is one micro-batch. The z-loss and the biases depend on nothing. For the same coefficient
    "global" is dp times as strong as in Megatron-core, whose P_i is a share of the mean over all
    replicas, and is averaged over them again: divide the coefficient by dp to have the same.
    """

    # Where the auxiliary loss counts choices. With "sequence" the result does not depend on the
    # layout; with "micro_batch" only on micro_batch_size; with "global" on dp too, unless a step is
    # one micro-batch.
    aux_loss: Literal["micro_batch", "sequence", "global"] = "micro_batch"
    # Weight of the auxiliary loss, which evens out the loads of experts; often 0.01.
    aux_loss_coefficient: float = 0.0
    # Weight of the routers' z-loss, which keeps logits small; often 0.001.
    z_loss_coefficient: float = 0.0
    # By which a step moves each expert's bias towards an even load; often 0.001.
    expert_bias_update_rate: float = 0.0

    def __post_init__(self):
        check_fields(self, LoadBalancing)
        for name in ("aux_loss_coefficient", "z_loss_coefficient", "expert_bias_update_rate"):
            value = getattr(self, name)
            if not isinstance(value, Real) or not 0 <= float(value) < math.inf:
                raise ValueError(f"{name}={value!r} must be a number of at least 0")


class Routing(NamedTuple):
    """The experts that each token chooses, and the probabilities that weight their outputs; both
    [..., seq, k].
    """

    experts: torch.Tensor  # from 0 to num_experts - 1; num_experts marks a choice that was dropped
    probs: torch.Tensor


class Load(NamedTuple):
    """What the losses need to know about this rank's tokens in one forward."""

    num_chosen: torch.Tensor  # [sequences, experts], how many tokens chose each
    # The same by scores alone, without biases, which is what an auxiliary loss counts
    num_preferred: torch.Tensor
    score_sums: torch.Tensor  # [sequences, experts], sums over tokens
    z_sum: torch.Tensor  # the sum of logsumexp(logits)^2 over tokens
    seq_length: int  # how many tokens of a sequence the tensor ranks have together


class Router(nn.Module):
    """Chooses ``top_k`` of ``num_experts`` for each token: ``router(x, seq_length)`` gives a
    `Routing` and a `Load`.

    Communication, with E = ``num_experts``:

    - forward: none. A rank routes its own tokens by itself.
    - `loss`: an auxiliary loss all-reduces E counts (with "sequence", E for each sequence) over the
      tensor ranks, and then over the context ranks, or with "global" over all replicas.
    - backward: the gradient of the weight, [E, hidden], is all-reduced over the tensor ranks,
      because each has a part of it. ``defer_grad_reduce`` leaves that to
      `labkit.gradients.all_reduce_grads`.
    - `end_step`, once a step: the counts of all routers are all-reduced together, over the tensor
      ranks, and then over all replicas.

    x: [sequences, tokens, hidden]. Scores are the "softmax" over all experts, or the "sigmoid" of
    each logit. With a bias, experts are chosen by score + bias. They are weighted by score; if
    there are several, the weights add up to 1.

    ``num_chosen`` [experts] counts the choices of this rank's tokens since the latest `end_step`,
    and with an auxiliary loss ``num_preferred`` those by scores alone.
    """

    def __init__(
        self,
        hidden_size: int,
        num_experts: int,
        top_k: int,
        groups: ProcessGroups,
        *,
        score_function: str = "softmax",
        balance: LoadBalancing | None = None,
        defer_grad_reduce: bool = False,
        init_method: Callable[[torch.Tensor], object] = nn.init.xavier_normal_,
        **factory: Any,
    ):
        super().__init__()
        self.num_experts = check_size("num_experts", num_experts)
        self.top_k = check_size("top_k", top_k)
        if self.top_k > self.num_experts:
            raise ValueError(f"top_k={top_k} must be at most num_experts={num_experts}")
        self.score_function = _check_choice(
            "score_function", score_function, ("softmax", "sigmoid")
        )
        self.balance = balance or LoadBalancing()
        self.groups = groups
        self.init_method = init_method
        self.reduces_in_backward = not defer_grad_reduce
        self.weight = nn.Parameter(torch.empty(num_experts, hidden_size, **factory))
        replicated = Placement(copy_groups=(groups.tp,), defer_grad_reduce=defer_grad_reduce)
        self.placements = {"weight": replicated}
        self.num_chosen: torch.Tensor | None = None  # no buffers: they differ from rank to rank
        self.num_preferred: torch.Tensor | None = None
        self.last_load: torch.Tensor | None = None
        # Always there: a rate that goes down to 0 late in training must not forget the biases.
        self.register_buffer(
            "expert_bias",
            torch.zeros(num_experts, device=factory.get("device"), dtype=torch.float32),
        )
        self.reset_parameters()

    def reset_parameters(self) -> None:
        draw(self, "weight", self.init_method)
        self.expert_bias.zero_()

    def forward(self, x: torch.Tensor, seq_length: int) -> tuple[Routing, Load]:
        refuse_autocast("Router", x.device)
        dtype = torch.promote_types(x.dtype, torch.float32)
        weight = self.weight
        if self.reduces_in_backward:
            weight = copy_to_tp(weight, self.groups.tp)
        logits = F.linear(x.to(dtype), weight.to(dtype))  # [sequences, tokens, experts]
        scores = logits.softmax(-1) if self.score_function == "softmax" else logits.sigmoid()
        experts = (scores + self.expert_bias).topk(self.top_k, -1).indices
        probs = scores.gather(-1, experts)
        if self.top_k > 1:  # of one expert all would be 1, without a gradient for the router
            probs = probs / (probs.sum(-1, keepdim=True) + 1e-20)  # sigmoids may all be zero
        if self.score_function == "sigmoid":
            # The scores that the losses see add up to 1, as a softmax does.
            scores = scores / (scores.sum(-1, keepdim=True) + 1e-20)
        num_chosen = num_preferred = _count(experts, self.num_experts)
        if self.balance.aux_loss_coefficient:
            num_preferred = _count(scores.topk(self.top_k, -1).indices, self.num_experts)
        z_sum = logits.logsumexp(-1).square().sum()
        load = Load(num_chosen, num_preferred, scores.sum(1), z_sum, seq_length)
        return Routing(experts, probs), load

    def loss(self, load: Load) -> torch.Tensor:
        """Count a load, and return this rank's share of its losses.

        Call it once per forward, outside of recomputation.

        The losses are the sum of the shares over the tensor ranks, averaged over context and
        data-parallel ranks, as gradients are. Fractions are counted over tensor and context ranks,
        in "global" over data-parallel ranks and the step's earlier micro-batches too.
        """
        groups = self.groups
        balance = self.balance
        self.num_chosen = _add(self.num_chosen, load.num_chosen.sum(0))
        num_sequences = len(load.num_chosen)
        num_tokens = num_sequences * load.seq_length
        loss = balance.z_loss_coefficient / num_tokens * load.z_sum
        if balance.aux_loss_coefficient == 0:
            return loss
        num_preferred = load.num_preferred.sum(0)
        self.num_preferred = _add(self.num_preferred, num_preferred)
        if balance.aux_loss == "global":
            chosen = _sum_over(self.num_preferred, groups.tp, groups.dp_cp)
        elif balance.aux_loss == "sequence":
            chosen = _sum_over(load.num_preferred, groups.tp, groups.cp)
        else:
            chosen = _sum_over(num_preferred, groups.tp, groups.cp)
        chosen = chosen.to(load.score_sums.dtype)
        fractions = chosen / chosen.sum(-1, keepdim=True)  # f_i
        # E * the sum of f_i P_i; P_i is score_sums / num_tokens
        aux_loss = self.num_experts * (fractions * load.score_sums).sum() / num_tokens
        return loss + balance.aux_loss_coefficient * aux_loss

    def _apply(self, fn, recurse=True):
        bias = self.expert_bias
        super()._apply(fn, recurse)
        if not bias.is_meta:  # in bfloat16 it would no longer change by small steps
            self.expert_bias = bias.to(self.expert_bias.device)
        return self


@torch.no_grad()
def end_step(model: nn.Module, groups: ProcessGroups) -> None:
    """Update the biases of a model's routers by the step's choices.

    Every rank calls it once a step.

    The bias of an expert goes down by ``expert_bias_update_rate`` if it was chosen more often than
    the mean, and up if less. ``last_load`` [experts] of each router are then the step's choices of
    all ranks, and what it counted is None.
    """
    routers = [m for m in model.modules() if isinstance(m, Router) and m.num_chosen is not None]
    if not routers:
        return
    counts = torch.stack([router.num_chosen for router in routers if router.num_chosen is not None])
    for router, chosen in zip(routers, _sum_over(counts, groups.tp, groups.dp_cp)):
        router.num_chosen = None
        router.num_preferred = None
        router.last_load = chosen
        too_few = chosen.double().mean() - chosen  # below zero: too many
        router.expert_bias += router.balance.expert_bias_update_rate * too_few.sign()


def drop_tokens(routing: Routing, num_experts: int, capacity: int) -> Routing:
    """Return a routing in which each expert keeps this rank's ``capacity`` most probable tokens."""
    experts = routing.experts.flatten()  # [tokens * k]
    # Sort twice: by expert, and within an expert by probability, the first to be kept first.
    by_prob = routing.probs.flatten().argsort(descending=True, stable=True)
    order = by_prob[experts[by_prob].argsort(stable=True)]
    chosen = experts.new_zeros(num_experts + 1).scatter_add_(0, experts, torch.ones_like(experts))
    starts = chosen.cumsum(0) - chosen  # of each expert's choices in this order
    position = torch.arange(len(experts), device=experts.device) - starts[experts[order]]
    is_dropped = torch.empty_like(experts, dtype=torch.bool)
    is_dropped.index_copy_(0, order, position >= capacity)
    kept = experts.masked_fill(is_dropped, num_experts)
    return routing._replace(experts=kept.view_as(routing.experts))


def attach_loss(x: torch.Tensor, loss: torch.Tensor) -> torch.Tensor:
    """Return x. In its backward ``loss`` gets the gradient 1, so that a router on any stage learns
    from it (Megatron-LM's ``MoEAuxLossAutoScaler``).
    """
    return _AttachLoss.apply(x, loss)  # pyright: ignore[reportReturnType]


class _AttachLoss(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, loss):
        ctx.save_for_backward(loss)
        return x.view_as(x)

    @staticmethod
    @first_derivative_only
    def backward(ctx, grad):  # pyright: ignore[reportIncompatibleMethodOverride]
        return grad, torch.ones_like(ctx.saved_tensors[0])


def _count(experts: torch.Tensor, num_experts: int) -> torch.Tensor:
    """Return how often each expert occurs in each sequence, [sequences, experts], of
    [sequences, tokens, k].
    """
    flat = experts.flatten(1)
    return flat.new_zeros(len(flat), num_experts).scatter_add_(1, flat, torch.ones_like(flat))


def _add(total: torch.Tensor | None, more: torch.Tensor) -> torch.Tensor:
    return more if total is None else total + more


def _sum_over(counts: torch.Tensor, *groups: dist.ProcessGroup) -> torch.Tensor:
    for group in groups:
        if group.size() > 1:
            counts = all_reduce(counts, group)
    return counts


def _check_choice(name: str, value: str, known: tuple[str, ...]) -> str:
    if value not in known:
        raise ValueError(f"{name}={value!r} is unknown: use {' or '.join(map(repr, known))}")
    return value
