"""Makes mutants of a function: copies of it, each with one small fault.

A check that accepts a mutant either has no case that tells it from the solution, or the two are the same function.
"""

import ast
import itertools
import linecache
import re
import warnings
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, field

from course.exercises.source import source_of

SWAPPED = {
    "sum": ["mean"], "mean": ["sum"], "max": ["min"], "min": ["max"], "argmax": ["argmin"], "MAX": ["MIN", "SUM"],
    "zeros": ["ones"], "zeros_like": ["ones_like"], "new_zeros": ["new_ones"], "ceil": ["floor"], "sqrt": ["square"],
    "square": ["abs"], "exp": ["log"], "log": ["exp"], "logaddexp": ["maximum"], "gcd": ["lcm"], "all": ["any"],
    "get_rank": ["get_world_size"], "get_world_size": ["get_rank"],
}  # fmt: skip
"""Functions and constants that people take for one another."""
OPERATORS = {
    ast.Add: [ast.Sub, ast.Mult], ast.Sub: [ast.Add], ast.Mult: [ast.Div, ast.Add], ast.Div: [ast.Mult, ast.FloorDiv],
    ast.FloorDiv: [ast.Mult, ast.Div], ast.Mod: [ast.FloorDiv], ast.BitAnd: [ast.BitOr],
}  # fmt: skip
COMPARISONS = {
    ast.Lt: [ast.LtE, ast.GtE], ast.LtE: [ast.Lt, ast.Gt], ast.Gt: [ast.GtE, ast.LtE], ast.GtE: [ast.Gt, ast.Lt],
    ast.Eq: [ast.NotEq], ast.NotEq: [ast.Eq], ast.Is: [ast.IsNot], ast.IsNot: [ast.Is],
}  # fmt: skip
SYMMETRIC = ("min", "max", "gcd", "logaddexp")
COMMUTES = (ast.Add, ast.Mult, ast.BitAnd)


@dataclass(frozen=True)
class Mutant:
    """A ``function`` with one fault, and the ``lines`` of its source in which it differs."""

    lines: str
    function: Callable


@dataclass(frozen=True)
class Names:
    """What a function's names stand for when it runs: the kind of each, and the symbol of each size that it is given.

    Expressions for the same size have the same symbol.
    """

    kinds: dict[str, str] = field(default_factory=dict)
    symbols: dict[str, str] = field(default_factory=dict)


def sizes_in(name: str, value) -> dict[str, int | float]:
    """Return the sizes that an argument has, by an expression for each.

    >>> sizes_in("steps", [[1, 2, 3], [4, 5, 6]])
    {'len(steps)': 2, 'len(steps[0])': 3}
    """
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        return {name: value}
    if hasattr(value, "shape"):
        return {f"{name}.shape[{dim}]": size for dim, size in enumerate(value.shape)}
    if isinstance(value, (list, tuple)):
        is_nested = bool(value) and not isinstance(value[0], (int, float, str))
        return {f"len({name})": len(value)} | (sizes_in(f"{name}[0]", value[0]) if is_nested else {})
    return {}


def mutants(function: Callable, names: Names) -> Iterator[Mutant]:
    """Yield each mutant of a function once, but none that only writes a size in a different way."""
    tree = ast.parse(source_of(function))
    before = ast.unparse(tree)
    inline = _Inline(before, names)
    seen = {inline(before)}
    for after in _sources(tree, names):
        if (plain := inline(after)) not in seen:
            seen.add(plain)
            yield Mutant(_difference(before, after), _compiled(after, function))


def _sources(tree: ast.Module, names: Names) -> Iterator[str]:
    """Yield the source of each mutant of the one function in a tree."""
    function = tree.body[0]
    assert isinstance(function, ast.FunctionDef)
    strings = {node.value for node in ast.walk(tree) if isinstance(node, ast.Constant) and isinstance(node.value, str)}
    for parent, part, place in _sites(function):
        siblings = getattr(parent, part)
        node = siblings if place is None else siblings[place]
        for new in _changed(node, names, strings):
            _put(parent, part, place, new)
            yield ast.unparse(ast.fix_missing_locations(tree))
            _put(parent, part, place, node)
    arguments = [each.arg for each in function.args.args]
    for one, other in itertools.combinations(arguments, 2):
        if names.kinds.get(one) == names.kinds.get(other):
            yield _with_exchanged(tree, {one: other, other: one})


def _sites(node: ast.AST) -> Iterator[tuple[ast.AST, str, int | None]]:
    """Yield each place of a node below this one: whose part it is, which, and where in it."""
    for part in node._fields:
        if isinstance(node, ast.FunctionDef) and part != "body":
            continue
        value = getattr(node, part, None)
        for place, each in enumerate(value) if isinstance(value, list) else [(None, value)]:
            if isinstance(each, ast.AST):
                yield node, part, place
                if not _is_last(each):
                    yield from _sites(each)


def _is_last(node: ast.AST) -> bool:
    """Whether this is the number -1, mostly the last dim or item: one off is the first, or does not exist."""
    return isinstance(node, ast.UnaryOp) and isinstance(node.operand, ast.Constant)


def _put(parent: ast.AST, part: str, place: int | None, node: ast.AST) -> None:
    if place is None:
        setattr(parent, part, node)
    else:
        getattr(parent, part)[place] = node


def _changed(node: ast.AST, names: Names, strings: Collection[str]) -> Iterator[ast.AST]:
    """Yield what a fault may put in the place of a node."""
    if isinstance(getattr(node, "ctx", None), (ast.Store, ast.Del)):
        return
    if isinstance(node, (ast.Expr, ast.Assign, ast.AugAssign)):
        yield ast.Pass()
    if change := CHANGES.get(type(node)):
        yield from change(node)
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        yield from (ast.Constant(other) for other in sorted(strings - {node.value}))
        yield from map(ast.Constant, _rearranged(node.value.split(" ")))
    if isinstance(node, ast.Name):
        kind = names.kinds.get(node.id)
        yield from (
            ast.Name(other, ast.Load())
            for other, its in names.kinds.items()
            if kind and its == kind and other != node.id
        )
        if kind == "float":
            yield ast.Call(ast.Name("int", ast.Load()), [node], [])
    if _is_size(node, names):
        yield from (ast.parse(size, mode="eval").body for size in names.symbols if size != ast.unparse(node))


def _is_size(node: ast.AST, names: Names) -> bool:
    if isinstance(node, ast.Name):
        return names.kinds.get(node.id) in ("int", "float")
    text = ast.unparse(node) if isinstance(node, (ast.Call, ast.Subscript)) else ""
    return text.startswith(("len(", "dist.get_")) or ".shape[" in text or ".size(" in text


def _constant(node: ast.Constant) -> Iterator[ast.AST]:
    if isinstance(node.value, bool):
        yield ast.Constant(not node.value)
    elif isinstance(node.value, (int, float)):
        is_large = abs(node.value) >= 1000  # and differs from the next number by less than answers may
        yield from (ast.Constant(node.value * 2),) if is_large else map(ast.Constant, (node.value + 1, node.value - 1))


def _rearranged(words: list[str]) -> Iterator[str]:
    """Yield a text of several words with one missing, and with two in a different order."""
    for place in range(len(words) - 1):
        one, other = words[place : place + 2]
        yield " ".join([*words[:place], *words[place + 1 :]])
        yield " ".join([*words[:place], other, one, *words[place + 2 :]])


def _operation(node: ast.BinOp) -> Iterator[ast.AST]:
    for operator in OPERATORS.get(type(node.op), []):
        yield ast.BinOp(node.left, operator(), node.right)
    if not isinstance(node.op, COMMUTES):
        yield ast.BinOp(node.right, node.op, node.left)
    yield node.left
    yield node.right


def _augmented(node: ast.AugAssign) -> Iterator[ast.AST]:
    for operator in OPERATORS.get(type(node.op), []):
        yield ast.AugAssign(node.target, operator(), node.value)
    yield ast.Assign([node.target], node.value)


def _comparison(node: ast.Compare) -> Iterator[ast.AST]:
    for operator in COMPARISONS.get(type(node.ops[0]), []):
        yield ast.Compare(node.left, [operator(), *node.ops[1:]], node.comparators)


def _both(node: ast.BoolOp) -> Iterator[ast.AST]:
    yield ast.BoolOp(ast.Or() if isinstance(node.op, ast.And) else ast.And(), node.values)
    for place in range(len(node.values)):
        left = [*node.values[:place], *node.values[place + 1 :]]
        yield left[0] if len(left) == 1 else ast.BoolOp(node.op, left)


def _call(node: ast.Call) -> Iterator[ast.AST]:
    if isinstance(node.func, ast.Name):
        yield from (ast.Call(ast.Name(other, ast.Load()), node.args, node.keywords) for other in _other(node.func.id))
    elif isinstance(node.func, ast.Attribute):
        yield node.func.value
    yield from node.args[:1]
    for place in range(len(node.args)):
        yield ast.Call(node.func, [*node.args[:place], *node.args[place + 1 :]], node.keywords)
    for place in range(len(node.keywords)):
        yield ast.Call(node.func, node.args, [*node.keywords[:place], *node.keywords[place + 1 :]])
    for place in range(len(node.args) - 1 if ast.unparse(node.func).split(".")[-1] not in SYMMETRIC else 0):
        one, other = node.args[place : place + 2]
        yield ast.Call(node.func, [*node.args[:place], other, one, *node.args[place + 2 :]], node.keywords)


def _attribute(node: ast.Attribute) -> Iterator[ast.AST]:
    yield from (ast.Attribute(node.value, other, node.ctx) for other in _other(node.attr))
    if node.attr == "T":
        yield node.value


def _other(name: str) -> list[str]:
    return SWAPPED.get(name, [])


def _subscript(node: ast.Subscript) -> Iterator[ast.AST]:
    if isinstance(node.slice, ast.Slice):
        for part in ("lower", "upper", "step"):
            if getattr(node.slice, part):
                parts = {each: getattr(node.slice, each) for each in ("lower", "upper", "step")} | {part: None}
                yield ast.Subscript(node.value, ast.Slice(**parts), node.ctx)
    elif not isinstance(node.slice, ast.Tuple):
        yield ast.Subscript(node.value, ast.Constant(0), node.ctx)


def _loop(node: ast.For) -> Iterator[ast.AST]:
    items = ast.Call(ast.Name("list", ast.Load()), [node.iter], [])
    for part in (ast.Slice(lower=ast.Constant(1)), ast.Slice(upper=ast.Constant(-1))):
        yield ast.For(node.target, ast.Subscript(items, part, ast.Load()), node.body, node.orelse)


def _condition(node: ast.If) -> Iterator[ast.AST]:
    yield from (ast.If(ast.Constant(always), node.body, node.orelse) for always in (True, False))


def _choice(node: ast.IfExp) -> Iterator[ast.AST]:
    yield node.body
    yield node.orelse
    yield ast.IfExp(node.test, node.orelse, node.body)


def _unary(node: ast.UnaryOp) -> Iterator[ast.AST]:
    yield ast.Constant(0) if _is_last(node) else node.operand


def _tuple(node: ast.Tuple) -> Iterator[ast.AST]:
    if all(isinstance(each, ast.Constant) for each in node.elts):
        return
    for place in range(len(node.elts) - 1):
        one, other = node.elts[place : place + 2]
        yield ast.Tuple([*node.elts[:place], other, one, *node.elts[place + 2 :]], node.ctx)


CHANGES: dict[type, Callable] = {
    ast.Constant: _constant, ast.BinOp: _operation, ast.AugAssign: _augmented, ast.Compare: _comparison,
    ast.BoolOp: _both, ast.Call: _call, ast.Attribute: _attribute, ast.Subscript: _subscript, ast.For: _loop,
    ast.If: _condition, ast.IfExp: _choice, ast.UnaryOp: _unary, ast.Tuple: _tuple,
}  # fmt: skip


class _Inline(ast.NodeTransformer):
    """Writes each size by its one symbol, also where a local name stands for it."""

    def __init__(self, source: str, names: Names):
        self.symbols = dict(names.symbols)
        for node in ast.walk(ast.parse(source)):
            if isinstance(node, ast.Assign):
                self._note(node.targets[0], node.value)

    def __call__(self, source: str) -> str:
        return ast.unparse(self.visit(ast.parse(source)))

    def _note(self, target: ast.expr, value: ast.expr) -> None:
        if isinstance(target, ast.Name) and (symbol := self._symbol(value)):
            self.symbols[target.id] = symbol
        elif isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple):
            for one, other in zip(target.elts, value.elts):
                self._note(one, other)
        elif isinstance(target, ast.Tuple) and isinstance(value, ast.Attribute) and value.attr == "shape":
            for dim, one in enumerate(target.elts):
                self._note(one, ast.Subscript(value, ast.Constant(dim), ast.Load()))

    def _symbol(self, node: ast.expr) -> str | None:
        text = ast.unparse(node)
        if size := re.fullmatch(r"(\w+)\.size\((-?\d)\)", text):
            dims = [each for each in self.symbols if each.startswith(f"{size[1]}.shape[")]
            text = dims[int(size[2])] if dims else text
        if text.startswith("len(") and f"{text[4:-1]}.shape[0]" in self.symbols:
            text = f"{text[4:-1]}.shape[0]"
        return self.symbols.get(text)

    def visit(self, node: ast.AST) -> ast.AST:
        is_read = isinstance(node, ast.expr) and not isinstance(getattr(node, "ctx", None), ast.Store)
        if is_read and (symbol := self._symbol(node)):
            return ast.Constant(symbol)
        node = self.generic_visit(node)
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mult):
            first, *others = sorted(_factors(node), key=ast.unparse)  # a product of numbers, in any order
            for each in others:
                first = ast.BinOp(first, ast.Mult(), each)
            return first
        return node


def _factors(node: ast.expr) -> list[ast.expr]:
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mult):
        return [*_factors(node.left), *_factors(node.right)]
    return [node]


class _Exchange(ast.NodeTransformer):
    def __init__(self, others: dict[str, str]):
        self.others = others

    def visit_Name(self, node: ast.Name) -> ast.AST:
        return ast.Name(self.others.get(node.id, node.id), node.ctx)


def _with_exchanged(tree: ast.Module, others: dict[str, str]) -> str:
    copied = ast.parse(ast.unparse(tree))
    return ast.unparse(_Exchange(others).visit(copied))


def _difference(before: str, after: str) -> str:
    """Return the lines of ``after`` that are not in ``before``, or what was taken away."""
    old, new = (text.splitlines() for text in (before, after))
    left = [line.strip() for line in new if line not in old]
    gone = [line.strip() for line in old if line not in new]
    return "; ".join(left) if left != ["pass"] and left else f"without {'; '.join(gone)}"


def _compiled(source: str, function: Callable) -> Callable:
    filename = f"<mutant {abs(hash(source))}>"
    linecache.cache[filename] = (len(source), None, source.splitlines(keepends=True), filename)
    namespace = dict(function.__globals__)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", SyntaxWarning)  # as of 0[0]
        exec(compile(source, filename, "exec"), namespace)
    return namespace[function.__name__]
