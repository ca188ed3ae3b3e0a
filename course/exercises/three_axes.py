"""The exercises of notebook 08: place ranks for a model, the norm of all gradients, and an embedding on two stages."""

import itertools
import operator

import torch
import torch.distributed as dist

from course.communication import CommunicationLog
from course.exercises.base import Exercise
from course.exercises.on_ranks import Conduct, RankExercise, only, summed, whole_numbers

# -- place 8 ranks for a model --------------------------------------------------------------------------------------


def my_place(num_parameters, num_heads, num_layers, node_size, memory_bytes):
    fitting = []
    for t in (1, 2, 4, 8):
        for p in (1, 2, 4, 8):
            can_be_cut = num_heads % t == 0 and num_layers % p == 0 and t <= node_size
            if t * p <= 8 and can_be_cut and 16 * num_parameters / (t * p) <= memory_bytes:
                fitting.append((t * p, p, t))  # few ranks per replica, then few stages
    if not fitting:
        return None
    _, p, t = min(fitting)
    return t, p, 8 // (t * p)


GB = 10**9
place = Exercise(
    "place",
    my_place,
    notebook="08",
    cases=[
        (1 * GB, 16, 24, 8, 80 * GB),  # fits a GPU
        (8 * GB, 32, 32, 8, 80 * GB),  # two are enough
        (16 * GB, 32, 40, 2, 80 * GB),  # four, with two per node
        (16 * GB, 25, 48, 8, 80 * GB),  # heads that cannot be divided
        (16 * GB, 32, 42, 1, 150 * GB),  # one GPU per node, and two stages
        (30 * GB, 30, 60, 8, 80 * GB),  # eight, t = 2 at most
        (34 * GB, 36, 42, 8, 70 * GB),  # eight; 36 heads are cut into four at most
        (20 * GB, 40, 40, 8, 80 * GB),  # four, exactly full
        (16 * GB, 25, 42, 8, 80 * GB),  # four stages would do, but 42 layers cannot be cut into four
        (21 * GB, 40, 42, 8, 80 * GB),  # four are almost enough, so eight
        (35 * GB, 64, 96, 1, 72 * GB),  # eight stages, one GPU per node
        (50 * GB, 64, 96, 8, 80 * GB),  # 16 would be enough, and there are 8
    ],
    hints=[
        "There are ten ways to choose t and p from 1, 2, 4, 8 with t · p ≤ 8. Try them all: two loops.",
        "A choice is possible if t divides the heads, p divides the layers, t ≤ node_size, and "
        "16 · num_parameters / (t · p) ≤ memory_bytes.",
        "Of the possible ones: the smallest t · p, and of those the smallest p. `min` of tuples (t * p, p, t) "
        "does it. None if there is no possible one.",
    ],
)


def place_wrongly(
    num_parameters, num_heads, num_layers, node_size, memory_bytes, *, heads=True, layers=True, node=True,
    bytes_each=16, order=lambda t, p: (t * p, p), parts=lambda t, p: t * p, fits=operator.le, most=8,
    in_node=lambda t, p: t,
):  # fmt: skip
    """Do what `my_place` does, with one thing wrong."""
    fitting = [
        (t, p)
        for t, p in itertools.product((1, 2, 4, 8), repeat=2)
        if t * p <= most
        and not (heads and num_heads % t)
        and not (layers and num_layers % p)
        and not (node and in_node(t, p) > node_size)
        and fits(bytes_each * num_parameters / parts(t, p), memory_bytes)
    ]
    if not fitting:
        return None
    t, p = min(fitting, key=lambda place: order(*place))
    return t, p, 8 // (t * p)


place.mistakes_of(
    place_wrongly,
    (
        dict(node=False),
        "A tensor group must stay in a node: it sends four times in every layer, and waits each time. t goes up to the "
        "number of GPUs in a node, and the rest is left to p.",
    ),
    (
        dict(in_node=lambda t, p: t * p),
        "You kept t · p within a node. Only t must stay in it: stages send little, and may be on different nodes.",
    ),
    (dict(fits=operator.lt), "What fills the memory exactly still fits: `<=`."),
    (dict(most=64), "There are 8 ranks, so t · p is at most 8: with 16, no replica would be whole."),
    (
        dict(fits=lambda needed, memory: needed / 2**30 <= memory / 1e9),
        "You compared GiB with GB: 2**30 bytes against 1e9. Both sides are bytes as they come.",
    ),
    (dict(heads=False), "t must divide the number of attention heads: a head is not cut."),
    (dict(layers=False), "p must divide the number of layers: stages should be equally long."),
    (
        dict(order=lambda t, p: (t * p, t)),
        "Where t and p could both do it, take t as long as it stays in a node: a pipeline has a bubble, and its first "
        "and last stage both keep the embedding.",
    ),
    (dict(order=lambda t, p: (-t * p, -p)), "It takes the fewest replicas, not the most, and the most stages."),
    (
        dict(order=lambda t, p: (-t * p, p)),
        "All ranks share one replica. A cut costs messages all the time: cut as little as the memory allows, and use "
        "the other ranks as replicas.",
    ),
    (
        dict(bytes_each=18),
        "This is what comes of 18 bytes per parameter, or of memory that is kept back. The rule here is ZeRO's count, "
        "16, and all of memory_bytes may be filled.",
    ),
    (
        dict(bytes_each=4),
        "You counted 4 bytes per parameter, for weight and gradient. Training takes 16: the optimizer adds a float32 "
        "weight and two moments.",
    ),
    (
        dict(parts=lambda t, p: 8),
        "You took an eighth of the memory. Either you divided by all 8 ranks: each replica has a whole model, so "
        "divide by t · p. Or you counted only the 2 bytes of a weight: training takes 16.",
    ),
)


place.mistakes_in((None, lambda found: found or (1, 1, 8), "Where nothing is possible, return None."))


# -- the norm of all gradients --------------------------------------------------------------------------------------


def my_norm(gradients, kinds, tp_rank):
    total = torch.zeros(())
    for gradient, kind in zip(gradients, kinds):
        if kind == "shard" or (kind == "whole" and tp_rank == 0):
            total += gradient.square().sum()
    dist.all_reduce(total)
    return total.sqrt()


def norm_inputs(num_stages: int):
    """Return gradients on rank 2 * stage + tp_rank: of a shard, of a whole parameter, and on the ends of the embedding.

    The embedding is a shard on the first stage and its "copy" on the last, with the same gradient.
    """
    rank = dist.get_rank()
    stage, tp_rank = divmod(rank, 2)
    gradients = [whole_numbers((3,), seed=300 + rank), whole_numbers((2,), seed=320 + stage)]
    kinds = ["shard", "whole"]
    if stage in (0, num_stages - 1):
        gradients.append(whole_numbers((2,), seed=340 + tp_rank))
        kinds.append("shard" if stage == 0 else "copy")
    return [gradient.cpu() for gradient in gradients], kinds, tp_rank


def sends_one_number(log: CommunicationLog, *_) -> str | None:
    if log.total_bytes() <= 8:
        return None
    return f"It sends {log.total_bytes()} bytes. One number is enough: the sum of the squares that this rank counts."


norm = RankExercise(
    "norm",
    my_norm,
    notebook="08",
    cases=[(4, 2), (2, 1), (8, 4)],
    inputs=norm_inputs,
    rule=only("all_reduce", also=sends_one_number),
    hints=[
        "|g|² is the sum of the squares of all numbers of the gradient, each once.",
        'On this rank, count a gradient if it is a "shard", or if it is "whole" and tp_rank is 0. Never a "copy".',
        "Add up the squares in a tensor, `dist.all_reduce` it (here the world is one model replica), take the root.",
    ],
    if_stuck="an all-reduce that only some ranks call, as one inside an `if tp_rank == 0`. Every rank must call it.",
)


def squares(gradients, kinds, *counted) -> torch.Tensor:
    """Return the sum of the squares of the gradients whose kind is counted."""
    return torch.stack([each.square().sum() for each, kind in zip(gradients, kinds) if kind in counted]).sum()


@norm.mistake("This is the norm of what this rank holds. The other stages and shards belong in it, too.")
def own_norm(gradients, kinds, tp_rank):
    return squares(gradients, kinds, "shard", "whole" if tp_rank == 0 else "shard").sqrt()


@norm.mistake("Everything was counted wherever it is: whole parameters t times, the embedding on both its stages.")
def everything_counted(gradients, kinds, tp_rank):
    return summed(squares(gradients, kinds, "shard", "whole", "copy")).sqrt()


@norm.mistake(
    "The last stage's copy of the embedding was counted, too, on tp_rank 0 only. It is one parameter, which the first "
    'stage counts as its shard: leave out every "copy".'
)
def copy_counted_as_whole(gradients, kinds, tp_rank):
    return summed(squares(gradients, kinds, "shard", *(["whole", "copy"] if tp_rank == 0 else []))).sqrt()


@norm.mistake("What all tensor ranks hold whole was counted on each of them: t times. Count it on tp_rank 0.")
def whole_counted_twice(gradients, kinds, tp_rank):
    return summed(squares(gradients, kinds, "shard", "whole")).sqrt()


@norm.mistake("The last stage's copy of the embedding was counted, too. It is one parameter: count the first stage's.")
def copy_counted(gradients, kinds, tp_rank):
    return summed(squares(gradients, kinds, "shard", "copy", "whole" if tp_rank == 0 else "shard")).sqrt()


@norm.mistake("You added up norms. Squares add up: sum the squares over the ranks, and take the root at the end.")
def norms_added(gradients, kinds, tp_rank):
    return summed(own_norm(gradients, kinds, tp_rank))


@norm.mistake("You added up the norms of single gradients. Squares add up: one root, at the end.")
def every_norm_added(gradients, kinds, tp_rank):
    counted = ("shard", "whole") if tp_rank == 0 else ("shard",)
    norms = [each.norm() for each, kind in zip(gradients, kinds) if kind in counted]
    return summed(torch.stack(norms).sum())


@norm.mistake(
    "Whole gradients were halved before they were squared, so each rank counts a quarter. Halve the square, or count "
    "it on tp_rank 0 only."
)
def halved_and_squared(gradients, kinds, tp_rank):
    return summed(squares(gradients, kinds, "shard") + squares(gradients, kinds, "whole") / 4).sqrt()


@norm.mistake(
    "Whole gradients were divided by the number of ranks before they were squared. A whole parameter is held by the t "
    "tensor ranks of its stage: count its square on tp_rank 0 only."
)
def divided_and_squared(gradients, kinds, tp_rank):
    shares = squares(gradients, kinds, "whole") / dist.get_world_size() ** 2
    return summed(squares(gradients, kinds, "shard") + shares).sqrt()


@norm.mistake(
    "The squares of whole gradients were divided by the number of ranks. A whole parameter is held by the t tensor "
    "ranks of its stage alone: count its square on tp_rank 0 only."
)
def square_divided_by_all(gradients, kinds, tp_rank):
    shares = squares(gradients, kinds, "whole") / dist.get_world_size()
    return summed(squares(gradients, kinds, "shard") + shares).sqrt()


@norm.mistake("The whole parameters are missing: each counts once, on tp_rank 0.")
def whole_left_out(gradients, kinds, tp_rank):
    return summed(squares(gradients, kinds, "shard")).sqrt()


norm.mistakes_in(
    (
        None,
        lambda norm: norm / dist.get_world_size() ** 0.5,
        "The squares were averaged over the ranks: ReduceOp.AVG, or a division. Ranks hold different parts here, so "
        "their squares add up: ReduceOp.SUM, which is what `dist.all_reduce` does by default.",
    ),
    (None, lambda norm: norm**2, "The sum of the squares is right. The norm is its root."),
    (None, lambda norm: norm**4, "The sum of the squares was squared again. The norm is its root."),
)


# -- one embedding on two stages ------------------------------------------------------------------------------------


def my_tied(gradient, num_stages):
    ends = dist.new_group([0, num_stages - 1])  # every rank makes the group, its members use it
    if gradient is not None:
        dist.all_reduce(gradient, group=ends)
    return gradient


def tied_inputs():
    """Return the gradient of the embedding [2, 3] on the end stages, None between, and the number of stages."""
    rank, num_stages = dist.get_rank(), dist.get_world_size()
    is_end = rank in (0, num_stages - 1)
    return whole_numbers((2, 3), seed=360 + rank).cpu() if is_end else None, num_stages


def ends_alone(log: Conduct, *_) -> str | None:
    """Complain if this rank is not an end and took part. (That all ranks make the same groups is asked everywhere.)"""
    if log and dist.get_rank() not in (0, dist.get_world_size() - 1):
        return f"This rank takes part in the {log.records[0].operation}, though it holds no embedding."
    return None


tied = RankExercise(
    "tied",
    my_tied,
    notebook="08",
    cases=[(2,), (4,)],
    inputs=tied_inputs,
    rule=ends_alone,
    may_change=("gradient",),
    hints=[
        "The embedding is used twice: to read words in and to write them out. What is the gradient of something used "
        "twice?",
        "`dist.new_group([0, num_stages - 1])` makes a group of the two ends. All ranks must call it.",
        "Then the two ends, and nobody else, call `dist.all_reduce(gradient, group=...)`.",
    ],
    if_stuck="if the report names an all_reduce of the world, which waits for all ranks: pass `group=`. If not, it is "
    "a group that not all ranks made, or an all-reduce by one end alone: `new_group` is called by every rank, the "
    "all-reduce by both members.",
)


@tied.mistake(
    "Each end keeps its own gradient. The optimizer then moves the two copies apart, and they are no longer one "
    "embedding. It was used twice: the gradient is the sum."
)
def left_alone(gradient, num_stages):
    return gradient


@tied.mistake("Ranks count from 0: the last is num_stages - 1.")
def group_beyond_the_world(gradient, num_stages):
    return dist.new_group([0, num_stages])


@tied.mistake("You averaged. These are not replicas: one parameter was used in two places, so its gradients add up.")
def averaged(gradient, num_stages):
    total = my_tied(gradient, num_stages)
    return None if total is None else total / 2


@tied.mistake("Only the first stage has the sum. Both ends update their copy: both need it.")
def first_stage_only(gradient, num_stages):
    own = None if gradient is None else gradient.clone()
    total = my_tied(gradient, num_stages)
    return total if dist.get_rank() == 0 else own


@tied.mistake("Each end has the other's gradient now. Both need the sum of the two.")
def exchanged(gradient, num_stages):
    own = None if gradient is None else gradient.clone()
    total = my_tied(gradient, num_stages)
    return None if total is None or own is None else total - own


@tied.mistake("The sum was formed twice, so it is twice too large.")
def summed_twice(gradient, num_stages):
    return my_tied(my_tied(gradient, num_stages), num_stages)


@tied.mistake("The first stage's gradient was copied to the last, whose own is lost. Add them up.")
def copied_from_the_first(gradient, num_stages):
    ends: dist.ProcessGroup = dist.new_group([0, num_stages - 1])  # type: ignore[assignment]
    if gradient is not None:
        dist.broadcast(gradient, src=0, group=ends)
    return gradient


@tied.mistake(
    "The ends are right. But the stages between took part with zeros: they hold no embedding, wait for the ends, and "
    "now have a gradient of nothing. Make a group of the two ends."
)
def zeros_between(gradient, num_stages):
    return summed(torch.zeros(2, 3) if gradient is None else gradient)
