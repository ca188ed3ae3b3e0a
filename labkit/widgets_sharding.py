"""Choose the sizes of Y = XA + b, the cut and t: the shards, what a rank holds, and what the ranks send."""

import io
from collections.abc import Sequence
from html import escape

import ipywidgets as widgets
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from labkit.bandwidth import bus_factor
from labkit.plots.layout_table import bytes_text
from labkit.plots.sharding import FIGURE_INCHES, draw_cut
from labkit.sharding import CUTS, LinearCut, Message
from labkit.widgets import STYLE

SIZES = (64, 128, 256, 512, 1000, 1024, 2048, 4096, 8192)
BYTES_PER_ELEMENT = 4  # float32
WHOLE_MEANS = {"column": "gather_output=True", "row": "input_is_parallel=False"}


def shard_explorer(
    cut: str = "column", input_size: int = 1024, output_size: int = 512, tp_size: int = 2, batch_size: int = 256
) -> "ShardExplorer":
    """The picture of a cut with a control for everything that decides it; ValueError if the start does not fit."""
    return ShardExplorer(LinearCut(cut, input_size, output_size, tp_size, batch_size))


class ShardExplorer(widgets.VBox):
    """Controls, a picture and its facts as text; ``shown`` is the cut in the picture: the last that fitted."""

    def __init__(self, shown: LinearCut):
        self.shown, self.fits = shown, True
        self.cut = widgets.Dropdown(options=CUTS, value=shown.cut, description="cut A by", **_LOOK)
        self.input_size = _selection("in", SIZES, shown.input_size)
        self.output_size = _selection("out", SIZES, shown.output_size)
        self.batch_size = _selection("batch", SIZES, shown.batch_size)
        self.tp_size = widgets.IntSlider(shown.tp_size, 1, max(16, shown.tp_size), description="tensor t", **_LOOK)
        self.whole = widgets.Checkbox(False, description="X and Y whole on every rank", indent=False)
        self.message, self.facts = widgets.HTML(), widgets.HTML()
        self.picture = widgets.Image(format="png")
        self.picture.add_class("labkit-grids")
        self._canvas = FigureCanvasAgg(Figure(figsize=FIGURE_INCHES, dpi=100))
        self._axes = self._canvas.figure.add_axes((0, 0, 1, 1))

        inputs = [self.cut, self.input_size, self.output_size, self.batch_size, self.tp_size, self.whole]
        controls = widgets.Box(inputs, layout=widgets.Layout(flex_flow="row wrap"))
        super().__init__([widgets.HTML(STYLE), controls, self.message, self.picture, self.facts])
        for control in inputs:
            control.observe(self._update, "value")
        self._update()

    def __repr__(self) -> str:
        """Short, because it is what a stored notebook keeps of a widget."""
        return f"shard_explorer({', '.join(map(repr, self._choice()))})"

    def _choice(self) -> tuple:
        controls = (self.cut, self.input_size, self.output_size, self.tp_size, self.batch_size)
        return tuple(control.value for control in controls)

    def _update(self, change=None) -> None:
        try:
            self.shown, self.fits, misfit = LinearCut(*self._choice()), True, ""
        except ValueError as error:
            self.fits, misfit = False, str(error)
        self.picture.value = self._png()
        whole: bool = self.whole.value  # type: ignore[assignment]
        facts = facts_table(self.shown, whole)
        self.facts.value = facts if self.fits else f'<div class="labkit-stale">{facts}</div>'
        self.message.value = _says(self.shown, misfit)

    def _png(self) -> bytes:
        for artist in list(self._axes.collections):
            artist.remove()
        draw_cut(self.shown, self._axes, dimmed=not self.fits)
        file = io.BytesIO()
        self._canvas.print_png(file)
        return file.getvalue()


def facts_table(cut: LinearCut, whole: bool) -> str:
    """The shapes, what a rank holds, and what it communicates forward and backward, as an HTML table."""
    holds = [("weight", cut.weight_shard), ("bias", cut.b_shard), ("X", cut.x_shard), ("Y", cut.y_shard)]
    words = ", ".join(f"{name} {list(shape)} {bytes_text(_num_bytes(shape))}" for name, shape in holds)
    rows = [
        ("each rank holds", words),
        ("sent forward", _messages_text(cut, cut.forward_messages(whole))),
        ("sent backward", _messages_text(cut, cut.backward_messages(whole))),
    ]
    body = "".join(f"<tr><th>{name}</th><td>{escape(text)}</td></tr>" for name, text in rows)
    ends = f"with {WHOLE_MEANS[cut.cut]}" if whole else "with shards left as they are"
    return f'<table class="labkit-facts"><caption>in float32, {ends}</caption><tbody>{body}</tbody></table>'


def _messages_text(cut: LinearCut, messages: list[Message]) -> str:
    """What is sent, how large it is, and what leaves each rank when the collective is a ring."""
    if not messages:
        return "nothing"
    [message] = messages
    size = message.size_bytes(BYTES_PER_ELEMENT)
    sent = bytes_text(size * bus_factor(message.operation, cut.tp_size))
    name = message.operation.replace("_", "-")
    return f"{name} of {message.tensor} {list(message.shape)}, {bytes_text(size)}; on a ring each rank sends {sent}"


def _num_bytes(shape: Sequence[int]) -> int:
    size = BYTES_PER_ELEMENT
    for length in shape:
        size *= length
    return size


def _says(cut: LinearCut, misfit: str) -> str:
    if misfit:
        text = f"<b>This does not fit.</b> {escape(misfit)}. Below, greyed: the last that did."
        return f'<div class="labkit-says misfit" role="alert">{text}</div>'
    what = "columns" if cut.cut == "column" else "rows"
    text = f"Each of {cut.tp_size} ranks has {cut.partition_size} {what} of A"
    return f'<div class="labkit-says" role="status">{text}</div>'


_LOOK = {"layout": {"width": "290px"}, "style": {"description_width": "5em"}}


def _selection(description: str, usual: Sequence[int], value: int) -> widgets.SelectionSlider:
    return widgets.SelectionSlider(options=sorted({*usual, value}), value=value, description=description, **_LOOK)
