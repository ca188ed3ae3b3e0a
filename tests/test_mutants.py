"""Mutants of the packages: valid changes, the same ones for the same seed; and whether tests notice them."""

import ast
from dataclasses import replace

import pytest

from tools.mutants import ROOT, Mutant, draw, mutants_of, noticed_by

CODE = """def larger(a: int = 1, b=2) -> int | None:
    if a < b:
        a = b + 0
    assert a >= b
    return a


def unused(x):
    return "é" if x is None else x * 3
"""
TEST = "from labkit.a import larger\n\n\ndef test_larger():\n    assert larger(1, 3) == 3 and larger(5, 3) == 5\n"


def test_the_same_seed_draws_the_same_valid_mutants():
    mutants = draw(60, seed=0)
    assert mutants == draw(60, seed=0) != draw(60, seed=1)
    assert len({*mutants}) == 60
    for mutant in mutants:
        source = (ROOT / mutant.path).read_text()
        changed = source[: mutant.start] + mutant.after + source[mutant.end :]
        assert ast.dump(ast.parse(changed)) != ast.dump(ast.parse(source)), mutant


@pytest.fixture
def project(tmp_path):
    (tmp_path / "labkit").mkdir()
    (tmp_path / "labkit" / "__init__.py").touch()
    (tmp_path / "labkit" / "a.py").write_text(CODE)
    for folder in ("labkit", "labtrain"):
        (tmp_path / "tests" / folder).mkdir(parents=True)
    (tmp_path / "tests" / "labkit" / "test_a.py").write_text(TEST)
    return tmp_path


def test_what_is_changed(project):
    changes = {(mutant.before, mutant.after) for mutant in mutants_of(project / "labkit" / "a.py", project)}
    assert changes == {
        ("1", "2"),  # a default
        ("2", "3"),
        ("a < b", "(a <= b)"),
        ("a < b", "not (a < b)"),
        ("b + 0", "(b - 0)"),
        ("0", "1"),
        ("x is None", "(x is not None)"),
        ("x is None", "not (x is None)"),
        ("x * 3", "(x + 3)"),
        ("3", "4"),
    }


@pytest.mark.parametrize(("after", "expected"), [("not (a < b)", "own"), ("(a <= b)", "none")])
def test_a_change_is_noticed_or_not(project, after, expected):
    """For equal numbers the larger one is either, so no test could notice the second."""
    mutants: list[Mutant] = mutants_of(project / "labkit" / "a.py", project)
    (mutant,) = [mutant for mutant in mutants if mutant.after == after]
    assert noticed_by(mutant, project) == expected
    with pytest.raises(AssertionError):
        replace(mutant, before="b > a").apply(project)
