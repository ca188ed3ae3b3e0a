"""Takes one_file.py apart: a file of stubs for a learner, and the learner's parts in the place of ours.

A part is a function or a class. The parts of a step that are not written yet are ours, so each step can be done alone.
"""

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parent
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


def to_begin_with() -> str:
    """Return the file to begin with: one_file.py, with a stub in the place of each part."""
    ours = ONE_FILE.read_text()
    stubs = STUBS.read_text()
    lines = ours.splitlines()
    parts = parts_of(ours)
    stub_of = parts_of(stubs)
    for name in sorted(stub_of, key=lambda name: parts[name].lineno, reverse=True):  # from the end: lines keep numbers
        part = parts[name]
        stub = ast.get_source_segment(stubs, stub_of[name])
        assert stub is not None
        lines[part.lineno - 1 : part.end_lineno] = stub.splitlines()
    docstring = ast.parse(ours).body[0]
    lines[: docstring.end_lineno] = HEADER.splitlines()
    return "\n".join(lines) + "\n"


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
