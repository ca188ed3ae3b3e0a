"""A tiny mixture of experts, trained in one process or on ranks in two layouts.

What is trained is labkit's: layers, balancing, replicas, the norm. Layers are recomputed in backward. A
micro-batch is divided among the replicas, so that it is the same in every layout.
"""

from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import dataclass

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from course.museum.harness import Job, Placed, Routing, Run, Tensors, fingerprint
from course.parity import gradients, weights
from labkit import expert_parallel
from labkit import gradients as reduced
from labkit.data_parallel import DataParallel
from labkit.expert_parallel import LoadBalancing, MoELayer
from labkit.groups import ProcessGroups
from labkit.layout import ParallelLayout
from labkit.placement import Placement, placed_parameters
from labtrain.model import normal

WORLD_SIZE, NUM_LAYERS, HIDDEN, FFN, NUM_EXPERTS, TOP_K = 4, 2, 4, 5, 6, 3
STEPS, NUM_MICRO_BATCHES, ROWS, SEQ_LENGTH = 3, 3, 4, 208
NUM_CHOICES = NUM_MICRO_BATCHES * ROWS * SEQ_LENGTH * TOP_K  # of a layer in a step
LEARNING_RATE, CLIP_NORM = 2.0, 0.15
BALANCE = LoadBalancing("global", aux_loss_coefficient=0.5, expert_bias_update_rate=0.01)
LAYOUTS = (
    ParallelLayout(WORLD_SIZE, cp_size=2, ep_size=2),  # experts are divided over context ranks, and copied over dp
    ParallelLayout(WORLD_SIZE, tp_size=2, expert_tp_size=1),  # every rank has all experts, whole
)
"""In the first, an expert has fewer copies than there are losses; in the second, more."""


class Dense(nn.Module):
    """A linear layer that all ranks have whole."""

    def __init__(self, groups: ProcessGroups):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(HIDDEN, HIDDEN, dtype=torch.float64))
        normal("dense", 0, 0.5)(self.weight.data)
        self.placements = {"weight": Placement(copy_groups=(groups.tp,))}

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + F.linear(x, self.weight)


class TinyMixture(nn.Module):
    """A dense layer, and two of experts, each added to what it gets; returns the output and the auxiliary losses."""

    def __init__(self, groups: ProcessGroups):
        super().__init__()
        self.dense = Dense(groups)
        self.moe_layers = [
            MoELayer(
                HIDDEN, FFN, NUM_EXPERTS, TOP_K, groups, dtype=torch.float64,
                init_method=normal(f"up {number}", 0, 0.5), output_layer_init_method=normal(f"down {number}", 0, 0.5),
                router=dict(balance=BALANCE, init_method=normal(f"router {number}", 0, 0.5)),
            )
            for number in range(NUM_LAYERS)
        ]  # fmt: skip
        self.layers = nn.ModuleList(self.moe_layers)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x, auxiliary = self.dense(x), x.new_zeros(())
        for layer in self.moe_layers:
            output, load = checkpoint(layer, x, use_reentrant=False)
            loss = layer.router.loss(load) / NUM_MICRO_BATCHES
            x, auxiliary = x + expert_parallel.attach_loss(output, loss), auxiliary + loss.detach()
        return x, auxiliary


@dataclass(frozen=True)
class MixtureRun(Job):
    """The tiny mixture in one layout; ``experts`` is of the gradients of a rank's experts."""

    layout: ParallelLayout
    shard_size: None = None

    def train(self, groups: ProcessGroups) -> tuple[nn.Module, Run]:
        model = TinyMixture(groups)
        return model, train(model, groups)

    def fingerprints(self, gradients: Tensors, placed: Placed, groups: ProcessGroups) -> dict[str, str]:
        return {"experts": fingerprint(grad for name, grad in gradients.items() if ".experts." in name)}


def micro_batches(step: int, groups: ProcessGroups) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yield this rank's inputs and targets [rows/d, seq/c, hidden] of a step's micro-batches."""
    generator, place, layout = torch.Generator().manual_seed(step), groups.coords, groups.layout
    for _ in range(NUM_MICRO_BATCHES):
        x = torch.randn(ROWS, SEQ_LENGTH, HIDDEN, generator=generator, dtype=torch.float64)
        own = x.chunk(layout.dp_size)[place.dp].chunk(layout.cp_size, 1)[place.cp].contiguous()
        yield own, own.flip(-1).tanh()


def train(model: TinyMixture, groups: ProcessGroups) -> Run:
    """Run all steps on this rank, by plain gradient descent."""
    replica, parameters = DataParallel(model, groups.dp_cp), placed_parameters(model)
    losses, norms, auxiliary, counted, biases = [], [], [], [], []
    start, first = weights(model), {}
    for step in range(STEPS):
        replica.zero_grad()
        share, of_experts = torch.zeros(2, dtype=torch.float64)
        for number, (x, target) in enumerate(micro_batches(step, groups), 1):
            with nullcontext() if number == NUM_MICRO_BATCHES else replica.no_sync():
                output, more = replica(x)
                loss = (output - target).square().mean() / NUM_MICRO_BATCHES
                loss.backward()
            share, of_experts = share + loss.detach(), of_experts + more
        if step == 0:  # before clipping
            first = {name: grad for name, grad in gradients(model).items() if grad is not None}
        num_losses = groups.dp_cp.size()
        loss, norm, *_ = reduced.loss_and_grad_norm(share / num_losses, parameters, groups)
        dist.all_reduce(of_experts)
        expert_parallel.end_step(model, groups)
        with torch.no_grad():
            for parameter in parameters:
                if parameter.grad is not None:
                    parameter -= LEARNING_RATE * min(1, CLIP_NORM / norm) * parameter.grad
        losses.append(loss)
        norms.append(norm)
        auxiliary.append(of_experts.item() / num_losses)
        routers = [layer.router for layer in model.moe_layers]
        counted.append([sum(map(int, router.last_load.tolist())) for router in routers if router.last_load is not None])
        biases.append([router.expert_bias.tolist() for router in routers])
    return Run(losses, norms, start, first, Routing(auxiliary, counted, biases))
