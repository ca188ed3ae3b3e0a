"""Puts what is alive into a page of a notebook: its explorers, and its questions with their stored results.

The stored output of an explorer says with which values it was called: the page calls it with the same ones, and has
what Python answers first, so that nothing moves when Python wakes. Without JavaScript all stands there as it was
stored, and results are folded below their questions.
"""

import ast
import base64
import copy
import importlib
import json
import re
import subprocess
import sys
from collections import Counter
from itertools import permutations
from pathlib import Path
from zipfile import ZIP_DEFLATED, ZipFile, ZipInfo

import nbformat

from course.explorers.jupyter import CONTROLS
from course.explorers.page import MODULES, View
from course.pictures.stacked import narrow_svgs
from course.predict import Between, Question
from course.publish import pyodide
from course.working_copy import ASKS_IN_WORDS, COMPARES, SUMMARY, hide_answers

ROOT = Path(__file__).parents[2]
RESULTS = json.loads(Path(__file__).with_name("results.json").read_text())
"""The result of each question, by its key: `make notebooks` stores it."""
FILES = [
    *(ROOT / "course" / name for name in ("model.js", "predict.js", "predict.css", "questions.js")),
    *(ROOT / "course/explorers" / name for name in ("page.js", "worker.js", "choice.js", "choice.css")),
    *(ROOT / "course/pictures" / name for name in ("stage.js", "stage.css")),
    *(Path(__file__).with_name("site") / name for name in ("wake.js", "scheme.js", "page.css")),
]
"""What pages load, beside Pyodide, all from one folder."""
STAYS = (
    "<p><em>This explorer needs PyTorch or real ranks, which a browser does not have. These are the steps that it "
    "showed when this page was made.</em></p>"
)
ANSWERED = '<details data-answers="{}"><summary>After your answer</summary>'
SVG = "data:image/svg+xml;base64,"
IMAGE = re.compile(rf'<img [^>]*src="{re.escape(SVG)}([^"]*)"[^>]*>')
RUN_TO_ANSWER = " Run this cell to answer here."


def put_files(folder: Path, cache: Path) -> None:
    """Put into a folder what makes pages live; Pyodide comes from ``cache`` if it is there, else from npm."""
    pyodide.unpack(pyodide.fetch(cache), folder)
    copy_files(folder)
    with ZipFile(folder / "lab.zip", "w", ZIP_DEFLATED, compresslevel=9) as archive:
        for path in plain_files():
            archive.writestr(ZipInfo(str(path)), (ROOT / path).read_bytes(), ZIP_DEFLATED)


def copy_files(folder: Path) -> None:
    """Put into a folder what every page loads."""
    folder.mkdir(parents=True, exist_ok=True)
    for path in FILES:
        (folder / path.name).write_bytes(path.read_bytes())


def plain_files() -> list[Path]:
    """Return the files of the packages that the page's view of any explorer imports, and the tables that they read."""
    modules = ["course.explorers.page", *(f"course.explorers.{name}" for name in MODULES.values())]
    code = f"import sys, {', '.join(modules)}\nfor each in sys.modules.values(): print(getattr(each, '__file__', None))"
    printed = subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True, capture_output=True, text=True).stdout
    files = sorted(path for path in map(Path, printed.splitlines()) if path.is_relative_to(ROOT))
    ours = [path.relative_to(ROOT) for path in files]
    tables = sorted((ROOT / "course/sizing").glob("*.csv"))
    return [path for path in ours if path.parts[0] in ("labkit", "labtrain", "course")] + [
        path.relative_to(ROOT) for path in tables
    ]


def enliven(notebook: nbformat.NotebookNode) -> nbformat.NotebookNode:
    """Return the notebook as its page shows it."""
    living, seen, key = copy.deepcopy(notebook), Counter(), ""
    hide_answers(living)
    asked = _questions(notebook)
    for cell, stored in zip(living.cells, notebook.cells):
        if cell.cell_type != "code":
            if cell.source != stored.source:
                cell.source = cell.source.replace(SUMMARY, ANSWERED.format(key), 1)
            if ASKS_IN_WORDS in cell.source:
                key = ""  # only the reader knows the answer
            continue
        if compared := COMPARES.search(cell.source):
            key = asked[compared[0].removesuffix(".compare(")].key
        if stored.outputs and not cell.outputs:
            cell.metadata["answers"] = key  # extension.py folds the outputs
        cell.outputs, cell.execution_count = copy.deepcopy(stored.outputs), stored.execution_count
        call, place = explorer_call(cell), ""
        if cell.source in asked:
            place = question_place(asked[cell.source])
            cell.metadata["tags"] = [*cell.metadata.get("tags", []), "remove-input"]  # the form says all of it
        elif call:
            name = call[0].removesuffix("_explorer")
            seen[name] += 1
            place = explorer_place(*call, name + (f"-{seen[name]}" if seen[name] > 1 else ""))
        for output in cell.outputs:
            if html := output.get("data", {}).get("text/html"):
                html = html.replace(CONTROLS, "" if call else STAYS).replace(RUN_TO_ANSWER, "")
                html = folded(html)
                output.data["text/html"] = f"<div {place}>{html}</div>" if place else html
    return living


def folded(html: str) -> str:
    """Return HTML whose stored pictures, which are steps of one, have a narrow form for a telephone if they can."""
    narrowed = iter(narrow_svgs([base64.b64decode(svg).decode() for svg in IMAGE.findall(html)]))

    def narrow(image: re.Match) -> str:
        svg = next(narrowed)
        return with_narrow(image[0], SVG + base64.b64encode(svg.encode()).decode()) if svg else image[0]

    return IMAGE.sub(narrow, html)


def with_narrow(image: str, address: str) -> str:
    """Return an image with the one that a telephone shows instead."""
    return f'<picture><source media="(max-width: 600px)" srcset="{address}">{image}</picture>'


def explorer_call(cell: nbformat.NotebookNode) -> tuple[str, list, dict] | None:
    """Return the explorer in a cell's stored output, and its values; None if there is none that a page can show.

    An explorer of what ranks have computed, which the output does not hold, begins as it does without values.
    """
    for output in cell.get("outputs", []):
        text = output.get("data", {}).get("text/plain", "")
        if text.partition("(")[0] in MODULES:
            call = ast.parse(text, mode="eval").body
            assert isinstance(call, ast.Call)
            name, values = text.partition("(")[0], [ast.literal_eval(value) for value in call.args]
            named = {str(each.arg): ast.literal_eval(each.value) for each in call.keywords}
            try:
                getattr(importlib.import_module(f"course.explorers.{MODULES[name]}"), name)(*values, **named)
            except ValueError:
                return name, [], {}
            return name, values, named
    return None


def explorer_place(name: str, values: list, named: dict, view: str, screen: str = "") -> str:
    """Return the attributes of an explorer's place, as page.js reads them; ``view`` is its key in addresses."""
    first = View(name, values, named, screen).make()
    given = f"data-values='{_in_quotes([values, named])}' data-first='{_in_quotes(first)}'"
    if screen:
        given += f' data-screen="{screen}"'
    elif (narrow := View(name, values, named, "phone").make()["stage"]) != first["stage"]:
        given += f" data-narrow='{_in_quotes(narrow['steps'])}'"
    return f'data-explorer="{name}" data-view="{view}" {given} class="labkit-place"'


def question_place(question: Question) -> str:
    """Return the attributes of a question's place, as questions.js reads them."""
    words = list(question.words.values())
    if question.kind == "number":
        wrong = [([*each] if isinstance(each, Between) else each, advice) for each, advice in question.wrong]
    else:
        answers = map(list, permutations(words)) if question.kind == "order" else words
        wrong = [(each, advice) for each in answers if (advice := question.mistake(each)) is not None]
    about = dict(key=question.key, kind=question.kind, text=question.html, words=words, unit=question.unit, wrong=wrong)
    about |= dict(result=RESULTS[question.key], tolerance=getattr(question, "tolerance", 0))
    return f"data-question='{_in_quotes(about)}'"


def _in_quotes(value) -> str:
    """Return JSON for an attribute in single quotes: it has many double ones, which need six letters each there."""
    text = json.dumps(value, ensure_ascii=False, separators=(",", ":"))
    return text.replace("&", "&amp;").replace("'", "&#39;").replace("<", "&lt;")


def _questions(notebook: nbformat.NotebookNode) -> dict[str, Question]:
    """Return the questions of a notebook by the words of the cells that show them."""
    code = "\n".join(cell.source for cell in notebook.cells if cell.cell_type == "code")
    imported = re.search(r"^from course\.predictions import (\w+) as predict$", code, re.MULTILINE)
    if not imported:
        return {}
    module = importlib.import_module(f"course.predictions.{imported[1]}")
    return {f"predict.{name}": each for name, each in vars(module).items() if isinstance(each, Question)}
