"""Draw a transformer layer on the ranks of a tensor group: what is cut, what is the same everywhere, and the messages.

Ranks go down, the computation goes right. Source: arXiv 1909.08053, figure 4; arXiv 2205.05198, figure 5.
"""

from matplotlib.axes import Axes
from matplotlib.patches import Rectangle

from course.pictures.glyphs import draw_heading, draw_labels
from course.pictures.painter import new_figure, use_inches
from course.pictures.style import CP, EM, FRAME, FRAME_FILL, INK, MUTED, TP, text_on, tint, tints

WIDTH = 12.35  # inches
MARGIN, GAP = 0.12, 0.07  # inches
HEAD, FOOT = 1.15, 0.5  # inches: title, a line about it and the forward messages; the backward messages
ROW = 0.62  # inches: one rank
BAR = 0.34  # inches: where the ranks meet
NAME = 0.75  # inches: "rank 0"


LAYER = (
    ("around", "norm", 0.85),
    ("f", "", BAR),
    ("cut", "Q K V", 0.95),
    ("cut", "heads", 0.95),
    ("cut", "out", 0.75),
    ("g", "", BAR),
    ("around", "drop +", 0.95),
    ("around", "norm", 0.85),
    ("f", "", BAR),
    ("cut", "up", 0.95),
    ("cut", "GeLU", 0.95),
    ("cut", "down", 0.85),
    ("g", "", BAR),
    ("around", "drop +", 0.95),
)
"""The parts of the layer and their widths in inches: cut over the ranks, around that, and the messages f and g."""

MESSAGES = {
    False: {"f": ("nothing", "all-reduce"), "g": ("all-reduce", "nothing")},
    True: {"f": ("all-gather", "reduce-scatter"), "g": ("reduce-scatter", "all-gather")},
}
"""The messages forward and backward where a pair of linear layers begins (f) and ends (g), with sequence parallelism
(True) and without."""


def draw_transformer_layers(tp_size: int = 2) -> list[Axes]:
    """Draw the layer twice: with tensor parallelism alone, and with sequence parallelism too."""
    figure = new_figure(WIDTH, 2 * (HEAD + tp_size * ROW + FOOT + 0.2))
    axes = [figure.add_axes((0, bottom, 1, 0.5)) for bottom in (0.5, 0)]
    return [draw_transformer_layer(tp_size, flag, ax) for flag, ax in zip((False, True), axes)]


def draw_transformer_layer(tp_size: int, sequence_parallel: bool, ax: Axes) -> Axes:
    """Draw one layer: one row of boxes per rank, and for each message a bar over all rows."""
    use_inches(ax)
    title = "with sequence parallelism" if sequence_parallel else f"a transformer layer, t = {tp_size}"
    around = "pink: cut by tokens" if sequence_parallel else "grey: the same on every rank"
    says = f"blue: cut by columns, heads, rows · {around} · bars: messages, forward above and backward below"
    draw_heading(ax, MARGIN, title, 0.22, says, 0.54, TP)
    for rank in range(tp_size):
        draw_labels(ax, [f"rank {rank}"], [(MARGIN, HEAD + (rank + 0.5) * ROW)], EM, INK, bold=True, align="left")
    fills = {"cut": tints(TP, tp_size)}
    fills["around"] = tints(CP, tp_size) if sequence_parallel else [tint(FRAME_FILL, 1.0)] * tp_size
    left = MARGIN + NAME
    for kind, text, width in LAYER:
        if kind in "fg":
            _draw_message(ax, left, tp_size, MESSAGES[sequence_parallel][kind])
        else:
            for rank, fill in enumerate(fills[kind]):
                top = HEAD + rank * ROW
                box = Rectangle((left, top + 0.05), width, ROW - 0.1, facecolor=fill, edgecolor=FRAME, linewidth=0.8)
                ax.add_patch(box)
                draw_labels(ax, [text], [(left + width / 2, top + ROW / 2)], EM, text_on(fill))
        left += width + GAP
    return ax


def _draw_message(ax: Axes, left: float, tp_size: int, messages: tuple[str, str]) -> None:
    bar = Rectangle((left, HEAD), BAR, tp_size * ROW, facecolor="white", edgecolor=INK, linewidth=2.2)
    ax.add_patch(bar)
    for message, y in zip(messages, (HEAD - 0.2, HEAD + tp_size * ROW + 0.22)):
        is_one = message != "nothing"
        draw_labels(ax, [message], [(left + BAR / 2, y)], EM, INK if is_one else MUTED, bold=is_one)
