"""The exercises of notebook 07: the order of a rank, the bubble, a gradient m times too large, and a deadlock."""

import copy
import math
from collections.abc import Callable
from dataclasses import replace

import torch
from torch import nn

from course.exercises.base import Exercise, Trial, is_blank
from course.exercises.calling import Raised, answer, answer_to
from course.sizing import read_ops
from labkit import pipeline
from labkit.groups import init_groups, local_device
from labkit.launch import launch
from labkit.layout import ParallelLayout
from labkit.schedules import Schedule, ScheduleDeadlock, check
from labkit.sizes import counted

# -- the order of one rank ------------------------------------------------------------------------------------------


def my_order(rank, num_stages, num_micro_batches):
    num_warmup = min(num_stages - rank - 1, num_micro_batches)  # as many as there are ranks below
    order = [f"F{i}" for i in range(num_warmup)]
    for i in range(num_micro_batches):
        if num_warmup + i < num_micro_batches:
            order.append(f"F{num_warmup + i}")
        order.append(f"B{i}")
    return order


one_f_one_b_order = Exercise(
    "one_f_one_b_order",
    my_order,
    notebook="07",
    cases=[(3, 4, 3), (1, 4, 5), (0, 4, 6), (0, 2, 3), (0, 4, 2), (0, 1, 2)],
    hints=[
        "Three phases: some forwards; a forward and a backward in turn until no forward is left; the backwards that "
        "are left. F and B both count from 0.",
        "How many forwards at the start? As many as there are ranks after rank r, so none on the last: p - r - 1.",
        "But never more than m: `min(num_stages - rank - 1, num_micro_batches)`.",
    ],
)


def in_turn(rank, num_stages, m, warmup: Callable, turn=("F", "B"), first_left=0) -> list[str]:
    """Return ``warmup(r, p, m)`` forwards; then forwards and backwards by ``turn``; then the backwards left over."""
    num_warmup = warmup(rank, num_stages, m)
    order = [f"F{i}" for i in range(num_warmup)]
    for i in range(m - num_warmup):
        order += [f"F{num_warmup + i}" if kind == "F" else f"B{i}" for kind in turn]
    return order + [f"B{i}" for i in range(max(first_left, m - num_warmup), m)]


BEYOND_M = "Some ops at the start or the end are of micro-batches that do not exist: there are only m."
one_f_one_b_order.mistakes_of(
    in_turn,
    (
        dict(warmup=lambda r, p, m: m),
        "All forwards, then all backwards: that is GPipe, which holds the activations of all m micro-batches. Here a "
        "rank starts backward as soon as the ranks below can have given it a gradient.",
    ),
    (
        dict(warmup=lambda r, p, m: min(p - r, m)),
        "There is one forward too many at the start. Below rank r there are p - r - 1 ranks: that many forwards come "
        "before the turns, and the next forward is the first of the turns.",
    ),
    (
        dict(warmup=lambda r, p, m: min(r, m)),
        "The forwards at the start are counted from the wrong end. The last rank needs none: its gradient is there at "
        "once. Rank 0 waits longest, and needs most.",
    ),
    (
        dict(warmup=lambda r, p, m: 0),
        "Forwards and backwards take turns from the first op on. That fits the last rank only: on the others B0 needs "
        "a gradient that the ranks below can give only after their own work, and meanwhile nobody goes on.",
    ),
    (dict(warmup=lambda r, p, m: p - r - 1), BEYOND_M),
    (dict(warmup=lambda r, p, m: p - r - 1, first_left=-9), BEYOND_M),
    (
        dict(warmup=lambda r, p, m: max(0, min(p - r - 2, m))),
        "There is one forward too few at the start: p - r - 1 of them, one for each rank below.",
    ),
    (
        dict(warmup=lambda r, p, m: min(p - r - 1, m), turn=("B", "F")),
        "In each turn the forward comes first: on the last rank B0 needs the F0 before it.",
    ),
)


one_f_one_b_order.mistakes_of(
    lambda *case, change: change(my_order(*case)),
    (dict(change=" ".join), "The ops are right, but in one text: return a list of them."),
    (
        dict(change=lambda order: [f"{op[0]}{int(op[1:]) + 1}" for op in order]),
        "The order is right, but micro-batches count from 0.",
    ),
)


@one_f_one_b_order.mistake("Backwards are missing at the end: as many as there were forwards at the start.")
def no_cool_down(rank, num_stages, num_micro_batches):
    num_warmup = min(num_stages - rank - 1, num_micro_batches)
    return my_order(rank, num_stages, num_micro_batches)[: 2 * num_micro_batches - num_warmup]


@one_f_one_b_order.mistake("In the turns a micro-batch m goes forward: the last is m - 1. Then backwards are left.")
def runs_past_the_end(rank, num_stages, num_micro_batches):
    num_warmup = num_stages - rank - 1
    turns = [op for i in range(num_micro_batches) for op in (f"F{num_warmup + i}", f"B{i}")]
    return [f"F{i}" for i in range(num_warmup)] + turns


@one_f_one_b_order.mistake(
    "Backward takes the micro-batch that went forward last. Gradients come in the order of the forwards: on the last "
    "rank B0 comes right after F0, so B0 is the first everywhere."
)
def last_in_first_out(rank, num_stages, num_micro_batches):
    order, held = [], []
    for op in my_order(rank, num_stages, num_micro_batches):
        if op[0] == "F":
            held.append(op[1:])
        order.append(op if op[0] == "F" else f"B{held.pop()}")
    return order


@one_f_one_b_order.mistake(
    "The backwards that are left at the end come in reverse. Their gradients arrive in the order of the forwards."
)
def last_ones_reversed(rank, num_stages, num_micro_batches):
    num_left = min(num_stages - rank - 1, num_micro_batches)
    order = my_order(rank, num_stages, num_micro_batches)
    return order[: len(order) - num_left] + order[len(order) - num_left :][::-1]


# -- the bubble -----------------------------------------------------------------------------------------------------


def my_bubble(p, m, v):
    over_ideal = (p - 1) / (v * m)
    share = (p - 1) / (v * m + p - 1)
    return over_ideal, share


bubble = Exercise(
    "bubble",
    my_bubble,
    notebook="07",
    cases=[(4, 8, 1), (4, 4, 1), (2, 4, 1), (1, 8, 1), (4, 8, 2), (8, 32, 4)],
    hints=[
        "Count in slots: one forward and one backward of one chunk. A rank's work is v·m slots.",
        "For v = 1 the last rank starts p - 1 slots late. Idle slots over slots of work: that is the first number.",
        "The second divides the idle slots by all slots: v·m of work, and the idle ones.",
    ],
)


bubble.mistakes_of(
    lambda p, m, v, answers: answers(p - 1, m, v),
    (
        dict(answers=lambda idle, m, v: my_bubble(idle + 1, m, 1)),
        "v is missing. With v chunks per rank, each slot takes 1/v of the time, and so does each idle slot.",
    ),
    (
        dict(answers=lambda idle, m, v: my_bubble(idle + 2, m, v)),
        "There is one idle slot too many: the first rank starts at once, the last waits for p - 1 before it.",
    ),
    (dict(answers=lambda idle, m, v: (idle // (v * m), idle // (v * m + idle))), "`//` rounds down, to 0. Use `/`."),
    (
        dict(answers=lambda idle, m, v: my_bubble(v * (idle + 1), m, v)),
        "You counted v · p ranks. Chunks make the stages shorter, but the ranks are still p: p - 1 idle slots.",
    ),
    *(
        (dict(answers=answers), "These are percent. Return both as shares of 1, and not rounded.")
        for answers in (
            lambda idle, m, v: [100 * each for each in my_bubble(idle + 1, m, v)],
            lambda idle, m, v: [round(100 * each, 1) for each in my_bubble(idle + 1, m, v)],
            lambda idle, m, v: [round(100 * each, 2) for each in my_bubble(idle + 1, m, v)],
        )
    ),
    (
        dict(answers=lambda idle, m, v: my_bubble(v * idle + 1, m, 1)),
        "v is on the wrong side: more chunks make the bubble smaller, not larger.",
    ),
)
bubble.mistakes_in(
    (0, lambda first: first / (1 + first), "The first is a share of the total. Idle over ideal divides by the work."),
)
bubble.mistakes_of(
    lambda p, m, v, second: ((p - 1) / (v * m), second(p - 1, m, v)),
    (dict(second=lambda idle, m, v: idle / (v * m)), "Both are idle over ideal. The share divides by idle + work."),
    (
        dict(second=lambda idle, m, v: idle / (v * m - idle) if idle < v * m else math.inf),
        "The first is right. The second divides by work *minus* idle: the total is their sum.",
    ),
    (dict(second=lambda idle, m, v: idle / (v * m + idle + 1)), "The total has one slot too many: v·m and p - 1 idle."),
    (
        dict(second=lambda idle, m, v: v * m / (v * m + idle)),
        "The first is right. The second is the share of *work*; you want that of idle time, 1 minus this.",
    ),
    (
        dict(second=lambda idle, m, v: idle / (m + idle) / v),
        "The first is right. In the share v multiplies the work only: v·m slots of work, and p - 1 idle ones.",
    ),
    (
        dict(second=lambda idle, m, v: idle / (m + idle)),
        "The first is right. In the share v is missing: it is the first divided by 1 plus the first.",
    ),
)


# -- the gradient that is m times too large -------------------------------------------------------------------------


def my_step(weight, micro_batches):
    num_rows = sum(len(x) for x in micro_batches)
    total = 0.0
    for x in micro_batches:
        loss = (x @ weight).square().mean() * len(x) / num_rows  # its part of the mean over all rows
        loss.backward()
        total += loss.item()
    return total, weight.grad


def step_cases() -> list[tuple]:
    """Return weights, each with micro-batches of small whole numbers; the last may have fewer rows."""
    generator = torch.Generator().manual_seed(0)
    cases = []
    for sizes in ([2], [1, 1, 1], [2, 1]):
        batches = [torch.randint(-3, 4, (rows, 2), generator=generator).double() for rows in sizes]
        cases.append((torch.tensor([1.0, 2.0], dtype=torch.float64, requires_grad=True), batches))
    return cases


class StepExercise(Exercise):
    """Backward must be called once for each micro-batch."""

    def trials(self, function: Callable, case: tuple) -> list[Trial]:
        """Return the answer, with a complaint unless backward was called once for each micro-batch."""
        [trial] = super().trials(function, case)
        weight, micro_batches = copy.deepcopy(case)
        arrived = []
        weight.register_post_accumulate_grad_hook(arrived.append)
        answer_to(function, (weight, micro_batches))
        if len(arrived) == len(micro_batches):
            return [trial]
        calls = (
            f"backward() was called {counted(len(arrived), 'time')} for {counted(len(micro_batches), 'micro-batch')}"
        )
        return [replace(trial, complaint=f"{calls}. Call it once for each, as a pipeline does.")]


average_gradient = StepExercise(
    "average_gradient",
    my_step,
    notebook="07",
    cases=step_cases(),
    hints=[
        "`backward()` adds to `weight.grad`: after m micro-batches it holds a sum. A sum of what should it be?",
        "The mean over all rows is a sum of shares: each micro-batch's mean, times its rows over all rows.",
        "Multiply the loss by that share *before* `backward()`. Then the sum of these losses is the mean, too.",
    ],
)


def step_wrongly(
    weight, micro_batches, parts: Callable, forgets=False, adds=True, rows=lambda batches: sum(map(len, batches))
):
    """Call backward on one part of each micro-batch's mean, and return the sum of the other part.

    ``parts(r, n, m)`` are both, for r of n rows in one of m micro-batches.
    """
    total, n, m = 0.0, rows(micro_batches), len(micro_batches)
    for x in micro_batches:
        if forgets:
            weight.grad = None
        loss = (x @ weight).square().mean()
        share, reported = parts(len(x), n, m)
        (loss * share).backward()
        total = total * adds + loss.item() * reported
    return total, weight.grad


TOO_LARGE = (
    "The loss is right, and the gradient is too large: that of a sum. The losses were averaged for the report, after "
    "backward. What backward starts from must be averaged: it adds up the gradients of the micro-batches."
)


average_gradient.mistakes_of(
    step_wrongly,
    (dict(parts=lambda r, n, m: (1, 1 / m)), TOO_LARGE),
    (dict(parts=lambda r, n, m: (1, r / n)), TOO_LARGE),
    (dict(parts=lambda r, n, m: (r, r / n)), TOO_LARGE),
    (dict(parts=lambda r, n, m: (r / n, r)), "The gradient is right. The loss is a sum over the rows, not their mean."),
    (
        dict(parts=lambda r, n, m: (r / n, r / n), adds=False),
        "The gradient is right. The loss is that of the last micro-batch alone: add up all.",
    ),
    (
        dict(parts=lambda r, n, m: (r / n / 2, r / n / 2)),
        "Both are half of the right ones: you divided by all numbers in x, `x.numel()`. A row has two: use `len(x)`.",
    ),
    (
        dict(parts=lambda r, n, m: (r / n, r / n), rows=lambda batches: len(batches) * len(batches[0])),
        "You took every micro-batch to be as long as the first. The last has fewer rows: add up the rows of all.",
    ),
    (dict(parts=lambda r, n, m: (1, 1)), "Loss and gradient are both sums over the micro-batches, m times the mean."),
    (
        dict(parts=lambda r, n, m: (1 / m, 1 / m)),
        "Each micro-batch counts 1/m. The last has fewer rows: it is a smaller part of the mean.",
    ),
    (dict(parts=lambda r, n, m: (r / n, 1)), "The gradient is right. The loss that you return is a sum, not the mean."),
    (
        dict(parts=lambda r, n, m: (r / n, r / n), forgets=True),
        "Only the last micro-batch is in the gradient: it was set back in between. Let it add up.",
    ),
    (dict(parts=lambda r, n, m: (r, r)), "Loss and gradient are sums over the rows: divide by the number of all rows."),
    (
        dict(parts=lambda r, n, m: (r / n / m, r / n)),
        "The loss is right. The gradient was divided by the number of micro-batches, after it was weighted by rows.",
    ),
    (dict(parts=lambda r, n, m: ((r / n) ** 2, r / n)), "The gradient is averaged twice, and too small."),
)


@average_gradient.mistake(
    "The loss is right. weight.grad was divided after each micro-batch: the first has been divided once for each that "
    "followed. Divide the loss before backward, or the gradient once, at the end."
)
def divided_again_and_again(weight, micro_batches):
    n = sum(map(len, micro_batches))
    for x in micro_batches:
        (x @ weight).square().sum().backward()
        weight.grad /= n
    return sum((x @ weight.detach()).square().sum().item() for x in micro_batches) / n, weight.grad


average_gradient.mistakes_in(
    (1, lambda gradient: None, "weight.grad is None: nobody has called `loss.backward()`, with its parentheses."),
    (None, lambda both: both[1], "This is the gradient alone: return the loss as well."),
)


# -- a schedule that deadlocks --------------------------------------------------------------------------------------

STUCK_ROWS = ["F0 F1 F2 B0 B1 B2", "F0 B0 F1 F2 B1 B2", "F0 F1 B0 B1 F2 B2"]
"""Each rank has all its ops, and no rank can finish."""


def stuck_schedule(rows=None) -> Schedule:
    """Return the schedule with these rows, one per rank; without ``rows``, the one that deadlocks."""
    rows = rows or STUCK_ROWS
    return Schedule("mine", len(rows), 3, [read_ops(row) for row in rows])


def run_small(schedule: Schedule):
    """On a rank: run a step of a small model in this schedule, even if it deadlocks."""
    groups = init_groups(ParallelLayout(schedule.pp_size, pp_size=schedule.pp_size))
    stage = nn.Linear(4, 4).to(local_device())
    inputs = list(torch.ones(schedule.num_micro_batches, 2, 4, device=local_device()))
    return pipeline.run(
        schedule, [stage], groups, inputs, loss=lambda output, _: output.square().mean(), allow_deadlock=True
    )


def what_happens(row) -> str:
    """Let real ranks run the row of rank 1; one that cannot run is not tried."""
    row = " ".join(map(str, row)) if isinstance(row, list) else row  # a list, as in the exercise of the order
    if not isinstance(row, str):
        return f"{row!r} is not a row of ops"
    try:
        schedule = stuck_schedule([STUCK_ROWS[0], row, STUCK_ROWS[2]])
        check(schedule)
    except ScheduleDeadlock as deadlock:
        op, rank, needed = deadlock.waits[1]  # ranks 0 and 2 cannot be stuck without it
        return f"deadlock: rank 1 waits at {op} for {needed} of rank {rank}"
    except ValueError as error:
        return str(error).partition(": ")[0]  # without the way out
    launch(run_small, schedule, world_size=3, backend="gloo")
    return f"all ranks finish; rank 1 holds {schedule.peak_in_flight(1)} micro-batches"


class RowExercise(Exercise):
    """The learner writes the row of rank 1; any row with which all ranks finish on little memory is right."""

    def trials(self, function: Callable, case: tuple) -> list[Trial]:
        """Return what real ranks do with this row."""
        row = answer(function, case)
        if is_blank(row) or isinstance(row, Raised):
            return [Trial("", row, "")]
        return [Trial(f"rank 1 runs {row!r}", what_happens(row), "all ranks finish; rank 1 holds 2 micro-batches")]

    def cases_text(self) -> str:
        return "on 3 ranks, which have just run it"


def my_row():
    return "F0 F1 B0 F2 B1 B2"


mended_row = RowExercise(
    "mended_row",
    my_row,
    notebook="07",
    cases=[()],
    hints=[
        "Find the circle in the report: who waits for whom, and for which op?",
        "Rank 1 waits for B0 of rank 2, rank 2 for F1 of rank 1. Rank 2's row is given: what must rank 1 run earlier?",
        "Move F1 before B0.",
    ],
)


mended_row.mistakes_of(
    lambda row: row,
    (
        dict(row=STUCK_ROWS[1]),
        "This is the row that deadlocks. Read the report: rank 2 waits for F1, which rank 1 runs only after B0, and "
        "rank 1 is itself waiting for that B0.",
    ),
    (dict(row="F0 B0 F1 B1 F2 B2"), "B0 is still before F1. Only the last rank takes turns at once: rank 2 wants F1."),
    (dict(row="F0 F1 F2 B0 B1 B2"), "It runs like GPipe, and holds every micro-batch. Move just one op, by one place."),
    (dict(row="F0 F1 F2 B1 B2"), "An op is missing: rank 1 needs three forwards and three backwards, each once."),
    (dict(row="F0 F1 B0 B1 B2 F2"), "A backward stands before its own forward, whose activations it needs."),
)
