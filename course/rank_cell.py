"""Runs a cell of `%%ranks` on a rank, among the names that the rank keeps from cell to cell.

A rank imports this file, so it imports nothing that is slow: the notebook's side is `course.ranks`.
"""

import ast
import os
import sys
import warnings
from dataclasses import dataclass
from typing import Any

from labkit.launch.linux import read_text


@dataclass(frozen=True)
class Cell:
    source: str  # with an empty line for that of %%ranks, so that line numbers are those of the notebook
    filename: str  # as IPython calls the cell that runs, so that a report can say "this cell"
    ranks: tuple[int, ...]  # who is asked to run it


@dataclass(frozen=True)
class Ran:
    """What a cell left on a rank."""

    value: str  # of its last expression, as text; "" if there is none
    shown: list[dict[str, Any]]  # what IPython.display was given, and a last expression that is more than text
    figures: list  # of matplotlib
    names: list[str]  # that belong to this rank


GIVEN = {"rank", "world_size", "dist", "torch"}
"""The names that every rank has from the start."""


class Names(dict):
    """The names of a rank. It notes which of them were assigned by cells: those belong to the rank."""

    def __init__(self):
        import torch  # not in the notebook, which imports this file too
        import torch.distributed as dist

        given = {"rank": dist.get_rank(), "world_size": dist.get_world_size(), "dist": dist, "torch": torch}
        super().__init__(given, __name__="__main__")  # so that classes travel as those of a notebook do
        self.sent: dict[str, Any] = given  # from the notebook, or from here
        self.own: set[str] = set()

    def __setitem__(self, name: str, value) -> None:
        super().__setitem__(name, value)
        self.own.add(name)

    def take(self, sent: dict[str, Any]) -> None:
        """Take over the notebook's values of names that are not the rank's own."""
        sent = {name: value for name, value in sent.items() if name not in self.belonging()}
        self.update(sent)
        self.sent |= sent

    def belonging(self) -> list[str]:
        """Return the names that belong to the rank. A function may assign one too, with ``global``."""
        hidden = {"__name__", "__builtins__", "__annotations__"}
        return [
            name
            for name in self
            if name not in hidden and (name in self.own or self[name] is not self.sent.get(name, self))
        ]


_names: Names | None = None  # of this rank, from its first cell on


def names() -> list[str]:
    return _here().belonging()


def value(name: str):
    return _here()[name]


def facts() -> tuple[int, float, list[str]]:
    """Return this rank's process id, its memory in MB that no other process shares, and its names."""
    private = sum(
        int(line.split()[1])
        for line in read_text("/proc/self/smaps_rollup").splitlines()
        if line.startswith("Private_")
    )
    return os.getpid(), private / 1e3, names()


def run(cell: Cell, sent: dict[str, Any]) -> Ran:
    """Run a cell. Whatever it raises goes to the launcher, which reports it."""
    here = _here()
    if here["rank"] not in cell.ranks:
        return Ran("", [], [], names())
    here.take(sent)
    os.environ["MPLBACKEND"] = "agg"  # the notebook's would look for a notebook here
    warnings.filterwarnings("ignore", "FigureCanvasAgg is non-interactive")  # show(): the notebook does it
    tree, last = ast.parse(cell.source, cell.filename), None
    if tree.body and isinstance(final := tree.body[-1], ast.Expr) and not cell.source.rstrip().endswith(";"):
        del tree.body[-1]
        last = compile(ast.Expression(final.value), cell.filename, "eval")
    if "display" in cell.source or "IPython" in sys.modules:  # to import it takes a quarter of a second
        _collect_displays()
    try:
        exec(compile(tree, cell.filename, "exec"), here)
        result = eval(last, here) if last else None
        is_rich = any(hasattr(type(result), name) for name in RICH)
        if is_rich:
            show(result)
        return Ran("" if result is None or is_rich else repr(result), [*_shown], _figures(), names())
    finally:
        _shown.clear()  # what a cell that failed has shown, or drawn, is not the next one's
        _figures()


RICH = ("_repr_html_", "_repr_mimebundle_", "_repr_markdown_", "_repr_svg_", "_repr_png_", "_repr_latex_")
_shown: list[dict[str, Any]] = []


def _collect_displays() -> None:
    """Let IPython's display give here what it would send to a notebook, also where its name was imported already."""
    import IPython.core.display_functions as functions

    functions.display.__code__ = _in_place_of_display.__code__


def _in_place_of_display(*things, **options):
    """This runs among the names of IPython's file, so it imports what it needs."""
    from course import rank_cell

    rank_cell.show(*things)


def show(*things) -> None:
    """Keep what the notebook shall show; print what is only text."""
    from IPython.core.formatters import DisplayFormatter

    for thing in things:
        data, _ = ({"text/plain": thing}, {}) if isinstance(thing, str) else DisplayFormatter().format(thing)
        data.pop("application/vnd.jupyter.widget-view+json", None)  # there is no kernel here that it could reach
        if data.keys() <= {"text/plain"}:
            print(*data.values())
        else:
            _shown.append(data)


def _here() -> Names:
    global _names
    _names = _names or Names()
    return _names


def _figures() -> list:
    """Take the figures that are open; a cell that imported no matplotlib has none."""
    pyplot = sys.modules.get("matplotlib.pyplot")
    if pyplot is None:
        return []
    figures = [pyplot.figure(number) for number in pyplot.get_fignums()]
    pyplot.close("all")
    return figures
