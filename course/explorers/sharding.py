"""Choose the sizes of Y = XA + b, the cut and t: the shards, what a rank holds, and what the ranks send."""

from collections import namedtuple
from math import prod

import ipywidgets as widgets

from course.explorers.base import Controls, Explorer, facts_html, says_html
from course.pictures.layout_table import bytes_text
from course.pictures.linear_cut import CUTS, LinearCut, Message
from course.pictures.painter import Canvas
from course.pictures.sharding import FIGURE_INCHES, draw_cut
from course.sizing.ring import bus_factor

SIZES = (64, 128, 256, 512, 1000, 1024, 2048, 4096, 8192)
BYTES_PER_ELEMENT = 4  # float32
WHOLE_MEANS = {"column": "gather_output=True", "row": "input_is_parallel=False"}


def shard_explorer(
    cut: str = "column", input_size: int = 1024, output_size: int = 512, tp_size: int = 2, batch_size: int = 256
) -> "ShardExplorer":
    """Show a cut of a linear layer, with a control for everything that decides it.

    Raises:
        ValueError: the start does not fit.
    """
    return ShardExplorer(LinearCut(cut, input_size, output_size, tp_size, batch_size))


class ShardExplorer(Explorer):
    """Controls, a picture and its facts; ``shown`` is a cut of A."""

    function, choice_type = "shard_explorer", namedtuple("Choice", "cut input_size output_size tp_size batch_size")

    def __init__(self, shown: LinearCut):
        make = Controls("290px", "5em")
        self.cut = make.dropdown("cut A by", CUTS, shown.cut)
        self.input_size = make.selection("in", SIZES, shown.input_size)
        self.output_size = make.selection("out", SIZES, shown.output_size)
        self.batch_size = make.selection("batch", SIZES, shown.batch_size)
        self.tp_size = make.slider("tensor t", shown.tp_size, 1, 16)
        self.whole = widgets.Checkbox(False, description="X and Y whole on every rank", indent=False)
        self._canvas = Canvas(FIGURE_INCHES)
        row = [self.cut, self.input_size, self.output_size, self.batch_size, self.tp_size, self.whole]
        super().__init__(shown, others=[self.whole], row=row)

    def _chosen(self) -> LinearCut:
        return LinearCut(*self.choice)

    def _parts(self) -> tuple[bytes, str, str]:
        picture = self._canvas.png(lambda ax: draw_cut(self.shown, ax, dimmed=not self.fits))
        what = "columns" if self.shown.cut == "column" else "rows"
        says = says_html(f"Each of {self.shown.tp_size} ranks has {self.shown.partition_size} {what} of A")
        return picture, says, facts_table(self.shown, bool(self.whole.value))


def facts_table(cut: LinearCut, whole: bool) -> str:
    """Return what a rank holds, and what it sends forward and backward, as an HTML table."""
    holds = [("weight", cut.weight_shard), ("bias", cut.b_shard), ("X", cut.x_shard), ("Y", cut.y_shard)]
    words = ", ".join(f"{name} {list(shape)} {bytes_text(prod(shape) * BYTES_PER_ELEMENT)}" for name, shape in holds)
    facts = {
        "each rank holds": words,
        "sent forward": _messages_text(cut, cut.forward_messages(whole)),
        "sent backward": _messages_text(cut, cut.backward_messages(whole)),
    }
    ends = f"with {WHOLE_MEANS[cut.cut]}" if whole else "with shards left as they are"
    return facts_html(f"in float32, {ends}", facts)


def _messages_text(cut: LinearCut, messages: list[Message]) -> str:
    """Say what is sent, how large it is, and what each rank sends if the collective is a ring."""
    if not messages:
        return "nothing"
    [message] = messages
    size = message.size_bytes(BYTES_PER_ELEMENT)
    sent = bytes_text(size * bus_factor(message.operation, cut.tp_size))
    name = message.operation.replace("_", "-")
    return f"{name} of {message.tensor} {list(message.shape)}, {bytes_text(size)}; on a ring each rank sends {sent}"
