"""Makes variants of a solution, each with one small change: an answer that is equal to that of a variant is explained.

Nothing is guessed: a variant is named only after it has run, and has given the learner's answers.
"""

import ast
import copy
import inspect
import itertools
import re
import textwrap
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache, partial

SWAPS: dict[type, tuple[type, ...]] = {
    ast.Add: (ast.Sub, ast.Mult),
    ast.Sub: (ast.Add,),
    ast.Mult: (ast.Div, ast.Add),
    ast.Div: (ast.Mult, ast.FloorDiv),
    ast.FloorDiv: (ast.Mod, ast.Div),
    ast.Mod: (ast.FloorDiv,),
    ast.LtE: (ast.Lt, ast.GtE),
    ast.Lt: (ast.LtE, ast.Gt),
    ast.GtE: (ast.Gt, ast.LtE),
    ast.Gt: (ast.GtE, ast.Lt),
    ast.Eq: (ast.NotEq,),
    ast.NotEq: (ast.Eq,),
    ast.And: (ast.Or,),
    ast.Or: (ast.And,),
}
SIGNS = {
    **{ast.Add: "+", ast.Sub: "-", ast.Mult: "*", ast.Div: "/", ast.FloorDiv: "//", ast.Mod: "%", ast.LtE: "<="},
    **{ast.Lt: "<", ast.GtE: ">=", ast.Gt: ">", ast.Eq: "==", ast.NotEq: "!=", ast.And: "and", ast.Or: "or"},
}
CALLS = {
    "min": ("max",), "max": ("min",), "sum": ("mean",), "mean": ("sum",), "ceil": ("floor",), "exp": ("log",),
    "logaddexp": ("maximum", "add"), "sqrt": ("square",), "square": ("abs",), "argmax": ("argmin",),
}  # fmt: skip
ALONG_DIM = {"chunk", "cat", "sum", "mean", "split", "max", "stack"}
PLAIN = {"dist", "torch", "math", "len", "F", "range", "sum", "min", "max", "list", "isqrt"}
RANK, WORLD = "dist.get_rank()", "dist.get_world_size()"
OTHER_RANKS = {
    "0": "rank 0's part on every rank",
    f"({WORLD} - 1 - {RANK})": "the ranks counted from the end",
    f"(({RANK} + 1) % {WORLD})": "the next rank's number in place of the rank's own",
    f"(({RANK} - 1) % {WORLD})": "the number of the rank before in place of the rank's own",
}


@dataclass(frozen=True)
class Variant:
    """A solution with one change, and in words what it is."""

    said: str
    function: Callable

    def __str__(self) -> str:
        return f"In all cases your answers are those of the right function with one change: {self.said}."


@cache
def variants(solution: Callable) -> list[Variant]:
    """Return all variants of a solution that stands in a file under its name.

    >>> [variant.said for variant in variants(_example) if variant.function(7, 2) == 6]
    ['`rank // t` in place of `rank % t`']
    """
    if not inspect.isfunction(solution) or solution.__name__ == "<lambda>":
        return []
    tree = ast.parse(textwrap.dedent(inspect.getsource(solution)))
    [function] = tree.body
    assert isinstance(function, ast.FunctionDef)
    parameters = [argument.arg for argument in function.args.args]
    reader = _Reader(function, parameters)
    found: dict[str, Variant] = {}
    for number, node in enumerate(ast.walk(tree)):
        for said, change in _changes(node, reader):
            changed = copy.deepcopy(tree)
            target = next(each for place, each in enumerate(ast.walk(changed)) if place == number)
            if not change(target, changed):
                continue
            text = ast.unparse(changed)
            if text not in found and text != ast.unparse(tree):
                names: dict = {}
                exec(compile(ast.parse(text), "<variant>", "exec"), solution.__globals__, names)
                found[text] = Variant(said, names[function.name])
    return [*found.values(), *_with_other_arguments(solution, parameters)]


def _with_other_arguments(solution: Callable, parameters: list[str]) -> list[Variant]:
    """Return a solution that is given its arguments in a different order, or a number that is one off."""
    found = []
    for one, other in itertools.combinations(range(len(parameters)), 2):
        order = [{one: other, other: one}.get(place, place) for place in range(len(parameters))]
        said = f"`{parameters[one]}` and `{parameters[other]}` exchanged"
        found.append(Variant(said, partial(_reordered, solution, order)))
    for place, name in enumerate(parameters):
        for off, sign in ((1, "+"), (-1, "-")):
            found.append(
                Variant(f"`{name} {sign} 1` in place of `{name}` everywhere", partial(_off, solution, place, off))
            )
    return found


def _reordered(solution: Callable, order: list[int], *arguments):
    return solution(*(arguments[place] for place in order))


def _off(solution: Callable, place: int, off: int, *arguments):
    if type(arguments[place]) is not int:
        raise TypeError
    return solution(*arguments[:place], arguments[place] + off, *arguments[place + 1 :])


def _example(rank, t):
    return rank % t * 2


class _Reader:
    """Writes expressions as a learner can read them: in the parameters of the function, without its own names."""

    def __init__(self, function: ast.FunctionDef, parameters: list[str]):
        self.parameters = parameters
        nodes = list(ast.walk(function))
        stored = [node.id for node in nodes if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)]
        self.constant = {name for name in stored if stored.count(name) == 1} - _changed_in_place(nodes)
        self.known: dict[str, ast.expr] = {}
        for node in nodes:
            if isinstance(node, ast.Assign) and len(node.targets) == 1:
                self._learn(node.targets[0], node.value)

    def _learn(self, target: ast.expr, value: ast.expr) -> None:
        if isinstance(target, ast.Name) and target.id in self.constant:
            self.known[target.id] = value
        elif isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple) and len(target.elts) == len(value.elts):
            for one, other in zip(target.elts, value.elts):
                self._learn(one, other)

    def text(self, node: ast.AST) -> str | None:
        """Return an expression as text; None if it has names that only the solution knows."""
        for _ in range(4):
            node = _Unfold(self.known, self.parameters).visit(copy.deepcopy(node))
        names = {each.id for each in ast.walk(node) if isinstance(each, ast.Name)}
        if names - {*self.parameters} - PLAIN:
            return None
        text = ast.unparse(node).replace(RANK, "rank").replace(WORLD, "the number of ranks")
        return text if len(text) <= 60 else None

    def operand(self, node: ast.AST) -> str | None:
        """Return an operand as text, in parentheses if it needs them."""
        text = self.text(node)
        return f"({text})" if text and re.search(r" [-+*/%]+ ", text) else text


def _changed_in_place(nodes: list[ast.AST]) -> set[str]:
    """Return the names of what collectives, methods as append, and `+=` write into."""
    found: list[ast.expr] = [node.target for node in nodes if isinstance(node, ast.AugAssign)]
    for call in (node for node in nodes if isinstance(node, ast.Call)):
        name = ast.unparse(call.func)
        if name.startswith("dist.") or name.endswith("_single"):
            found += call.args
        elif isinstance(call.func, ast.Attribute) and (call.func.attr == "append" or call.func.attr.endswith("_")):
            found.append(call.func.value)
    targets = [node.targets[0] for node in nodes if isinstance(node, ast.Assign)]
    found += [target.value for target in targets if isinstance(target, ast.Subscript)]
    return {each.id for each in found if isinstance(each, ast.Name)}


class _Unfold(ast.NodeTransformer):
    def __init__(self, known: dict[str, ast.expr], parameters: list[str]):
        self.known, self.parameters = known, parameters

    def visit_Name(self, node: ast.Name) -> ast.AST:
        if node.id in self.known and node.id not in self.parameters:
            return copy.deepcopy(self.known[node.id])
        return node


def _changes(node: ast.AST, reader: _Reader) -> Iterator[tuple[str, Callable]]:
    """Yield changes of a node: what to say, and a function that makes it in a copy of the tree."""
    if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load) and node.id in reader.parameters:
        for other in reader.parameters:
            if other != node.id:
                yield f"`{other}` in place of `{node.id}`", _set("id", other)
    if isinstance(node, ast.BinOp):
        yield from _changes_of_operation(node, reader)
    if isinstance(node, ast.Compare) and len(node.ops) == 1:
        yield from _changes_of_comparison(node, reader)
    if isinstance(node, ast.BoolOp) and type(node.op) in SWAPS:
        [other] = SWAPS[type(node.op)]
        yield f"`{SIGNS[other]}` in place of `{SIGNS[type(node.op)]}`", _set("op", other())
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub) and (text := reader.text(node.operand)):
        yield f"no minus before `{text}`", _become(node.operand)
    if isinstance(node, ast.IfExp) and (text := reader.text(node.test)):
        yield f"the condition `{text}` turned round", _set("test", ast.UnaryOp(ast.Not(), node.test))
        yield f"no condition `{text}`", _become(node.body)
    if isinstance(node, ast.Attribute) and node.attr == "T":
        yield f"no transpose `.T`{_of(node.value, reader)}", _become(node.value)
    if isinstance(node, ast.Call):
        yield from _changes_of_call(node, reader)
    if isinstance(node, ast.stmt):
        yield from _changes_of_statement(node, reader)


def _changes_of_statement(node: ast.stmt, reader: _Reader) -> Iterator[tuple[str, Callable]]:
    if isinstance(node, ast.If) and (text := reader.text(node.test)):
        yield f"no condition `{text}`", _set("test", ast.Constant(True))
        yield f"the part under `if {text}` left out", _set("test", ast.Constant(False))
    if isinstance(node, ast.Expr) and isinstance(node.value, ast.Call) and ast.unparse(node.value).startswith("dist."):
        yield f"no `{ast.unparse(node.value.func)}`{_of(node.value.args[0], reader)}", _become(ast.Pass())
    if isinstance(node, ast.AugAssign):
        if text := reader.text(node.value):
            yield f"no `{SIGNS.get(type(node.op), '')}= {text}`", _become(ast.Pass())
        yield "`=` in place of `" + SIGNS.get(type(node.op), "") + "=`", _assign


def _changes_of_operation(node: ast.BinOp, reader: _Reader) -> Iterator[tuple[str, Callable]]:
    sign, left, right = SIGNS.get(type(node.op)), reader.operand(node.left), reader.operand(node.right)
    if sign is None:
        return
    whole = reader.text(node)
    for other in SWAPS[type(node.op)]:
        if text := reader.text(ast.BinOp(node.left, other(), node.right)):
            yield f"`{text}` in place of `{whole}`", _set("op", other())
        elif right:
            yield f"`{SIGNS[other]} {right}` in place of `{sign} {right}`", _set("op", other())
    if right:
        yield f"no `{sign} {right}`{f' after `{left}`' if left else ''}", _become(node.left)
    if left and isinstance(node.op, (ast.Add, ast.Mult)):
        yield f"no `{left} {sign}`{f' before `{right}`' if right else ''}", _become(node.right)
    for side, text in (("left", left), ("right", right)):
        value = getattr(node, side)
        if isinstance(value, ast.Constant) and type(value.value) is int:
            for new in (value.value + 1, value.value - 1):
                changed = copy.copy(node)
                setattr(changed, side, ast.Constant(new))
                if changed_text := reader.text(changed):
                    yield f"`{changed_text}` in place of `{whole}`", _set(side, ast.Constant(new))
        elif text and isinstance(node.op, (ast.Mult, ast.Div)):
            squared = ast.BinOp(value, ast.Pow(), ast.Constant(2))
            yield f"the square of `{text}` in place of `{text}`", _set(side, squared)


def _changes_of_comparison(node: ast.Compare, reader: _Reader) -> Iterator[tuple[str, Callable]]:
    left, right = reader.text(node.left), reader.text(node.comparators[0])
    sign = SIGNS.get(type(node.ops[0]))
    for other in SWAPS.get(type(node.ops[0]), ()):
        if left and right:
            yield f"`{left} {SIGNS[other]} {right}` in place of `{left} {sign} {right}`", _set("ops", [other()])
        else:
            yield f"`{SIGNS[other]}` in place of `{sign}`", _set("ops", [other()])


def _changes_of_call(node: ast.Call, reader: _Reader) -> Iterator[tuple[str, Callable]]:
    name = ast.unparse(node.func).split(".")[-1]
    for other in CALLS.get(name, ()):
        yield f"`{other}` in place of `{name}`", _rename(other)
    yield from _changes_of_dim(node, name)
    if name in ("all_reduce", "reduce_scatter"):
        given = next((ast.unparse(each.value) for each in node.keywords if each.arg == "op"), "dist.ReduceOp.SUM")
        for other in ("SUM", "MAX", "MIN"):
            if not given.endswith(other):
                yield f"`ReduceOp.{other}` in place of `ReduceOp.{given.split('.')[-1]}`", _reduce_by(other)
    if name in ("clone", "detach") and isinstance(node.func, ast.Attribute) and not node.args:
        yield f"no `.{name}()`{_of(node.func.value, reader)}", _become(node.func.value)
    if name == "ceil" and node.args:
        yield "no rounding up", _become(node.args[0])
    if ast.unparse(node) == RANK:
        for expression, said in OTHER_RANKS.items():
            yield said, _become(ast.parse(expression, mode="eval").body)
    if name == "range" and node.args:
        last = len(node.args) - 1 if len(node.args) < 3 else 1
        for added, said in ((1, "a `range` that ends one later"), (-1, "a `range` that ends one earlier")):
            yield said, _add_to_argument(last, added)


def _changes_of_dim(node: ast.Call, name: str) -> Iterator[tuple[str, Callable]]:
    if name in ALONG_DIM:
        for place, value in _dims(node, name):
            for new in (0, 1):
                if new != value % 2 or value < 0:
                    said = f"dim {new} in place of dim {value} in `{name}`"
                    yield said, _set_dim(place, new)
    if name in ("chunk", "cat") and not _dims(node, name):
        yield f"dim 1 in place of dim 0 in `{name}`", _add_dim


def _dims(node: ast.Call, name: str) -> list[tuple[object, int]]:
    """Return where a call has its dim, by number or by keyword, and which it is."""
    is_method = isinstance(node.func, ast.Attribute) and ast.unparse(node.func.value) != "torch"
    places: list = [keyword.arg for keyword in node.keywords if keyword.arg == "dim"]
    first = 0 if is_method and name not in ("chunk", "split") else 1
    places += [first] if len(node.args) > first else []
    found = []
    for place in places:
        value = node.args[place] if isinstance(place, int) else next(k.value for k in node.keywords if k.arg == place)
        try:
            number = ast.literal_eval(value)
        except ValueError:
            continue
        if type(number) is int:
            found.append((place, number))
    return found


def _of(node: ast.AST, reader: _Reader) -> str:
    text = reader.text(node)
    return f" of `{text}`" if text else ""


def _set(name: str, value) -> Callable:
    def change(target, tree) -> bool:
        setattr(target, name, copy.deepcopy(value))
        return True

    return change


def _become(other: ast.AST) -> Callable:
    """Put another node in the place of this one."""

    def change(target, tree) -> bool:
        return _replace(tree, target, copy.deepcopy(other))

    return change


def _replace(tree: ast.AST, target: ast.AST, other: ast.AST) -> bool:
    for parent in ast.walk(tree):
        for name, value in ast.iter_fields(parent):
            if value is target:
                setattr(parent, name, other)
                return True
            if isinstance(value, list) and any(each is target for each in value):
                value[next(place for place, each in enumerate(value) if each is target)] = other
                return True
    return False


def _assign(target, tree) -> bool:
    return _replace(tree, target, ast.Assign([target.target], target.value, lineno=target.lineno))


def _rename(other: str) -> Callable:
    def change(target, tree) -> bool:
        if isinstance(target.func, ast.Attribute):
            target.func.attr = other
        else:
            target.func.id = other
        return True

    return change


def _set_dim(place, new: int) -> Callable:
    def change(target, tree) -> bool:
        if isinstance(place, int):
            target.args[place] = ast.Constant(new)
        else:
            next(each for each in target.keywords if each.arg == place).value = ast.Constant(new)
        return True

    return change


def _add_dim(target, tree) -> bool:
    target.keywords.append(ast.keyword("dim", ast.Constant(1)))
    return True


def _reduce_by(other: str) -> Callable:
    def change(target, tree) -> bool:
        target.keywords = [each for each in target.keywords if each.arg != "op"]
        target.keywords.append(ast.keyword("op", ast.parse(f"dist.ReduceOp.{other}", mode="eval").body))
        return True

    return change


def _add_to_argument(place: int, added: int) -> Callable:
    def change(target, tree) -> bool:
        target.args[place] = ast.BinOp(target.args[place], ast.Add(), ast.Constant(added))
        return True

    return change
