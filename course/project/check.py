"""Checks a my_megatron.py step by step on real ranks: python -m course.project.check my_megatron.py

It prints a table, and what is wrong with each step that is. The exit status is 0 if all steps are right.
"""

import argparse
import contextlib
import io
import os
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any
from unittest.mock import patch
from xml.etree import ElementTree

from course.exercises.base import indent
from course.exercises.values import difference, same, told_apart
from course.junit import Case, suite_of
from course.project.mistakes import MISTAKES
from course.project.parts import steps, written_in
from course.project.probes import CASES, observe
from labkit.launch import Deadlock, RankFailed, launch
from labkit.launch.client import will_train
from labtrain.command_line import run_command

TITLES = {
    1: "groups",
    2: "f and g",
    3: "the pair, then attention",
    4: "vocabulary and loss",
    5: "data parallel",
    6: "pipeline",
    7: "put together",
}
TIMEOUT = 20.0
MOST_LINES = 20
MOST_LETTERS = 200

will_train()


@dataclass(frozen=True)
class Outcome:
    """What parts did in one case: what each rank saw, or how they ended."""

    seen: list[Any]  # of each rank what its function returned: pairs of what was looked at and what was seen
    ended: str = ""  # "stuck", or the type and text of the error that a rank raised
    report: str = ""
    printed: str = ""

    @property
    def returned(self) -> list[str]:
        """Return which ranks had returned when others waited for a message: they owe it.

        Where ranks wait for each other in collectives, who has returned is a matter of time.
        """
        is_owed = self.ended == "stuck" and "recv" in self.report
        return re.findall(r"rank ([\d, ]+): has returned", self.report) if is_owed else []

    def equals(self, other: "Outcome") -> bool:
        """Return whether both saw the same on all ranks, or ended in the same way."""
        return (self.ended, self.returned) == (other.ended, other.returned) and same(self.seen, other.seen)

    def until(self, end: int) -> "Outcome":
        """Return what each rank saw before number ``end``."""
        return replace(self, seen=[seen[:end] for seen in self.seen])


@dataclass(frozen=True)
class Result:
    """The check of one step: ``status`` is passed, not attempted, wrong, raised, stuck or endless."""

    step: int
    status: str
    text: str = ""

    def __str__(self) -> str:
        heading = f"step {self.step}, {TITLES[self.step]}: {self.status}"
        return f"{heading}\n{self.text}" if self.text else heading


def check(path: str | Path, step: int) -> Result:
    """Try what a file has of one step on real ranks, the rest of the program being ours."""
    source = Path(path).read_text()
    try:
        written = written_in(source)
    except SyntaxError as error:
        return Result(step, "raised", f"  {Path(path).name}, line {error.lineno}: {error.msg}")
    names = [name for name in written if steps()[name] == step]
    if not names:
        return Result(step, "not attempted")
    for number, (world_size, options) in enumerate(CASES[step]):
        found = outcome(source, str(path), names, step, number)
        expected = ours(step, number)
        if expected.ended:
            raise RuntimeError(
                f"our own parts do not run on this machine, so nothing can be checked:\n{expected.report}"
            )
        if found.equals(expected):
            continue
        advice = diagnosis(found, names, step, number)
        where = job_in_words(world_size, options)
        if found.ended:
            status = status_of(found)
            lines = [found.report]
        else:
            status = "wrong"
            lines = [*first_difference(found, expected)]
        lines = [f"  With {where}:", *lines, advice, *printed_lines(found.printed)]
        return Result(step, status, "\n".join(filter(None, lines)))
    left = [name for name, of_step in steps().items() if of_step == step and name not in names]
    if left:
        return Result(step, "not attempted", f"  Right so far: {', '.join(names)}. To be written: {', '.join(left)}.")
    return Result(step, "passed")


def job_in_words(world_size: int, options: dict[str, Any]) -> str:
    """Name a job by its size and its options.

    >>> job_in_words(4, {"tp": 2})
    '4 ranks, tp=2'
    """
    return ", ".join([f"{world_size} ranks", *(f"{name}={value}" for name, value in options.items())])


def status_of(found: Outcome) -> str:
    """Return the status of what has not come to its end."""
    if found.ended.startswith("EndlessLoop"):
        return "endless"
    return "stuck" if found.ended == "stuck" else "raised"


def outcome(source: str, filename: str, names: list[str], step: int, number: int) -> Outcome:
    """Run a step's probe in one of its cases, and return what happened."""
    world_size, options = CASES[step][number]
    return on_ranks(world_size, observe, source, filename, names, step, options)


def on_ranks(world_size: int, function: Callable, *args) -> Outcome:
    """Run a function of the probes on ranks, and return what happened."""
    seen: list[Any] = []
    ended = report = ""
    no_notes = patch.dict(os.environ, LABKIT_NO_NOTES="1")  # a check says at its end where ranks stand, if it matters
    with no_notes, contextlib.redirect_stdout(io.StringIO()) as printed:
        try:
            seen = launch(function, *args, world_size=world_size, backend="gloo", timeout_seconds=TIMEOUT)
        except Deadlock as stuck:
            ended = "stuck"
            report = str(stuck)
        except RankFailed as failed:
            cause = failed.cause
            ended = f"{type(cause).__name__}: {cause}" if cause else "died"
            report = str(failed)
    return Outcome(seen, ended, report, printed.getvalue())


@cache
def ours(step: int, number: int) -> Outcome:
    """Return what our parts do."""
    return outcome("", "my_megatron.py", [], step, number)


@cache
def of_mistake(mistake: int, number: int) -> Outcome:
    """Return what one of the known mistakes does."""
    wrong = MISTAKES[mistake]
    return outcome(wrong.source(), "my_megatron.py", [wrong.part], wrong.step, number)


def diagnosis(found: Outcome, names: list[str], step: int, number: int) -> str:
    """Return the advice for a mistake that does the same, or the same up to what is wrong first, if one is known.

    What comes later may vary from run to run: a gradient that changes while it is sent, for instance.
    """
    known = [index for index, mistake in enumerate(MISTAKES) if mistake.step == step and mistake.part in names]
    end = first_wrong(found, ours(step, number)) + 1
    for index in known:
        if found.equals(of_mistake(index, number)):
            return indent(f"What this usually is: {MISTAKES[index].advice}")
    for index in known:
        if found.seen and found.until(end).equals(of_mistake(index, number).until(end)):
            return indent(f"What this usually is: {MISTAKES[index].advice}")
    return ""


def first_wrong(found: Outcome, expected: Outcome) -> int:
    """Return the number of what is wrong first on some rank; probes look at simple things first."""
    wrong = [
        number
        for seen, right in zip(found.seen, expected.seen)
        for number, pair in enumerate(zip(seen, right))
        if not same(*pair)
    ]
    return min(wrong, default=0)


def first_difference(found: Outcome, expected: Outcome) -> Iterator[str]:
    """Say on which rank what differs first."""
    number = first_wrong(found, expected)
    for rank, (seen, right) in enumerate(zip(found.seen, expected.seen)):
        what, got = seen[number]
        if same(got, right[number][1]):
            continue
        told_got, told_right = told_apart(got, right[number][1])
        yield f"  {what}, on rank {rank}"
        yield f"    is        {told_got}"
        yield f"    expected  {told_right}"
        if where := difference(got, right[number][1]):
            yield f"    differs   {where}"
        return


def printed_lines(printed: str) -> list[str]:
    """Return what a learner's parts printed, or the first lines of it."""
    lines = [line for line in printed.splitlines() if line.startswith("[rank")]  # the launcher prints, too
    if not lines:
        return []
    more = [f"    ... and {len(lines) - MOST_LINES:,} more lines"] if len(lines) > MOST_LINES else []
    return ["  Your parts printed:", *(f"    {line[:MOST_LETTERS]}" for line in lines[:MOST_LINES]), *more]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("file", type=Path)
    parser.add_argument("--step", type=int, choices=TITLES, help="check this one alone")
    parser.add_argument("--junit-xml", type=Path, help="write the results for a program that collects them")
    options = parser.parse_args()
    results = []
    for step in [options.step] if options.step else TITLES:
        results.append(check(options.file, step))
        print(results[-1], flush=True)
    if options.junit_xml:
        ElementTree.ElementTree(junit(results)).write(options.junit_xml, encoding="utf-8", xml_declaration=True)
    return 0 if all(result.status == "passed" for result in results) else 1


def junit(results: list[Result]) -> ElementTree.Element:
    """Return one test case for each step."""
    cases = []
    for result in results:
        is_right = None if result.status == "not attempted" else result.status == "passed"
        cases.append(Case("steps", f"step {result.step}: {TITLES[result.step]}", is_right, result.status, result.text))
    return suite_of("my_megatron", cases)


if __name__ == "__main__":
    run_command(main)
