"""Checks a learner's function on several ranks at once, each with its own data, and how it got its answer."""

import inspect
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist

from course.communication import CommunicationLog, communication_log
from course.exercises.advice import RANKS, explain
from course.exercises.base import Exercise, Raised, Trial, Verdict, answer, indent, said
from course.exercises.values import leaves, plain, show
from labkit.groups import local_device
from labkit.launch import Deadlock, RankFailed, launch

SOME_RANKS_ONLY = (
    "a collective that only some ranks call, as inside an `if rank == ...`, or that some call more often than others. "
    "Every rank must call it equally often."
)


@dataclass
class Conduct(CommunicationLog):
    """What a rank did on the way to its answer: its messages, what autograd ``kept`` for a backward, and new groups."""

    kept: list[torch.Tensor] = field(default_factory=list)
    num_groups: int = 0


@dataclass
class RankExercise(Exercise):
    """An exercise on real ranks. They run on the CPU even if there are GPUs, because a deadlock is reported only there.

    Each of the ``cases`` is a tuple: the number of ranks, then the arguments of ``inputs``. That function runs on
    every rank, with torch.distributed set up, and returns the arguments for the learner's function there.
    ``rule`` may object to how a right answer was reached: it gets this rank's `Conduct` and arguments,
    and returns a complaint or None. ``if_stuck`` is the advice for a deadlock.
    """

    inputs: Callable = field(kw_only=True)
    rule: Callable[..., str | None] | None = field(default=None, kw_only=True)
    if_stuck: str = field(default=SOME_RANKS_ONLY, kw_only=True)
    _known: dict[tuple, list] = field(default_factory=dict, init=False, repr=False)

    def verdict(self, function: Callable) -> Verdict:
        """Return what `check` prints, as data; a deadlock of the ranks becomes part of it."""
        try:
            return super().verdict(function)
        except Deadlock as stuck:
            advice = indent(f"What this usually is: {self.if_stuck}")
            return Verdict("stuck", f"{self.name}: the ranks wait for each other.\n{stuck}\n{advice}")

    def trials(self, function: Callable, case: tuple) -> list[Trial]:
        """Return the answers of all ranks to one case, in rank order; or the error alone, if a rank raised one."""
        expected = [right for _, [right] in self._reference((self.solution_function,), case)]
        try:
            ranks = self._answers((function,), case)
        except Deadlock:
            raise
        except RankFailed as failed:
            return [Trial("", Raised(said(failed.cause), str(failed)), expected)]
        return [
            Trial(
                f"rank {rank} of {case[0]}, starting from {show(arguments[0] if len(arguments) == 1 else arguments)}",
                got,
                right,
                complaint,
                cause,
            )
            for rank, ((arguments, [got], complaint, cause), right) in enumerate(zip(ranks, expected))
        ]

    def report_lines(self, trial: Trial) -> list[str]:
        """Return what is shown of a wrong answer: of an error, the launcher's own report."""
        if isinstance(trial.got, Raised):
            return [f"{self.name}: a rank raised an error.\n{trial.got.where}"]
        return super().report_lines(trial)

    def advice(self, function: Callable, number: int, trials: list[Trial]) -> str:
        """Return what a report adds to the ranks' values in this case, or to the error that one of them raised."""
        del function
        case, names = self.cases[number], inspect.signature(self.solution_function).parameters
        got, right = [trial.got for trial in trials], [trial.expected for trial in trials]
        ranks = self._reference(tuple(mistake.function for mistake in self.mistakes), case)
        given = [{RANKS: case[0], **dict(zip(names, arguments))} for arguments, _ in ranks]
        wrong = zip(*(answers for _, answers in ranks))
        if isinstance(got[0], Raised):  # the answer of one rank, and it does not matter of which
            wrong = [got if got[0] in answers else [None] for answers in wrong]
        advices = [mistake.advice for mistake in self.mistakes]
        return explain(got, right, list(zip(advices, map(list, wrong))), given)

    def cases_text(self) -> str:
        """Say on how many ranks it was right."""
        *others, last = [str(world_size) for world_size in dict.fromkeys(case[0] for case in self.cases)]
        return f"on {', '.join(others)} and {last} ranks" if others else f"on {last} ranks"

    def _reference(self, functions: tuple[Callable, ...], case: tuple) -> list[tuple]:
        """Return each rank's arguments and answers for functions of the exercise itself, which run only once."""
        if (functions, case) not in self._known:
            self._known[functions, case] = [each[:2] for each in self._answers(functions, case, Exception)]
        return self._known[functions, case]

    def _answers(self, functions: tuple[Callable, ...], case: tuple, catch: Any = ()) -> list[tuple]:
        how = functions, self.inputs, case[1:], self.rule, catch
        return launch(_answers_here, *how, world_size=case[0], backend="gloo")


def _answers_here(functions, inputs: Callable, rest: tuple, rule: Callable | None, catch: Any) -> tuple:
    """On one rank: return its arguments, each answer, a complaint about the first, and why it is wrong."""
    arguments = inputs(*rest)
    answers = [plain(answer(function, arguments, catch)) for function in functions]
    complaint = cause = None
    if not catch:  # in a run of its own, so that the report of a deadlock does not lead through the log
        kept, world = [], dist.distributed_c10d._world
        num_groups = world.group_count

        def note(tensor):
            kept.append(tensor)
            return tensor

        with communication_log() as log, torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
            got = answer(functions[0], arguments, catch)
        complaint = (
            rule and rule(Conduct(log.records, kept, world.group_count - num_groups), *arguments)
        ) or wrong_dtype(got, arguments)
        cause = not_waited_for(log)
    return plain(arguments), answers, complaint, cause


def wrong_dtype(got, arguments: tuple) -> str | None:
    """Complain about tensors of a different dtype than those that came in; a single number may have any."""
    given, returned = (
        [value for value in leaves(values) if isinstance(value, torch.Tensor)] for values in (arguments, got)
    )
    different = {value.dtype for value in returned if value.dim() and given} - {value.dtype for value in given}
    return f"It returns {different.pop()}, and was given {given[0].dtype}: keep the dtype." if different else None


def not_waited_for(log: CommunicationLog) -> str | None:
    """Say which operation was started and never waited for, if there is one."""
    for record in log.records:
        if record.seconds is None:
            return (
                f"Nobody waited for the {record.operation}: with async_op=True it is only started. Keep its handle, "
                "and call `wait()` before you use the tensor."
            )
    return None


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


def own(tensor: torch.Tensor, dim: int = 0) -> torch.Tensor:
    """Return this rank's shard of a tensor that is cut along ``dim``."""
    return tensor.chunk(dist.get_world_size(), dim)[dist.get_rank()]


def whole_numbers(shape: tuple[int, ...], seed: int) -> torch.Tensor:
    """Return small whole numbers from -4 to 5, so that a report can be checked by hand; ``seed`` chooses them."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-4, 6, shape, generator=generator).float().to(local_device())
