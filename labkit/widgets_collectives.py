"""Choose an operation, its root and the number of ranks; real ranks run it, and the picture shows what came out."""

import io
from functools import partial
from html import escape

import ipywidgets as widgets
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from labkit.flow import Flow, numbered, row_and_column, trace_flow
from labkit.operations import WITH_ROOT, WITHOUT_ROOT
from labkit.plots.collectives import draw_flow, flow_size

FULL_WIDTH = 1200  # pixels that the widest picture takes, two of them in the file for one on the screen


def collective_explorer(operation: str = "broadcast", world_size: int = 4, root: int = 0) -> "CollectiveExplorer":
    """Controls for one operation, and its picture from real ranks."""
    return CollectiveExplorer(operation, world_size, root)


class CollectiveExplorer(widgets.VBox):
    """Controls, a picture and its text; ``flow`` is what the ranks last did."""

    def __init__(self, operation: str, world_size: int, root: int):
        names = [*WITH_ROOT, *WITHOUT_ROOT]
        self.operation = widgets.Dropdown(options=names, value=operation, description="operation")
        self.world_size = widgets.IntSlider(world_size, 2, 8, description="ranks", continuous_update=False)
        self.root = widgets.IntSlider(root, 0, world_size - 1, description="root", continuous_update=False)
        self.picture, self.says = widgets.Image(format="png"), widgets.HTML()
        controls = widgets.Box([self.operation, self.world_size, self.root], layout={"flex_flow": "row wrap"})
        super().__init__([controls, self.says, self.picture])
        for control in (self.operation, self.world_size, self.root):
            control.observe(self._update, "value")
        self._update()

    def __repr__(self) -> str:
        """Short, because it is what a stored notebook keeps of a widget."""
        return f"collective_explorer({self.operation.value!r}, {self.world_size.value}, {self.root.value})"

    def _update(self, change=None) -> None:
        name: str = self.operation.value  # type: ignore[assignment]
        self.root.disabled = name not in WITH_ROOT
        last = self.world_size.value - 1
        root_leaves = self.root.value > last
        self.root.max = last
        if root_leaves:
            return  # the slider has moved to the last rank, and that change has drawn everything
        self.flow = run_example(name, self.world_size.value, self.root.value)
        self.picture.value = _png(self.flow)
        self.picture.width = int(min(FULL_WIDTH, 60 * flow_size(self.flow)[0]))
        sentence = (WITH_ROOT.get(name) or WITHOUT_ROOT[name]).__doc__
        self.says.value = f'<p>{escape(sentence or "")}</p><pre role="status">{escape(str(self.flow))}</pre>'


def run_example(name: str, world_size: int, root: int = 0) -> Flow:
    """Run one operation on real ranks, on a tensor that suits it."""
    function = partial(WITH_ROOT[name], root=root) if name in WITH_ROOT else WITHOUT_ROOT[name]
    if name == "all-to-all":  # whose result on 0, 1, 2, ... plus the rank looks as if nothing had moved
        return trace_flow(function, row_and_column(world_size, world_size))
    if name in ("gather", "all-gather"):
        return trace_flow(function, numbered(world_size, 2 if world_size <= 4 else 1))
    return trace_flow(function, numbered(world_size, world_size))


def _png(flow: Flow) -> bytes:
    width, height = flow_size(flow)
    canvas = FigureCanvasAgg(Figure(figsize=(width * 0.6, height * 0.6), dpi=150))
    draw_flow(flow, ax=canvas.figure.add_axes((0, 0, 1, 1)))
    file = io.BytesIO()
    canvas.print_png(file)
    return file.getvalue()
