"""Builds each kind of rank on fake tensors, which take no memory, and says what it would hold."""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import astuple, dataclass, fields
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import nn
from torch._C._distributed_c10d import FakeProcessGroup
from torch._subclasses.fake_tensor import FakeTensorMode

from labkit.communication import all_to_all
from labkit.expert_parallel import layer
from labkit.groups import AXES_OF_GROUP, ProcessGroups
from labkit.layout import ParallelLayout
from labkit.model import ParallelGPT
from labkit.placement import placement_of
from labkit.sizes import counted, ranks_text
from labkit.train.config import TrainConfig, node_memory_bytes
from labkit.train.trainer import make_models


@dataclass(frozen=True)
class Held:
    """What a rank holds when it is fullest, in bytes; torch itself and messages in flight take some more."""

    weights: float
    gradients: float
    optimizer: float
    activations: float

    def __str__(self) -> str:
        sizes = ", ".join(f"{each.name} {_gib(getattr(self, each.name))}" for each in fields(self))
        return f"{_gib(sum(astuple(self)))} ({sizes})"


def check(config: TrainConfig, world_size: int) -> bool:
    """Print what each rank of a pipeline would hold; return whether it fits a GPU of this machine, or its memory.

    Raises:
        ValueError: the sizes do not fit together, or not this number of ranks.
    """
    config = config.fitted(world_size)
    layout, kinds = config.layout(world_size), {}
    print(f"{str(layout).splitlines()[0]}; {counted(config.num_micro_batches(world_size), 'micro-batch')} per pipeline")
    for pp_rank in range(layout.pp_size):
        kinds.setdefault(what_a_rank_holds(config, world_size, pp_rank), []).append(pp_rank)
    for (num_parameters, held), pp_ranks in kinds.items():
        print(f"pipeline ranks {ranks_text(pp_ranks)}: {num_parameters:,} parameters, {held}")
    totals = [sum(astuple(held)) for (_, held), pp_ranks in kinds.items() for _ in pp_ranks]
    on_gpu = torch.cuda.is_available()
    needed = max(totals) if on_gpu else sum(totals) * world_size / layout.pp_size
    there = torch.cuda.mem_get_info()[1] if on_gpu else node_memory_bytes()
    what = "a GPU of this machine" if on_gpu else f"this machine, with all {counted(world_size, 'rank')} on it"
    fits = "fits" if needed <= there else "does not fit"
    print(f"This {fits} {what}: {_gib(needed)} of {_gib(there)}.")
    return needed <= there


def _gib(num_bytes: float) -> str:
    return f"{num_bytes / 2**30:,.1f} GiB" if num_bytes > 2**28 else f"{num_bytes / 2**20:,.1f} MiB"


def what_a_rank_holds(config: TrainConfig, world_size: int, pp_rank: int) -> tuple[int, Held]:
    """Return how many parameters a rank of a pipeline has before replicas divide them, and the bytes that it holds."""
    layout, schedule = config.layout(world_size), config.make_schedule(world_size)
    with FakeTensorMode(), _even_loads(), _fake_groups(layout, pp_rank, config.shard_size) as groups:
        models = make_models(config, schedule, groups)
        for module in (module for model in models for module in model.modules()):
            for name, p in module.named_parameters(recurse=False):
                module._parameters[name] = nn.Parameter(torch.empty_like(p, device="cpu"))
            for name, buffer in module.named_buffers(recurse=False):
                module._buffers[name] = torch.empty_like(buffer, device="cpu")
        own = {p.untyped_storage()._cdata for model in models for p in model.parameters()}
        activations = [_activation_bytes(model, own, config) for model in models]
        parameters = [(p.numel(), placement_of(p).replica_group) for model in models for p in model.parameters()]
        shard = sum(size / (groups.expert_shard if group else groups.shard).size() for size, group in parameters)
    whole = sum(size for size, _ in parameters)
    unit = max(sum(p.numel() for p in each.parameters()) for model in models for each in [*model.units, nn.Module()])
    weight, stage = config.dtype.itemsize, config.zero_stage
    gradient, moments = max(weight, 4), 12 if config.precision == "bfloat16" else 2 * weight
    held = Held(
        weights=weight * (whole, whole + shard, whole + shard, shard + 2 * unit)[stage],
        gradients=gradient * (whole, whole, shard + unit, shard + unit)[stage],
        optimizer=moments * (shard if stage else whole),
        activations=schedule.peak_in_flight(pp_rank) * sum(activations) / len(activations),
    )
    return whole, held


def _activation_bytes(model: ParallelGPT, own: set[int], config: TrainConfig) -> int:
    """Return the bytes that autograd keeps of one micro-batch, each memory once, without its ``own`` weights."""
    saved: dict[int, torch.Tensor] = {}

    def note(tensor: torch.Tensor) -> torch.Tensor:
        saved[tensor.untyped_storage()._cdata] = tensor  # kept, so that no address comes twice
        return tensor

    tokens = torch.zeros(config.micro_batch_size, config.seq_length // config.cp_size, dtype=torch.long)
    dtype, hidden = model.hidden_shape(tokens)
    x = tokens if model.is_first else torch.zeros(hidden, dtype=dtype, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        y = model(x)
        if model.is_last:
            model.loss(y, tokens)
    return sum(tensor.untyped_storage().nbytes() for key, tensor in saved.items() if key not in own)


@contextmanager
def _even_loads() -> Iterator[None]:
    """Let experts compute fake tensors, whose choices nobody knows: each rank gets as many rows as it sends.

    Nor does anybody know the seeds of dropout.
    """

    def dispatch(x, experts, num_experts, groups):
        num_rows, size = experts.numel() * groups.expert_tp.size(), groups.tp_ep.size()
        splits = [num_rows * (rank + 1) // size - num_rows * rank // size for rank in range(size)]
        slots, ends = torch.arange(num_rows) // groups.expert_tp.size(), torch.zeros(num_experts // groups.ep.size())
        rows = all_to_all(x[slots // experts.size(-1)], groups.tp_ep, splits, splits)
        return rows, layer.Exchange(slots, splits, splits, torch.arange(num_rows), ends)

    def product(a, b, ends):
        experts = (len(ends),) if b.dim() == 2 else ()  # the gradient of their weights has one matrix for each
        return a.new_empty(*experts, len(a), b.size(-1))

    of_experts = patch.multiple(layer, dispatch=dispatch, _grouped_product=product)
    with of_experts, patch.object(torch.Tensor, "__int__", lambda _: 0):
        yield


@contextmanager
def _fake_groups(layout: ParallelLayout, pp_rank: int, shard_size: int | None) -> Iterator[ProcessGroups]:
    """Yield the groups of the first rank of a stage, whose collectives do nothing."""
    sizes = {name: math.prod(map(layout.size, axes)) for name, axes in AXES_OF_GROUP.items()}
    shard_size = shard_size or sizes["dp_cp"]
    sizes |= {"embedding": 1, "shard": shard_size, "expert_shard": sizes["expert_dp"] * shard_size // sizes["dp_cp"]}
    groups: dict = {name: _fake_group(size) for name, size in sizes.items()}
    ranks = {group: {rank: rank for rank in range(group.size())} for group in groups.values()}
    with patch.dict(dist.distributed_c10d._world.pg_group_ranks, ranks):
        yield ProcessGroups(layout, layout.rank_at(pp=pp_rank), **groups)


def _fake_group(size: int) -> dist.ProcessGroup:
    """Return the first rank's view of a group whose collectives do nothing."""
    group = dist.ProcessGroup(0, size)  # pyright: ignore[reportCallIssue] - its stub knows the other constructor only
    nobody = FakeProcessGroup._create_internal(0, size)
    group._register_backend(torch.device("cpu"), dist.ProcessGroup.BackendType.CUSTOM, nobody)
    group._set_default_backend(dist.ProcessGroup.BackendType.CUSTOM)
    return group
