"""Draw collectives: whole tensors before and after on every rank, coloured by where the data came from.

Ranks go down, tensor elements go right. A box has the colour of the rank that its data came from, a sum has
one stripe per rank in it, and both say so in words.
"""

from collections.abc import Mapping, Sequence

import numpy as np
from matplotlib.axes import Axes

from course.measure.flow import Flow
from course.pictures.glyphs import draw_labels
from course.pictures.painter import inches, new_figure
from course.pictures.rows import draw_boxes
from course.pictures.style import FRAME, INK, MUTED, TITLE

RANK_COLOR = ("#77AADD", "#EE8866", "#EEDD88", "#FFAABB", "#99DDFF", "#44BB99", "#BBCC33", "#DDDDDD")
"""Paul Tol's light scheme, made for labelled boxes: safe for colour-blind readers, and none of the axes' colours."""

EDGE = 0.03  # around an element's box: half the gap to its neighbour
BOX = 1 - 2 * EDGE
GAP = 1.6  # between the tensors before and after: room for the arrow
LABEL = 1.5  # left of the tensors: room for "rank 0"
HEAD = 0.75  # above them: room for "before" and "after"


def draw_flow(flow: Flow, title: str = "", ax: Axes | None = None, *, before: bool = True) -> Axes:
    """Draw every rank's tensor before (left) and after (right); only the latter if ``before`` is False."""
    width, height = flow_size(flow, before)
    if ax is None:
        unit, head = min(0.75, 12 / width), 0.45 if title else 0.0
        figure = new_figure(width * unit, height * unit + head)
        ax = figure.add_axes((0, 0, 1, height * unit / (height * unit + head)))
    ax.set_axis_off()
    ax.set(xlim=(0, width), ylim=(height, 0))  # ranks go down
    ax.set_aspect("equal", anchor="W")
    em = float(min(inches(ax) / (width, height)))

    after_x = LABEL + _width_before(flow, before)
    if before:
        own = [[(rank,)] * len(values) for rank, values in enumerate(flow.before)]
        _draw_tensors(ax, flow.before, own, LABEL, em, words=False)
        draw_labels(ax, ["before"], [(LABEL + 0.03, HEAD / 2)], 0.27 * em, MUTED, align="left")
    _draw_tensors(ax, flow.after, flow.sources, after_x, em, words=True)

    ranks = [f"rank {rank}" for rank in range(len(flow.before))]
    draw_labels(ax, ranks, [(0.08, HEAD + rank + 0.5) for rank in range(len(ranks))], 0.27 * em, INK, align="left")
    draw_labels(ax, ["after"], [(after_x + 0.03, HEAD / 2)], 0.27 * em, MUTED, align="left")
    if before:
        middle = HEAD + len(ranks) / 2
        arrow = {"arrowstyle": "simple,head_width=0.9,head_length=0.7,tail_width=0.3", "color": MUTED}
        ax.annotate("", (after_x - 0.35, middle), (after_x - GAP + 0.35, middle), arrowprops=arrow)
    if title:
        ax.set_title(title, **TITLE)
    return ax


def draw_flows(flows: Mapping[str, Flow], num_columns: int = 2, *, before: bool = True) -> list[Axes]:
    """Draw several flows in columns, each under its name; ``before`` as in `draw_flow`."""
    rows = -(-len(flows) // num_columns)
    width, height = map(max, zip(*(flow_size(flow, before) for flow in flows.values())))
    height *= 15 / num_columns / (width + 0.5)  # from here on in inches
    figure_height = rows * (height + 0.6)
    figure = new_figure(15, figure_height)
    axes = []
    for index, (name, flow) in enumerate(flows.items()):
        row, column = divmod(index, num_columns)
        bottom = 1 - (row + 1) / rows + 0.1 / figure_height
        place = column / num_columns + 0.005, bottom, 0.97 / num_columns, height / figure_height
        axes.append(draw_flow(flow, name, figure.add_axes(place), before=before))
    return axes


def flow_size(flow: Flow, before: bool = True) -> tuple[float, float]:
    """Return the width and height of a flow's picture, in boxes; without the tensors before if ``before`` is False."""
    after = max((len(values) for values in flow.after if values is not None), default=1)
    return LABEL + _width_before(flow, before) + after + 0.1, HEAD + len(flow.before) + 0.1


def _width_before(flow: Flow, before: bool) -> float:
    return max(map(len, flow.before)) + GAP if before else 0.0


def source_text(sources: Sequence[int]) -> str:
    """Say where an element's data came from, in words that fit into its box.

    >>> source_text((2,)), source_text((0, 2)), source_text((0, 1, 2, 3))
    ('from 2', '0 + 2', 'sum of 4')
    """
    if len(sources) == 1:
        return f"from {sources[0]}"
    return " + ".join(map(str, sources)) if len(sources) == 2 else f"sum of {len(sources)}"


def _draw_tensors(ax: Axes, tensors, sources, left: float, em: float, words: bool) -> None:
    fills, colors, frames, numbers, centres, notes, note_centres = [], [], [], [], [], [], []
    for rank, values in enumerate(tensors):
        y = HEAD + rank
        if values is None:
            notes.append("nothing")
            note_centres.append((left + 0.5, y + 0.5))
            continue
        for element, (value, origins) in enumerate(zip(values, sources[rank])):
            x, is_sum = left + element, len(origins) != 1
            top, stripe = (0.76 if is_sum else EDGE), BOX / max(len(origins), 1)
            for index, origin in enumerate(origins):
                begin = x + EDGE + index * stripe
                fills.append((begin, begin + stripe, y + top, 1 - EDGE - top))
                colors.append(RANK_COLOR[origin % len(RANK_COLOR)])
            frames.append((x + EDGE, x + EDGE + BOX, y + EDGE, BOX))
            numbers.append(f"{value:g}")
            centres.append((x + 0.5, y + (0.5 if not words else 0.30 if is_sum else 0.38)))
            if words:
                notes.append(source_text(origins))
                note_centres.append((x + 0.5, y + (0.59 if is_sum else 0.74)))
    draw_boxes(ax, *np.reshape(fills, (-1, 4)).T, facecolors=colors, linewidths=0)
    draw_boxes(ax, *np.reshape(frames, (-1, 4)).T, facecolors="none", edgecolors=FRAME, linewidths=1)
    draw_labels(ax, numbers, centres, 0.36 * em, INK, bold=True)
    draw_labels(ax, notes, note_centres, 0.19 * em, INK)
