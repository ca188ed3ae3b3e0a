"""Takes one_file.py apart: a file of stubs for a learner, and the learner's parts in the place of ours.

A part is a function or a class. The parts of a step that are not written yet are ours, so each step can be done alone.
"""

import ast
import re
from collections.abc import Iterator, Mapping
from functools import cache
from importlib.resources import files
from typing import Any

FOLDER = files("course.project")  # in a handout a place in an archive, so not a Path
ONE_FILE = FOLDER / "one_file.py"
STUBS = FOLDER / "stubs.py"
Part = ast.FunctionDef | ast.ClassDef  # what a learner writes, or not
HEADER = '''"""My Megatron. The parts that raise NotImplementedError are mine to write; notebook 18 checks them.

    torchrun --nproc-per-node 8 my_megatron.py --tp 2 --pp 2 --text my_megatron.py
"""'''


def parts_of(source: str) -> dict[str, Part]:
    """Return the functions and classes that a file defines, by name, as syntax trees."""
    return {node.name: node for node in ast.parse(source).body if isinstance(node, Part)}


@cache  # it is asked for each part and each known mistake
def steps() -> dict[str, int]:
    """Return the parts that a learner writes, and to which step each belongs."""
    text = STUBS.read_text()
    found = {}
    for name, part in parts_of(text).items():
        [step] = set(re.findall(r"step (\d)", ast.get_source_segment(text, part) or ""))
        found[name] = int(step)
    return found


def source_of(source: str, name: str) -> str:
    """Return the text of one part of a file."""
    text = ast.get_source_segment(source, parts_of(source)[name])
    assert text is not None
    return text


def replaced(source: str, new: Mapping[str, str]) -> str:
    """Return a file with a ``new`` text in the place of some of its functions and classes."""
    lines = source.splitlines()
    parts = parts_of(source)
    for name in sorted(new, key=lambda name: parts[name].lineno, reverse=True):  # from the end: lines keep numbers
        part = parts[name]
        lines[part.lineno - 1 : part.end_lineno] = new[name].splitlines()
    return "\n".join(lines) + "\n"


def to_begin_with() -> str:
    """Return the file to begin with: one_file.py, with a stub in the place of each part."""
    stubs = STUBS.read_text()
    text = replaced(ONE_FILE.read_text(), {name: source_of(stubs, name) for name in parts_of(stubs)})
    end = ast.parse(text).body[0].end_lineno  # of the docstring
    return "\n".join([HEADER, *text.splitlines()[end:]]) + "\n"


def filled_in(source: str) -> str:
    """Return a learner's file, with our parts in the place of stubs."""
    ours = ONE_FILE.read_text()
    written = written_in(source)
    stubs = [name for name in steps() if name in parts_of(source) and name not in written]
    return replaced(source, {name: source_of(ours, name) for name in stubs})


def is_blank(part: Part) -> bool:
    """Return whether some of a part is still to be written."""
    return "NotImplementedError" in ast.unparse(part)


def written_in(source: str) -> list[str]:
    """Return the names of the parts that a learner has written."""
    parts = parts_of(source)
    return [name for name in steps() if name in parts and not is_blank(parts[name])]


def define(source: str, filename: str, names: list[str], scope: dict[str, Any]) -> None:
    """Run one_file.py in ``scope``, with the parts ``names`` from a learner's ``source``, and what these may use."""
    for node, file in _statements(source, filename, names):
        exec(compile(ast.Module([node], []), file, "exec"), scope)


def _statements(source: str, filename: str, names: list[str]) -> Iterator[tuple[ast.stmt, str]]:
    ours = ast.parse(ONE_FILE.read_text()).body
    theirs = parts_of(source)
    known = parts_of(ONE_FILE.read_text())
    is_first_part = True
    for node in ours:
        if not isinstance(node, Part):
            yield node, str(ONE_FILE)
            continue
        if is_first_part:  # after one_file's own imports, and before anything of the learner's
            yield from ((other, filename) for other in _helpers(source, set(known)))
            is_first_part = False
        if node.name in names:
            yield theirs[node.name], filename
        else:
            yield node, str(ONE_FILE)


def _helpers(source: str, known: set[str]) -> Iterator[ast.stmt]:
    """Yield a learner's own imports, functions and classes, which one_file.py does not have; no other statements."""
    for node in ast.parse(source).body:
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            yield node
        if isinstance(node, Part) and node.name not in known:
            yield node
