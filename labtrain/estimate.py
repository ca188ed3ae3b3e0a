"""Builds each kind of rank on fake tensors, which take no memory, and says what it would hold."""

import math
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from typing import NamedTuple
from unittest.mock import patch

import torch
import torch.distributed as dist
import torch.nn.functional as F
from labkit.collectives import all_to_all
from labkit.expert_parallel import layer
from labkit.groups import AXES_OF_GROUP, ProcessGroups
from labkit.layout import ParallelLayout
from labkit.placement import placement_of
from labkit.sizes import counted, ranks_text
from labkit.tensor_parallel.blocks import ReplicatedRMSNorm
from torch import nn
from torch._C._distributed_c10d import FakeProcessGroup
from torch._subclasses.fake_tensor import FakeTensorMode

from labtrain.config import TrainConfig, node_memory_bytes
from labtrain.memory_estimate import MemoryEstimate, gib
from labtrain.model import ParallelGPT
from labtrain.trainer import make_models


def estimate(config: TrainConfig, world_size: int, say: Callable[[str], None] = print) -> bool:
    """Print what each rank of a pipeline would hold; return whether it fits.

    It must fit a GPU, one with ``gpu_memory_gib`` or one of this machine. Without either, all ranks
    run on this machine's CPU, and must fit its memory together.

    Raises:
        ValueError: the sizes do not fit together, or not this number of ranks.
    """
    config = config.fitted(world_size)
    layout, kinds = config.layout(world_size), {}
    micro_batches = counted(config.num_micro_batches(world_size), "micro-batch")
    say(f"{str(layout).splitlines()[0]}; {micro_batches} per pipeline")
    on_gpu = config.gpu_memory_gib is not None or torch.cuda.is_available()
    for pp_rank in range(layout.pp_size):
        found = what_a_rank_holds(config, world_size, pp_rank, on_gpu)
        kinds.setdefault(found, []).append(pp_rank)
    for (num_parameters, held), pp_ranks in kinds.items():
        say(f"pipeline ranks {ranks_text(pp_ranks)}: {num_parameters:,} parameters, {held}")
    totals = [held.total for (_, held), pp_ranks in kinds.items() for _ in pp_ranks]
    needed = max(totals) if on_gpu else sum(totals) * world_size / layout.pp_size
    there, what = _memory(config, world_size)
    fits = "fits" if needed <= there else "does not fit"
    advice = (
        "" if on_gpu else (" To compare with a GPU, say how much memory it has: gpu_memory_gib=80.")
    )
    say(f"This {fits} {what}: {gib(needed)} of {gib(there)}.{advice}")
    return needed <= there


def _memory(config: TrainConfig, world_size: int) -> tuple[float, str]:
    """Return how many bytes there are, and what has them."""
    if config.gpu_memory_gib is not None:
        return config.gpu_memory_gib * 2**30, f"a GPU of {config.gpu_memory_gib:g} GiB"
    if torch.cuda.is_available():
        return torch.cuda.mem_get_info()[1], "a GPU of this machine"
    return node_memory_bytes(), f"this machine, with all {counted(world_size, 'rank')} on it"


def what_a_rank_holds(
    config: TrainConfig, world_size: int, pp_rank: int, on_gpu: bool = False
) -> tuple[int, MemoryEstimate]:
    """Return how many parameters a rank of a pipeline has before replicas divide them, and the
    bytes that it holds.

    A GPU's kernels keep less than a CPU's for the same layer.
    """
    layout, schedule = config.layout(world_size), config.make_schedule(world_size)
    kernels = _kernels_of_a_gpu() if on_gpu else nullcontext()
    fakes = FakeTensorMode(), _even_loads(), kernels
    with ExitStack() as stack:
        for context in fakes:
            stack.enter_context(context)
        groups = stack.enter_context(_fake_groups(layout, pp_rank, config.shard_size))
        models = make_models(config, schedule, groups)
        for module in (module for model in models for module in model.modules()):
            for name, p in module.named_parameters(recurse=False):
                module._parameters[name] = nn.Parameter(torch.empty_like(p, device="cpu"))
            for name, buffer in module.named_buffers(recurse=False):
                module._buffers[name] = torch.empty_like(buffer, device="cpu")
        own = {p.untyped_storage()._cdata for model in models for p in model.parameters()}
        kept = [_kept_bytes(model, own, config) for model in models]
        parameters = [
            (p.numel(), placement_of(p).replica_group)
            for model in models
            for p in model.parameters()
        ]
        shard = sum(
            size / (groups.expert_shard if group else groups.shard).size()
            for size, group in parameters
        )
    whole = sum(size for size, _ in parameters)
    unit = max(
        sum(p.numel() for p in each.parameters())
        for model in models
        for each in [*model.units, nn.Module()]
    )
    weight, stage = config.dtype.itemsize, config.zero_stage
    gradient, moments = max(weight, 4), 12 if config.precision == "bfloat16" else 2 * weight
    held = MemoryEstimate(
        weights=weight * (whole, whole + shard, whole + shard, shard + 2 * unit)[stage],
        gradients=gradient * (whole, whole, shard + unit, shard + unit)[stage],
        optimizer=moments * (shard if stage else whole),
        activations=_activation_bytes(kept, schedule.peak_in_flight(pp_rank)),
    )
    return whole, held


class _Kept(NamedTuple):
    """The bytes that autograd keeps of one micro-batch in a stage."""

    layers: int  # by the layers and what is before them, until their backward
    # By what is after them: the last norm, the logits and the loss, whose backward is next
    head: int
    again: int  # by the largest layer while it is computed again; 0 without recomputation


def _activation_bytes(kept: list[_Kept], in_flight: int) -> float:
    """Return the most that a rank keeps of its stages' micro-batches, each of which counts as their
    mean.

    One micro-batch at a time is in the head, and one layer at a time is computed again.
    """
    of_a_micro_batch = sum(stage.layers for stage in kept) / len(kept)
    return (
        in_flight * of_a_micro_batch
        + sum(stage.head for stage in kept)
        + max(stage.again for stage in kept)
    )


def _kept_bytes(model: ParallelGPT, own: set[int], config: TrainConfig) -> _Kept:
    kept = _bytes_by_part(model, own, config)
    head = kept.pop(_HEAD, 0)
    again = 0
    if model.recompute:
        model.recompute = False
        whole = _bytes_by_part(model, own, config)
        model.recompute = True
        again = max(size for part, size in whole.items() if part in model.layers)
    return _Kept(sum(kept.values()), head, again)


_HEAD = "head"


def _bytes_by_part(model: ParallelGPT, own: set[int], config: TrainConfig) -> Counter[str]:
    """Return what autograd keeps of one micro-batch by layer, each memory once, without the ``own``
    weights.

    The embedding counts as a part with an empty name, and all after the last layer as the head.
    """
    saved: dict[int, torch.Tensor] = {}
    sizes: Counter[str] = Counter()
    part = ""

    def note(tensor: torch.Tensor) -> torch.Tensor:
        memory = tensor.untyped_storage()
        if memory._cdata not in saved and memory._cdata not in own:
            saved[memory._cdata] = tensor  # held, so that no address comes twice
            sizes[part] += memory.nbytes()
        return tensor

    def enter(name: str) -> None:
        nonlocal part
        part = name

    hooks = [
        layer.register_forward_pre_hook(lambda *_, name=name: enter(name))
        for name, layer in model.layers.items()
    ]
    if model.is_last:
        hooks.append(model.norm.register_forward_pre_hook(lambda *_: enter(_HEAD)))
    tokens = torch.zeros(
        config.micro_batch_size, config.seq_length // config.cp_size, dtype=torch.long
    )
    dtype, hidden = model.activation_spec(tokens)
    x = tokens if model.is_first else torch.zeros(hidden, dtype=dtype, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        y = model(x)
        if model.is_last:
            model.loss(y, tokens)
    for hook in hooks:
        hook.remove()
    return sizes


@contextmanager
def _kernels_of_a_gpu() -> Iterator[None]:
    """Let CPU tensors keep what a GPU's would: its kernels for RMSNorm, dropout and attention keep
    less.
    """
    dropout, attention = F.dropout, F.scaled_dot_product_attention

    def rms_norm(x, shape, weight, eps):
        # Keeps its input and few numbers, as RMSNorm does there
        return F.layer_norm(x, shape, weight, eps=eps)

    def with_a_mask_of_bytes(x, p=0.5, training=True, inplace=False):
        return (
            torch.native_dropout(x, p, training)[0]
            if training and p
            else dropout(x, p, training, inplace)
        )

    def without_scores(*args, dropout_p=0.0, **options):
        return attention(*args, **options)

    norms = patch.object(ReplicatedRMSNorm, "normalise", staticmethod(rms_norm))
    functions = patch.multiple(
        F, dropout=with_a_mask_of_bytes, scaled_dot_product_attention=without_scores
    )
    with norms, functions:
        yield


@contextmanager
def _even_loads() -> Iterator[None]:
    """Let experts compute fake tensors, whose choices nobody knows: each rank gets as many rows as
    it sends.

    Nor does anybody know the seeds of dropout.
    """

    def dispatch(x, experts, num_experts, groups):
        num_rows, size = experts.numel() * groups.expert_tp.size(), groups.tp_ep.size()
        splits = [num_rows * (rank + 1) // size - num_rows * rank // size for rank in range(size)]
        slots, ends = (
            torch.arange(num_rows) // groups.expert_tp.size(),
            torch.zeros(num_experts // groups.ep.size()),
        )
        rows = all_to_all(x[slots // experts.size(-1)], groups.tp_ep, splits, splits)
        return rows, layer.Exchange(slots, splits, splits, torch.arange(num_rows), ends)

    def product(a, b, ends):
        # The gradient of their weights has one matrix for each
        experts = (len(ends),) if b.dim() == 2 else ()
        return a.new_empty(*experts, len(a), b.size(-1))

    of_experts = patch.multiple(layer, dispatch=dispatch, _grouped_product=product)
    with of_experts, patch.object(torch.Tensor, "__int__", lambda _: 0):
        yield


@contextmanager
def _fake_groups(
    layout: ParallelLayout, pp_rank: int, shard_size: int | None
) -> Iterator[ProcessGroups]:
    """Yield the groups of the first rank of a stage, whose collectives do nothing."""
    sizes = {name: math.prod(map(layout.size, axes)) for name, axes in AXES_OF_GROUP.items()}
    shard_size = shard_size or sizes["dp_cp"]
    sizes |= {
        "embedding": 1,
        "shard": shard_size,
        "expert_shard": sizes["expert_dp"] * shard_size // sizes["dp_cp"],
    }
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
