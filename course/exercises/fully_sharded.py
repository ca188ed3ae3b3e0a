"""The exercises of notebook 14: a sharded unit forward and backward, which stage fits, accumulation, and a norm.

The unit is a linear layer. Its parameters lie side by side: the weight [out, in] row by row, the bias [out], and zeros
until the number of ranks divides them. Each rank has one of equal parts, its shard. The group is the whole world.
"""

import math
import operator
from contextlib import nullcontext
from types import SimpleNamespace

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from course.communication import CommunicationLog
from course.exercises.base import Exercise
from course.exercises.on_ranks import Conduct, RankExercise, gathered, only, own, summed, whole_numbers
from course.exercises.parallel_objects import New
from labkit.collectives import all_gather_single, reduce_scatter_single
from labkit.data_parallel import FullyShardedDataParallel

# -- forward of a sharded unit --------------------------------------------------------------------------------------


def my_unit_forward(x, shard, out_features):
    buffer = shard.new_empty(dist.get_world_size() * len(shard))
    all_gather_single(buffer, shard)
    end = out_features * x.shape[1]
    weight, bias = buffer[:end].view(out_features, -1), buffer[end : end + out_features]  # the rest is padding
    out = F.linear(x, weight, bias)
    buffer.untyped_storage().resize_(0)  # autograd keeps the tensor `weight`, but no memory
    return out


def forward_inputs(in_features: int, out_features: int):
    """Return this rank's rows [2, in], its shard of the parameters, and how many features come out."""
    numbers, d = whole_numbers(((in_features + 1) * out_features,), seed=1400).cpu(), dist.get_world_size()
    x = whole_numbers((2, in_features), seed=1410 + dist.get_rank()).cpu().requires_grad_()
    return x, own(F.pad(numbers, (0, -len(numbers) % d))).clone(), out_features


def memory_is_gone(log: Conduct, x, shard, out_features) -> str | None:
    most = max((each.untyped_storage().nbytes() for each in log.kept), default=0)
    if most < out_features * x[0].nbytes:
        return None
    return (
        f"Autograd keeps {most} bytes of gathered parameters until backward. A sharded layer gathers them again there: "
        "at the end, `buffer.untyped_storage().resize_(0)` takes the memory away from all tensors that share it."
    )


def moved_once(log: Conduct, shard: torch.Tensor) -> str | None:
    """Say if more bytes were gathered, or reduced, than the whole unit has."""
    whole = dist.get_world_size() * shard.numel() * shard.element_size()
    for verb, operations in (("gathers", ("all_gather", "broadcast")), ("reduces", ("reduce_scatter",))):
        if (moved := log.total_bytes(*operations)) > whole:
            return f"It {verb} {moved} bytes, but the whole unit has {whole}: once is enough, shard by shard."
    return None


unit_forward = RankExercise(
    "unit_forward",
    my_unit_forward,
    notebook="14",
    cases=[(3, 3, 4), (2, 3, 4), (4, 2, 3)],  # with two numbers of padding, none, and three
    inputs=forward_inputs,
    rule=only(
        "all_gather",
        "broadcast",
        also=lambda log, x, shard, out_features: moved_once(log, shard) or memory_is_gone(log, x, shard, out_features),
    ),
    gradient_to="x",
    hints=[
        "All shards together: `buffer = shard.new_empty(d * len(shard))`, then `all_gather_single(buffer, shard)`.",
        "The weight is the first out_features * in_features numbers, `.view(out_features, -1)`. The bias is the next "
        "out_features numbers. Count from the start: at the end there may be padding.",
        "`F.linear(x, weight, bias)`. Autograd now keeps the weight until backward, so `del` would not free it. "
        "`buffer.untyped_storage().resize_(0)` does: the tensors stay, and their memory goes.",
    ],
)


def forward_wrongly(
    x, shard, out_features, *, gather=lambda shard: gathered(shard, 0), weight=lambda buffer, out, end: buffer[:end],
    bias=lambda buffer, out, end: buffer[end : end + out], view=lambda weight, out: weight.view(out, -1),
    answer=lambda out: out,
):  # fmt: skip
    """Do what `my_unit_forward` does, with one thing wrong."""
    buffer, end = gather(shard), out_features * x.shape[1]
    flat = weight(buffer, out_features, end)
    return answer(F.linear(x, view(flat, out_features), bias(buffer, out_features, end)))


SHUFFLED = "You took every d-th number. A shard is consecutive numbers, in the order of the ranks."
ROW_BY_ROW = "The weight lies row by row, [out, in]: `.view(out_features, -1)`."
OWN_ROWS = "Each rank has rows of its own, and now the whole layer: its output is complete, with nothing to add."
unit_forward.mistakes_of(
    forward_wrongly,
    (dict(bias=lambda buffer, out, end: buffer[-out:]), "The bias comes right after the weight. The end is padding."),
    (dict(bias=lambda buffer, out, end: None), "The bias is missing. It comes after the weight."),
    (dict(view=lambda weight, out: weight.view(-1, out).T), ROW_BY_ROW),
    (
        dict(weight=lambda buffer, out, end: buffer[out : out + end], bias=lambda buffer, out, end: buffer[:out]),
        "You took the bias from the start. The weight comes first, then the bias.",
    ),
    (dict(gather=lambda shard: gathered(shard[:, None], 1).flatten()), SHUFFLED),
    (
        dict(gather=lambda shard: torch.zeros(dist.get_world_size() * len(shard))),
        "The parameters are all 0: nothing was gathered. `all_gather_single(buffer, shard)` fills its first argument.",
    ),
    (dict(gather=lambda shard: shard), "This is one rank's shard. All ranks' shards together are the layer."),
    (dict(weight=lambda buffer, out, end: buffer[:-out]), "Cut the padding off: the weight has out * in numbers."),
    (dict(answer=summed), f"The outputs were added up over the ranks. {OWN_ROWS}"),
    (dict(answer=lambda out: summed(out) / dist.get_world_size()), f"The outputs were averaged. {OWN_ROWS}"),
    (dict(answer=lambda out: gathered(out, 0)), "These are all ranks' rows. Only the parameters are gathered."),
)


@unit_forward.mistake("The memory was freed before the layer computed with it. First the output, then resize_(0).")
def freed_too_early(x, shard, out_features):
    weight = gathered(shard, 0)[: out_features * x.shape[1]].view(out_features, -1)
    weight.untyped_storage().resize_(0)
    return F.linear(x, weight)


# -- its backward ---------------------------------------------------------------------------------------------------


def my_unit_backward(grad, x, shard):
    d, end = dist.get_world_size(), grad.shape[1] * x.shape[1]
    buffer = shard.new_empty(d * len(shard))
    all_gather_single(buffer, shard)
    grad_x = grad @ buffer[:end].view(grad.shape[1], -1)
    flat = torch.zeros_like(buffer)  # the gradients, where the parameters were
    flat[:end] = (grad.T @ x).flatten()
    flat[end : end + grad.shape[1]] = grad.sum(0)
    grad_shard = torch.empty_like(shard)
    reduce_scatter_single(grad_shard, flat / d)
    return grad_x, grad_shard


def backward_inputs(in_features: int, out_features: int):
    """Return the gradient of this rank's output [2, out], its rows [2, in], and its shard of the parameters."""
    x, shard, _ = forward_inputs(in_features, out_features)
    return whole_numbers((2, out_features), seed=1420 + dist.get_rank()).cpu(), x.detach(), shard


unit_backward = RankExercise(
    "unit_backward",
    my_unit_backward,
    notebook="14",
    cases=[(3, 3, 4), (4, 2, 3)],
    inputs=backward_inputs,
    rule=only("all_gather", "broadcast", "reduce_scatter", also=lambda log, grad, x, shard: moved_once(log, shard)),
    hints=[
        "Forward has freed the weight, and grad_x = grad @ weight needs it: gather again, as there.",
        "The gradient of the weight is grad.T @ x, [out, in]; that of the bias is grad.sum(0). Put them into one flat "
        "tensor as long as all shards, where the parameters were; the padding has gradient 0.",
        "`reduce_scatter_single(grad_shard, flat / d)` adds up the gradients of all ranks, and gives each rank its "
        "shard of the sum. grad_x belongs to this rank's rows, so it stays.",
    ],
)


def backward_wrongly(
    grad, x, shard, *, parts=lambda grad, x: (grad.T @ x, grad.sum(0)), grad_x=lambda grad, weight: grad @ weight,
    share=lambda flat, d: own(summed(flat)) / d,
):  # fmt: skip
    """Do what `my_unit_backward` does, with one thing wrong."""
    d, buffer = dist.get_world_size(), gathered(shard, 0)
    flat = torch.cat([part.flatten() for part in parts(grad, x)])
    weight = buffer[: grad.shape[1] * x.shape[1]].view(grad.shape[1], -1)
    return grad_x(grad, weight), share(F.pad(flat, (0, len(buffer) - len(flat))), d)


def padded(numbers):
    return F.pad(numbers.flatten(), (0, -numbers.numel() % dist.get_world_size()))


OWN_GRAD_X = "grad_x was combined over the ranks. It belongs to this rank's own rows, of which no other rank knows."
NO_MEAN = "You divided by the number of rows. If the loss is a mean over rows, `grad` has been divided already."
unit_backward.mistakes_of(
    backward_wrongly,
    (dict(share=lambda flat, d: own(summed(flat))), "These are sums over the ranks. Divide by their number."),
    (dict(share=lambda flat, d: own(summed(flat)) / d**2), "You divided by the number of ranks twice."),
    (dict(share=lambda flat, d: own(flat)), "This is this rank's own gradient. Add the others': reduce-scatter."),
    (dict(share=lambda flat, d: own(flat) / d), "You divided, but nothing was added up: reduce-scatter does that."),
    (dict(share=lambda flat, d: summed(flat) / d), "This is the whole average. A rank keeps only its shard's."),
    (dict(share=lambda flat, d: summed(flat)[dist.get_rank() :: d] / d), SHUFFLED),
    (dict(parts=lambda grad, x: (x.T @ grad, grad.sum(0))), "The weight's gradient is transposed: it is grad.T @ x."),
    (dict(parts=lambda grad, x: [grad.T @ x]), "The bias has a gradient, too: grad.sum(0)."),
    (dict(parts=lambda grad, x: (grad.T @ x, grad.mean(0))), NO_MEAN),
    (dict(parts=lambda grad, x: (grad.T @ x / len(x), grad.mean(0))), NO_MEAN),
    (dict(parts=lambda grad, x: (grad.sum(0), grad.T @ x)), "Here the bias comes first. The weight lies before it."),
    (
        dict(parts=lambda grad, x: (padded(grad.T @ x), padded(grad.sum(0)))),
        "Weight and bias were padded apart. The bias comes right after the weight, and the zeros once, at the end.",
    ),
    (dict(grad_x=lambda grad, weight: summed(grad @ weight)), OWN_GRAD_X),
    (dict(grad_x=lambda grad, weight: summed(grad @ weight) / dist.get_world_size()), OWN_GRAD_X),
    (
        dict(grad_x=lambda grad, weight: grad @ weight / dist.get_world_size()),
        "grad_x is not an average: do not divide.",
    ),
    (dict(grad_x=lambda grad, weight: grad @ weight.reshape(-1, len(weight)).T), ROW_BY_ROW),
)


# -- which stage fits -----------------------------------------------------------------------------------------------


def my_stage(num_parameters, num_ranks, memory_gib):
    shard = math.ceil(num_parameters / num_ranks)  # shards are equally long: the last is padded
    bytes_each = [12, 4, 2]  # optimizer, gradients, weights: the order in which stages 1, 2 and 3 divide them
    for stage in range(4):
        num_bytes = sum(bytes_each[:stage]) * shard + sum(bytes_each[stage:]) * num_parameters
        if num_bytes <= memory_gib * 2**30:
            return stage
    return None


which_stage_fits = Exercise(
    "which_stage_fits",
    my_stage,
    notebook="14",
    cases=[
        (1_000_000_000, 8, 80),  # fits as it is
        (7_000_000_000, 8, 56),  # the optimizer's states are enough
        (20_000_000_000, 16, 56),  # 60e9 bytes: 56 GiB, but not 56 GB
        (70_000_000_000, 64, 24),
        (70_000_000_000, 8, 80),  # not even stage 3
        (2**30, 4, 18),  # exactly full
        (2**30, 4, 17),
        (2**30, 4, 15),
        (2**31, 8, 15),  # full with stage 1
        (2**30, 3, 10),  # 10 GiB and 8 bytes, because 3 does not divide the parameters
    ],
    hints=[
        "A parameter takes 2 bytes as a weight, 4 as a gradient in float32, and 12 in the optimizer.",
        "Stage 1 divides the 12 among the ranks, stage 2 also the 4, stage 3 also the 2. A divided part counts for "
        "math.ceil(num_parameters / num_ranks) parameters, the rest for all.",
        "A GiB is 2**30 bytes. Return the first of the stages 0, 1, 2, 3 whose bytes are at most the memory, or None.",
    ],
)


def stage_wrongly(
    num_parameters, num_ranks, memory_gib, *, bytes_each=(12, 4, 2), gib=2**30, shard=lambda n, d: -(-n // d),
    fits=operator.le, stages=(0, 1, 2, 3), is_divided=operator.le, gpus=1,
):  # fmt: skip
    """Do what `my_stage` does, with one thing wrong; level 1 is the optimizer, 2 gradients, 3 weights."""
    held = shard(num_parameters, num_ranks)
    for stage in stages:
        counts = (held if is_divided(level, stage) else num_parameters for level in (1, 2, 3))
        if fits(sum(map(operator.mul, bytes_each, counts)), memory_gib * gib * (gpus or num_ranks)):
            return stage
    return None


OPTIMIZER_FIRST = "The order is wrong. Stage 1 divides the largest part, the optimizer's 12 bytes; weights come last."
ROUND_UP = (
    "Shards are equally long, in whole parameters. Where d does not divide the parameters, round their number up first "
    "and then take the bytes of so many."
)
which_stage_fits.mistakes_of(
    stage_wrongly,
    (
        dict(gib=10**9),
        "This is what comes of a GiB of 10**9 bytes, or of memory that is kept back. A GiB is 2**30 bytes, 7% more "
        "than a GB, and all of it may be filled.",
    ),
    (dict(shard=operator.truediv), ROUND_UP),
    (dict(fits=operator.lt), "What fills the memory exactly still fits: `<=`."),
    (dict(bytes_each=(12, 2, 2)), "You counted 2 bytes for a gradient. Here gradients add up in float32: 4."),
    (dict(bytes_each=(8, 4, 2)), "You counted 8 bytes in the optimizer, two moments. Its float32 weight takes 4 more."),
    (dict(bytes_each=(12, 4, 4)), "You counted 4 bytes for a weight. It is in bfloat16: 2."),
    (dict(bytes_each=(2, 4, 12)), OPTIMIZER_FIRST),
    (dict(bytes_each=(4, 12, 2)), OPTIMIZER_FIRST),
    (dict(bytes_each=(12, 2, 4)), "Stage 2 divides the gradients' 4 bytes. The weights' 2 come last, with stage 3."),
    (dict(is_divided=operator.eq), "Each stage also divides what the one before it does: stage 3 divides all three."),
    (dict(is_divided=lambda level, stage: stage > 0), "Stage 1 divides the optimizer's 12 bytes alone, not all 18."),
    (dict(gpus=None), "You compared with all GPUs' memory, or divided all by d. What is not divided is on each GPU."),
    (dict(stages=(1, 2, 3)), "Stage 0 divides nothing, and sometimes that fits. It needs the fewest messages."),
    (dict(stages=(3, 2, 1, 0)), "This is the largest stage. Stage 3 sends half as much again: take the smallest."),
)
which_stage_fits.mistakes_in(
    (None, lambda stage: 3 if stage is None else stage, "Where not even stage 3 fits, return None."),
    (None, lambda stage: None if stage is None else stage + 1, "Stages count from 0, which divides nothing."),
)


@which_stage_fits.mistake("0 counts as false: `x or None` and `if x:` take stage 0 for nothing.")
def none_for_stage_0(num_parameters, num_ranks, memory_gib):
    return my_stage(num_parameters, num_ranks, memory_gib) or None


# -- accumulate -----------------------------------------------------------------------------------------------------


def my_accumulate(model, micro_batches):
    for number, x in enumerate(micro_batches, 1):
        is_last = number == len(micro_batches)
        with nullcontext() if is_last else model.no_sync():  # the last backward sends the sum
            loss = model(x).square().mean() / len(micro_batches)
            loss.backward()
    return [parameter.grad for parameter in model.parameters()]


def sharded_model() -> FullyShardedDataParallel:
    """Return a new model with one unit per layer."""
    layers, world = (nn.Linear(2, 3), nn.Linear(3, 1)), dist.group.WORLD
    for seed, parameter in enumerate([*layers[0].parameters(), *layers[1].parameters()]):
        parameter.data = whole_numbers(tuple(parameter.shape), seed=1430 + seed).cpu() / 4
    assert world is not None
    return FullyShardedDataParallel(nn.Sequential(*layers), world, units=layers)


def accumulate_inputs(num_micro_batches: int, num_rows: int):
    """Return a sharded model of two units, and this rank's micro-batches [rows, 2]."""
    first = 1440 + 10 * dist.get_rank()
    micro_batches = [whole_numbers((num_rows, 2), seed).cpu() for seed in range(first, first + num_micro_batches)]
    return New(sharded_model, "model"), micro_batches


def sends_once(log: Conduct, model, micro_batches) -> str | None:
    operations, m, units = [record.operation for record in log.records], len(micro_batches), 2
    if (sent := operations.count("reduce_scatter")) > units:
        return (
            f"It calls {sent} reduce-scatters for {m} micro-batches and {units} units. {units} are enough: inside "
            "`no_sync` a backward sends nothing, so that only the last has to send, the sum of all."
        )
    if (num_gathers := operations.count("all_gather")) > (enough := 2 * units * m):
        return (
            f"It gathers units {num_gathers} times, and {enough} are enough: each of the {units} units for forward and "
            f"for backward of {m} micro-batches. Go through them once: the last backward sends what is accumulated."
        )
    if any(len(each) == m * len(micro_batches[0]) for each in log.kept):
        return "All rows go through the model at once, so all their activations are there at once. Take them in turn."
    return None


accumulate = RankExercise(
    "accumulate",
    my_accumulate,
    notebook="14",
    cases=[(3, 5, 7), (2, 4, 3)],  # m, m - 1, ranks, rows and features all differ
    inputs=accumulate_inputs,
    rule=sends_once,
    hints=[
        "For each micro-batch: its loss `model(x).square().mean()`, divided by their number, and `backward()`.",
        "Inside `with model.no_sync():` a backward adds up gradients and sends nothing. Which backwards belong there?",
        "All but the last, which sends the sum. (For the last, `contextlib.nullcontext()` is a `with` that does "
        "nothing.) The model averages over the ranks. Return `[parameter.grad for parameter in model.parameters()]`.",
    ],
    if_stuck="messages of your own. The model averages by itself; and ranks have shards of different sizes.",
)


def accumulate_wrongly(
    model, micro_batches, *, scale=lambda m, d, x: 1 / m, sends=lambda i, m: i == m - 1, used=lambda m: range(m),
    result=lambda parameter: parameter.grad,
):  # fmt: skip
    """Do what `my_accumulate` does, with one thing wrong."""
    m, d = len(micro_batches), dist.get_world_size()
    for number in used(m):
        with nullcontext() if sends(number, m) else model.no_sync():
            (model(micro_batches[number]).square().mean() * scale(m, d, micro_batches[number])).backward()
    return [result(parameter) for parameter in model.parameters()]


MEAN_OF_NUMBERS = (
    "You divided by the rows or the numbers of a micro-batch. Its loss is a mean over them already: divide it by the "
    "number of micro-batches, and by nothing else."
)
accumulate.mistakes_of(
    accumulate_wrongly,
    (dict(scale=lambda m, d, x: 1), "The gradients were added up. The loss of all is a mean: divide each loss by m."),
    (
        dict(scale=lambda m, d, x: 1 / m**2),
        "You divided by the number of micro-batches twice, in the loss and after it.",
    ),
    (dict(scale=lambda m, d, x: 1 / (m * d)), "You divided by the number of ranks as well, which the model does."),
    (dict(scale=lambda m, d, x: 1 / (m - 1)), "You divided by m - 1: divide by all micro-batches, len(micro_batches)."),
    (dict(scale=lambda m, d, x: 1 / x.numel()), MEAN_OF_NUMBERS),
    (dict(scale=lambda m, d, x: 1 / (m * x.numel())), MEAN_OF_NUMBERS),
    (dict(scale=lambda m, d, x: 1 / len(x)), MEAN_OF_NUMBERS),
    (dict(scale=lambda m, d, x: 1 / (m * len(x))), MEAN_OF_NUMBERS),
    (dict(result=lambda parameter: parameter), "These are the weights. Return the `.grad` of each."),
    (dict(scale=lambda m, d, x: 1 / d), "You divided by the number of ranks, which the model does: divide by m."),
    (dict(sends=lambda i, m: False), "There is no gradient: the last backward was inside `no_sync`, too."),
    (dict(sends=lambda i, m: i == 0), "Only the first micro-batch was sent: `no_sync` is for all but the last."),
    (dict(used=lambda m: [m - 1]), "Only the last micro-batch counts. Each needs its own backward."),
    (dict(used=lambda m: range(m - 1), sends=lambda i, m: i == m - 2), "The last micro-batch is missing."),
)


# -- the norm of all gradients --------------------------------------------------------------------------------------


def my_norm(gradients, is_cut, groups):
    total = torch.zeros(())
    for gradient, cut in zip(gradients, is_cut):
        if cut or groups.tp.rank() == 0:  # what tensor ranks hold alike counts on the first
            total += gradient.square().sum()
    dist.all_reduce(total, group=groups.shard)
    dist.all_reduce(total, group=groups.tp)
    return total.sqrt()  # replicas have the same gradients: nothing to add


class Groups(SimpleNamespace):
    """This rank's process groups ``tp``, ``shard`` and ``replicate``, which can be neither copied nor sent."""

    def __deepcopy__(self, memo) -> "Groups":
        return self

    def __reduce__(self):
        return Groups, ()

    def __repr__(self) -> str:
        return "groups"


def norm_inputs(tp_size: int, shard_size: int):
    """Return shards of two gradients, which of them tensor parallelism cuts, and the groups; replicas are alike."""
    names, num_replicas = ("replicate", "shard", "tp"), dist.get_world_size() // (tp_size * shard_size)
    mesh = init_device_mesh("cpu", (num_replicas, shard_size, tp_size), mesh_dim_names=names)
    shard, tp = mesh.get_local_rank("shard"), mesh.get_local_rank("tp")
    gradients = whole_numbers((3,), seed=1480 + 2 * shard + tp).cpu(), whole_numbers((2,), seed=1490 + shard).cpu()
    return list(gradients), [True, False], Groups(**{name: mesh.get_group(name) for name in names})


def sends_one_number_per_group(log: CommunicationLog, *_) -> str | None:
    groups = [record.group for record in log.records]
    if len(set(groups)) == len(groups) and all(record.message_bytes <= 8 for record in log.records):
        return None
    return (
        f"It calls {len(groups)} all-reduces in {len(set(groups))} groups, of {log.total_bytes()} bytes in all. One "
        "number in each group is enough: first add up the squares of all gradients here, then reduce that sum."
    )


norm_of_shards = RankExercise(
    "norm_of_shards",
    my_norm,
    notebook="14",
    cases=[(4, 2, 2), (4, 1, 2)],  # tensor ranks and shards; shards and replicas
    inputs=norm_inputs,
    rule=only("all_reduce", also=sends_one_number_per_group),
    hints=[
        "|g|² is the sum of the squares of all numbers of the gradients, each once. Which ranks have different shards, "
        "and which have the same?",
        "Ranks of `groups.shard` have different shards, and ranks of `groups.replicate` have the same. Ranks of "
        "`groups.tp` have different shards where tensor parallelism cuts the parameter, and the same elsewhere.",
        "Add up the squares of a gradient if it is cut or if `groups.tp.rank()` is 0. All-reduce the sum over "
        "`groups.shard`, then over `groups.tp`, and take the root.",
    ],
    if_stuck="an all-reduce inside an `if groups.tp.rank() == 0`, which only some ranks call. Every rank must call it.",
)


def norm_wrongly(gradients, is_cut, groups, *, over=("shard", "tp"), counts=lambda cut, tp: cut or tp == 0):
    """Do what `my_norm` does, with one thing wrong."""
    total = torch.zeros(())
    for gradient, cut in zip(gradients, is_cut):
        total += gradient.square().sum() * counts(cut, groups.tp.rank())
    for name in over:
        dist.all_reduce(total, group=getattr(groups, name, None))  # None is the world
    return total.sqrt()


norm_of_shards.mistakes_of(
    norm_wrongly,
    (
        dict(over=["world"]),
        "The replicas were counted, too. They have the same gradients, so the norm is too large by the root of their "
        "number, and clipping makes every step too small. Add up over groups.shard and groups.tp alone.",
    ),
    (dict(counts=lambda cut, tp: True), "What is not cut was counted on each tensor rank. Count it on the first."),
    (dict(over=["shard"]), "The shards of the other tensor ranks are missing: all-reduce over groups.tp as well."),
    (dict(over=["shard"], counts=lambda cut, tp: True), "This is the norm on one tensor rank. There are more."),
    (dict(over=["tp"]), "The other shards are missing: all-reduce over groups.shard."),
    (dict(over=[], counts=lambda cut, tp: True), "This is the norm of what is here. Each rank must get that of all."),
    (dict(counts=lambda cut, tp: tp == 0), "Where tensor parallelism cuts, each tensor rank has a shard: count all."),
    (dict(counts=lambda cut, tp: cut), "What is not cut is missing: it counts once, where groups.tp.rank() is 0."),
    (dict(counts=lambda cut, tp: not cut or tp == 0), "It is the wrong way round: shards count on every tensor rank."),
)
norm_of_shards.mistakes_in(
    (None, lambda norm: norm**2, "The sum of the squares is right. The norm is its root."),
    (None, lambda norm: norm / 2, "The squares were averaged. Shards are different numbers, so their squares add up."),
)


@norm_of_shards.mistake("You added up norms. Squares add up: take the root at the end.")
def norms_added(gradients, is_cut, groups):
    return summed(norm_wrongly(gradients, is_cut, groups, over=[]))  # case 1 has one replica


@norm_of_shards.mistake("You added up norms. Squares add up: take the root at the end.")
def norms_of_each_added(gradients, is_cut, groups):
    total = sum(g.norm() for g, cut in zip(gradients, is_cut) if cut or groups.tp.rank() == 0) + torch.zeros(())
    for group in (groups.shard, groups.tp):
        dist.all_reduce(total, group=group)
    return total


@norm_of_shards.mistake("You added up norms. Squares add up: take the root at the end.")
def norms_added_in_the_groups(gradients, is_cut, groups):
    norm = norm_wrongly(gradients, is_cut, groups, over=[])
    for group in (groups.shard, groups.tp):
        dist.all_reduce(norm, group=group)
    return norm


@norm_of_shards.mistake(
    "What is not cut was not summed over groups.shard. Tensor parallelism does not cut it, but its shards differ all "
    "the same: sum it over groups.shard."
)
def whole_not_over_shards(gradients, is_cut, groups):
    cut = norm_wrongly(gradients, is_cut, groups, counts=lambda cut, tp: cut)
    whole = norm_wrongly(gradients, is_cut, groups, over=[], counts=lambda cut, tp: not cut)
    return (cut**2 + whole**2).sqrt()


def root_between(gradients, is_cut, groups, *, first, last):
    """Take the root before the last all-reduce."""
    norm = norm_wrongly(gradients, is_cut, groups, over=[first])
    dist.all_reduce(norm, group=getattr(groups, last))
    return norm


norm_of_shards.mistakes_of(
    root_between,
    *[
        (dict(first=first, last=last), f"You took the root before the sum over groups.{last}. It comes after both.")
        for first, last in (("tp", "shard"), ("shard", "tp"))
    ],
)
