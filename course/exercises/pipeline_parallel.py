"""The exercises of notebook 07: the order of a rank, the bubble, a gradient m times too large, and a deadlock.

The functions named my_... are the solutions; those with a leading underscore make the typical mistakes.
"""

import re
from collections.abc import Callable
from functools import partial

import torch
from torch import nn

from course.exercises.base import Exercise, Mistake, Raised, Trial, answer, is_blank
from labkit import pipeline
from labkit.groups import init_groups, local_device
from labkit.launch import launch
from labkit.layout import ParallelLayout
from labkit.schedules import Schedule, check, read_ops

# -- the order of one rank ------------------------------------------------------------------------------------------


def my_order(rank, num_stages, num_micro_batches):
    num_warmup = min(num_stages - rank - 1, num_micro_batches)  # so many ranks are below
    order = [f"F{i}" for i in range(num_warmup)]
    for i in range(num_micro_batches):
        if num_warmup + i < num_micro_batches:
            order.append(f"F{num_warmup + i}")
        order.append(f"B{i}")
    return order


def _in_turn(num_warmup, num_micro_batches, cool_down=True, clipped=True):
    """Forwards first, then one forward and one backward in turn; the rest of the backwards with ``cool_down``."""
    m = num_micro_batches
    num_warmup = min(num_warmup, m) if clipped else num_warmup
    order = [f"F{i}" for i in range(num_warmup)]
    for i in range(m - num_warmup):
        order += [f"F{num_warmup + i}", f"B{i}"]
    return order + [f"B{i}" for i in range(m - num_warmup, m) if cool_down and i >= 0]


def _gpipe_order(rank, num_stages, num_micro_batches):
    return _in_turn(num_micro_batches, num_micro_batches)


def _one_too_many(rank, num_stages, num_micro_batches):
    return _in_turn(num_stages - rank, num_micro_batches)


def _counted_from_the_top(rank, num_stages, num_micro_batches):
    return _in_turn(rank, num_micro_batches)


def _no_warm_up(rank, num_stages, num_micro_batches):
    return _in_turn(0, num_micro_batches)


def _no_cool_down(rank, num_stages, num_micro_batches):
    return _in_turn(num_stages - rank - 1, num_micro_batches, cool_down=False)


def _too_few_micro_batches(rank, num_stages, num_micro_batches):
    return _in_turn(num_stages - rank - 1, num_micro_batches, clipped=False)


def _runs_past_the_end(rank, num_stages, num_micro_batches):
    """A forward with every backward, also when none is left."""
    num_warmup = num_stages - rank - 1
    turns = [op for i in range(num_micro_batches) for op in (f"F{num_warmup + i}", f"B{i}")]
    return [f"F{i}" for i in range(num_warmup)] + turns


def _backward_first_in_turn(rank, num_stages, num_micro_batches):
    num_warmup = min(num_stages - rank - 1, num_micro_batches)
    turns = [op for i in range(num_micro_batches - num_warmup) for op in (f"B{i}", f"F{num_warmup + i}")]
    order = [f"F{i}" for i in range(num_warmup)] + turns
    return order + [f"B{i}" for i in range(num_micro_batches - num_warmup, num_micro_batches)]


def _last_in_first_out(rank, num_stages, num_micro_batches):
    """Each backward takes the newest micro-batch that is held."""
    order, held = [], []
    for op in my_order(rank, num_stages, num_micro_batches):
        if op[0] == "F":
            held.append(op[1:])
        order.append(op if op[0] == "F" else f"B{held.pop()}")
    return order


one_f_one_b_order = Exercise(
    "one_f_one_b_order",
    my_order,
    cases=[(3, 4, 3), (1, 4, 5), (0, 4, 6), (0, 2, 3), (0, 4, 2), (0, 1, 2)],
    mistakes=[
        Mistake(
            _gpipe_order,
            "All forwards, then all backwards: that is GPipe, which holds the activations of all m micro-batches. "
            "Here a rank starts backward as soon as the ranks below can have given it a gradient.",
        ),
        Mistake(
            _one_too_many,
            "One forward too many at the start. Below rank r there are p - r - 1 ranks: so many forwards come "
            "before forwards and backwards take turns, and the next forward is the first of the turns.",
        ),
        Mistake(
            _counted_from_the_top,
            "The forwards at the start are counted from the wrong end. The last rank needs none: its gradient is "
            "there at once. Rank 0 waits longest, and needs most.",
        ),
        Mistake(
            _no_warm_up,
            "Forwards and backwards take turns from the first op on. That fits the last rank only: on the others B0 "
            "needs a gradient that the ranks below can give only after their own work, and meanwhile nobody goes on.",
        ),
        Mistake(_no_cool_down, "Backwards are missing at the end: as many as there were forwards at the start."),
        Mistake(
            _too_few_micro_batches,
            "With fewer micro-batches than ranks there are forwards of micro-batches that do not exist: "
            "there can be no more at the start than m.",
        ),
        Mistake(
            _runs_past_the_end,
            "There are forwards of micro-batches that do not exist: with m of them the last forward is F(m - 1). "
            "Behind it only backwards are left.",
        ),
        Mistake(
            _backward_first_in_turn,
            "In each turn the forward comes first: on the last rank B0 needs the F0 before it.",
        ),
        Mistake(
            _last_in_first_out,
            "Backward takes the micro-batch that went forward last. Gradients come in the order of the forwards: "
            "on the last rank B0 comes right behind F0, so B0 is the first everywhere.",
        ),
    ],
    hints=[
        "Three phases: some forwards; a forward and a backward in turn until no forward is left; the backwards that "
        "are left. F and B both count from 0.",
        "How many forwards at the start? None on the last rank, one more for each rank above it: p - r - 1.",
        "But never more than m: `min(num_stages - rank - 1, num_micro_batches)`.",
    ],
)

# -- the bubble -----------------------------------------------------------------------------------------------------


def my_bubble(p, m, v):
    over_ideal = (p - 1) / (v * m)
    share = (p - 1) / (v * m + p - 1)
    return over_ideal, share


def _without_chunks(p, m, v):
    return my_bubble(p, m, 1)


def _the_other_way_round(p, m, v):
    return my_bubble(p, m, v)[::-1]


def _all_stages(p, m, v):
    return p / (v * m), p / (v * m + p)


def _one_for_both(p, m, v):
    return (my_bubble(p, m, v)[0],) * 2


def _the_share_for_both(p, m, v):
    return (my_bubble(p, m, v)[1],) * 2


def _chunks_on_top(p, m, v):
    return v * (p - 1) / m, v * (p - 1) / (m + v * (p - 1))


def _idle_in_chunks_twice(p, m, v):
    return my_bubble(p, m, v)[0], my_bubble(p, m, 1)[1] / v


def _share_without_chunks(p, m, v):
    return my_bubble(p, m, v)[0], my_bubble(p, m, 1)[1]


bubble = Exercise(
    "bubble",
    my_bubble,
    cases=[(4, 8, 1), (4, 4, 1), (2, 4, 1), (1, 8, 1), (4, 8, 2), (8, 32, 4)],
    mistakes=[
        Mistake(
            _without_chunks,
            "v is missing. With v chunks a rank a step from rank to rank takes 1/v of the time, and so does each "
            "slot that a rank stands idle.",
        ),
        Mistake(
            _the_other_way_round,
            "The two are swapped. Idle over ideal divides by the time of the work alone, the share by work and "
            "idle time together: the share is the smaller one.",
        ),
        Mistake(
            _all_stages,
            "p slots too many by one. The first rank starts at once: the last one waits for the p - 1 before it.",
        ),
        Mistake(
            _one_for_both,
            "Both are idle over ideal. The share of the total divides by work and idle time together.",
        ),
        Mistake(_the_share_for_both, "Both are the share of the total. Idle over ideal divides by the work alone."),
        Mistake(
            _chunks_on_top,
            "v is on the wrong side: more chunks make the bubble smaller, not larger.",
        ),
        Mistake(
            _idle_in_chunks_twice,
            "The first is right. In the share, v multiplies the work only: v·m slots of work, and p - 1 idle ones.",
        ),
        Mistake(
            _share_without_chunks,
            "The first is right. In the share, v is missing: it is the first divided by 1 plus the first.",
        ),
    ],
    hints=[
        "Count in slots: one forward and one backward of one chunk. A rank's work is v·m slots.",
        "For v = 1 the last rank starts p - 1 slots late. Idle slots over slots of work: that is the first number.",
        "The second divides the idle slots by all: v·m of work, and the idle ones.",
    ],
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
    """A weight, and micro-batches of small whole numbers; the last may have fewer rows."""
    generator = torch.Generator().manual_seed(0)
    cases = []
    for sizes in ([2], [1, 1, 1], [2, 1]):
        batches = [torch.randint(-3, 4, (rows, 2), generator=generator).double() for rows in sizes]
        cases.append((torch.tensor([1.0, 2.0], dtype=torch.float64, requires_grad=True), batches))
    return cases


def _step(weight, micro_batches, share: Callable, reported: Callable, forgets: bool = False):
    """Backward of ``share`` of each micro-batch's mean, and the sum of ``reported`` of it."""
    total = 0.0
    for x in micro_batches:
        if forgets:
            weight.grad = None
        loss = (x @ weight).square().mean()
        (loss * share(x, micro_batches)).backward()
        total += loss.item() * reported(x, micro_batches)
    return total, weight.grad


def _only_the_loss(weight, micro_batches):
    return my_step(weight, micro_batches)[0]


def _whole(x, micro_batches):
    return 1.0


def _one_of_m(x, micro_batches):
    return 1 / len(micro_batches)


def _by_rows(x, micro_batches):
    return len(x) / sum(map(len, micro_batches))


def _rows_here(x, micro_batches):
    return len(x)


def _twice(x, micro_batches):
    return _by_rows(x, micro_batches) ** 2


_too_large = partial(_step, share=_whole, reported=_one_of_m)
_too_large_by_rows = partial(_step, share=_whole, reported=_by_rows)
_never_averaged = partial(_step, share=_whole, reported=_whole)
_all_alike = partial(_step, share=_one_of_m, reported=_one_of_m)
_loss_not_averaged = partial(_step, share=_by_rows, reported=_whole)
_only_the_last = partial(_step, share=_by_rows, reported=_by_rows, forgets=True)
_sum_of_rows = partial(_step, share=_rows_here, reported=_rows_here)
_averaged_twice = partial(_step, share=_twice, reported=_by_rows)

_TOO_LARGE = (
    "The loss is right and the gradient is m times too large. The losses were averaged for the report, after "
    "backward. What backward starts from must be averaged: it adds up the gradients of the m micro-batches."
)

average_gradient = Exercise(
    "average_gradient",
    my_step,
    cases=step_cases(),
    mistakes=[
        Mistake(_too_large, _TOO_LARGE),
        Mistake(_too_large_by_rows, _TOO_LARGE),
        Mistake(_never_averaged, "Loss and gradient are both sums over the micro-batches, m times the mean."),
        Mistake(
            _all_alike,
            "Each micro-batch counts 1/m. The last has fewer rows: of a mean over all rows it is a smaller part.",
        ),
        Mistake(_loss_not_averaged, "The gradient is right. The loss that you return is a sum, not the mean."),
        Mistake(
            _only_the_last,
            "Only the last micro-batch is in the gradient: it was set back in between. Gradients are to add up until "
            "the optimizer steps.",
        ),
        Mistake(_sum_of_rows, "Loss and gradient are both sums over the rows: divide by the number of all rows."),
        Mistake(_only_the_loss, "Only the loss came back. Return two things: the loss, and `weight.grad`."),
        Mistake(_averaged_twice, "The gradient is averaged twice, and too small."),
    ],
    hints=[
        "`backward()` adds to `weight.grad`: after m micro-batches it holds a sum. Of what should it be the sum?",
        "The mean over all rows is a sum of shares: each micro-batch's mean, times its rows over all rows.",
        "Multiply the loss by that share *before* `backward()`. Then the sum of these losses is the mean, too.",
    ],
)

# -- a schedule that deadlocks --------------------------------------------------------------------------------------

STUCK_ROWS = ["F0 F1 F2 B0 B1 B2", "F0 B0 F1 F2 B1 B2", "F0 F1 B0 B1 F2 B2"]
"""Each rank has all its ops, and no rank can finish."""


def stuck_schedule(rows=None) -> Schedule:
    """The schedule of these rows, one a rank; the one that deadlocks if none are given."""
    rows = rows or STUCK_ROWS
    return Schedule("mine", len(rows), 3, [read_ops(row) for row in rows])


def run_small(schedule: Schedule):
    """On a rank: a step of a small model in this schedule."""
    groups = init_groups(ParallelLayout(schedule.num_stages, pp_size=schedule.num_stages))
    stage = nn.Linear(4, 4).to(local_device())
    inputs = torch.ones(schedule.num_micro_batches, 2, 4, device=local_device())
    return pipeline.run(schedule, [stage], groups, list(inputs), loss=lambda output, _: output.square().mean())


def my_row():
    return "F0 F1 B0 F2 B1 B2"


def _as_it_was():
    return STUCK_ROWS[1]


def _taking_turns():
    return "F0 B0 F1 B1 F2 B2"


def _all_forwards_first():
    return "F0 F1 F2 B0 B1 B2"


def _an_op_left_out():
    return "F0 F1 F2 B1 B2"


def _backward_too_early():
    return "F0 F1 B0 B1 B2 F2"


class RowExercise(Exercise):
    """The learner writes the row of rank 1; right is any with which all ranks finish, on little memory."""

    def trials(self, function: Callable, case: tuple) -> list[Trial]:
        """What real ranks do with this row. One that cannot run is not tried."""
        row = answer(function, case)
        if is_blank(row) or isinstance(row, Raised):
            return [Trial("", row, "")]
        return [
            Trial(f"rank 1 runs {row!r}", self._what_happens(row), "all ranks finish; rank 1 holds 2 micro-batches")
        ]

    def cases_text(self) -> str:
        return "on 3 ranks, which have just run it"

    @staticmethod
    def _what_happens(row) -> str:
        row = " ".join(map(str, row)) if isinstance(row, list) else row  # as in the exercise of the order
        try:
            schedule = stuck_schedule([STUCK_ROWS[0], row, STUCK_ROWS[2]])
            check(schedule)
        except (ValueError, AttributeError) as error:
            waits = re.search(r"rank 1 waits[^;:]*", str(error))
            return f"deadlock: {waits[0]}" if waits else str(error).partition(":")[0]
        launch(run_small, schedule, world_size=3, backend="gloo")
        return f"all ranks finish; rank 1 holds {schedule.peak_in_flight(1)} micro-batches"


mended_row = RowExercise(
    "mended_row",
    my_row,
    cases=[()],
    mistakes=[
        Mistake(
            _as_it_was,
            "This is the row that deadlocks. Read the report: rank 2 waits for F1, which rank 1 has behind the B0 that "
            "it waits for itself.",
        ),
        Mistake(
            _taking_turns,
            "B0 still stands before F1. Only the last rank can take turns from the start: here B0 comes from rank 2, "
            "which wants F1 first.",
        ),
        Mistake(
            _all_forwards_first,
            "It runs, as GPipe does, and holds every micro-batch. It is enough to move one op, by one place.",
        ),
        Mistake(_an_op_left_out, "An op is missing: three forwards and three backwards, each once."),
        Mistake(
            _backward_too_early,
            "A backward stands before its own forward, whose activations it needs.",
        ),
    ],
    hints=[
        "Find the circle in the report: who waits for whom, and for which op?",
        "Rank 1 waits for B0 of rank 2, rank 2 for F1 of rank 1. Rank 2's row is given: what must rank 1 run earlier?",
        "Move F1 before B0.",
    ],
)
