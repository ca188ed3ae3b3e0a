"""More exercises of notebook 13: backward of Ulysses' all-to-all, and the loss from which each rank starts backward.

For the all-to-all the context-parallel group is the whole world. For the loss the world has replicas, too.
"""

from collections.abc import Callable

import torch
import torch.distributed as dist

from course.exercises.calling import no_gradient_to
from course.exercises.on_ranks import RankExercise, only, summed, whole_numbers

# -- backward of the all-to-all -------------------------------------------------------------------------------------


def my_exchange_backward(grad, split_dim, join_dim):
    leaving = torch.stack(grad.chunk(dist.get_world_size(), join_dim))  # cut where forward has joined: [c, ...]
    arrived = torch.empty_like(leaving)
    dist.all_to_all_single(arrived, leaving)
    return torch.cat(arrived.unbind(), split_dim)


def exchange_inputs(rows: int, columns: int, split_dim: int):
    """Return the gradient [rows, columns] of what the exchange returned on this rank, and both dims."""
    return whole_numbers((rows, columns), seed=700 + dist.get_rank()).cpu(), split_dim, 1 - split_dim


ulysses_backward = RankExercise(
    "ulysses_backward",
    my_exchange_backward,
    notebook="13",
    cases=[(2, 2, 4, 0), (2, 4, 2, 1), (4, 1, 8, 0)],
    inputs=exchange_inputs,
    rule=only("all_to_all"),
    hints=[
        "Each number of x went to one rank, and its gradient is on that rank now. It must come back to where the "
        "number came from.",
        "Forward cut along split_dim and joined along join_dim. So where is the gradient cut, and where is it joined?",
        "It is the forward with the two dims swapped: chunks of grad along join_dim, stacked, to an all-to-all; what "
        "arrives is joined along split_dim.",
    ],
)


def exchanged(x, cut_dim, join: Callable) -> torch.Tensor:
    """Return ``join(pieces)`` of what arrives when each rank gets its chunk of one dim."""
    arrived = torch.stack(x.chunk(dist.get_world_size(), cut_dim))
    leaving = arrived.clone()
    dist.all_to_all_single(arrived, leaving)
    return join(arrived.unbind())


SAME_DIMS = (
    "This is the forward once more, cut and joined along the same dims. Backward undoes it: what was joined is cut, "
    "and what was cut is joined. Swap the two dims; and if 0 or 1 is written in, use the arguments."
)
JOINED_WRONG = (
    "The gradient is cut along the right dim, join_dim, and joined along the same. Forward had cut x along split_dim: "
    "the pieces belong side by side there."
)
ulysses_backward.mistakes_of(
    lambda grad, split_dim, join_dim, answer: answer(grad, split_dim, join_dim),
    (dict(answer=lambda grad, split, join: my_exchange_backward(grad, join, split)), SAME_DIMS),
    (
        dict(answer=lambda grad, split, join: grad),
        "The gradient came back as it is. It is that of other ranks' numbers, in a different shape: send each number "
        "back to where it came from.",
    ),
    (
        dict(answer=lambda grad, split, join: torch.cat(grad.chunk(dist.get_world_size(), join), split)),
        "The shape is right, but nothing was sent: these are gradients of all ranks' numbers. dist.all_to_all_single "
        "sends each piece home.",
    ),
    (
        dict(answer=lambda grad, split, join: exchanged(grad, join, lambda pieces: torch.cat(pieces, join))),
        JOINED_WRONG,
    ),
    (dict(answer=lambda grad, split, join: exchanged(grad, join, torch.stack)), "The pieces are stacked: join them."),
    (dict(answer=lambda grad, split, join: my_exchange_backward(grad, 0, 1)), SAME_DIMS),
    (
        dict(answer=lambda grad, split, join: summed(my_exchange_backward(grad, split, join))),
        "The gradients were added up over the ranks. The ranks hold different tokens, so that there is nothing to add.",
    ),
    (
        dict(answer=lambda grad, split, join: my_exchange_backward(summed(grad), split, join)),
        "The gradients were added up over the ranks. The ranks hold different tokens, so that there is nothing to add.",
    ),
    (
        dict(answer=lambda grad, split, join: exchanged(grad.movedim(join, 0), 0, torch.cat).movedim(0, split)),
        "You moved join_dim to the front, and what arrives has it there, too. In each piece, move it back to where it "
        "was; then join the pieces along split_dim.",
    ),
    (
        dict(
            answer=lambda grad, split, join: exchanged(grad, join, lambda pieces: torch.cat(pieces[::-1], split)),
        ),
        "The pieces are in the wrong order. Those of rank 0 come first.",
    ),
    (
        dict(
            answer=lambda grad, split, join: exchanged(
                grad, join, lambda pieces: torch.stack(pieces, split + 1).flatten(split, split + 1)
            )
        ),
        "The pieces that arrived are interleaved along split_dim: the first number of each rank, then the second of "
        "each. All of rank 0's come first, then all of rank 1's: torch.cat(pieces, split_dim).",
    ),
    (
        dict(
            answer=lambda grad, split, join: exchanged(grad.flatten(), 0, torch.cat).view(
                my_exchange_backward(grad, split, join).shape
            )
        ),
        "`view` and `reshape` do not cut along a dim: they read the numbers row by row. Cut with `grad.chunk(c, "
        "join_dim)`, and join what arrives with torch.cat along split_dim.",
    ),
)
ulysses_backward.mistakes_in(
    (
        None,
        lambda grad_x: grad_x / dist.get_world_size(),
        "Everything is divided by c. An all-to-all only moves numbers, and its backward only moves them back. The "
        "average over the ranks comes later, for the gradients of the weights.",
    ),
    (None, lambda grad_x: grad_x * dist.get_world_size(), "Everything is c times too large: numbers only move."),
    (None, torch.zeros_like, "All is 0. Of the two tensors of all_to_all_single, the output comes first."),
    (None, torch.t, "The two dims of the result are swapped. Join along split_dim, and do not transpose."),
)


@ulysses_backward.mistake(
    "all_to_all_single wants contiguous tensors. Slices along a later dim and transposed tensors are not: "
    "`torch.stack(grad.chunk(c, join_dim))` makes a new one, and so does `.contiguous()`."
)
def not_contiguous(grad, split_dim, join_dim):
    c = dist.get_world_size()
    leaving = grad.unflatten(join_dim, (c, -1)).movedim(join_dim, 0)
    dist.all_to_all_single(arrived := torch.empty(leaving.shape), leaving)
    return torch.cat(arrived.unbind(), split_dim)


# -- the loss from which a rank starts ------------------------------------------------------------------------------


def my_loss(losses, is_counted):
    count = is_counted.sum()
    dist.all_reduce(count)  # all tokens that count, on all ranks
    total = losses[is_counted].sum()  # of this rank
    return total / count * dist.get_world_size()  # because the gradients will be averaged over the ranks


def loss_inputs(*counted_on_ranks: int):
    """Return the losses of this rank's five tokens, and which of them count: the first ones."""
    losses = 6 + whole_numbers((5,), seed=800 + dist.get_rank()).cpu()
    return losses, torch.arange(5) < counted_on_ranks[dist.get_rank()]


def has_the_right_gradient(loss, losses, is_counted) -> bool:
    """Whether averaged gradients match, as also those of a loss that autograd has added up over the ranks do."""
    can_start = isinstance(loss, torch.Tensor) and loss.numel() == 1
    leads_back = torch.tensor(float(can_start and no_gradient_to("losses", losses, loss) is None))
    dist.all_reduce(leads_back, dist.ReduceOp.MIN)
    if not leads_back:  # backward may send messages: all ranks call it, or none
        return False
    try:
        loss.sum().backward()
    except RuntimeError:  # it has gone backward itself
        return False
    right = is_counted / summed(is_counted.sum()) * dist.get_world_size()
    return losses.grad is not None and bool(torch.allclose(losses.grad, right.to(losses.dtype)))


loss_scale = RankExercise(
    "loss_scale",
    my_loss,
    notebook="13",
    cases=[(3, 4, 1, 2), (4, 4, 3, 1, 0)],
    inputs=loss_inputs,
    rule=only("all_reduce"),
    gradient_to="losses",
    also_right=has_the_right_gradient,
    hints=[
        "The loss of one process is a sum over all counted tokens, divided by their number. This rank has some terms "
        "of that sum. Which number does it not know?",
        "All-reduce the number of counted tokens. The sum of this rank's counted losses, divided by that number, is "
        "its part of the mean: the parts of all ranks add up to it.",
        "But the trainer averages: it adds up the gradients and divides by the number of ranks. Multiply by that "
        "number first, dist.get_world_size().",
    ],
    if_stuck="an all-reduce that only some ranks call. A rank on which no token counts takes part with a count of 0.",
)


def sum_of(losses, is_counted) -> torch.Tensor:
    """Return the sum of this rank's counted losses."""
    return (losses * is_counted).sum()


NOT_TIMES_N = (
    "The count is already that of all ranks. Then the trainer averages over the n ranks, which divides by n once more. "
    "Multiply by dist.get_world_size()."
)
MEANS_OF_MEANS = (
    "This is the mean over the rank's own tokens. The trainer then takes the mean of the means. There a token counts "
    "more if its rank has few of them. It is right only where all ranks have equally many: divide by the number "
    "of all, and multiply by the number of ranks."
)
LOSS_OF_ALL = (
    "The losses were added up over the ranks. Divided by the number of all counted tokens, that is the number for the "
    "log. Start from this rank's own part of it: the other ranks start from theirs, and the trainer combines the "
    "gradients. All-reduce the count alone."
)
IGNORED_COUNT = "Tokens that do not count are included. Add up only the losses where is_counted is True."
MEAN_TIMES_N = (
    "The mean over the rank's own tokens was multiplied by the number of ranks. The trainer averages such means, "
    "so this gradient is n times too large. Multiply only what was divided by the number of all tokens."
)
TWICE_OFF = (
    "The mean over the rank's own tokens was divided by n. The trainer does that, when it averages. And do not start "
    "from your own mean: divide by the number of all counted tokens."
)
DIVIDED_BY_ALL = (
    "You divided by a number of all tokens, of this rank or of all ranks, also of those that do not count. All-reduce "
    "the number of those that do."
)
WRITTEN_IN = "Did you hard-code a number of ranks? The average is over all ranks: dist.get_world_size()."

loss_scale.mistakes_of(
    lambda losses, is_counted, answer: answer(
        sum_of(losses, is_counted), is_counted.sum(), summed(is_counted.sum()), dist.get_world_size()
    ),
    (dict(answer=lambda total, own, count, n: total / own), MEANS_OF_MEANS),
    (dict(answer=lambda total, own, count, n: total / own.clamp(min=1)), MEANS_OF_MEANS),
    (dict(answer=lambda total, own, count, n: total / count), NOT_TIMES_N),
    (dict(answer=lambda total, own, count, n: total / own / n), TWICE_OFF),
    (dict(answer=lambda total, own, count, n: total / own.clamp(min=1) / n), TWICE_OFF),
    (dict(answer=lambda total, own, count, n: total / own * n), MEAN_TIMES_N),
    (dict(answer=lambda total, own, count, n: total / own.clamp(min=1) * n), MEAN_TIMES_N),
    (
        dict(answer=lambda total, own, count, n: total / count / n),
        "You divided by the number of all tokens, and by that of the ranks. The trainer's average divides by the ranks "
        "already: multiply by them here.",
    ),
    (dict(answer=lambda total, own, count, n: total / count * n**2), "It is multiplied by n twice. Once is enough."),
    (dict(answer=lambda total, own, count, n: total / count * 2), WRITTEN_IN),
    (dict(answer=lambda total, own, count, n: total / count * 4), WRITTEN_IN),
    (dict(answer=lambda total, own, count, n: total), "This is a sum, and you want a mean: divide by all that count."),
    (
        dict(answer=lambda total, own, count, n: total * n),
        "This is a sum, times the number of ranks. You want a mean: divide by the number of all tokens that count.",
    ),
    (dict(answer=lambda total, own, count, n: summed(total) / count), LOSS_OF_ALL),
    (dict(answer=lambda total, own, count, n: summed(total) / count * n), LOSS_OF_ALL),
    (dict(answer=lambda total, own, count, n: summed(total)), LOSS_OF_ALL),
    (
        dict(answer=lambda total, own, count, n: count / total * n),
        "It is upside down: divide the sum of the losses by the number of tokens.",
    ),
)
loss_scale.mistakes_of(
    lambda losses, is_counted, answer: answer(
        losses, sum_of(losses, is_counted), summed(is_counted.sum()), dist.get_world_size()
    ),
    (dict(answer=lambda losses, total, count, n: losses.mean()), IGNORED_COUNT),
    (dict(answer=lambda losses, total, count, n: losses.sum() / count * n), IGNORED_COUNT),
    (dict(answer=lambda losses, total, count, n: losses.sum() / count), IGNORED_COUNT),
    (
        dict(answer=lambda losses, total, count, n: total / len(losses)),
        DIVIDED_BY_ALL,
    ),
    (dict(answer=lambda losses, total, count, n: total / (len(losses) * n)), DIVIDED_BY_ALL),
)
