"""Breaks labkit and labtrain on purpose, one small change at a time, and counts how many changes the tests notice.

A mutant is the code with one operator, constant or condition changed. The same seed draws the same mutants of the same
code, so the score before tests are rewritten can be compared with the score after. Each mutant is tried in a copy of
the last commit, first by the tests of its own folder, and if these notice nothing, by all tests of labkit and labtrain.
60 mutants take hours: `python -m tools.mutants --help`. What is done is kept in a file, so that a run can go on.
"""

import argparse
import ast
import json
import os
import random
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ("labkit", "labtrain")
EVERYTHING = ["tests/labkit", "tests/labtrain"]
MOST_SECONDS = 1500  # for a folder's tests or for all: a mutant that makes them hang is noticed, too

COMPARISONS = {
    ast.Lt: "<=",
    ast.LtE: "<",
    ast.Gt: ">=",
    ast.GtE: ">",
    ast.Eq: "!=",
    ast.NotEq: "==",
    ast.Is: "is not",
    ast.IsNot: "is",
    ast.In: "not in",
    ast.NotIn: "in",
}
ARITHMETIC = {ast.Add: "-", ast.Sub: "+", ast.Mult: "+", ast.FloorDiv: "*", ast.Div: "*", ast.Mod: "//"}
FUNCTIONS = {"min": "max", "max": "min", "any": "all", "all": "any"}


@dataclass(frozen=True)
class Mutant:
    """One changed place of a file: its characters from start to end, and what stands there instead."""

    path: str  # below the root
    line: int
    start: int
    end: int
    before: str
    after: str

    def apply(self, folder: Path) -> None:
        """Change the file in a copy of the project."""
        file = folder / self.path
        source = file.read_text()
        assert source[self.start : self.end] == self.before, self
        file.write_text(source[: self.start] + self.after + source[self.end :])

    def __str__(self) -> str:
        return f"{self.path}:{self.line}: {self.before} -> {self.after}"


def mutants_of(path: Path, root: Path = ROOT) -> list[Mutant]:
    """Return all mutants of a file, in the order in which they stand there."""
    source = path.read_text()
    starts = [0]
    for line in source.splitlines(keepends=True):
        starts.append(starts[-1] + len(line))

    def offset(line: int, column: int) -> int:
        """Return where in the file a node begins or ends: ast counts bytes within a line."""
        text = source[starts[line - 1] : starts[line]]
        return starts[line - 1] + len(text.encode()[:column].decode())

    found = []
    for node, after in _changes(ast.parse(source)):
        start = offset(node.lineno, node.col_offset)
        end = offset(node.end_lineno, node.end_col_offset)
        found.append(Mutant(str(path.relative_to(root)), node.lineno, start, end, source[start:end], after))
    return sorted(found, key=lambda mutant: (mutant.start, mutant.end, mutant.after))


def _changes(tree: ast.Module) -> Iterator[tuple[ast.expr, str]]:
    """Yield each expression that can be changed, and its changed source.

    Left out is what no test could notice: annotations, texts of errors, and what only type checkers read.
    """
    pending: list[ast.AST] = [tree]
    while pending:
        node = pending.pop()
        if isinstance(node, (ast.Raise, ast.Assert, ast.JoinedStr)):
            continue
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            continue
        for field, value in ast.iter_fields(node):
            if field in ("annotation", "returns", "decorator_list"):
                continue
            values = value if isinstance(value, list) else [value]
            pending += [child for child in values if isinstance(child, ast.AST)]
        if isinstance(node, ast.expr):
            yield from _changed(node)
        if isinstance(node, (ast.If, ast.While, ast.IfExp)):
            yield node.test, f"not ({ast.unparse(node.test)})"


def _changed(node: ast.expr) -> Iterator[tuple[ast.expr, str]]:
    match node:
        case ast.Compare(left=left, ops=[op], comparators=[right]) if type(op) in COMPARISONS:
            yield node, f"({ast.unparse(left)} {COMPARISONS[type(op)]} {ast.unparse(right)})"
        case ast.BinOp(left=left, op=op, right=right) if type(op) in ARITHMETIC:
            yield node, f"({ast.unparse(left)} {ARITHMETIC[type(op)]} {ast.unparse(right)})"
        case ast.BoolOp(op=op, values=values):
            word = " and " if isinstance(op, ast.Or) else " or "
            yield node, f"({word.join(f'({ast.unparse(value)})' for value in values)})"
        case ast.Constant(value=bool()):
            yield node, str(not node.value)
        case ast.Constant(value=int()):
            yield node, str(node.value + 1)
        case ast.Call(func=ast.Name(id=name)) if name in FUNCTIONS:
            yield node.func, FUNCTIONS[name]


def draw(number: int, seed: int, root: Path = ROOT) -> list[Mutant]:
    """Return so many mutants of the packages, drawn at random, one per file until all files have one."""
    generator = random.Random(seed)
    of_files = []
    for package in PACKAGES:
        for path in sorted((root / package).rglob("*.py")):
            mutants = mutants_of(path, root)
            if mutants:
                of_files.append(mutants)
    drawn: list[Mutant] = []
    while len(drawn) < number:
        generator.shuffle(of_files)
        for mutants in of_files:
            left = [mutant for mutant in mutants if mutant not in drawn]
            if left and len(drawn) < number:
                drawn.append(generator.choice(left))
    return drawn


def tests_of(path: str, root: Path) -> list[list[str]]:
    """Return which tests to try on a mutant of a file: first its own, with its package's refusals, then all."""
    package, *folders, name = Path(path).parts
    own = root / "tests" / package / Path(*folders)
    if not folders or not own.is_dir():
        own = root / "tests" / package / f"test_{Path(folders[0] if folders else name).stem}.py"
    if not own.exists():
        return [EVERYTHING]
    refusals = root / "tests" / package / "test_refusals.py"
    first = [str(tests.relative_to(root)) for tests in (own, refusals) if tests.exists()]
    return [[*first, path], EVERYTHING]


def noticed_by(mutant: Mutant, copy: Path, only_own: bool = False) -> str:
    """Return which tests notice a mutant: "own", "all" or "none"."""
    mutant.apply(copy)
    stages = tests_of(mutant.path, copy)
    names = ["own", "all"][-len(stages) :]
    for name, tests in zip(names, stages):
        is_tried = name == "own" or not only_own
        if is_tried and not pass_in(copy, tests):
            return name
    return "none"


def pass_in(copy: Path, tests: list[str]) -> bool:
    """Return whether tests pass in a copy of the project, in time."""
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-n", "2", "--dist", "loadfile", *tests]
    environment = os.environ | {"PYTHONPATH": str(copy)}  # else commands that tests start would run the healthy code
    try:
        done = subprocess.run(command, cwd=copy, env=environment, capture_output=True, timeout=MOST_SECONDS)
    except subprocess.TimeoutExpired:
        return False
    return done.returncode == 0


@contextmanager
def copy_of_project(root: Path = ROOT) -> Iterator[Path]:
    """Yield a folder with the last commit, which is removed afterwards."""
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder) / "copy"
        subprocess.run(["git", "worktree", "add", "--detach", "--quiet", str(copy), "HEAD"], cwd=root, check=True)
        try:
            yield copy
        finally:
            subprocess.run(["git", "worktree", "remove", "--force", str(copy)], cwd=root, check=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--number", type=int, default=60, help="of mutants")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--list", action="store_true", help="print the mutants, and try none")
    parser.add_argument("--own", action="store_true", help="try a mutant's own tests only: minutes instead of hours")
    parser.add_argument("--results", type=Path, default=ROOT / "build" / "mutants.json", help="what is done already")
    options = parser.parse_args()
    mutants = draw(options.number, options.seed)
    if options.list:
        print(*mutants, sep="\n")
        return
    done = json.loads(options.results.read_text()) if options.results.exists() else []
    noticed = {json.dumps(entry["mutant"]): entry["noticed"] for entry in done}
    if not done:
        with copy_of_project() as copy:
            if not pass_in(copy, EVERYTHING):
                sys.exit("The tests fail without any mutant: mend that first.")
    for number, mutant in enumerate(mutants, start=1):
        key = json.dumps(asdict(mutant))
        if key not in noticed:
            with copy_of_project() as copy:
                noticed[key] = noticed_by(mutant, copy, options.own)
            done.append({"mutant": asdict(mutant), "noticed": noticed[key]})
            options.results.parent.mkdir(exist_ok=True)
            options.results.write_text(json.dumps(done, indent=1))
        print(f"{number:3} {noticed[key]:4} {mutant}", flush=True)
    found = sum(noticed[json.dumps(asdict(mutant))] != "none" for mutant in mutants)
    print(f"{found} of {len(mutants)} mutants are noticed")


if __name__ == "__main__":
    main()
