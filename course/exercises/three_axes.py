"""The exercises of notebook 08: place ranks for a model, the norm of all gradients, and an embedding on two stages.

The functions named my_... are the solutions; those with a leading underscore make the typical mistakes.
"""

from typing import Any

import torch
import torch.distributed as dist

from course.exercises.base import Exercise, Mistake
from course.exercises.on_ranks import RankExercise, only
from course.exercises.row_parallel import summed, whole_numbers
from labkit.communication import CommunicationLog

# -- place 8 ranks for a model --------------------------------------------------------------------------------------

NUM_RANKS, BYTES_PER_PARAMETER = 8, 16
SIZES = (1, 2, 4, 8)


def my_place(num_parameters, num_heads, num_layers, node_size, memory_bytes):
    fitting = []
    for t in (1, 2, 4, 8):
        for p in (1, 2, 4, 8):
            can_be_cut = num_heads % t == 0 and num_layers % p == 0 and t <= node_size
            if t * p <= 8 and can_be_cut and 16 * num_parameters / (t * p) <= memory_bytes:
                fitting.append((t * p, p, t))  # few ranks a replica, then few stages
    if not fitting:
        return None
    _, p, t = min(fitting)
    return t, p, 8 // (t * p)


def _place(
    num_parameters, num_heads, num_layers, node_size, memory_bytes, *,
    order=lambda t, p: (t * p, p), parts=lambda t, p: t * p, heads=True, layers=True, node=True, bytes_each=16,
):  # fmt: skip
    """`my_place` with one thing wrong."""
    fitting = [
        (t, p)
        for t in SIZES
        for p in SIZES
        if t * p <= NUM_RANKS
        and not (heads and num_heads % t)
        and not (layers and num_layers % p)
        and not (node and t > node_size)
        and bytes_each * num_parameters / parts(t, p) <= memory_bytes
    ]
    if not fitting:
        return None
    t, p = min(fitting, key=lambda place: order(*place))
    return t, p, NUM_RANKS // (t * p)


def _over_nodes(*case):
    return _place(*case, node=False)


def _heads_not_divided(*case):
    return _place(*case, heads=False)


def _layers_not_divided(*case):
    return _place(*case, layers=False)


def _pipeline_first(*case):
    return _place(*case, order=lambda t, p: (t * p, t))


def _most_ranks_a_replica(*case):
    return _place(*case, order=lambda t, p: (-t * p, p))


def _weights_and_gradients_only(*case):
    return _place(*case, bytes_each=4)


def _divided_among_replicas(*case):
    return _place(*case, parts=lambda t, p: NUM_RANKS)


def _pipeline_before_tensor(*case):
    found = my_place(*case)
    return found and (found[1], found[0], found[2])


GB = 10**9
place = Exercise(
    "place",
    my_place,
    cases=[
        (1 * GB, 16, 24, 8, 80 * GB),  # fits a GPU
        (8 * GB, 32, 32, 8, 80 * GB),  # two are enough
        (16 * GB, 32, 40, 2, 80 * GB),  # four, and two a node
        (16 * GB, 25, 48, 8, 80 * GB),  # heads that cannot be divided
        (16 * GB, 32, 42, 1, 150 * GB),  # one GPU a node, and two stages
        (30 * GB, 30, 60, 8, 80 * GB),  # eight, t = 2 at most
        (34 * GB, 36, 42, 8, 70 * GB),  # eight; 36 heads are cut into four at most
        (16 * GB, 25, 42, 8, 80 * GB),  # four stages would do, but 42 layers cannot be cut into four
    ],
    mistakes=[
        Mistake(
            _over_nodes,
            "A tensor group must stay in a node: it sends four times in every layer, and waits for it. t goes up to "
            "the number of GPUs in a node, and the rest is left to p.",
        ),
        Mistake(_heads_not_divided, "t must divide the number of attention heads: a head is not cut."),
        Mistake(_layers_not_divided, "p must divide the number of layers: stages should be equally long."),
        Mistake(
            _pipeline_first,
            "Where t and p could both do it, take t as long as it stays in a node: a pipeline has a bubble, and first "
            "and last stage both keep the embedding.",
        ),
        Mistake(
            _most_ranks_a_replica,
            "All ranks share one replica. A cut costs messages all the time: cut as little as the memory allows, and "
            "use the other ranks as replicas.",
        ),
        Mistake(
            _weights_and_gradients_only,
            "You counted 4 bytes a parameter, for weight and gradient. Training takes 16: the optimizer has a float32 "
            "weight and two means besides.",
        ),
        Mistake(
            _divided_among_replicas,
            "You took an eighth of the memory. Either you divided by all 8 ranks: replicas do not divide, each has a "
            "whole model, so divide by t · p. Or you counted the weights' 2 bytes alone: training takes 16.",
        ),
        Mistake(_pipeline_before_tensor, "The numbers are right, in another order: (t, p, d) is asked for."),
    ],
    hints=[
        "There are ten ways to choose t and p from 1, 2, 4, 8 with t · p ≤ 8. Try them all: two loops.",
        "A choice is possible if t divides the heads, p divides the layers, t ≤ node_size, and "
        "16 · num_parameters / (t · p) ≤ memory_bytes.",
        "Of the possible ones: the smallest t · p, and of those the smallest p. `min` of tuples (t * p, p, t) "
        "does it. None if there is no possible one.",
    ],
)

# -- the norm of all gradients --------------------------------------------------------------------------------------


def my_norm(gradients, kinds, tp_rank):
    total = torch.zeros(())
    for gradient, kind in zip(gradients, kinds):
        if kind == "shard" or (kind == "whole" and tp_rank == 0):
            total += gradient.square().sum()
    dist.all_reduce(total)
    return total.sqrt()


def norm_inputs(num_stages: int):
    """On rank r = 2 * stage + tp_rank: gradients of a shard, of a whole parameter, and on the end stages the embedding.

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


def _squares(gradients, kinds, counted) -> torch.Tensor:
    chosen = [gradient.square().sum() for gradient, kind in zip(gradients, kinds) if kind in counted]
    return torch.stack(chosen).sum()


def _own_norm(gradients, kinds, tp_rank):
    counted = ("shard", "whole") if tp_rank == 0 else ("shard",)
    return _squares(gradients, kinds, counted).sqrt()


def _whole_counted_twice(gradients, kinds, tp_rank):
    return summed(_squares(gradients, kinds, ("shard", "whole"))).sqrt()


def _copy_counted(gradients, kinds, tp_rank):
    counted = ("shard", "whole", "copy") if tp_rank == 0 else ("shard", "copy")
    return summed(_squares(gradients, kinds, counted)).sqrt()


def _everything_counted(gradients, kinds, tp_rank):
    return summed(_squares(gradients, kinds, ("shard", "whole", "copy"))).sqrt()


def _norms_added(gradients, kinds, tp_rank):
    return summed(_own_norm(gradients, kinds, tp_rank))


def _squares_averaged(gradients, kinds, tp_rank):
    return my_norm(gradients, kinds, tp_rank) / dist.get_world_size() ** 0.5


def _no_root(gradients, kinds, tp_rank):
    return my_norm(gradients, kinds, tp_rank) ** 2


def _whole_left_out(gradients, kinds, tp_rank):
    return summed(_squares(gradients, kinds, ("shard",))).sqrt()


def _one_number(log: CommunicationLog, *_) -> str | None:
    if complaint := only("all_reduce")(log):
        return complaint
    if log.total_bytes() <= 8:
        return None
    return f"It sends {log.total_bytes()} bytes. One number is enough: the sum of the squares that this rank counts."


norm = RankExercise(
    "norm",
    my_norm,
    cases=[(4, 2), (2, 1), (8, 4)],
    inputs=norm_inputs,
    rule=_one_number,
    mistakes=[
        Mistake(_own_norm, "This is the norm of what this rank holds. The other stages and shards belong to it too."),
        Mistake(
            _everything_counted,
            "Everything was counted wherever it is. What tensor ranks hold whole is there t times, and the embedding "
            "once more on the last stage.",
        ),
        Mistake(
            _whole_counted_twice,
            "What all tensor ranks hold whole was counted on each of them: t times. Count it on tp_rank 0.",
        ),
        Mistake(
            _copy_counted,
            "The last stage's copy of the embedding was counted too. It is one parameter, and counts "
            "on the first stage.",
        ),
        Mistake(
            _norms_added,
            "You added up norms. Squares add up: sum the squares over the ranks, and take the root at the end.",
        ),
        Mistake(
            _squares_averaged,
            "The squares were averaged over the ranks: ReduceOp.AVG, or a division. Ranks hold different parts here, "
            "so their squares add up: ReduceOp.SUM, which is what `dist.all_reduce` does if nothing is said.",
        ),
        Mistake(_no_root, "The sum of the squares is right. The norm is its root."),
        Mistake(_whole_left_out, "The whole parameters are missing: each counts once, on tp_rank 0."),
    ],
    hints=[
        "|g|² is the sum of the squares of all numbers of the gradient, each once.",
        'On this rank, count a gradient if it is a "shard", or if it is "whole" and tp_rank is 0. Never a "copy".',
        "Add up the squares in a tensor, `dist.all_reduce` it (here the world is one model replica), take the root.",
    ],
    if_stuck="an all-reduce that only some ranks call, as one inside an `if tp_rank == 0`. Every rank must call it.",
)

# -- one embedding on two stages ------------------------------------------------------------------------------------


def my_tied(gradient, num_stages):
    ends = dist.new_group([0, num_stages - 1])  # every rank makes the group, its members use it
    if gradient is not None:
        dist.all_reduce(gradient, group=ends)
    return gradient


def tied_inputs():
    """A pipeline of as many stages as ranks. First and last: their gradient of the embedding [2, 2]; others: None."""
    rank, num_stages = dist.get_rank(), dist.get_world_size()
    is_end = rank in (0, num_stages - 1)
    return whole_numbers((2, 2), seed=360 + rank).cpu() if is_end else None, num_stages


def _ends(num_stages) -> Any:
    return dist.new_group([0, num_stages - 1])


def _left_alone(gradient, num_stages):
    return gradient


def _averaged(gradient, num_stages):
    total = my_tied(gradient, num_stages)
    return None if total is None else total / 2


def _first_stage_only(gradient, num_stages):
    own = None if gradient is None else gradient.clone()
    total = my_tied(gradient, num_stages)
    return total if dist.get_rank() == 0 else own


def _exchanged(gradient, num_stages):
    own = None if gradient is None else gradient.clone()
    total = my_tied(gradient, num_stages)
    return None if total is None or own is None else total - own


def _summed_twice(gradient, num_stages):
    return my_tied(my_tied(gradient, num_stages), num_stages)


def _copied_from_the_first(gradient, num_stages):
    ends = _ends(num_stages)
    if gradient is not None:
        dist.broadcast(gradient, src=0, group=ends)
    return gradient


def _zeros_between(gradient, num_stages):
    total = torch.zeros(2, 2) if gradient is None else gradient
    dist.all_reduce(total)
    return total


def _made_by_all(log: CommunicationLog, *_) -> str | None:
    """Whether all ranks made equally many groups. torch numbers those that it names, on members and others alike.

    It asks by an all-gather: gloo would take an all-reduce for the learner's, where the ends call theirs in the world.
    """
    made = torch.tensor(dist.distributed_c10d._world.group_count)
    by_rank = [torch.zeros_like(made) for _ in range(dist.get_world_size())]
    dist.all_gather(by_rank, made)
    if len(set(map(int, by_rank))) == 1:
        return None
    return (
        "Only some ranks call `new_group`. It goes well here, but torch asks every rank of the world to call it, "
        "members or not: a group gets its name by counting, and the ranks now count differently."
    )


tied = RankExercise(
    "tied",
    my_tied,
    cases=[(2,), (4,)],
    inputs=tied_inputs,
    rule=_made_by_all,
    mistakes=[
        Mistake(
            _left_alone,
            "Each end keeps its own gradient. The optimizer then moves the two copies apart, and they are no longer "
            "one embedding. It was used twice: the gradient is the sum.",
        ),
        Mistake(
            _averaged,
            "You averaged. These are not replicas that saw other rows: one parameter was used in two places, and the "
            "gradients of its uses add up.",
        ),
        Mistake(_first_stage_only, "Only the first stage has the sum. Both ends update their copy: both need it."),
        Mistake(_exchanged, "Each end has the other's gradient now. Both need the sum of the two."),
        Mistake(_summed_twice, "The sum was formed twice, so it is twice too large."),
        Mistake(
            _copied_from_the_first,
            "The first stage's gradient was copied to the last, whose own is lost. Add them up.",
        ),
        Mistake(
            _zeros_between,
            "The ends are right. But the stages between took part with zeros: they hold no embedding, wait for it, and "
            "have a gradient of nothing now. Make a group of the two ends.",
        ),
    ],
    hints=[
        "The embedding is used twice, to read words in and to write them out. What is the gradient of something used "
        "twice?",
        "`dist.new_group([0, num_stages - 1])` makes a group of the two ends. All ranks must call it.",
        "Then the two ends, and nobody else, call `dist.all_reduce(gradient, group=...)`.",
    ],
    if_stuck="where the report says all_reduce of the world: it waits for all ranks, so pass `group=`. Else a group "
    "that not all ranks made, or an all-reduce by one end alone: `new_group` is called by every rank, the all-reduce "
    "by both members.",
)
