"""Checks a learner's function on several ranks at once, each with its own data, and how it got its answer."""

import copy
import inspect
import re
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch.utils._pytree import tree_leaves

from course.communication import CommunicationLog, communication_log
from course.exercises.advice import Evidence, explain, joined, recognise
from course.exercises.base import NOT_WHOLE, Exercise, Trial, Verdict, indent
from course.exercises.calling import (
    EndlessLoop,
    Kept,
    Raised,
    answer,
    answer_to,
    no_gradient_to,
    quietly,
    said,
    tensors_of,
)
from course.exercises.on_gpus import heard_on_gpus, sends_messages
from course.exercises.relations import RANKS, what_is_new
from course.exercises.values import has_floats, leaves, plain, show
from course.exercises.watch import Watch
from labkit.c10d import listening
from labkit.groups import local_device
from labkit.launch import Deadlock, RankFailed, launch
from labkit.launch.payload import pickled, why_not
from labkit.sizes import counted, ranks_text

SOME_RANKS_ONLY = (
    "a collective that only some ranks call, as inside an `if rank == ...`, or that some call more often than others. "
    "Every rank must call it equally often."
)


ALL_ARE_IN_IT = (
    "All ranks are in the same {operation}, so none of them is missing. But they do not agree: each must name the same "
    "rank as the {end}. (`{operation}` {does}.)"
)
ENDS = {
    "broadcast": dict(end="source, `src`", does="copies the tensor of one rank to all"),
    "scatter": dict(end="source, `src`", does="gives each rank a part of what one rank has"),
    "reduce": dict(end="destination, `dst`", does="adds up on one rank"),
    "gather": dict(end="destination, `dst`", does="collects on one rank"),
}
"""The collectives in which one rank differs from the others."""
ENDS_THE_RANKS = (
    "It calls destroy_process_group, which ends all groups: after that, this function cannot be called again. Whoever "
    "has started the ranks ends them: leave it out."
)
NOT_THE_SAME_GROUPS = (
    "Not every rank calls `new_group` with the same ranks, in the same order: {calls}. It works here, but torch asks "
    "every rank of the world to do so, member or not: a group gets its name by counting, and the ranks count "
    "differently."
)


@dataclass
class Conduct(CommunicationLog):
    """What a rank did on the way to its answer: its messages, and what autograd ``kept`` for a backward."""

    kept: list[torch.Tensor] = field(default_factory=list)


@dataclass(frozen=True)
class OnRank:
    """What a rank has after a check: its arguments, the answers, and what there is to say of the first of them."""

    arguments: Any
    answers: list
    complaint: str | None = None
    cause: str | None = None
    groups: Sequence[tuple[int, ...]] = ()
    is_right: bool = False
    sends_messages: bool = False


@dataclass
class RankExercise(Exercise):
    """An exercise on real ranks. They run on the CPU even if there are GPUs, because a deadlock is reported only there.

    Each of the ``cases`` is a tuple: the number of ranks, then the arguments of ``inputs``. That function runs on
    every rank, with torch.distributed set up, and returns the arguments for the learner's function there.
    ``rule`` may object to how a right answer was reached: it gets this rank's `Conduct` and arguments,
    and returns a complaint or None. ``if_stuck`` is the advice for a deadlock. Backward from the answer must lead to
    the argument ``gradient_to``, if one is named. ``also_right`` says of an answer and this rank's arguments whether it
    is right though it is not that of the solution; all ranks call it, and it may communicate.
    """

    inputs: Callable = field(kw_only=True)
    rule: Callable[..., str | None] | None = field(default=None, kw_only=True)
    gradient_to: str | None = field(default=None, kw_only=True)
    also_right: Callable[..., bool] | None = field(default=None, kw_only=True)
    if_stuck: str = field(default=SOME_RANKS_ONLY, kw_only=True)
    _known: dict[tuple, list] = field(default_factory=dict, init=False, repr=False)
    _with_messages: dict[tuple, list[OnRank]] = field(default_factory=dict, init=False, repr=False)
    """The cases of this check in which messages were sent."""

    def judge(self, function: Callable) -> Verdict:
        """Try the cases one after the other; a deadlock of the ranks becomes part of the verdict."""
        try:
            pickled(function)
        except Exception as error:
            text = f"{self.name}: it cannot run on ranks.\n{indent(why_not(error, function, (), {}) + '.')}"
            return Verdict("wrong", text)
        self._with_messages.clear()
        try:
            verdict = super().judge(function)
            return self._and_on_gpus(verdict, function) if verdict.status == "passed" else verdict
        except Deadlock as stuck:
            advice = all_are_in_it(str(stuck)) or f"What this usually is: {self.if_stuck}"
            text = f"{self.name}: the ranks wait for each other.\n{stuck}\n{indent(advice)}"
            return Verdict("stuck", text)

    def _and_on_gpus(self, verdict: Verdict, function: Callable) -> Verdict:
        """Add to the verdict on a right answer what its messages would do on GPUs, if that is something else."""
        if not self._with_messages:
            return verdict
        case, ranks = min(self._with_messages.items(), key=_how_telling)
        names = list(inspect.signature(self.solution_function).parameters)
        gradient_to = names.index(self.gradient_to) if self.gradient_to else None
        heard = heard_on_gpus(function, self.inputs, case, gradient_to, [rank.answers[0] for rank in ranks])
        return replace(verdict, text=f"{verdict.text}\n{indent(heard)}") if heard else verdict

    def trials(self, function: Callable, case: tuple) -> list[Trial]:
        """Return the answers of all ranks to one case, in rank order; or the error alone, if a rank raised one."""
        expected = [rank.answers[0] for rank in self._reference((self.solution_function,), case)]
        try:
            ranks = self._answers((function,), case)
        except Deadlock:
            raise
        except RankFailed as failed:
            if isinstance(failed.cause, EndlessLoop):
                raise EndlessLoop(str(failed)) from None
            message = said(failed.cause) if failed.cause else str(failed).partition("\n")[0]
            return [Trial("", Raised(message, str(failed)), expected)]
        if any(rank.sends_messages for rank in ranks):
            self._with_messages[case] = ranks
        is_right = all(rank.is_right for rank in ranks)
        different_groups = groups_that_differ([rank.groups for rank in ranks])
        trials = []
        for rank, (on_rank, right) in enumerate(zip(ranks, expected)):
            arguments, [got] = on_rank.arguments, on_rank.answers
            given = show(arguments[0] if len(arguments) == 1 else arguments)
            floats = None if has_floats(right) or not has_floats(got) else NOT_WHOLE
            trials.append(
                Trial(
                    f"rank {rank} of {case[0]}, starting from {given}",
                    right if is_right else got,
                    right,
                    on_rank.complaint or different_groups or floats,
                    on_rank.cause,
                )
            )
        return trials

    def report_lines(self, trial: Trial) -> list[str]:
        """Return what is shown of a wrong answer: of an error, the launcher's own report."""
        if isinstance(trial.got, Raised):
            return [f"{self.name}: a rank raised an error.\n{trial.got.where}"]
        return super().report_lines(trial)

    def advice(self, function: Callable, number: int, trials: list[Trial]) -> str:
        """Return what a report adds to the ranks' values in this case, or to the error that one of them raised."""
        case = self.cases[number]
        failed = self._evidence(case, [trial.got for trial in trials])
        if isinstance(trials[0].got, Raised):
            return explain(failed)
        # In one small case two mistakes may look the same.
        others = [self._in_case(function, other) for other in self.cases if other != case]
        everywhere = joined([failed, *filter(None, others)])
        if recognise(everywhere):
            return explain(everywhere)
        return explain(replace(failed, mistakes=[]), everywhere)

    def right_before(self, number: int) -> str:
        """Say what is new in a case that went wrong, if others went right before it: as rank 0 has it."""
        if not number:
            return ""
        names = inspect.signature(self.solution_function).parameters
        *before, here = [
            {RANKS: case[0], **dict(zip(names, self._reference((self.solution_function,), case)[0].arguments))}
            for case in self.cases[: number + 1]
        ]
        return f"It was right in {counted(number, 'case')} before this one. {what_is_new(before, here)}".strip()

    def answers_later(self, function: Callable) -> bool:
        """Return False: no rank's right answer is None."""
        return False

    def _in_case(self, function: Callable, case: tuple) -> Evidence | None:
        """Return what the ranks answer in a different case, and what they should; None if they fail there."""
        try:
            return self._evidence(case, [rank.answers[0] for rank in self._answers((function,), case, is_quiet=True)])
        except RankFailed:
            return None

    def _evidence(self, case: tuple, got: list) -> Evidence:
        names = inspect.signature(self.solution_function).parameters
        ranks = self._reference((self.solution_function, *(mistake.function for mistake in self.mistakes)), case)
        right = [rank.answers[0] for rank in ranks]
        given = [{RANKS: case[0], **dict(zip(names, rank.arguments))} for rank in ranks]
        wrong = zip(*(rank.answers[1:] for rank in ranks))
        if isinstance(got[0], Raised):  # the answer of one rank, and it does not matter of which
            wrong = [got if got[0] in answers else [None] for answers in wrong]
        advices = [mistake.advice for mistake in self.mistakes]
        return Evidence(got, right, list(zip(advices, map(list, wrong))), given)

    def cases_text(self) -> str:
        """Say on how many ranks it was right."""
        *others, last = [str(world_size) for world_size in dict.fromkeys(case[0] for case in self.cases)]
        return f"on {', '.join(others)} and {last} ranks" if others else f"on {last} ranks"

    def _reference(self, functions: tuple[Callable, ...], case: tuple) -> list[OnRank]:
        """Return each rank's arguments and answers for functions of the exercise itself, which run only once."""
        if (functions, case) not in self._known:
            self._known[functions, case] = self._answers(functions, case, Exception)
        return self._known[functions, case]

    def _answers(
        self, functions: tuple[Callable, ...], case: tuple, catch: Any = (), is_quiet: bool = False
    ) -> list[OnRank]:
        names = tuple(inspect.signature(self.solution_function).parameters)
        care = Care(names, self.may_change, self.gradient_to, self.rule, self.also_right, is_quiet)
        return launch(_answers_here, functions, self.inputs, case[1:], care, catch, world_size=case[0], backend="gloo")


def _how_telling(case_and_ranks: tuple[tuple, list[OnRank]]) -> tuple[bool, int]:
    """Put cases first in which some ranks send nothing, then those with few ranks."""
    case, ranks = case_and_ranks
    return all(rank.sends_messages for rank in ranks), case[0]


@dataclass(frozen=True)
class Care:
    """What a right answer must also heed: the arguments by ``names``, and the exercise's fields of these names."""

    names: tuple[str, ...]
    may_change: tuple[str, ...]
    gradient_to: str | None
    rule: Callable[..., str | None] | None
    also_right: Callable[..., bool] | None
    is_quiet: bool


def _answers_here(functions, inputs: Callable, rest: tuple, care: Care, catch: Any) -> OnRank:
    """On one rank: return its arguments, each answer, and what is to be said of the first."""
    arguments = inputs(*rest)
    if care.gradient_to:
        arguments[care.names.index(care.gradient_to)].requires_grad_()
    with equal_parts(), groups_stay() as ended, quietly() if care.is_quiet else nullcontext():
        answers = [plain(answer(function, arguments, catch)) for function in functions]
    if catch or care.is_quiet:
        return OnRank(plain(arguments), answers)

    # Once more, so that the report of a deadlock does not lead through the log.
    saved, copies = [], copy.deepcopy(arguments)
    by_name = dict(zip(care.names, copies))
    kept, watch = Kept(by_name, care.may_change), Watch(functions[0])

    def note(tensor):
        saved.append(tensor)
        return tensor

    heard = listening(watch.hear)
    kept_for_backward = torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor)
    with quietly(), groups_stay(), groups_made() as groups, communication_log() as log, kept_for_backward, watch, heard:
        got = answer_to(functions[0], copies, catch)
    complaint = (
        kept.complaint()
        or (care.gradient_to and no_gradient_to(care.gradient_to, by_name[care.gradient_to], got))
        or wrong_dtype(got, arguments)  # before the rule, which counts bytes
        or sent_too_short(watch.sent, tensors_of(by_name).values())
        or (care.rule and care.rule(Conduct(log.records, saved), *arguments))
        or (ENDS_THE_RANKS if ended else None)
    )
    is_right = bool(care.also_right and all_have_come() and care.also_right(got, *copies))
    cause = not_waited_for(log) or watch.too_early or None
    return OnRank(
        plain(arguments),
        answers,
        complaint,
        cause,
        tuple(groups),
        is_right,
        sends_messages(log),
    )


def all_have_come(seconds: float = 10) -> bool:
    """Whether all ranks come here in time. A message of the check must not meet a collective that one rank skips."""
    store = dist.distributed_c10d._get_default_store()
    num_ranks, number = dist.get_world_size(), store.add("ranks that have answered", 1)
    end, enough = time.monotonic() + seconds, -(-number // num_ranks) * num_ranks
    while time.monotonic() < end:
        if store.add("ranks that have answered", 0) >= enough:
            return True
        time.sleep(0.005)
    return False


@contextmanager
def groups_stay() -> Iterator[list]:
    """Keep the world, also if an answer ends it as a script does; note that it wanted to."""
    ended = []

    def end(group=None):
        if group is None or group == dist.group.WORLD:
            ended.append(group)
        else:
            destroy(group)

    destroy = dist.destroy_process_group
    with patch.object(dist, "destroy_process_group", end):
        yield ended


@contextmanager
def groups_made() -> Iterator[list[tuple[int, ...]]]:
    """Note the ranks of each group that is named by counting, so that all ranks must make it alike."""
    made = []

    def named(ranks, use_hashed_name, *rest, **options):
        if not use_hashed_name:
            made.append(tuple(ranks))
        return name(ranks, use_hashed_name, *rest, **options)

    name = dist.distributed_c10d._process_group_name
    with patch.object(dist.distributed_c10d, "_process_group_name", named):
        yield made


def groups_that_differ(groups: Sequence[Sequence[tuple[int, ...]]]) -> str | None:
    """Complain if the ranks have made different groups."""
    if len(set(groups)) == 1:
        return None
    by_calls: dict[tuple, list[int]] = {}
    for rank, made in enumerate(groups):
        by_calls.setdefault(tuple(made), []).append(rank)
    calls = "; ".join(f"ranks {ranks_text(ranks)}: {_groups_text(made)}" for made, ranks in by_calls.items())
    return NOT_THE_SAME_GROUPS.format(calls=calls)


def _groups_text(made: tuple) -> str:
    return ", ".join(ranks_text(ranks) for ranks in made) or "none"


def all_are_in_it(report: str) -> str:
    """Return the advice for ranks that all wait in one collective in which one of them differs."""
    for operation, members, waiting in re.findall(
        r"(\w+) number \d+ .*\[([\d, ]+)\]: ranks ([\d, ]+) wait$", report, re.M
    ):
        if members == waiting and operation in ENDS:
            return ALL_ARE_IN_IT.format(operation=operation, **ENDS[operation])
    return ""


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


def sent_too_short(sent: dict[torch.dtype, str], given: Iterable[torch.Tensor]) -> str | None:
    """Complain about messages that round the numbers that came in, though these here may be such as it can hold."""
    eps = max((torch.finfo(each.dtype).eps for each in given if each.is_floating_point()), default=None)
    for dtype, operation in sent.items():
        if eps and dtype.is_floating_point and torch.finfo(dtype).eps > eps:
            return f"Its {operation} sends {dtype}, to which most of the numbers must be rounded: keep the dtype."
    return None


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
