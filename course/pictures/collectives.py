"""Pictures of collectives: whole tensors before and after on every rank, coloured by where the data came from.

Ranks go down, tensor elements go right. A box has the colour of the rank that its data came from; a sum has
a stripe for each of its ranks; and both say so in words.
"""

from collections.abc import Mapping, Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.collections import PolyCollection
from matplotlib.figure import Figure

from course.measure.flow import Flow
from course.pictures.glyphs import draw_labels
from course.pictures.style import FRAME, INK, MUTED, TITLE_PT

RANK_COLOR = ("#77AADD", "#EE8866", "#EEDD88", "#FFAABB", "#99DDFF", "#44BB99", "#BBCC33", "#DDDDDD")
"""Paul Tol's light scheme, made for labelled boxes: apart for colour-blind readers, and none of the axes' colours."""

EDGE = 0.03  # around an element's box: half the gap to its neighbour
BOX = 1 - 2 * EDGE
GAP = 1.6  # between the tensors before and after: room for the arrow
LABEL = 1.5  # left of the tensors: room for "rank 0"
HEAD = 0.75  # above them: room for "before" and "after"


def draw_flow(flow: Flow, title: str = "", ax: Axes | None = None, *, before: bool = True) -> Axes:
    """Draw every rank's tensor before (left) and after (right), or only the latter where ``before`` is False."""
    width, height = flow_size(flow, before)
    if ax is None:
        inches, head = min(0.75, 12 / width), 0.45 if title else 0.0
        figure = _new_figure(width * inches, height * inches + head)
        ax = figure.add_axes((0, 0, 1, height * inches / (height * inches + head)))
    ax.set_axis_off()
    ax.set_xlim(0, width)
    ax.set_ylim(height, 0)  # ranks go down
    ax.set_aspect("equal", anchor="W")
    em = _inches_per_unit(ax, width, height)

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
        ax.set_title(title, loc="left", size=TITLE_PT, weight="bold", color=INK)
    return ax


def draw_flows(flows: Mapping[str, Flow], num_columns: int = 2, *, before: bool = True) -> list[Axes]:
    """Draw several flows, each under its name, in columns; ``before`` as in `draw_flow`."""
    rows = -(-len(flows) // num_columns)
    sizes = [flow_size(flow, before) for flow in flows.values()]
    width, height = max(size[0] for size in sizes), max(size[1] for size in sizes)
    inches = 15 / num_columns / (width + 0.5)
    figure_height = rows * (height * inches + 0.6)
    figure = _new_figure(15, figure_height)
    axes = []
    for index, (name, flow) in enumerate(flows.items()):
        row, column = divmod(index, num_columns)
        bottom = 1 - (row + 1) / rows + 0.1 / figure_height
        ax = figure.add_axes(
            (column / num_columns + 0.005, bottom, 0.97 / num_columns, height * inches / figure_height)
        )
        axes.append(draw_flow(flow, name, ax, before=before))
    return axes


def flow_size(flow: Flow, before: bool = True) -> tuple[float, float]:
    """Width and height of a flow's picture, in boxes; without the tensors before if ``before`` is False."""
    after = max((len(values) for values in flow.after if values is not None), default=1)
    return LABEL + _width_before(flow, before) + after + 0.1, HEAD + len(flow.before) + 0.1


def _width_before(flow: Flow, before: bool) -> float:
    return max(map(len, flow.before)) + GAP if before else 0.0


def source_text(sources: Sequence[int]) -> str:
    """Where an element's data came from, in words that fit into its box.

    >>> source_text((2,)), source_text((0, 2)), source_text((0, 1, 2, 3))
    ('from 2', '0 + 2', 'sum of 4')
    """
    if len(sources) == 1:
        return f"from {sources[0]}"
    return " + ".join(map(str, sources)) if len(sources) == 2 else f"sum of {len(sources)}"


def _draw_tensors(ax: Axes, tensors, sources, left: float, em: float, words: bool) -> None:
    fills, colors, numbers, centres, notes, note_centres = [], [], [], [], [], []
    for rank, values in enumerate(tensors):
        if values is None:
            notes.append("nothing")
            note_centres.append((left + 0.5, HEAD + rank + 0.5))
            continue
        for element, value in enumerate(values):
            origins = sources[rank][element]
            x, y = left + element, HEAD + rank
            is_sum = len(origins) != 1
            top, stripe = (0.76 if is_sum else EDGE), BOX / max(len(origins), 1)
            for index, origin in enumerate(origins):
                fills.append(_box(x + EDGE + index * stripe, y + top, stripe, 1 - EDGE - top))
                colors.append(RANK_COLOR[origin % len(RANK_COLOR)])
            numbers.append(f"{value:g}")
            centres.append((x + 0.5, y + (0.5 if not words else 0.30 if is_sum else 0.38)))
            notes += [source_text(origins)] * words
            note_centres += [(x + 0.5, y + (0.59 if is_sum else 0.74))] * words
    frames = [
        _box(left + e + EDGE, HEAD + r + EDGE, BOX, BOX) for r, row in enumerate(tensors) for e in range(len(row or []))
    ]
    ax.add_collection(PolyCollection(fills, facecolors=colors, linewidths=0), autolim=False)
    ax.add_collection(PolyCollection(frames, facecolors="none", edgecolors=FRAME, linewidths=1), autolim=False)
    draw_labels(ax, numbers, centres, 0.36 * em, INK, bold=True)
    draw_labels(ax, notes, note_centres, 0.19 * em, INK)


def _box(x: float, y: float, width: float, height: float) -> np.ndarray:
    return np.array([(x, y), (x + width, y), (x + width, y + height), (x, y + height)])


def _inches_per_unit(ax: Axes, width: float, height: float) -> float:
    extent, dpi = ax.get_window_extent(), ax.figure.dpi
    return min(extent.width / dpi / width, extent.height / dpi / height)


def _new_figure(width: float, height: float) -> Figure:
    from matplotlib import pyplot

    return pyplot.figure(figsize=(width, height))
