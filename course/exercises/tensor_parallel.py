"""The exercises of notebooks 06 and 11: the backward pass of a gathered layer, alike shards, dropout masks."""

import math
from collections.abc import Callable

import torch
import torch.distributed as dist

from course.communication import CommunicationLog
from course.exercises.base import Exercise, Trial, is_blank
from course.exercises.calling import Raised, answer
from course.exercises.on_ranks import RankExercise, gathered, only, own, summed, whole_numbers
from labkit.launch import launch

# -- backward of a column layer whose output is gathered -----------------------------------------------------------


def my_gather_backward(grad_y, x, weight):
    mine = grad_y.chunk(dist.get_world_size(), dim=1)[dist.get_rank()]  # [tokens, out/t]: what this rank computed
    grad_weight = mine.T @ x  # [out/t, in]: complete
    grad_x = mine @ weight  # [tokens, in]: one rank's part, because all ranks used this x
    dist.all_reduce(grad_x)
    return grad_x, grad_weight


def gather_gradient_inputs(in_size: int, out_shard: int):
    """Return the gradient of the whole output [3, out] and x [3, in], alike on all ranks, and a weight [out/t, in]."""
    world_size, rank = dist.get_world_size(), dist.get_rank()
    grad_y = whole_numbers((3, out_shard * world_size), seed=400)
    return grad_y, whole_numbers((3, in_size), seed=401), whole_numbers((out_shard, in_size), seed=410 + rank)


def reduces_only_grad_x(log: CommunicationLog, grad_y, x, weight) -> str | None:
    needed = x.numel() * x.element_size()
    if log.total_bytes() <= needed:
        return None
    return f"It sends {log.total_bytes()} bytes into all-reduces. One of the size of x is enough: {needed} bytes."


gather_backward = RankExercise(
    "gather_backward",
    my_gather_backward,
    notebook="06",
    cases=[(2, 3, 2), (4, 2, 1)],
    inputs=gather_gradient_inputs,
    rule=only("all_reduce", also=reduces_only_grad_x),
    hints=[
        "Go backwards. The last thing in the forward pass was the all-gather. Which columns of the whole output did "
        "this rank contribute?",
        "`grad_y.chunk(dist.get_world_size(), dim=1)[dist.get_rank()]`: from there on it is an ordinary linear "
        "layer, y = x @ weight.T.",
        "grad_weight = mine.T @ x. And mine @ weight is only this rank's part of the gradient of x: who else used x?",
    ],
)


def backward_of(grad_y, x, weight, mine: Callable, also_x: Callable = lambda x: x, reduce: Callable = summed):
    """Return the gradients if a rank takes ``mine(grad_y)`` for its columns."""
    columns = mine(grad_y)
    return reduce(columns @ weight), columns.T @ also_x(x)


GRAD_Y_IS_WHOLE = (
    "You added up the gradient of the output. It is the same on every rank already, because every rank computed the "
    "same loss, so everything came out t times too large. Backward of this all-gather keeps a slice."
)
gather_backward.mistakes_of(
    backward_of,
    (
        dict(mine=lambda grad_y: own(grad_y, 1), reduce=lambda grad_x: grad_x),
        "This is one rank's part of the gradient of x. All ranks used x: add up all parts.",
    ),
    (dict(mine=lambda grad_y: own(summed(grad_y), 1)), GRAD_Y_IS_WHOLE),
    (dict(mine=lambda grad_y: own(summed(grad_y), 1), reduce=lambda grad_x: grad_x), GRAD_Y_IS_WHOLE),
    (
        dict(mine=lambda grad_y: grad_y),
        "The whole gradient of y went into the product, [tokens, out], but this rank's weight has out/t rows. The "
        "rank computed out/t columns of y: use the gradient of those only, `grad_y.chunk(t, dim=1)[rank]`.",
    ),
    (
        dict(mine=lambda grad_y: grad_y.chunk(dist.get_world_size(), 1)[0]),
        "Every rank took the first columns of the gradient. Rank r computed the r-th slice.",
    ),
    (
        dict(mine=lambda grad_y: grad_y[:, dist.get_rank() :: dist.get_world_size()]),
        "The rank took every t-th column of the gradient. Its columns are one block: `grad_y.chunk(t, dim=1)[rank]`.",
    ),
    (
        dict(mine=lambda grad_y: grad_y.reshape(dist.get_world_size(), len(grad_y), -1)[dist.get_rank()]),
        "`view` and `reshape` count the numbers row by row, so this is no block of columns. Cut along dim 1: "
        "`grad_y.chunk(t, dim=1)[rank]`.",
    ),
    (
        dict(mine=lambda grad_y: own(grad_y), also_x=own),
        "The gradient was cut along the tokens. A rank computed all tokens, but only some columns: cut along dim 1.",
    ),
    (
        dict(mine=lambda grad_y: own(grad_y, 1), reduce=lambda grad_x: gathered(grad_x, dim=-1)),
        "The parts of the gradient of x were joined. Each already has the shape of x: add them up.",
    ),
)


@gather_backward.mistake(
    "That is the gradient of the whole weight. This rank holds [out/t, in] of it, and needs only the columns of the "
    "gradient that it computed itself."
)
def whole_grad_weight(grad_y, x, weight):
    return my_gather_backward(grad_y, x, weight)[0], grad_y.T @ x


gather_backward.mistakes_in(
    (1, summed, "You added up the weight gradients. The ranks hold different columns: nothing to add."),
    (1, torch.t, "The weight gradient is transposed: it has the weight's shape, [out/t, in]."),
    (
        0,
        lambda grad_x: grad_x / dist.get_world_size(),
        "You averaged the gradient of x. Averaging is for replicas that saw different data. Here each rank has "
        "different terms of one sum.",
    ),
)


# -- shards that are all alike --------------------------------------------------------------------------------------

FAULTS = ("same seed", "local width", "both")


def my_spread(tp_size, fault):
    same_seed = math.sqrt(tp_size)  # t equal terms: t times one. t different terms: sqrt(t) times one.
    local_width = math.sqrt(tp_size)  # 1/sqrt(n/t) is sqrt(t) times 1/sqrt(n)
    return {"same seed": same_seed, "local width": local_width, "both": same_seed * local_width}[fault]


def measure(tp_size: int, fault: str) -> None:
    """Print how many times larger the pair's output is with the fault, on real ranks."""
    print(f"t = {tp_size}, {fault}: {measured_spread(tp_size, fault):.2f} times the right standard deviation")


def measured_spread(tp_size: int, fault: str, num_draws: int = 24) -> float:
    """Return the root mean square of the output with the fault, over that without it."""
    if fault not in FAULTS:
        raise ValueError(f"fault={fault!r} is unknown: use {', '.join(map(repr, FAULTS))}")
    with_fault, without = launch(pair_spreads, fault, num_draws, world_size=tp_size, backend="gloo")[0]
    return with_fault / without


def pair_spreads(fault: str, num_draws: int, hidden_size: int = 64, ffn_hidden_size: int = 256) -> list[float]:
    """On a rank that draws its own shards: return the spread of GeLU(X A) B with the fault and without."""
    rank, shard = dist.get_rank(), ffn_hidden_size // dist.get_world_size()
    spreads = []
    for faults in ({"same seed", "local width"} if fault == "both" else {fault}, set()):
        squares = []
        for draw in range(num_draws):
            seed = 1000 * draw + (0 if "same seed" in faults else rank)
            generator = torch.Generator().manual_seed(seed)
            up = torch.randn(shard, hidden_size, generator=generator) / math.sqrt(hidden_size)
            width = shard if "local width" in faults else ffn_hidden_size
            down = torch.randn(hidden_size, shard, generator=generator) / math.sqrt(width)
            x = torch.randn(64, hidden_size, generator=torch.Generator().manual_seed(draw))
            z = torch.nn.functional.gelu(x @ up.T) @ down.T
            dist.all_reduce(z)
            squares.append(z.square().mean().item())
        spreads.append(math.sqrt(sum(squares) / num_draws))
    return spreads


spread = Exercise(
    "spread",
    my_spread,
    notebook="06",
    cases=[(t, fault) for fault in FAULTS for t in (4, 2, 9, 16)],
    hints=[
        "A sum of t independent random numbers of spread s has the spread s * sqrt(t): their variances add up. What is "
        "the spread of a sum of t *equal* numbers?",
        "The weights of B should have the spread 1/sqrt(n), where n counts all inputs. With the fault it is "
        "1/sqrt(n/t). How many times larger is that? The output grows as the weights do.",
        "`measure(4, 'same seed')` runs the pair on real ranks, with the fault and without, and compares.",
    ],
)


def spread_wrongly(tp_size, fault, powers) -> float:
    """Return t to this fault's power; ``powers`` are those of all `FAULTS`."""
    return tp_size ** powers[FAULTS.index(fault)]


spread.mistakes_of(
    lambda t, fault, root: root(t) ** (2 if fault == "both" else 1),
    (dict(root=math.isqrt), "The root of t was rounded down: this factor is seldom a whole number."),
    (dict(root=lambda t: t / 2), "t / 2 and the root of t agree at t = 4, and nowhere else."),
    (dict(root=math.log2), "log2(t) and the root of t agree at t = 4 and 16, and nowhere else."),
    (dict(root=lambda t: 2), "This is right for t = 4 only: the factors depend on tp_size."),
)


@spread.mistake("Each fault alone is right. Together the factors multiply; they do not add up.")
def factors_added(t, fault):
    return math.sqrt(t) * (2 if fault == "both" else 1)


EQUAL_TERMS = (
    "t equal terms add up to t times one of them: right. But the right layer adds up t *different* terms, and random "
    "signs cancel in part: that is sqrt(t) times one of them. You want the ratio."
)
spread.mistakes_of(
    spread_wrongly,
    (dict(powers=(1, 0.5, 1.5)), EQUAL_TERMS),
    (dict(powers=(1, 0.5, 1)), EQUAL_TERMS),
    (dict(powers=(-0.5, -0.5, -1)), "Upside down: with each of these faults the output is too *large*."),
    (dict(powers=(0, 0.5, 0.5)), "Equal shards do change the output: all ranks add the same, so nothing cancels."),
    (
        dict(powers=(0.5, 0.5, 0)),
        'Each fault alone is right. For `"both"` yours changes nothing: that word is neither of the others, and is not '
        "in them. Both factors apply.",
    ),
    (dict(powers=(0.5, -0.5, 0)), "A smaller width makes *larger* weights: 1/sqrt(n/t) is more than 1/sqrt(n)."),
    (dict(powers=(0.5, 0, 0.5)), "The local width changes the output, too: 1/sqrt(n/t) is sqrt(t) times 1/sqrt(n)."),
    (dict(powers=(0.5, 1, 1.5)), "1/sqrt(n/t) is sqrt(t) times 1/sqrt(n), not t times: that is for the variance."),
    (dict(powers=(1, 1, 2)), "These are the factors of the variance. The standard deviation is its root."),
    (
        dict(powers=(0.5, 0.5, 0.5)),
        "Each fault alone is right. But one makes the weights larger, and the other adds them up without cancelling: "
        "with both, the output grows twice.",
    ),
)


# -- dropout masks --------------------------------------------------------------------------------------------------

PLACES = ("hidden states", "attention weights")
ACROSS = ("tensor ranks", "data replicas", "recomputation")


def my_mask(place, across, sequence_parallel):
    if across == "recomputation":
        return "same"  # or the gradient is that of a different function
    if across == "data replicas":
        return "different"  # different rows, different noise
    if place == "attention weights":
        return "different"  # different heads
    return "different" if sequence_parallel else "same"  # different tokens, or copies that must stay alike


class Choices(Exercise):
    """An exercise with only two possible answers: its report says how many are right, and gives none away."""

    def trials(self, function: Callable, case: tuple) -> list[Trial]:
        """Return the answer to this case if it is right, and otherwise how many are."""
        [trial] = super().trials(function, case)
        if trial.got == trial.expected or is_blank(trial.got) or isinstance(trial.got, Raised):
            return [trial]
        num_right = sum(answer(function, each) == my_mask(*each) for each in self.cases)
        cause = None if trial.got in ("same", "different") else 'Return one of the words "same" and "different".'
        num_cases = len(self.cases)
        return [Trial(self.name, f"{num_right} of {num_cases} right", f"{num_cases} of {num_cases} right", cause=cause)]


mask = Choices(
    "mask",
    my_mask,
    notebook="11",
    cases=[(place, across, flag) for flag in (False, True) for across in ACROSS for place in PLACES],
    hints=[
        "Ask of each tensor: do the ranks hold copies of the same numbers, or different numbers? Copies need one mask, "
        "different numbers need different masks.",
        "Hidden states are copies on the tensor ranks, unless the sequence is divided. Attention weights belong to "
        "heads, and heads are always divided.",
        "Recomputation is not a different place: it is the same tensor a second time.",
    ],
)


mask.mistakes_of(
    lambda *case, answer: answer(*case),
    (
        dict(answer=lambda place, across, flag: "same"),
        "You gave one mask to all. Then heads that should learn separately drop the same places, and so do replicas, "
        "although they see different rows.",
    ),
    (
        dict(answer=lambda place, across, flag: "different"),
        "You gave each its own mask. Then hidden states that all ranks hold as copies stop being copies, and "
        "recomputation gives the gradient of a different function.",
    ),
    (
        dict(answer=lambda place, across, flag: my_mask(place, across, False)),
        "With sequence parallelism each rank holds different tokens: the hidden states are not copies then.",
    ),
    (
        dict(answer=lambda *case: "same" if my_mask(*case) == "different" else "different"),
        "Each is the other way round. Copies need one mask, different numbers need different masks.",
    ),
    (
        dict(answer=lambda place, across, flag: my_mask(place, across, not flag)),
        "Look at the hidden states, with sequence parallelism and without: without it all tensor ranks hold copies of "
        "the same tokens; with it each holds its own.",
    ),
    (
        dict(answer=lambda *case: "same" if case[:2] == (PLACES[1], ACROSS[0]) else my_mask(*case)),
        "The attention weights are never copies: each rank has different heads, whatever the sequence does.",
    ),
    (
        dict(answer=lambda place, across, flag: "same" if across == ACROSS[1] else my_mask(place, across, flag)),
        "Data replicas see different rows. In one process, every row of a longer batch gets its own mask.",
    ),
    (
        dict(answer=lambda place, across, flag: "different" if across == ACROSS[2] else my_mask(place, across, flag)),
        "Recomputation must give the numbers of the first time again: the loss came from them. With a different mask "
        "the gradient is that of a different function.",
    ),
)
