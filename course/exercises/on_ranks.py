"""Checks a learner's function on several ranks at once, each with its own data, and how it got its answer."""

import copy
import inspect
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch.utils._pytree import tree_leaves

from course.communication import CommunicationLog, communication_log
from course.exercises.advice import RANKS, explain
from course.exercises.base import NOT_WHOLE, Exercise, Trial, Verdict, indent
from course.exercises.calling import EndlessLoop, Kept, Raised, answer, answer_to, no_gradient_to, said
from course.exercises.source import sized_by_data
from course.exercises.values import has_floats, leaves, plain, show
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
    and returns a complaint or None. ``if_stuck`` is the advice for a deadlock. Backward from the answer must lead to
    the argument ``gradient_to``, if one is named.
    """

    inputs: Callable = field(kw_only=True)
    rule: Callable[..., str | None] | None = field(default=None, kw_only=True)
    gradient_to: str | None = field(default=None, kw_only=True)
    if_stuck: str = field(default=SOME_RANKS_ONLY, kw_only=True)
    _known: dict[tuple, list] = field(default_factory=dict, init=False, repr=False)

    def judge(self, function: Callable) -> Verdict:
        """Try the cases one after the other; a deadlock of the ranks becomes part of the verdict."""
        try:
            return super().judge(function)
        except Deadlock as stuck:
            advice = indent(f"{sized_by_data(function)} What this usually is: {self.if_stuck}".lstrip())
            return Verdict("stuck", f"{self.name}: the ranks wait for each other.\n{stuck}\n{advice}")

    def trials(self, function: Callable, case: tuple) -> list[Trial]:
        """Return the answers of all ranks to one case, in rank order; or the error alone, if a rank raised one."""
        expected = [right for _, [right] in self._reference((self.solution_function,), case)]
        try:
            ranks = self._answers((function,), case)
        except Deadlock:
            raise
        except RankFailed as failed:
            if isinstance(failed.cause, EndlessLoop):
                raise EndlessLoop(str(failed)) from None
            message = said(failed.cause) if failed.cause else str(failed).partition("\n")[0]
            return [Trial("", Raised(message, str(failed)), expected)]
        return [
            Trial(
                f"rank {rank} of {case[0]}, starting from {show(arguments[0] if len(arguments) == 1 else arguments)}",
                got,
                right,
                complaint or (None if has_floats(right) or not has_floats(got) else NOT_WHOLE),
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
        names = tuple(inspect.signature(self.solution_function).parameters)
        care = Care(names, self.may_change, self.gradient_to, self.rule)
        return launch(_answers_here, functions, self.inputs, case[1:], care, catch, world_size=case[0], backend="gloo")


@dataclass(frozen=True)
class Care:
    """What a right answer must also heed: the arguments by ``names``, and the exercise's fields of these names."""

    names: tuple[str, ...]
    may_change: tuple[str, ...]
    gradient_to: str | None
    rule: Callable[..., str | None] | None


def _answers_here(functions, inputs: Callable, rest: tuple, care: Care, catch: Any) -> tuple:
    """On one rank: return its arguments, each answer, a complaint about the first, and why it is wrong."""
    arguments = inputs(*rest)
    if care.gradient_to:
        arguments[care.names.index(care.gradient_to)].requires_grad_()
    with equal_parts():
        answers = [plain(answer(function, arguments, catch)) for function in functions]
    complaint = cause = None
    if not catch:  # in a run of its own, so that the report of a deadlock does not lead through the log
        saved, world, copies = [], dist.distributed_c10d._world, copy.deepcopy(arguments)
        by_name, num_groups = dict(zip(care.names, copies)), world.group_count
        kept = Kept(by_name, care.may_change)

        def note(tensor):
            saved.append(tensor)
            return tensor

        with communication_log() as log, torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
            got = answer_to(functions[0], copies, catch)
        conduct = Conduct(log.records, saved, world.group_count - num_groups)
        complaint = (
            kept.complaint()
            or (care.gradient_to and no_gradient_to(care.gradient_to, by_name[care.gradient_to], got))
            or (care.rule and care.rule(conduct, *arguments))
            or wrong_dtype(got, arguments)
        )
        cause = not_waited_for(log)
    return plain(arguments), answers, complaint, cause


@contextmanager
def equal_parts() -> Iterator[None]:
    """Refuse a reduce-scatter without an equal part for each rank: gloo would log that, and may leave ranks waiting."""

    def checked(method: Callable):
        def reduce_scatter(group, *args, **kwargs):
            shard, parts = ([each.numel() for each in tree_leaves(value)] for value in [*args, *kwargs.values()][:2])
            num_ranks, [size] = group.size(), shard
            if parts not in ([size] * num_ranks, [size * num_ranks]) and len(parts) in (1, num_ranks):
                has = parts[0] if len(parts) == 1 else f"parts of {parts}"
                needed = f"{num_ranks} * {size} = {num_ranks * size}, padding included"
                message = f"reduce_scatter of {has} numbers into shards of {size}: it needs {needed}"
                raise ValueError(message)
            return method(group, *args, **kwargs)

        return reduce_scatter

    with ExitStack() as stack:
        names = {"reduce_scatter", "reduce_scatter_single", "_reduce_scatter_base"}  # of which torch has two or three
        for name in names & vars(dist.ProcessGroup).keys():
            stack.enter_context(patch.object(dist.ProcessGroup, name, checked(getattr(dist.ProcessGroup, name))))
        yield


def wrong_dtype(got, arguments: tuple) -> str | None:
    """Complain about tensors of a different dtype than those that came in; a number, or whole ones, may have any."""
    given, returned = (
        [value for value in leaves(values) if isinstance(value, torch.Tensor)] for values in (arguments, got)
    )
    different = {value.dtype for value in returned if value.dim() and given and value.is_floating_point()}
    different -= {value.dtype for value in given}
    return f"It returns {different.pop()}, and was given {given[0].dtype}: keep the dtype." if different else None


def not_waited_for(log: CommunicationLog) -> str | None:
    """Say which operation was started and never waited for, if there is one."""
    for record in log.records:
        if record.seconds is None and record.has_handle:
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
