"""Choose the batch, the replicas and the micro-batches: who sees which rows, and what that costs in messages."""

import io
from collections.abc import Sequence
from html import escape

import ipywidgets as widgets
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from labkit.bandwidth import bus_factor
from labkit.batch import BatchCut
from labkit.plots.batch import FIGURE_INCHES, draw_batch
from labkit.plots.layout_table import bytes_text
from labkit.widgets import STYLE

BATCH_SIZES = (8, 16, 32, 64, 96, 128, 192, 256, 512, 1024)
GRADIENT_BYTES = 4 * 4 * (1024 * 1024 + 1024)
"""Of notebook 05's model, in float32: four linear layers of width 1024, with their biases."""


def batch_explorer(batch_size: int = 128, dp_size: int = 4, num_micro_batches: int = 1) -> "BatchExplorer":
    """The rows of a batch with a control for everything that deals them out; ValueError if the start does not fit."""
    return BatchExplorer(BatchCut(batch_size, dp_size, num_micro_batches))


class BatchExplorer(widgets.VBox):
    """Controls, a picture and its facts as text; ``shown`` is the cut in the picture: the last that fitted."""

    def __init__(self, shown: BatchCut):
        self.shown, self.fits = shown, True
        sizes = sorted({*BATCH_SIZES, shown.batch_size})
        self.batch_size = widgets.SelectionSlider(
            options=sizes, value=shown.batch_size, description="batch B, rows", **_LOOK
        )
        self.dp_size = widgets.IntSlider(shown.dp_size, 1, max(16, shown.dp_size), description="replicas d", **_LOOK)
        most = max(8, shown.num_micro_batches)
        self.num_micro_batches = widgets.IntSlider(
            shown.num_micro_batches, 1, most, description="micro-batches m", **_LOOK
        )
        self.message, self.facts = widgets.HTML(), widgets.HTML()
        self.picture = widgets.Image(format="png")
        self.picture.add_class("labkit-grids")
        self._canvas = FigureCanvasAgg(Figure(figsize=FIGURE_INCHES, dpi=100))
        self._axes = self._canvas.figure.add_axes((0, 0, 1, 1))

        inputs = [self.batch_size, self.dp_size, self.num_micro_batches]
        controls = widgets.Box(inputs, layout=widgets.Layout(flex_flow="row wrap"))
        super().__init__([widgets.HTML(STYLE), controls, self.message, self.picture, self.facts])
        for control in inputs:
            control.observe(self._update, "value")
        self._update()

    def __repr__(self) -> str:
        """Short, because it is what a stored notebook keeps of a widget."""
        return f"batch_explorer({', '.join(map(str, self._choice()))})"

    def _choice(self) -> Sequence[int]:
        return [control.value for control in (self.batch_size, self.dp_size, self.num_micro_batches)]

    def _update(self, change=None) -> None:
        try:
            self.shown, self.fits, misfit = BatchCut(*self._choice()), True, ""
        except ValueError as error:
            self.fits, misfit = False, str(error)
        self.picture.value = self._png()
        facts = facts_table(self.shown)
        self.facts.value = facts if self.fits else f'<div class="labkit-stale">{facts}</div>'
        self.message.value = _says(self.shown, misfit)

    def _png(self) -> bytes:
        for artist in list(self._axes.collections):
            artist.remove()
        draw_batch(self.shown, self._axes, dimmed=not self.fits)
        file = io.BytesIO()
        self._canvas.print_png(file)
        return file.getvalue()


def facts_table(cut: BatchCut) -> str:
    """What a rank has at once, how much a row counts, and what is sent in a step, as an HTML table."""
    m, d, b = cut.num_micro_batches, cut.dp_size, cut.micro_batch_size
    steps = f"{_count(m, 'backward')} of {_count(b, 'row')}"
    rows = [
        ("each rank", f"{steps}: activations of {_count(b, 'row')} at a time"),
        ("a row counts", f"1/{b} in its micro-batch · 1/{m} in its rank · 1/{d} in the average = 1/{cut.batch_size}"),
        ("sent in a step", _messages_text(cut)),
    ]
    body = "".join(f"<tr><th>{name}</th><td>{escape(text)}</td></tr>" for name, text in rows)
    return (
        f'<table class="labkit-facts"><caption>for four layers of width 1024, in float32</caption>'
        f"<tbody>{body}</tbody></table>"
    )


def _messages_text(cut: BatchCut) -> str:
    """All gradients once, and what accumulation spares."""
    if cut.dp_size == 1:
        return "nothing"
    sent = bus_factor("all_reduce", cut.dp_size) * GRADIENT_BYTES
    text = f"all gradients once, {bytes_text(GRADIENT_BYTES)}; on a ring each rank sends {bytes_text(sent)}"
    if cut.num_micro_batches > 1:
        text += f" (without no_sync {bytes_text(cut.num_micro_batches * sent)})"
    return text


def _says(cut: BatchCut, misfit: str) -> str:
    if misfit:
        text = f"<b>This does not fit.</b> {escape(misfit)}. Below, greyed: the last that did."
        return f'<div class="labkit-says misfit" role="alert">{text}</div>'
    per_rank = _count(cut.batch_size // cut.dp_size, "row")
    text = f"Each of {cut.dp_size} ranks sees {per_rank} of {cut.batch_size} in a step"
    if cut.dp_size == 1:
        text = f"One rank sees all {cut.batch_size} rows"
    return f'<div class="labkit-says" role="status">{text}</div>'


def _count(number: int, what: str) -> str:
    return f"{number} {what}{'s' * (number != 1)}"


_LOOK = {"layout": {"width": "340px"}, "style": {"description_width": "9.5em"}}
