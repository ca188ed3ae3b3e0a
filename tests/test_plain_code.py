"""labkit and labtrain are written to be read: one thought for each statement, and functions that fit on a screen."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGES = [path for path in (ROOT / "labkit", ROOT / "labtrain") if path.is_dir()]
MAX_LINES = 50  # of a function, from its `def` to its end

# How often each file breaks a rule. A number may only go down: one that is too high fails as well.
EXCEPTIONS: dict[str, dict[str, int]] = {}


def parallel_assignments(tree: ast.AST) -> Iterator[int]:
    """Yield the line of each ``a, b = x, y`` of unrelated values. A swap is none: a name occurs on both sides."""
    for node in ast.walk(tree):
        if not isinstance(node, ast.Assign):
            continue
        target, value = node.targets[0], node.value
        if isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple):
            names = {ast.unparse(element) for element in target.elts}
            if names.isdisjoint(ast.unparse(element) for element in value.elts):
                yield node.lineno


def nested_conditionals(tree: ast.AST) -> Iterator[int]:
    """Yield the line of each ``x if y else z`` that has one inside."""
    for node in ast.walk(tree):
        if isinstance(node, ast.IfExp):
            inside = [child for child in ast.walk(node) if isinstance(child, ast.IfExp)]
            if len(inside) > 1:
                yield node.lineno


def long_functions(tree: ast.AST) -> Iterator[int]:
    for node in ast.walk(tree):
        is_function = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        if is_function and node.end_lineno - node.lineno + 1 > MAX_LINES:
            yield node.lineno


RULES = {
    "parallel assignments": parallel_assignments,
    "nested conditionals": nested_conditionals,
    "long functions": long_functions,
}


def lines_by_rule(tree: ast.AST) -> dict[str, list[int]]:
    found = {name: sorted(lines_of(tree)) for name, lines_of in RULES.items()}
    return {name: lines for name, lines in found.items() if lines}


def test_code_is_plain_but_for_the_exceptions():
    problems = []
    table = {}
    paths = [path for package in PACKAGES for path in sorted(package.rglob("*.py"))]
    for path in paths:
        name = str(path.relative_to(ROOT))
        found = lines_by_rule(ast.parse(path.read_text()))
        if found:
            table[name] = {rule: len(lines) for rule, lines in found.items()}
        allowed = EXCEPTIONS.get(name, {})
        for rule in RULES:
            lines = found.get(rule, [])
            if len(lines) != allowed.get(rule, 0):
                problems.append(f"{name}: {len(lines)} {rule}, {allowed.get(rule, 0)} allowed; lines {lines}")
    gone = EXCEPTIONS.keys() - {str(path.relative_to(ROOT)) for path in paths}
    problems += [f"{name} does not exist" for name in gone]
    rows = "\n".join(f'    "{name}": {rules},' for name, rules in table.items()).replace("'", '"')
    advice = f"Mend what is new. If there is less than before, the table becomes:\n{rows}"
    assert not problems, "\n".join([*problems, advice])


@pytest.mark.parametrize("package", PACKAGES, ids=lambda path: path.name)
def test_lines_have_at_most_100_columns(package):
    """ruff holds that where the package says so."""
    assert "line-length = 100\n" in (package / "ruff.toml").read_text()


EXAMPLES = {
    "a, b = x, y": ["parallel assignments"],
    "a.b, c[0] = 1, 2": ["parallel assignments"],
    "a, b = b, a": [],
    "a, b = b, a + b": [],
    "a, b = f(x)": [],
    "a, *b = x": [],
    "a = x, y": [],
    "a = x if y else (z if u else v)": ["nested conditionals"],
    "a = [x if y else z for y in (u if v else w)]": [],
    "a = x if y else z": [],
    "def f():" + "\n    x" * (MAX_LINES - 1): [],
    "def f():" + "\n    x" * MAX_LINES: ["long functions"],
}


@pytest.mark.parametrize("source", EXAMPLES)
def test_what_the_rules_find(source):
    assert list(lines_by_rule(ast.parse(source))) == EXAMPLES[source]
