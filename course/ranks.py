"""Runs cells of a notebook on ranks (`%%ranks`), which keep their names from cell to cell.

``from course.ranks import ranks`` loads it. ``%%ranks 4`` starts four ranks and runs its cell on each; ``%%ranks`` runs
on all that live, ``%%ranks [0, 2]`` on some. There, ``rank``, ``world_size``, ``dist`` and ``torch`` have a value.
``ranks["loss"]`` brings the value of each rank into the notebook, and ``%ranks`` says who lives.

Whose is a name? One that a ``%%ranks`` cell has assigned belongs to the ranks, until they restart. Any other name that
a cell uses comes from the notebook, each time with the value that it has there now.

A fault keeps the ranks and their names, as they were when each rank's cell stopped: ranks that wait are freed, and all
groups are connected anew. A rank that was killed, or that C code does not let go, costs all names: the ranks are
restarted, and the error says which names are lost. So does, with NCCL, any fault that leaves a message on its way.
"""

import ast
import linecache
import re
import sys
from collections.abc import Iterable
from itertools import groupby
from symtable import SymbolTable, symtable
from typing import Any

from IPython.core.completer import CompletionContext, SimpleCompletion, context_matcher
from IPython.core.getipython import get_ipython
from IPython.display import display

from course import rank_cell
from labkit.launch import RankFailed, World
from labkit.launch.client import stopped
from labkit.launch.frames import is_cell, stack_of
from labkit.launch.payload import pickled, why_not
from labkit.launch.world import MAX_RANKS
from labkit.sizes import whole_number

_COLLECTIVES = {
    *("all_gather", "all_gather_into_tensor", "all_gather_object", "all_gather_single", "all_reduce", "all_to_all"),
    *("all_to_all_single", "barrier", "broadcast", "broadcast_object_list", "gather", "gather_object"),
    *("monitored_barrier", "new_group", "reduce", "reduce_scatter", "reduce_scatter_single", "reduce_scatter_tensor"),
    *("scatter", "scatter_object_list"),
}
_BRANCHES = (ast.If, ast.For, ast.While, ast.Try, ast.With, ast.Match)
"""Statements that may leave a name unassigned."""


class Ranks:
    """The ranks of this notebook's cells: ``ranks["loss"]`` is a list of what each has under that name."""

    def __init__(self):
        self.world: World | None = None
        self.names: list[list[str]] = []  # of each rank, those that belong to it, or will when its cell has run
        self.uses: dict[str, set[str]] = {}  # name -> what the functions in it read whenever they are called

    def __getitem__(self, name: str) -> list:
        without = [rank for rank, names in enumerate(self.names) if name not in (*names, *rank_cell.GIVEN)]
        if not self._living() or without:
            raise KeyError(f"{name} has no value on {who(without) if without else 'any rank: none lives'}")
        return self._on_ranks(rank_cell.value, name)

    def __repr__(self) -> str:
        if not self._living():
            return "No ranks live: start some with a count, as in %%ranks 4"
        rows = [f"{'rank':>4} {'process':>9} {'memory':>9}  names"]
        for rank, (pid, megabytes, names) in enumerate(self._on_ranks(rank_cell.facts)):
            rows.append(f"{rank:>4} {pid:>9} {megabytes:>6,.0f} MB  {', '.join(sorted(names)) or '-'}")
        return "\n".join(rows)

    def magic(self, line: str, cell: str | None = None) -> None:
        """Run a cell on ranks (`%%ranks 4`, `%%ranks`, `%%ranks [0, 2]`), or say who lives (`%ranks`)."""
        if cell is None:
            print(self)
            return
        num_ranks, asked = self._asked(line.strip())
        filename = next((file for file, _, _ in stack_of(sys._getframe()) if is_cell(file)), "<ipython-input>")
        lines = [f"{text}\n" for text in (f"%%ranks {line}", *cell.splitlines())]
        linecache.cache[filename] = (0, None, lines, filename)  # reports quote it; IPython put its own call there
        source = f"\n{cell}"
        tree = _parsed(source, filename)
        is_new = num_ranks != self._living()
        sent = self._from_notebook(tree, set() if is_new else set.intersection(*map(set, self.names)))
        if is_new:
            self._start(num_ranks)
            self._names_read(tree)  # the names that this cell's functions read were noted for the ranks of before
        others, note = sorted({*range(num_ranks)} - {*asked}), ""
        if others:
            note = f"{who(others).capitalize()} were not asked: this cell runs on {who(asked)} only.\n"
            if called := sorted(_calls_of_all(tree)):
                print(f"{note}They would have to call {', '.join(called)} too, unless it has a group=... of its own.")
        new = _writes(symtable(source, filename, "exec"))  # a killed rank cannot say which it has made
        self.names = [[*own, *new - {*own}] if rank in asked else own for rank, own in enumerate(self.names)]
        rows = self._on_ranks(rank_cell.run, rank_cell.Cell(source, filename, asked), sent, note=note)
        self.names = [ran.names for ran in rows]
        _show(rows)

    @context_matcher()
    def complete(self, context: CompletionContext):
        """Complete the names on the ranks, in a cell that runs there."""
        names = {*rank_cell.GIVEN, *set().union(*self.names)} if context.full_text.startswith("%%ranks") else ()
        found = [SimpleCompletion(name, type="instance") for name in sorted(names) if name.startswith(context.token)]
        return {"completions": found}

    def _living(self) -> int:
        return 0 if self.world is None or self.world.ended else self.world.world_size

    def _asked(self, line: str) -> tuple[int, tuple[int, ...]]:
        """Return how many ranks shall live, and which of them shall run the cell."""
        living = self._living()
        try:
            given = ast.literal_eval(line) if line else range(living)
        except (SyntaxError, ValueError):
            given = line
        count = whole_number(given)
        if count is not None:
            if not 1 <= count <= MAX_RANKS:
                way_out = "; for rank 0 alone write %%ranks [0]" * (count == 0)
                raise _refused(f"%%ranks {line}: the count must be from 1 to {MAX_RANKS}{way_out}")
            return count, tuple(range(count))
        if not isinstance(given, list | range):
            ways = "a count as in %%ranks 4, a list as in %%ranks [0, 2], or nothing for all ranks that live"
            raise _refused(f"%%ranks {line} is neither a count nor a list: write {ways}")
        if not living:
            raise _refused(
                f"%%ranks {line}: no ranks live: start some with a count, as in %%ranks 4".replace(" :", ":")
            )
        if not given or len({*map(whole_number, given)} & {*range(living)}) < len(given):
            raise _refused(f"%%ranks {line}: the list must name ranks that live, each once: {who(range(living))}")
        return living, tuple(given)

    def _start(self, num_ranks: int) -> None:
        if before := self._living():
            print(f"Ranks restarted, {num_ranks} instead of {before}{self._lost()}.")
            self.world.close()  # pyright: ignore[reportOptionalMemberAccess]
        self.world = World(num_ranks)
        self.names, self.uses = [[]] * num_ranks, {}

    def _lost(self) -> str:
        names = sorted(set().union(*self.names))
        return f", names lost: {', '.join(names)}" if names else ""

    def _on_ranks(self, function, *args, note: str = "") -> list:
        """Call a function on every rank. A fault says what became of the ranks and their names."""
        world: Any = self.world
        try:
            return world.run(function, *args)
        except (RankFailed, KeyboardInterrupt) as error:
            fault, text = error, f"{error}\n{note}"
        if world.ended:
            text += f"Ranks restarted{self._lost()}."
            self._start(world.world_size)
        else:
            text += "Waiting ranks were freed, and all groups connected anew. " * world.was_freed
            text += "The ranks and their names are kept."
            self.names = world.run(rank_cell.names)
        if isinstance(fault, RankFailed):
            raise type(fault)(text, fault.rank, fault.cause, fault.tracebacks)
        raise stopped(text)

    def _from_notebook(self, tree: ast.Module, own: set[str]) -> dict[str, Any]:
        """Return the notebook's values of the names that a cell reads, without those that belong to every rank."""
        shell: Any = get_ipython()
        there, hidden = shell.user_ns, shell.user_ns_hidden  # In, Out, exit
        names = self._names_read(tree) & there.keys() - rank_cell.GIVEN - own
        sent = {name: there[name] for name in sorted(names) if there[name] is not hidden.get(name, shell)}
        try:
            pickled(sent)
        except Exception as error:
            reason = why_not(error, None, (), sent).replace("argument ", "")
            raise ValueError(reason.replace("inside the function", "in a %%ranks cell")) from None
        return sent

    def _names_read(self, tree: ast.Module) -> set[str]:
        """Return what a cell may read before it assigns it, and what the functions that it calls may read."""
        read, assigned = set(), set()
        for statement in tree.body:
            table = symtable(ast.unparse(_Spelled().visit(statement)), "", "exec")
            inside = set().union(*map(_reads, table.get_children()))
            writes, reads = _writes(table), _reads(table)
            read |= reads - assigned
            self.uses |= dict.fromkeys(writes, inside | (reads & self.uses.keys()))
            assigned |= set() if isinstance(statement, _BRANCHES) else writes
        todo = list(read)
        while todo:
            new = self.uses.get(todo.pop(), set()) - read
            read |= new
            todo += new
        return read


def who(ranks: Iterable[int]) -> str:
    """Name ranks.

    >>> who([3]), who([0, 1, 2, 5])
    ('rank 3', 'ranks 0-2, 5')
    """
    ranks = sorted(ranks)
    runs = [[rank for _, rank in run] for _, run in groupby(enumerate(ranks), lambda pair: pair[1] - pair[0])]
    text = ", ".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)
    return f"rank {text}" if len(ranks) == 1 else f"ranks {text}"


def _refused(text: str) -> ValueError:
    """Return an error of which IPython shows the text alone: the line of %%ranks is wrong, not this file."""
    error = ValueError(text)
    error._render_traceback_ = lambda: [f"ValueError: {text}"]  # pyright: ignore
    return error


def _parsed(source: str, filename: str) -> ast.Module:
    """Return the tree of a cell's code. IPython would understand more than Python: say that here it does not."""
    try:
        return ast.parse(source, filename)
    except SyntaxError as error:
        line = (error.text or "").strip()
        if found := re.match(r"(?:\w+ *= *)?([!%]\S*)", line):
            raise _refused(
                f"{found[1]} cannot stand in a %%ranks cell: ranks run plain Python, without IPython's magics (%) and "
                "shell commands (!). Put the line into a cell of its own, which runs in the notebook"
            ) from None
        raise


def _name_of_ranks(shell: Any, kind: type, error: NameError, trace: Any, tb_offset: int | None = None) -> None:
    """Show a NameError of the notebook; say where the name is, if ranks have it."""
    if any(error.name in names for names in ranks.names) and ranks._living():
        error.args = (f'{error}. The ranks have it: ranks["{error.name}"] is a list with the value of each',)
    shell.showtraceback((kind, error, trace), tb_offset=tb_offset)


class _Spelled(ast.NodeTransformer):
    """Writes `x += 1` as `x = x + 1`: a table of symbols does not say that the first reads x."""

    def visit_AugAssign(self, node: ast.AugAssign) -> ast.Assign:
        read = ast.parse(ast.unparse(node.target), mode="eval").body
        return ast.Assign([node.target], ast.BinOp(read, node.op, node.value), lineno=node.lineno)


def _reads(table: SymbolTable) -> set[str]:
    """Return the global names that code reads, and the functions in it."""
    is_cell = table.get_type() == "module"
    here = {name.get_name() for name in table.get_symbols() if name.is_referenced() and (is_cell or name.is_global())}
    return here.union(*map(_reads, table.get_children()))


def _writes(table: SymbolTable) -> set[str]:
    return {name.get_name() for name in table.get_symbols() if name.is_assigned() or name.is_imported()}


def _calls_of_all(tree: ast.Module) -> set[str]:
    """Return the collectives that code calls without a group of its own."""
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call)]
    names = {getattr(call.func, "attr", getattr(call.func, "id", "")): call.keywords for call in calls}
    return {name for name, given in names.items() if all(each.arg != "group" for each in given)} & _COLLECTIVES


def _show(rows: list[rank_cell.Ran]) -> None:
    """Show what was displayed, then the values, equal ones once, then the figures beside each other."""
    for data, ranks in _folded([[*enumerate(ran.shown)] for ran in rows]):
        print(f"{who(ranks)}:")
        display(data[1], raw=True)
    for value, ranks in _folded([[ran.value] for ran in rows]):
        if value:
            print(f"{who(ranks)}:{chr(10) if chr(10) in value else ' '}{value}")
    figures = [(rank, figure) for rank, ran in enumerate(rows) for figure in ran.figures]
    if figures:
        _show_figures(figures)


def _folded(things: list[list]) -> list[tuple[Any, list[int]]]:
    """Return each of the ranks' things once, with the ranks that have it."""
    found: list[tuple[Any, list[int]]] = []
    for rank, of_rank in enumerate(things):
        for thing in of_rank:
            same = next((ranks for each, ranks in found if each == thing), None)
            if same is None:
                found.append((thing, same := []))
            same.append(rank)
    return found


def _show_figures(figures: list[tuple[int, Any]]) -> None:
    from course.pictures.painter import Plot  # which imports matplotlib: not before there is a figure

    words, boxes = [], []
    for rank, figure in figures:
        if figure.get_layout_engine() is None:
            figure.set_layout_engine("tight")  # as notebooks do: no word is cut off
        titles = [ax.get_title() for ax in figure.axes] + [figure.get_suptitle()]
        words.append(f"Figure of rank {rank}: {', '.join(filter(None, titles)) or 'no title'}")
        look = f"flex: 1 1 300px; max-width: {72 * figure.get_figwidth():.0f}px; margin: 0"
        caption = f"<figcaption><b>rank {rank}</b></figcaption>"
        boxes.append(f'<figure style="{look}">{caption}{Plot(figure, words[-1]).html()}</figure>')
    html = f'<div style="display: flex; flex-wrap: wrap; gap: 1em">{"".join(boxes)}</div>'
    display({"text/plain": "\n".join(words), "text/html": html}, raw=True)


ranks = Ranks()
if (shell := get_ipython()) is not None:
    shell.register_magic_function(ranks.magic, "line_cell", "ranks")  # pyright: ignore[reportArgumentType]
    shell.Completer.custom_matchers.append(ranks.complete)  # pyright: ignore[reportOptionalMemberAccess]
    if not shell.custom_exceptions:  # or a different extension shows errors of its own
        shell.set_custom_exc((NameError,), _name_of_ranks)
