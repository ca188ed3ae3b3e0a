"""Reads the source of functions: whether a learner has written one, and which of its arguments it looks at.

A cell's text is in linecache, as a file's is. A function whose text is not known is taken for a stub.
"""

import ast
import inspect
import linecache
import textwrap
from collections.abc import Callable


def source_of(function: Callable) -> str:
    """Return a function's source, as it would stand at the top of a file."""
    return textwrap.dedent(inspect.getsource(function)).strip()


def is_written(function: Callable) -> bool:
    """Whether there is more in a function than in a stub: a docstring, ``...`` or NotImplementedError.

    >>> is_written(lambda values: ...)
    False
    >>> is_written(lambda values: print(values))
    True
    """
    bodies = _bodies(function)
    return bool(bodies) and all(not all(map(_is_blank, body)) for body in bodies)


def unused(function: Callable) -> str:
    """Say which arguments a function never looks at.

    >>> unused(lambda rank, size: rank)
    'Your function does not use `size`.'
    """
    if not (bodies := _bodies(function)):
        return ""
    read = set().union(*map(_names_read, bodies))
    code = function.__code__
    left = [f"`{name}`" for name in code.co_varnames[: code.co_argcount] if name not in read]
    return f"Your function does not use {', '.join(left)}." if left else ""


def _bodies(function: Callable) -> list[list]:
    """Return the body of a function; of several lambdas in one line, those of all: nothing says which one it is."""
    if (code := getattr(function, "__code__", None)) is None:
        return []
    try:
        nodes = ast.walk(ast.parse("".join(linecache.getlines(code.co_filename))))
    except SyntaxError:
        return []
    kind = ast.Lambda if code.co_name == "<lambda>" else ast.FunctionDef
    here = [node for node in nodes if isinstance(node, kind) and _first_line(node) == code.co_firstlineno]
    return [node.body if isinstance(node.body, list) else [node.body] for node in here]


def _first_line(node: ast.FunctionDef | ast.Lambda) -> int:
    """Return the line that a function's code begins with: that of its first decorator, if it has one."""
    return min(each.lineno for each in (*getattr(node, "decorator_list", ()), node))


def _is_blank(node: ast.AST) -> bool:
    if isinstance(node, (ast.Expr, ast.Return)):
        return node.value is None or isinstance(node.value, ast.Constant)
    if isinstance(node, ast.Raise):
        return "NotImplementedError" in ast.dump(node)
    return isinstance(node, (ast.Constant, ast.Pass))


def _names_read(body: list) -> set[str]:
    """Return the names that code looks at, also in `x += 1`."""
    nodes = [node for statement in body for node in ast.walk(statement)]
    changed = [node.target for node in nodes if isinstance(node, ast.AugAssign)]
    loaded = [node for node in nodes if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load)]
    return {name.id for name in (*changed, *loaded) if isinstance(name, ast.Name)}
