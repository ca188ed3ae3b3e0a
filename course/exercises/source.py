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


def rebound(function: Callable) -> str:
    """Say which assignment in a loop is lost: to the loop's own name, which nobody reads afterwards."""
    nodes = _nodes(function)
    for loop in (node for node in nodes if isinstance(node, ast.For)):
        for place, line in enumerate(loop.body):
            if not isinstance(line, ast.Assign) or not isinstance(line.targets[0], ast.Name):
                continue
            name = line.targets[0].id
            if name in _names(loop.target) & _names(line.value) and name not in _names(*loop.body[place + 1 :]):
                return (
                    f"`{ast.unparse(line)}` gives the name `{name}` to a new tensor, and the one in the list stays as "
                    "it was. Change that one in place, as `/=` does, or append the new one to a list of results."
                )
    return ""


def received_into_what_is_sent(function: Callable) -> str:
    """Say which tensor one batch of messages both sends and receives into: what arrives may be sent on."""
    nodes = _nodes(function)
    calls = [node for node in nodes if isinstance(node, ast.Call) and ast.unparse(node.func).endswith("P2POp")]
    messages = [[ast.unparse(argument) for argument in call.args[:2]] for call in calls if len(call.args) > 1]
    sent, received = (
        [tensor for operation, tensor in messages if operation.endswith(end)] for end in ("isend", "irecv")
    )
    if not (both := [tensor for tensor in received if tensor in sent]):
        return ""
    return (
        f"`{both[0]}` is sent and received into at the same time: what arrives may overwrite it before it has left. "
        f"Receive into a new tensor, as from `torch.empty_like({both[0]})`."
    )


def sized_by_data(function: Callable) -> str:
    """Say which call makes a tensor as long as the numbers in it ask for.

    >>> sized_by_data(lambda x: torch.bincount(x, minlength=8))
    ''
    """
    for call in (node for node in _nodes(function) if isinstance(node, ast.Call)):
        name, given = ast.unparse(call.func).split(".")[-1], len(call.args) + len(call.keywords)
        if (name == "bincount" and "minlength" not in ast.unparse(call)) or (name == "one_hot" and given < 2):
            return (
                f"`{ast.unparse(call)}` is as long as the largest number in it asks for: not the same in each case, or "
                f"on each rank. Say how long it is, by `{'minlength' if name == 'bincount' else 'num_classes'}=`."
            )
    return ""


def _nodes(function: Callable) -> list[ast.AST]:
    return [node for body in _bodies(function) for statement in body for node in ast.walk(statement)]


def _names(*nodes: ast.AST) -> set[str]:
    return {each.id for node in nodes for each in ast.walk(node) if isinstance(each, ast.Name)}


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
