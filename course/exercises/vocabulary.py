"""The exercise of notebook 09 on the vocabulary: cross-entropy of logits that are split over the ranks, never gathered.

The tensor group is the whole world.
"""

from functools import partial

import torch
import torch.distributed as dist

from course.communication import CommunicationLog
from course.exercises.on_ranks import RankExercise, only, summed, whole_numbers
from labkit.groups import local_device


def my_cross_entropy(logits, target):
    highest = logits.max(dim=-1).values
    dist.all_reduce(highest, op=dist.ReduceOp.MAX)  # over the whole vocabulary
    logits = logits - highest[:, None]  # so that exp cannot overflow; the loss stays the same

    total = logits.exp().sum(dim=-1)
    dist.all_reduce(total)

    shard_size = logits.size(-1)
    place = target - dist.get_rank() * shard_size  # where this rank would have it
    is_mine = (place >= 0) & (place < shard_size)
    chosen = logits.gather(-1, place.clamp(0, shard_size - 1)[:, None]).squeeze(-1)
    chosen = torch.where(is_mine, chosen, 0)  # one rank has the target's logit, the others add 0
    dist.all_reduce(chosen)
    return total.log() - chosen


def logit_inputs(shard_size: int, scale: float):
    """Return a rank's slice [4, V/t] of the same logits, and the same four targets, from the first id to the last."""
    rank, vocab_size = dist.get_rank(), shard_size * dist.get_world_size()
    logits = scale * whole_numbers((4, vocab_size), seed=7)
    target = torch.tensor([0, vocab_size - 1, shard_size, vocab_size // 2 - 1], device=local_device())
    return logits[:, rank * shard_size : (rank + 1) * shard_size].contiguous(), target


def sends_three_numbers_per_token(log: CommunicationLog, logits, target) -> str | None:
    enough = 3 * len(target) * logits.element_size()
    own = log.total_bytes("all_reduce") + log.total_bytes("all_gather") // dist.get_world_size()
    if own <= enough:
        return None
    return (
        f"Each rank puts {own} bytes into collectives. Three numbers per token are enough, {enough} bytes: "
        "the highest logit, the sum of the exponentials and the target's logit."
    )


vocab_cross_entropy = RankExercise(
    "vocab_cross_entropy",
    my_cross_entropy,
    notebook="09",
    cases=[(2, 5, 1.0), (4, 3, 100.0)],
    inputs=logit_inputs,
    rule=only("all_reduce", "all_gather", also=sends_three_numbers_per_token),
    may_change=("logits",),
    hints=[
        "Start from the formula: loss = log(sum of exp(logit)) - logit of the target. Which two numbers does each "
        "rank know a part of?",
        "Three all-reduces of one number per token: the highest logit (op=dist.ReduceOp.MAX; subtract it everywhere), "
        "the sum of the exponentials, and the target's logit.",
        "`place = target - rank * shard_size` is where this rank would have the target; it has it if that is from 0 to "
        "shard_size - 1. Clamp it before `gather`, and use `torch.where` to put 0 where the target is not yours.",
    ],
    if_stuck="a collective that only some ranks call, as inside `if is_mine.any()`. Every rank must call it: those "
    "that do not have the target add 0.",
)


def highest_logit(logits, op=dist.ReduceOp.MAX):
    highest = logits.max(dim=-1).values
    dist.all_reduce(highest, op=op)
    return highest


def own_highest(logits):
    return logits.max(dim=-1).values


def nothing(logits):
    return torch.zeros_like(logits[:, 0])


def loss(
    logits, target, *, highest=highest_logit, shifts_target=True, back=0, offset=True, masked=True,
    clamped=True, join=summed, total=lambda logits: summed(logits.exp().sum(-1)).log(),
    owned=lambda logits: logits.size(-1),
):  # fmt: skip
    """Compute the loss with one step wrong: its maximum, its offset, its mask or its sum.

    A rank has ``owned(logits)`` words.
    """
    high, shard_size = highest(logits), logits.size(-1)
    shifted = logits - high[:, None]
    place = target - (dist.get_rank() * owned(logits) if offset else 0)
    is_mine = (place >= 0) & (place < owned(logits))
    place = place.clamp(0, shard_size - 1) if clamped else place
    chosen = (shifted if shifts_target else logits).gather(-1, place[:, None]).squeeze(-1)
    return total(shifted) + back * high - join(torch.where(is_mine, chosen, 0) if masked else chosen)


OWN_MAXIMUM = (
    "Each rank subtracted the maximum of its own slice. The exponentials then have different scales and must not be "
    "added: all-reduce the maximum first, with op=dist.ReduceOp.MAX."
)
IN_BOTH = (
    "The maximum was subtracted on one side only. Subtract it from the target's logit too, or add it back to the "
    "logarithm."
)
NOT_MASKED = "Each rank added a logit for each target. Only one rank has the target: the others add 0."
NO_OFFSET = "Targets are ids of the whole vocabulary. Subtract this rank's first id, rank * V/t."

OWN_TARGETS = "Only the rank that has the target knows its logit, and the others took 0: all-reduce it, too."

vocab_cross_entropy.mistakes_of(
    loss,
    (dict(highest=own_highest), OWN_MAXIMUM),
    (dict(highest=own_highest, shifts_target=False, back=1), OWN_MAXIMUM),
    (
        dict(highest=nothing),
        "The formula is right, but the numbers overflow: exp(1000) is infinite. Subtract the highest logit of the "
        "whole vocabulary first.",
    ),
    (
        dict(highest=partial(highest_logit, op=dist.ReduceOp.SUM)),
        "The maxima were added up: dist.all_reduce adds unless told otherwise. Then too much is subtracted, and every "
        "exponential becomes 0. Use op=dist.ReduceOp.MAX.",
    ),
    (dict(back=1), IN_BOTH),
    (dict(shifts_target=False), IN_BOTH),
    (dict(owned=len), "A rank has as many words as its logits have columns, `logits.size(-1)`. You took the tokens."),
    (dict(offset=False), NO_OFFSET),
    (dict(offset=False, clamped=False), NO_OFFSET),
    (dict(join=lambda chosen: chosen), OWN_TARGETS),
    (dict(join=lambda chosen: chosen, shifts_target=False, back=1), OWN_TARGETS),
    (dict(total=lambda logits: summed(logits.exp().sum(-1))), "The logarithm of the sum is missing."),
    (dict(masked=False), NOT_MASKED),
    (dict(masked=False, shifts_target=False, back=1), NOT_MASKED),
    (
        dict(total=lambda logits: logits.exp().sum(-1).log()),
        "Only the exponentials of this rank's slice were added up: all-reduce their sum too.",
    ),
    (
        dict(highest=nothing, total=lambda logits: summed(logits.logsumexp(-1))),
        "Logarithms were added up. Add the exponentials over all ranks, then take one logarithm.",
    ),
)


vocab_cross_entropy.mistakes_in(
    (None, torch.mean, "This is the mean over the tokens. Return the loss of each."),
    (None, torch.neg, "The sign is wrong: the loss is log(sum of exponentials) minus the target's logit."),
)


def with_place_0(logits, target, back):
    """Take the rank's first logit where the target is elsewhere, and do not replace it by 0."""
    high, first = highest_logit(logits), dist.get_rank() * logits.size(-1)
    shifted = logits - high[:, None]
    is_mine = (target >= first) & (target < first + logits.size(-1))
    chosen = (logits if back else shifted).gather(-1, torch.where(is_mine, target - first, 0)[:, None]).squeeze(-1)
    return summed(shifted.exp().sum(-1)).log() + back * high - summed(chosen)


vocab_cross_entropy.mistakes_of(with_place_0, (dict(back=0), NOT_MASKED), (dict(back=1), NOT_MASKED))


@vocab_cross_entropy.mistake(
    "Each loss is that among the words of one rank, as if there were no others: `F.cross_entropy` and `log_softmax` "
    "add up the exponentials of what they are given. The sum runs over the whole vocabulary."
)
def among_own_words(logits, target):
    place = target - dist.get_rank() * logits.size(-1)
    is_mine = (place >= 0) & (place < logits.size(-1))
    loss = torch.nn.functional.cross_entropy(logits, torch.where(is_mine, place, 0), reduction="none")
    return summed(torch.where(is_mine, loss, 0))


@vocab_cross_entropy.mistake(
    "`%` finds a place for every target on every rank, so the sum has t logits, t - 1 of them of other words. A rank "
    "has the target only if its id lies in the rank's slice: the others add 0."
)
def wrapped(logits, target):
    return loss(logits, target % logits.size(-1), offset=False)
