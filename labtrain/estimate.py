"""Builds each kind of rank on fake tensors, which take no memory, and says what it would hold."""

import math
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from itertools import pairwise
from typing import NamedTuple
from unittest.mock import patch

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch._C._distributed_c10d import FakeProcessGroup
from torch._subclasses.fake_tensor import FakeTensorMode

from labkit.collectives import all_to_all
from labkit.expert_parallel import layer
from labkit.groups import AXES_OF_GROUP, ProcessGroups
from labkit.layout import ParallelLayout
from labkit.placement import placed_parameters
from labkit.sizes import counted, ranks_text
from labkit.tensor_parallel.blocks import ReplicatedRMSNorm
from labtrain.build import make_models
from labtrain.config import TrainConfig
from labtrain.memory_estimate import MemoryEstimate, gib, node_memory_bytes
from labtrain.model import ParallelGPT


def estimate(config: TrainConfig, world_size: int, say: Callable[[str], None] = print) -> bool:
    """Print what each rank of a pipeline would hold; return whether it fits.

    It must fit a GPU, one with ``gpu_memory_gib`` or one of this machine. Without either, all ranks
    run on this machine's CPU, and must fit its memory together.

    Raises:
        ValueError: the sizes do not fit together, or not this number of ranks.
    """
    config = config.resize_to(world_size)
    config.parallel.check(config.shape, world_size)
    layout = config.layout(world_size)
    micro_batches = counted(config.num_micro_batches(world_size), "micro-batch")
    say(f"{str(layout).splitlines()[0]}; {micro_batches} per pipeline")
    on_gpu = config.gpu_memory_gib is not None or torch.cuda.is_available()
    pp_ranks_of_kind: dict[tuple[int, MemoryEstimate], list[int]] = {}
    totals = []
    for pp_rank in range(layout.pp_size):
        kind = what_a_rank_holds(config, world_size, pp_rank, on_gpu)
        pp_ranks_of_kind.setdefault(kind, []).append(pp_rank)
        totals.append(kind[1].total)
    for (num_parameters, held), pp_ranks in pp_ranks_of_kind.items():
        say(f"pipeline ranks {ranks_text(pp_ranks)}: {num_parameters:,} parameters, {held}")
    needed = max(totals) if on_gpu else sum(totals) * world_size / layout.pp_size
    there, what = _memory(config, world_size)
    fits = "fits" if needed <= there else "does not fit"
    text = f"This {fits} {what}: {gib(needed)} of {gib(there)}."
    if not on_gpu:
        text += " To compare with a GPU, say how much memory it has: gpu_memory_gib=80."
    say(text)
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
    layout = config.layout(world_size)
    schedule = config.make_schedule(world_size)
    with ExitStack() as stack:
        stack.enter_context(FakeTensorMode())
        stack.enter_context(_even_loads())
        if on_gpu:
            stack.enter_context(_kernels_of_a_gpu())
        groups = stack.enter_context(_fake_groups(layout, pp_rank, config.shard_size))
        models = make_models(config, schedule, groups)
        for model in models:
            _move_to_cpu(model)
        parameters = placed_parameters(*models)
        memories = {param.untyped_storage()._cdata for param in parameters}
        kept = [_kept_bytes(model, memories, config) for model in models]
        unsharded = 0
        shard = 0.0
        for param, placement in parameters.items():
            unsharded += param.numel()
            is_expert = placement.replica_group is not None
            shard_group = groups.expert_shard if is_expert else groups.shard
            shard += param.numel() / shard_group.size()
        units = [unit for model in models for unit in model.units]
        sizes = [sum(param.numel() for param in unit.parameters()) for unit in units]
    largest_unit = max(sizes, default=0)
    activations = _activation_bytes(kept, schedule.peak_in_flight(pp_rank))
    return unsharded, _held(config, unsharded, shard, largest_unit, activations)


def _move_to_cpu(model: nn.Module) -> None:
    """Replace the tensors of a model on the meta device by fake ones on the CPU."""
    for module in model.modules():
        for name, param in module.named_parameters(recurse=False):
            module._parameters[name] = nn.Parameter(torch.empty_like(param, device="cpu"))
        for name, buffer in module.named_buffers(recurse=False):
            module._buffers[name] = torch.empty_like(buffer, device="cpu")


def _held(
    config: TrainConfig, unsharded: int, shard: float, unit: int, activations: float
) -> MemoryEstimate:
    """Return the bytes of a rank by its numbers of parameters: before replicas divide them, its
    shard of them, and those of the largest unit that FSDP gathers at once.
    """
    weight = config.dtype.itemsize
    gradient = max(weight, 4)  # bfloat16's are added up in float32
    moments = 2 * weight
    if config.precision == "bfloat16":
        moments = 12  # both moments and the master weight, in float32
    # By the ZeRO stage. From stage 1 on, the updated shard is beside the weights
    weights = (unsharded, unsharded + shard, unsharded + shard, shard + 2 * unit)
    gradients = (unsharded, unsharded, shard + unit, shard + unit)
    return MemoryEstimate(
        weights=weight * weights[config.zero_stage],
        gradients=gradient * gradients[config.zero_stage],
        optimizer=moments * (shard if config.zero_stage else unsharded),
        activations=activations,
    )


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
    layers = in_flight * sum(stage.layers for stage in kept) / len(kept)
    head = sum(stage.head for stage in kept)
    again = max(stage.again for stage in kept)
    return layers + head + again


def _kept_bytes(model: ParallelGPT, weights: set[int], config: TrainConfig) -> _Kept:
    kept = _bytes_by_part(model, weights, config)
    head = kept.pop(_HEAD, 0)
    again = 0
    if model.recompute == "full":
        model.recompute = "none"
        all_kept = _bytes_by_part(model, weights, config)
        model.recompute = "full"
        again = max(all_kept[part] for part in model.layers)
    return _Kept(sum(kept.values()), head, again)


_HEAD = "head"


def _bytes_by_part(model: ParallelGPT, weights: set[int], config: TrainConfig) -> Counter[str]:
    """Return what autograd keeps of one micro-batch by layer, each memory once, without that of
    its ``weights``.

    The embedding counts as a part with an empty name, and all after the last layer as the head.
    """
    saved: dict[int, torch.Tensor] = {}
    sizes: Counter[str] = Counter()
    part = ""

    def note(tensor: torch.Tensor) -> torch.Tensor:
        memory = tensor.untyped_storage()
        if memory._cdata not in saved and memory._cdata not in weights:
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
    seq = config.seq_length // config.cp_size
    tokens = torch.zeros(config.micro_batch_size, seq, dtype=torch.long)
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
    dropout = F.dropout
    attention = F.scaled_dot_product_attention

    def rms_norm(x, shape, weight, eps):
        # Keeps its input and few numbers, as RMSNorm does there
        return F.layer_norm(x, shape, weight, eps=eps)

    def with_a_mask_of_bytes(x, p=0.5, training=True, inplace=False):
        if training and p:
            return torch.native_dropout(x, p, training)[0]
        return dropout(x, p, training, inplace)

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
        copies = groups.expert_tp.size()
        num_rows = experts.numel() * copies
        size = groups.tp_ep.size()
        bounds = [num_rows * rank // size for rank in range(size + 1)]
        splits = [stop - start for start, stop in pairwise(bounds)]
        slots = torch.arange(num_rows) // copies
        ends = torch.zeros(num_experts // groups.ep.size())
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
    sizes["embedding"] = 1
    sizes["shard"] = shard_size or sizes["dp_cp"]
    sizes["expert_shard"] = sizes["expert_dp"] * sizes["shard"] // sizes["dp_cp"]
    groups: dict = {name: _fake_group(size) for name, size in sizes.items()}
    ranks = {group: {rank: rank for rank in range(group.size())} for group in groups.values()}
    with patch.dict(dist.distributed_c10d._world.pg_group_ranks, ranks):
        yield ProcessGroups(layout, layout.rank_at(pp=pp_rank), **groups)


def _fake_group(size: int) -> dist.ProcessGroup:
    """Return the first rank's view of a group whose collectives do nothing."""
    # Its stub knows only the other constructor
    group = dist.ProcessGroup(0, size)  # pyright: ignore[reportCallIssue]
    nobody = FakeProcessGroup._create_internal(0, size)
    group._register_backend(torch.device("cpu"), dist.ProcessGroup.BackendType.CUSTOM, nobody)
    group._set_default_backend(dist.ProcessGroup.BackendType.CUSTOM)
    return group
