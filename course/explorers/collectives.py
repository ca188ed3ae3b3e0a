"""Choose an operation, its root and the number of ranks; real ranks run it, and the picture shows what came out."""

from collections import namedtuple
from functools import partial
from html import escape

import ipywidgets as widgets
from matplotlib.figure import Figure

from course.explorers.base import Explorer
from course.measure.flow import Flow, numbered, row_and_column, trace_flow
from course.measure.operations import WITH_ROOT, WITHOUT_ROOT
from course.pictures.collectives import draw_flow, flow_size
from course.pictures.painter import png

FULL_WIDTH = 1200  # pixels on the screen that the widest picture takes; its file has two for each


def collective_explorer(operation: str = "broadcast", world_size: int = 4, root: int = 0) -> "CollectiveExplorer":
    """Show one operation as real ranks run it, with a control for its root and the number of ranks."""
    return CollectiveExplorer(operation, world_size, root)


class CollectiveExplorer(Explorer):
    """Controls, a picture and its text; ``flow`` is what the ranks last did."""

    function, choice_type = "collective_explorer", namedtuple("Choice", "operation world_size root")

    def __init__(self, operation: str, world_size: int, root: int):
        names = [*WITH_ROOT, *WITHOUT_ROOT]
        self.operation = widgets.Dropdown(options=names, value=operation, description="operation")
        self.world_size = widgets.IntSlider(world_size, 2, 8, description="ranks", continuous_update=False)
        self.root = widgets.IntSlider(root, 0, world_size - 1, description="root", continuous_update=False)
        super().__init__(self.choice)

    def _chosen(self) -> tuple:
        self.root.disabled = self.operation.value not in WITH_ROOT
        self.root.max = self.world_size.value - 1
        return self.choice

    def _parts(self) -> tuple[bytes, str, str]:
        self.flow = run_example(*self.shown)
        width, height = flow_size(self.flow)
        self.picture.layout.width = f"min(100%, {min(FULL_WIDTH, 60 * width):.0f}px)"
        figure = Figure(figsize=(width * 0.6, height * 0.6), dpi=150)
        draw_flow(self.flow, ax=figure.add_axes((0, 0, 1, 1)))
        sentence = {**WITH_ROOT, **WITHOUT_ROOT}[self.shown.operation].__doc__ or ""
        # All that the ranks did is said above the picture: there are no other facts.
        return png(figure), f'<p>{escape(sentence)}</p><pre role="status">{escape(str(self.flow))}</pre>', ""


def run_example(name: str, world_size: int, root: int = 0) -> Flow:
    """Run one operation on real ranks, on a tensor that suits it."""
    function = partial(WITH_ROOT[name], root=root) if name in WITH_ROOT else WITHOUT_ROOT[name]
    if name == "all-to-all":  # its result on 0, 1, 2, ... plus the rank looks as if nothing had moved
        return trace_flow(function, row_and_column(world_size, world_size))
    if name in ("gather", "all-gather"):
        return trace_flow(function, numbered(world_size, 2 if world_size <= 4 else 1))
    return trace_flow(function, numbered(world_size, world_size))
