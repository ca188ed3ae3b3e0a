"""Every notebook has a quiz with its key apart, and the numbers in the keys are what labkit and course compute."""

import math
import re
from pathlib import Path

import pytest

from course import sizing, working_copy
from course.progress import LAST_OF_THE_LAB
from course.sizing import simulate
from course.sizing.linear_cut import LinearCut
from course.sizing.ring import bus_factor
from labkit.layout import ParallelLayout
from labkit.partition import chunks_of_rank
from labkit.schedules import gpipe, interleaved, one_f_one_b, zero_bubble_v

ROOT = Path(__file__).parents[2]
QUIZ = ROOT / "course" / "quiz"
NAMES = [path.stem for path in working_copy.notebooks(ROOT)[1:]]
TOOLS = [
    LinearCut, ParallelLayout, bus_factor, chunks_of_rank, gpipe, interleaved, math, one_f_one_b, simulate, sizing,
    zero_bubble_v,
]  # fmt: skip
KNOWN = {tool.__name__.rpartition(".")[2]: tool for tool in TOOLS}
ANSWER = re.compile(r"\*\*([^*]+)\*\*\s+=\s+`([^`]+)`")


def wrong_answers(key: str) -> list[str]:
    """The answers of a key that are not what the expression beside them gives, to as many digits as they have."""
    wrong = []
    for said, expression in ANSWER.findall(key):
        found = eval(expression, dict(KNOWN))
        if isinstance(found, float):
            found = f"{found:.{len(said.partition('.')[2])}f}"
        if said.replace(",", "") != str(found).replace(",", ""):
            wrong.append(f"{said} is {found} by {expression}")
    return wrong


@pytest.mark.parametrize("name", NAMES)
def test_a_notebook_has_a_quiz_of_five_questions_and_a_key_apart(name):
    for folder in (QUIZ, QUIZ / "key"):
        text = (folder / f"{name}.md").read_text()
        assert f"{name[:2]} {name[3:].replace('_', ' ')}" in text.splitlines()[0]
        assert text.splitlines()[0].endswith(" (further)") == (name[:2] > LAST_OF_THE_LAB)
        assert re.findall(r"(?m)^(\d)\. ", text) == list("12345")
    assert len((QUIZ / "key" / f"{name}.md").read_text()) > 200 and "**" not in (QUIZ / f"{name}.md").read_text()


@pytest.mark.parametrize("key", sorted((QUIZ / "key").glob("*.md")), ids=lambda path: path.stem)
def test_the_numbers_of_a_key_are_computed(key):
    text = key.read_text()
    assert key.stem in NAMES
    assert text.count("**") == 2 * len(ANSWER.findall(text)), "a number stands without what computes it"
    assert not wrong_answers(text)


def test_a_wrong_number_is_found():
    right = (QUIZ / "key" / "07_pipeline_parallel.md").read_text()
    assert len(wrong_answers(right.replace("**33**", "**34**"))) == 1
    assert wrong_answers(right.replace("**0.1875**", "**0.19**")) == []  # fewer digits are right, too
    assert len(wrong_answers(right.replace("**0.1875**", "**0.18**"))) == 1
