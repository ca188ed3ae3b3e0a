"""Choose the batch, the replicas and the micro-batches: which rank sees which rows, and what that costs in messages."""

from collections import namedtuple

from course.explorers.base import Controls, Explorer, facts_html, says_html
from course.pictures.batch import FIGURE_INCHES, draw_batch
from course.pictures.layout_table import bytes_text
from course.pictures.painter import Canvas
from course.sizing.ring import bus_factor
from labkit.cuts import BatchCut
from labkit.sizes import counted

BATCH_SIZES = (8, 16, 32, 64, 96, 128, 192, 256, 512, 1024)
GRADIENT_BYTES = 4 * 4 * (1024 * 1024 + 1024)
"""The gradients of notebook 05's model in float32: four linear layers of width 1024, with their biases."""


def batch_explorer(batch_size: int = 128, dp_size: int = 4, num_micro_batches: int = 1) -> "BatchExplorer":
    """Show the rows of a batch, with a control for each size that deals them out.

    Raises:
        ValueError: the start does not fit.
    """
    return BatchExplorer(BatchCut(batch_size, dp_size, num_micro_batches))


class BatchExplorer(Explorer):
    """Controls, a picture and its facts; ``shown`` is a cut of the batch."""

    function, choice_type = "batch_explorer", namedtuple("Choice", "batch_size dp_size num_micro_batches")

    def __init__(self, shown: BatchCut):
        make = Controls("340px", "9.5em")
        self.batch_size = make.selection("batch B, rows", BATCH_SIZES, shown.batch_size)
        self.dp_size = make.slider("replicas d", shown.dp_size, 1, 16)
        self.num_micro_batches = make.slider("micro-batches m", shown.num_micro_batches, 1, 8)
        self._canvas = Canvas(FIGURE_INCHES)
        super().__init__(shown)

    def _chosen(self) -> BatchCut:
        return BatchCut(*self.choice)

    def _parts(self) -> tuple[bytes, str, str]:
        picture = self._canvas.png(lambda ax: draw_batch(self.shown, ax, dimmed=not self.fits))
        return picture, _says(self.shown), facts_table(self.shown)


def facts_table(cut: BatchCut) -> str:
    """Return what a rank has at once, how much a row counts, and what is sent in a step, as an HTML table."""
    m, d, b = cut.num_micro_batches, cut.dp_size, cut.micro_batch_size
    rows = counted(b, "row")
    facts = {
        "each rank": f"{counted(m, 'backward')} of {rows}: activations of {rows} at a time",
        "a row counts": f"1/{b} in its micro-batch · 1/{m} in its rank · 1/{d} in the average = 1/{cut.batch_size}",
        "sent in a step": _messages_text(cut),
    }
    return facts_html("for four layers of width 1024, in float32", facts)


def _messages_text(cut: BatchCut) -> str:
    """Say that all gradients are sent once, and what accumulation saves."""
    if cut.dp_size == 1:
        return "nothing"
    sent = bus_factor("all_reduce", cut.dp_size) * GRADIENT_BYTES
    text = f"all gradients once, {bytes_text(GRADIENT_BYTES)}; on a ring each rank sends {bytes_text(sent)}"
    if cut.num_micro_batches > 1:
        text += f" (without no_sync {bytes_text(cut.num_micro_batches * sent)})"
    return text


def _says(cut: BatchCut) -> str:
    if cut.dp_size == 1:
        return says_html(f"One rank sees all {cut.batch_size} rows")
    per_rank = counted(len(cut.rows_of_replica(0)), "row")
    return says_html(f"Each of {cut.dp_size} ranks sees {per_rank} of {cut.batch_size} in a step")
