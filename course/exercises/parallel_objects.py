"""Checks a learner's function that returns an object: a parallel model, a stage, a model that was loaded.

The object is put to work on real ranks, and what is measured of it there are its values: a dict of facts, such as the
output, the gradients and the shapes of the shards. They are compared with those of the solution's object.
"""

import logging
import re
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch.utils._python_dispatch import _disable_current_modes

from course.exercises.advice import Evidence, explain, joined, recognise
from course.exercises.base import Trial, Verdict, _broken, is_blank
from course.exercises.calling import Raised
from course.exercises.on_ranks import OnRank, RankExercise
from course.exercises.values import difference, same, told_apart

MISSING = "nothing of this name"


@dataclass(frozen=True)
class New:
    """A placeholder for an argument, which each call gets anew: ``make`` makes it wherever it is copied."""

    make: Callable[[], Any]
    name: str

    def __deepcopy__(self, memo) -> Any:
        return self.make()

    def __repr__(self) -> str:
        return self.name


@dataclass(frozen=True)
class Measured:
    """A ``function`` that answers with the facts that ``measure`` finds of the object that it returns."""

    function: Callable
    measure: Callable
    is_quiet: bool  # as for a typical mistake, of which only the facts are needed

    @property
    def __code__(self):
        return self.function.__code__  # by which a report finds the learner's own lines

    def __call__(self, *arguments) -> Any:
        with quiet_torch(), all_quiet() if self.is_quiet else nullcontext():
            found = self.function(*arguments)
            return None if is_blank(found) else self.measure(found, *arguments)


@contextmanager
def quiet_torch() -> Iterator[None]:
    """Keep out what DTensors set off: a dispatch mode would see their fake tensors, and a log their errors."""
    log = logging.getLogger("torch._subclasses.fake_tensor")
    level = log.level
    log.setLevel(logging.CRITICAL)
    try:
        with _disable_current_modes():
            yield
    finally:
        log.setLevel(level)


@contextmanager
def all_quiet() -> Iterator[None]:
    """Leave out all warnings."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


@dataclass
class ObjectExercise(RankExercise):
    """An exercise on real ranks whose answer is an object.

    ``measure`` gets the object and the arguments, on every rank, and returns facts: a dict of plain values. An object
    of the wrong kind is a string that names it. The facts go from cause to effect, because the report is about the
    first that is wrong. ``facts`` has the advice for a wrong fact that no typical mistake explains, ``errors`` that for
    an error by what is in its message, and ``kind`` says what the function should return.
    """

    measure: Callable[..., dict[str, Any] | str] = field(kw_only=True)
    facts: Mapping[str, str] = field(kw_only=True)
    kind: str = field(kw_only=True)
    errors: Mapping[str, str] = field(default_factory=dict, kw_only=True)

    def _answers(
        self, functions: tuple[Callable, ...], case: tuple, catch: Any = (), is_quiet: bool = False
    ) -> list[OnRank]:
        measured = tuple(Measured(function, self.measure, is_quiet or bool(catch)) for function in functions)
        return super()._answers(measured, case, catch, is_quiet)

    def _reference(self, functions: tuple[Callable, ...], case: tuple) -> list[OnRank]:
        """Return what the exercise's own functions answer. All of them run at once: to start ranks takes longer."""
        known = (self.solution_function, *(mistake.function for mistake in self.mistakes))
        places = [known.index(function) for function in functions]
        ranks = super()._reference(known, case)
        return [replace(rank, answers=[rank.answers[place] for place in places]) for rank in ranks]

    def _and_on_gpus(self, verdict: Verdict, function: Callable) -> Verdict:
        """Return the verdict as it is: PyTorch's own wrappers send the messages."""
        return verdict

    def report_lines(self, trial: Trial) -> list[str]:
        """Return the first wrong fact of a wrong answer."""
        if isinstance(trial.got, Raised):
            return super().report_lines(trial)
        if not isinstance(trial.got, dict):
            lines = [f"  {trial.given}", f"    gave      {trial.got}", f"    expected  {self.kind}"]
            return [f"{self.name}: not right yet.", *map(_broken, lines)]
        fact = first_wrong(trial.got, trial.expected)
        got, right = trial.got[fact], trial.expected[fact]
        if isinstance(got, dict) and isinstance(right, dict):  # such as the weights, by their names
            name = next(name for name in {**right, **got} if not same(got.get(name), right.get(name)))
            fact = f"{fact}: {name}"
            got = got.get(name, MISSING)
            right = right.get(name, MISSING)
        shown, expected = told_apart(got, right)
        lines = [f"  {trial.given}", f"  {fact}", f"    gave      {shown}", f"    expected  {expected}"]
        if where := difference(got, right):
            lines.append(f"    differs   {where}")
        return [f"{self.name}: not right yet.", *map(_broken, lines)]

    def seen_of(self, function: Callable, case: tuple, trials: list[Trial], wrong: Trial) -> tuple[list[Trial], Trial]:
        """Return the trial whose first wrong fact is the earliest: what is wrong on one rank may show on all."""
        found = [each for each in trials if isinstance(each.got, dict) and not same(each.got, each.expected)]
        order = list(self.facts)
        return trials, min(found, key=lambda each: order.index(first_wrong(each.got, each.expected)), default=wrong)

    def advice(self, function: Callable, number: int, trials: list[Trial]) -> str:
        """Return what a report adds to the first wrong fact, or to the error that a rank raised."""
        case = self.cases[number]
        failed = self._evidence(case, [trial.got for trial in trials])
        if isinstance(error := trials[0].got, Raised):
            message = " ".join(error.message.split())
            known = next((words for part, words in self.errors.items() if re.search(part, message)), "")
            return f"What this usually is: {known}" if known and not recognise(failed) else explain(failed)
        if not isinstance(trials[0].got, dict):
            return f"What this usually is: The function should return {self.kind}."
        others = [self._in_case(function, other) for other in self.cases if other != case]
        everywhere = joined([failed, *filter(None, others)])
        found = recognise(everywhere) or recognise(failed)
        return f"What this usually is: {found or self._of_first_fact(everywhere)}"

    def _of_first_fact(self, evidence: Evidence) -> str:
        """Return the advice for a mistake that gets the first wrong fact equally wrong, or that for the fact."""
        wrong = [(got, right) for got, right in zip(evidence.got, evidence.right) if not same(got, right)]
        facts = [first_wrong(got, right) for got, right in wrong if isinstance(got, dict)]
        fact = min(facts, key=list(self.facts).index)

        def of_fact(answers: Sequence) -> list:
            return [answer.get(fact) if isinstance(answer, dict) else None for answer in answers]

        got, right = of_fact(evidence.got), of_fact(evidence.right)
        mistakes = [(advice, of_fact(answers)) for advice, answers in evidence.mistakes]
        return recognise(Evidence(got, right, mistakes, evidence.given)) or self.facts[fact]


def first_wrong(got: dict[str, Any], right: dict[str, Any]) -> str:
    """Return the name of the first fact in which two answers differ."""
    return next(fact for fact in right if not same(got[fact], right[fact]))


def numbers_in(tensor: Any) -> Any:
    """Return the numbers that this rank holds of a tensor, which may be a DTensor, or None, as of a gradient."""
    return None if tensor is None else local(tensor).tolist()


def local(tensor: Any) -> torch.Tensor:
    """Return what this rank holds of a tensor or a DTensor."""
    return (tensor.to_local() if hasattr(tensor, "to_local") else tensor).detach()
