"""Exercises whose function runs on several ranks at once, each with data of its own."""

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
import torch.distributed as dist

from course.exercises.base import Exercise, Trial, Verdict, answer, indent
from course.exercises.values import plain, same, show
from labkit.communication import CommunicationLog, communication_log
from labkit.groups import local_device
from labkit.launch import Deadlock, RankFailed, launch


@dataclass
class RankExercise(Exercise):
    """An exercise on real ranks: on the CPU, also where there are GPUs, for there a deadlock gets a report.

    ``cases`` are tuples: first the number of ranks, then what goes to ``inputs``, which runs on every rank,
    where torch.distributed is up, and returns the arguments that the learner's function gets there.
    ``rule`` may object to how a right answer was reached: it gets this rank's communication log and
    arguments, and returns a complaint or None. ``if_stuck`` is the advice for a deadlock.
    """

    inputs: Callable = field(kw_only=True)
    rule: Callable[..., str | None] | None = field(default=None, kw_only=True)
    if_stuck: str = field(default="", kw_only=True)

    def verdict(self, function: Callable) -> Verdict:
        """What `check` prints, as data; an error or a deadlock on the ranks becomes part of it."""
        try:
            return super().verdict(function)
        except Deadlock as stuck:
            advice = f"\n{indent(f'What this usually is: {self.if_stuck}')}" if self.if_stuck else ""
            return Verdict("stuck", f"{self.name}: the ranks wait for each other.\n{stuck}{advice}")
        except RankFailed as failed:
            return Verdict("raised", f"{self.name}: a rank raised an error.\n{failed}")

    def trials(self, function: Callable, case: tuple) -> list[Trial]:
        """The answers of all ranks to one case, in rank order."""
        expected = self._answers([self.solution_function], case)
        rows = self._answers([function], case)
        return [
            Trial(f"rank {rank} of {case[0]}, starting from {show(arguments)}", got, right, complaint)
            for rank, ((arguments, [got], complaint), (_, [right], _)) in enumerate(zip(rows, expected))
        ]

    def recognise(self, function: Callable, case: tuple) -> str | None:
        """The advice for the mistake that gives the learner's values on every rank of this case."""
        rows = self._answers([function, *(mistake.function for mistake in self.mistakes)], case)
        for index, mistake in enumerate(self.mistakes):
            if all(same(answers[0], answers[1 + index]) for _, answers, _ in rows):
                return mistake.advice
        return None

    def cases_text(self) -> str:
        """On how many ranks it was right."""
        *others, last = [str(world_size) for world_size in dict.fromkeys(case[0] for case in self.cases)]
        return f"on {', '.join(others)} and {last} ranks" if others else f"on {last} ranks"

    def _answers(self, functions: list[Callable], case: tuple) -> list[tuple]:
        world_size, *rest = case
        return launch(_answers_here, functions, self.inputs, rest, self.rule, world_size=world_size, backend="gloo")


def _answers_here(functions: list[Callable], inputs: Callable, rest: list, rule: Callable | None) -> tuple:
    """On one rank: its arguments, each function's answer, and the rule's complaint about the first function."""
    arguments = inputs(*rest)
    answers = [plain(answer(function, arguments, catch=())) for function in functions]
    complaint = None
    if rule:  # in a run of its own: a deadlock's report should not lead through the log
        with communication_log() as log:
            answer(functions[0], arguments, catch=())
        complaint = rule(log, *arguments)
    return plain(arguments if len(arguments) > 1 else arguments[0]), answers, complaint


def only(*operations: str) -> Callable[..., str | None]:
    """A rule that allows these operations and no others."""

    def complain(log: CommunicationLog, *_) -> str | None:
        other = next((record.operation for record in log.records if record.operation not in operations), None)
        return other and f"It calls {other}, but here it is to be built from {' and '.join(operations)} alone."

    return complain


def summed(tensor: torch.Tensor) -> torch.Tensor:
    """Return the sum of all ranks' tensors."""
    total = tensor.contiguous().clone()
    dist.all_reduce(total)
    return total


def whole_numbers(shape: tuple[int, ...], seed: int) -> torch.Tensor:
    """Return small whole numbers from -4 to 5, so that a report can be checked by hand; ``seed`` chooses them."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-4, 6, shape, generator=generator).float().to(local_device())
