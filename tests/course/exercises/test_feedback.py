"""Verdicts are told apart by sign, word and colour in a notebook; a terminal has their text."""

import re
from pathlib import Path

import pytest

from course.exercises.base import Exercise
from course.exercises.feedback import LOOKS, Feedback
from course.pictures.style import text_on

double = Exercise("double", lambda x: 2 * x, [(0,), (3,)], notebook="00")


@pytest.fixture
def shown(monkeypatch):
    found = []
    monkeypatch.setattr("IPython.display.display", found.append)
    return found


def test_a_notebook_tells_verdicts_apart_by_sign_word_and_colour(shown):
    def raises(x):
        raise KeyError(x)

    for function in (lambda x: x + x, lambda x: 3 * x, lambda x: None, raises):
        double.check(function)
    bundles = [each._repr_mimebundle_() for each in shown]
    assert [bundle["text/plain"].splitlines()[0] for bundle in bundles] == [
        "double: correct, all 2 cases.",
        "double: not right yet.",
        "double: not attempted yet (it returns nothing so far).",
        "double: double(x=0) raised an error.",
    ]
    words = ("✓ correct", "✗ not right yet", "○ not attempted yet", "✗ raised an error")
    pages = [bundle["text/html"] for bundle in bundles]
    assert [[word for word in words if word in page] for page in pages] == [[word] for word in words]
    right, wrong, blank, raised = (re.search("background: (#.*?);", page)[1] for page in pages)
    assert wrong == raised and len({right, wrong, blank}) == 3
    assert all(text_on(color) == "#ffffff" for _, color in LOOKS.values())


def test_the_text_is_not_markup():
    page = Feedback("wrong", "gave <b>1</b>")._repr_mimebundle_()["text/html"]
    assert "gave &lt;b&gt;1&lt;/b&gt;" in page


def test_a_terminal_has_the_text(capsys):
    double.check(lambda x: 3 * x)
    assert capsys.readouterr().out.startswith("double: not right yet.\n  double(x=3)")


def test_every_status_has_a_look():
    course = Path(__file__).parents[3] / "course"
    sources = "".join(path.read_text() for path in course.rglob("*.py"))
    assert {"passed", "stuck"} <= set(re.findall(r'Verdict\("(.*?)"', sources)) <= set(LOOKS)
