"""Checks a learner's function: an exercise is a reference solution, cases to try, hints and typical mistakes.

A typical mistake is kept as the wrong function that makes it. `Exercise.check` recognises it because
the learner's values equal that function's values, so the advice is about that mistake and not a guess.
"""

import copy
import inspect
import os
import re
import sys
import textwrap
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial, wraps
from importlib.resources import files
from types import CodeType
from typing import Any, TypeVar

from course.exercises.advice import NONE, Evidence, explain
from course.exercises.calling import EndlessLoop, Kept, Raised, answer, answer_to, quietly
from course.exercises.feedback import give_feedback
from course.exercises.record import note_check
from course.exercises.relations import what_is_new
from course.exercises.source import is_written, source_of, unused
from course.exercises.values import difference, has_floats, plain, same, show, told_apart
from labkit.sizes import counted

Wrong = TypeVar("Wrong", bound=Callable)

UNKNOWN = "No mistake that is known here gives these values."
NOT_WHOLE = (
    "These are whole numbers, but stored as floats, which no size and no rank may be: use `//` for `/`, or `int`."
)


def kept_in_handouts(solution: Callable[..., "Folded"]) -> Callable[..., "Folded"]:
    """Let a handout's ``solution`` say who has it, unless the environment variable LABKIT_SOLUTIONS is "open"."""

    @wraps(solution)
    def shown(self) -> "Folded":
        note = files("course") / "handout.md"  # course/publish/handout.py writes it
        if note.is_file() and os.environ.get("LABKIT_SOLUTIONS") != "open":
            return Folded("Solution", note.read_text())
        return solution(self)

    return shown


@dataclass(frozen=True)
class Mistake:
    """A wrong ``function`` that people often write, and the ``advice`` for those who do."""

    function: Callable
    advice: str


@dataclass(frozen=True)
class Verdict:
    """What a check found: ``status`` is passed, not attempted, wrong, raised, stuck or endless."""

    status: str
    text: str


@dataclass(frozen=True)
class Trial:
    """One answer of the learner's function to what was ``given``.

    A ``complaint`` is about how a right answer was reached; a ``cause`` explains a wrong one.
    """

    given: str
    got: Any
    expected: Any
    complaint: str | None = None
    cause: str | None = None


@dataclass
class Exercise:
    """A function for the learner to write, checked in this process.

    Each of the ``cases`` is a tuple of arguments, for which ``solution_function`` gives the expected answer. They
    go from simple to telling, because the report names the first that goes wrong. ``notebook`` is the number of the
    notebook that has the exercise. Mistakes are tried in the order of their definition. An answer must leave the
    tensors that it is given as they are, except in the arguments that it ``may_change``.

    >>> double = Exercise("double", lambda x: 2 * x, [(0,), (3,)], notebook="00")
    >>> @double.mistake("You squared it.")
    ... def square(x):
    ...     return x * x
    >>> double.check(lambda x: x * x)
    double: not right yet.
      double(x=3)
        gave      9
        expected  6
      What this usually is: You squared it.
    """

    name: str
    solution_function: Callable
    cases: Sequence[tuple]
    hints: Sequence[str] = ()
    notebook: str = field(kw_only=True)
    may_change: tuple[str, ...] = field(default=(), kw_only=True)
    mistakes: list[Mistake] = field(default_factory=list, init=False)
    _hints_shown: int = field(default=0, init=False, repr=False)

    def mistake(self, advice: str) -> Callable[[Wrong], Wrong]:
        """Note the decorated function as a typical mistake, and ``advice`` for those who make it."""

        def note(function: Wrong) -> Wrong:
            self.mistakes.append(Mistake(function, advice))
            return function

        return note

    def mistakes_of(self, wrong: Callable, *choices: tuple[dict[str, Any], str]) -> None:
        """Note a typical mistake for each choice: the options with which ``wrong`` makes it, and the advice."""
        self.mistakes += [Mistake(partial(wrong, **options), advice) for options, advice in choices]

    def mistakes_in(self, *choices: tuple[int | None, Callable, str]) -> None:
        """Note a typical mistake for each choice: which part of the right answer (or all) changes, how, the advice."""
        for part, change, advice in choices:
            self.mistakes.append(Mistake(partial(_with_part, self.solution_function, part, change), advice))

    def check(self, function: Callable) -> None:
        """Try the learner's ``function`` and print what was found; never raises for the learner's faults."""
        report(self.name, self.verdict(function))

    def verdict(self, function: Callable) -> Verdict:
        """Return what `check` prints, as data; a loop that never ends becomes part of it."""
        try:
            return self.judge(function)
        except EndlessLoop as endless:
            return Verdict("endless", f"{self.name}: it does not come back.\n{indent(str(endless))}")

    def judge(self, function: Callable) -> Verdict:
        """Try the cases one after the other, until one goes wrong."""
        if not callable(function):
            text = f"{self.name}: check needs the function itself: write its name without parentheses."
            return Verdict("wrong", text)
        complaints = []  # which count when all values are right
        for number, case in enumerate(self.cases):
            trials = self.trials(function, case)
            if number == 0 and all(is_blank(trial.got) for trial in trials) and not self.answers_later(function):
                return self.nothing_returned(function, trials[0].got)
            if wrong := next((trial for trial in trials if not same(trial.got, trial.expected)), None):
                return self.on_wrong(function, number, trials, wrong)
            complaints += [trial for trial in trials if trial.complaint or trial.cause]
        for trial in complaints:
            lines = [f"{self.name}: the values are right, but not the way they were computed."]
            lines += [_broken(f"  {trial.given}"), indent(trial.complaint or trial.cause or "")]
            return Verdict("wrong", "\n".join(lines))
        return Verdict("passed", f"{self.name}: correct, {self.cases_text()}.")

    def on_wrong(self, function: Callable, number: int, trials: list[Trial], wrong: Trial) -> Verdict:
        """Return the verdict on a wrong answer in one case: the values or the error, and what is known of it."""
        is_error = isinstance(wrong.got, Raised)
        advice = wrong.cause or self.advice(function, number, trials)
        if not wrong.cause and "usually" not in advice:
            said = unused(function), advice, self.right_before(number)
            advice = " ".join(filter(None, said))
        if not advice:
            unknown = [] if is_error else [UNKNOWN]
            advice = " ".join([*unknown, f"`{self.name}.hint()` gives a hint."])
        text = "\n".join([*self.report_lines(wrong), indent(advice)])
        return Verdict("raised" if is_error else "wrong", text)

    def right_before(self, number: int) -> str:
        """Say what is new in a case that went wrong, if others went right before it."""
        if not number:
            return ""
        names = inspect.signature(self.solution_function).parameters
        *before, here = [dict(zip(names, plain(case))) for case in self.cases[: number + 1]]
        return f"It was right in {counted(number, 'case')} before this one. {what_is_new(before, here)}".strip()

    def trials(self, function: Callable, case: tuple) -> list[Trial]:
        """Return the learner's answers to one case."""
        names = inspect.signature(self.solution_function).parameters
        given = f"{self.name}({', '.join(f'{name}={show(value)}' for name, value in zip(names, case))})"
        arguments, expected = copy.deepcopy(case), self.solution_function(*copy.deepcopy(case))
        kept = Kept(dict(zip(names, arguments)), self.may_change)
        got = answer_to(function, arguments)
        complaint = None if has_floats(expected) or not has_floats(got) else NOT_WHOLE
        return [Trial(given, got, expected, kept.complaint() or complaint)]

    def answers_later(self, function: Callable) -> bool:
        """Whether a function that returns nothing in the first case returns something in others, where None is right.

        Then None is an answer, and not what a function without `return` gives back.
        """
        if not is_written(function):
            return False
        with quietly():
            trials = [trial for case in self.cases for trial in self.trials(function, case)]
        return any(each.expected is None for each in trials) and not all(is_blank(each.got) for each in trials)

    def nothing_returned(self, function: Callable, got) -> Verdict:
        """Return the verdict on a function that returns nothing: a blank stub, or one that forgot to return."""
        if got is None and is_written(function):
            return Verdict("wrong", f"{self.name}: not right yet.\n{indent(NONE)}")
        return Verdict("not attempted", f"{self.name}: not attempted yet (it returns nothing so far).")

    def advice(self, function: Callable, number: int, trials: list[Trial]) -> str:
        """Return what a report adds to a wrong answer: the mistake with the same values, or what is seen of it."""
        del number, trials
        names = inspect.signature(self.solution_function).parameters
        functions = function, self.solution_function, *(mistake.function for mistake in self.mistakes)
        try:
            with quietly():
                got, right, *wrong = ([plain(answer(each, case)) for case in self.cases] for each in functions)
        except EndlessLoop as endless:
            return f"And in a later case: {endless}"
        given = [dict(zip(names, plain(case))) for case in self.cases]
        advices = [mistake.advice for mistake in self.mistakes]
        return explain(Evidence(got, right, list(zip(advices, wrong)), given))

    def cases_text(self) -> str:
        """Say how much was tried, for the good news."""
        return f"all {len(self.cases)} cases" if len(self.cases) > 1 else "as expected"

    def hint(self) -> "Folded":
        """Return one more hint, after those already shown: a cell that runs again replaces what it showed."""
        if self._hints_shown >= len(self.hints):
            last = f"That was all. `{self.name}.solution()` shows one way to do it."
            return Folded("No more hints", "\n\n".join([*self.hints, last]))
        self._hints_shown += 1
        title = f"Hint {self._hints_shown} of {len(self.hints)}"
        return Folded(title, "\n\n".join(self.hints[: self._hints_shown]))

    @kept_in_handouts
    def solution(self) -> "Folded":
        """Return the source of the reference solution: the very function that `check` compares with."""
        source = source_of(self.solution_function)
        return Folded("Solution", f"```python\n{source}\n```", plain_text=source)

    def report_lines(self, trial: Trial) -> list[str]:
        """Return what is shown of a wrong answer, before any advice."""
        if isinstance(trial.got, Raised):
            heading = _broken(f"{self.name}: {trial.given} raised an error.")
            return [heading, indent(trial.got.message + trial.got.where)]
        got, expected = told_apart(trial.got, trial.expected)
        lines = [f"  {trial.given}", f"    gave      {got}", f"    expected  {expected}"]
        if where := difference(trial.got, trial.expected):
            lines.append(f"    differs   {where}")
        return [f"{self.name}: not right yet.", *map(_broken, lines)]


class Unaided(Exercise):
    """An exercise on what a function of labkit does: an answer that asks it is right, and teaches nothing."""

    labkits: CodeType

    def trials(self, function: Callable, case: tuple) -> list[Trial]:
        asked, before = [], sys.getprofile()
        sys.setprofile(lambda frame, event, _: asked.append(event) if frame.f_code is self.labkits else None)
        try:
            trials = super().trials(function, case)
        finally:
            sys.setprofile(before)
        said = "labkit's own function was called: write it yourself, with `range`."
        return [replace(trial, complaint=said) if asked else trial for trial in trials]


def report(name: str, verdict: Verdict) -> None:
    """Show what a check found, and remember it."""
    if verdict.status != "not attempted":
        mistake = re.search(r"What this usually is: (.*)", verdict.text, re.DOTALL)
        note_check(name, verdict.status, " ".join(mistake[1].split()) if mistake else None)
    give_feedback(verdict.status, verdict.text)


class Folded:
    """Text that a notebook shows below a title that folds it away, and a terminal as it is."""

    def __init__(self, title: str, markdown: str, plain_text: str | None = None):
        self.title, self.markdown, self.plain_text = title, markdown, plain_text or f"{title}: {markdown}"

    def __repr__(self) -> str:
        return self.plain_text

    def _repr_markdown_(self) -> str:
        return f"<details open><summary>{self.title}</summary>\n\n{self.markdown}\n\n</details>"


def _with_part(right: Callable, part: int | None, change: Callable, *case):
    if part is None:
        return change(right(*case))
    answers = list(right(*case))
    answers[part] = change(answers[part])
    return answers


def is_blank(got) -> bool:
    """Whether this is what an unfilled stub returns."""
    return got is None or got is ...


def _broken(line: str) -> str:
    """Return a line of values, broken where it is too wide for a notebook."""
    return textwrap.fill(line, 100, subsequent_indent=" " * 14, break_on_hyphens=False, break_long_words=False)


def indent(text: str) -> str:
    """Return ``text`` two spaces in, with no line longer than a notebook shows in a window 1024 pixels wide."""
    lines = [textwrap.fill(line, 72, initial_indent="  ", subsequent_indent="  ") for line in text.splitlines()]
    return "\n".join(lines)
