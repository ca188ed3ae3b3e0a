"""Every question of every notebook has a key of its own, and is asked right before the cell that computes its result.

That no typical mistake is the result, and that a result can be answered, shows when a notebook runs: `compare` raises.
"""

import importlib
import pkgutil
import re

import nbformat
import pytest

import course.predictions
from course.predict import Question
from course.working_copy import ROOT, find

MODULES = [module.name for module in pkgutil.iter_modules(course.predictions.__path__)]
NOTEBOOK_OF = {"three_axes": "3d_parallel"}  # a module's name cannot begin with a digit


def questions(name):
    module = importlib.import_module(f"course.predictions.{name}")
    return {key: each for key, each in vars(module).items() if isinstance(each, Question)}


def notebook(name):
    if name == "start_here":
        return ROOT / "Start_Here.ipynb"
    return ROOT / find(f"??_{NOTEBOOK_OF.get(name, name)}")


@pytest.mark.parametrize("name", MODULES)
def test_a_key_is_the_number_of_the_notebook_and_the_name_of_the_question(name):
    number, found = "00" if name == "start_here" else notebook(name).name[:2], questions(name)
    assert found and {key: each.key for key, each in found.items()} == {key: f"{number}.{key}" for key in found}


@pytest.mark.parametrize("name", MODULES)
def test_answers_and_sentences_can_be_told_apart(name):
    for each in questions(name).values():
        assert len(set(each.words.values())) == len(each.words) != 1
        assert len({say for _, say in each.wrong}) == len(each.wrong) > 0
        assert all(say.endswith((".", "?")) for _, say in each.wrong)


@pytest.mark.parametrize("name", MODULES)
def test_each_question_is_asked_right_before_the_cell_that_computes_its_result(name):
    cells = [cell.source for cell in nbformat.read(notebook(name), as_version=4).cells if cell.cell_type == "code"]
    if f"from course.predictions import {name} as predict" not in "\n".join(cells):
        pytest.skip("this notebook does not ask in place yet")
    compared = [re.findall(r"\bpredict\.(\w+)\.compare\(", source) for source in cells]
    asked = [asks and asks[1] for asks in (re.fullmatch(r"predict\.(\w+)", source) for source in cells)]
    assert [each for each in asked if each] == [each for found in compared for each in found] == list(questions(name))
    assert all(each in compared[number + 1] for number, each in enumerate(asked) if each)
