"""Exercises whose function runs on several ranks at once, each with its own data; and what their mistakes share."""

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
import torch.distributed as dist

from course.exercises.base import Exercise, Trial, Verdict, answer, indent
from course.exercises.values import plain, same, show
from labkit.communication import CommunicationLog, communication_log
from labkit.groups import local_device
from labkit.launch import Deadlock, RankFailed, launch

SOME_RANKS_ONLY = (
    "a collective that only some ranks call, as inside an `if rank == ...`, or that they call unequally often. Every "
    "rank must call it."
)


@dataclass
class RankExercise(Exercise):
    """An exercise on real ranks. They run on the CPU even if there are GPUs, because a deadlock is reported only there.

    Each of the ``cases`` is a tuple: the number of ranks, then the arguments of ``inputs``. That function runs on
    every rank, with torch.distributed set up, and returns the arguments for the learner's function there.
    ``rule`` may object to how a right answer was reached: it gets this rank's communication log and
    arguments, and returns a complaint or None. ``if_stuck`` is the advice for a deadlock.
    """

    inputs: Callable = field(kw_only=True)
    rule: Callable[..., str | None] | None = field(default=None, kw_only=True)
    if_stuck: str = field(default=SOME_RANKS_ONLY, kw_only=True)
    _expected: dict[tuple, list] = field(default_factory=dict, init=False, repr=False)

    def verdict(self, function: Callable) -> Verdict:
        """Return what `check` prints, as data; an error or a deadlock on the ranks becomes part of it."""
        try:
            return super().verdict(function)
        except Deadlock as stuck:
            advice = indent(f"What this usually is: {self.if_stuck}")
            return Verdict("stuck", f"{self.name}: the ranks wait for each other.\n{stuck}\n{advice}")
        except RankFailed as failed:
            return Verdict("raised", f"{self.name}: a rank raised an error.\n{failed}")

    def trials(self, function: Callable, case: tuple) -> list[Trial]:
        """Return the answers of all ranks to one case, in rank order."""
        if case not in self._expected:
            self._expected[case] = [right for _, [right], _ in self._answers([self.solution_function], case)]
        return [
            Trial(f"rank {rank} of {case[0]}, starting from {show(arguments)}", got, right, complaint)
            for rank, ((arguments, [got], complaint), right) in enumerate(
                zip(self._answers([function], case), self._expected[case])
            )
        ]

    def recognise(self, function: Callable, case: tuple) -> str | None:
        """Return the advice for the mistake that gives the learner's values on every rank in this case."""
        rows = self._answers([function, *(mistake.function for mistake in self.mistakes)], case)
        for index, mistake in enumerate(self.mistakes):
            if all(same(answers[0], answers[1 + index]) for _, answers, _ in rows):
                return mistake.advice
        return None

    def cases_text(self) -> str:
        """Say on how many ranks it was right."""
        *others, last = [str(world_size) for world_size in dict.fromkeys(case[0] for case in self.cases)]
        return f"on {', '.join(others)} and {last} ranks" if others else f"on {last} ranks"

    def _answers(self, functions: list[Callable], case: tuple) -> list[tuple]:
        world_size, *rest = case
        return launch(_answers_here, functions, self.inputs, rest, self.rule, world_size=world_size, backend="gloo")


def _answers_here(functions: list[Callable], inputs: Callable, rest: list, rule: Callable | None) -> tuple:
    """On one rank: return its arguments, each function's answer, and the rule's complaint about the first function."""
    arguments = inputs(*rest)
    answers = [plain(answer(function, arguments, catch=())) for function in functions]
    complaint = None
    if rule:  # in a run of its own, so that the report of a deadlock does not lead through the log
        with communication_log() as log:
            answer(functions[0], arguments, catch=())
        complaint = rule(log, *arguments)
    return plain(arguments if len(arguments) > 1 else arguments[0]), answers, complaint


def only(*operations: str, also: Callable[..., str | None] | None = None) -> Callable[..., str | None]:
    """Return a rule that allows these operations and no others; ``also`` is a rule for how they are used."""

    def complain(log: CommunicationLog, *arguments) -> str | None:
        other = next((record.operation for record in log.records if record.operation not in operations), None)
        if other:
            return f"It calls {other}, but here it must be built from {' and '.join(operations)} alone."
        return also(log, *arguments) if also else None

    return complain


def summed(tensor: torch.Tensor) -> torch.Tensor:
    """Return the sum of all ranks' tensors."""
    total = tensor.contiguous().clone()
    dist.all_reduce(total)
    return total


def gathered(tensor: torch.Tensor, dim: int) -> torch.Tensor:
    """Return all ranks' tensors, joined along ``dim``."""
    parts = [torch.empty_like(tensor) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, tensor.contiguous())
    return torch.cat(parts, dim)


def whole_numbers(shape: tuple[int, ...], seed: int) -> torch.Tensor:
    """Return small whole numbers from -4 to 5, so that a report can be checked by hand; ``seed`` chooses them."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-4, 6, shape, generator=generator).float().to(local_device())
