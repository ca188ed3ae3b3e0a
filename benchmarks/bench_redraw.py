"""Redrawing the three grids of the explorer as PNG, against the plain way: a new figure with one artist per box."""

import io
import statistics
import time
from collections.abc import Callable, Iterator

from matplotlib.figure import Figure
from matplotlib.patches import FancyBboxPatch

from course.pictures.floor_plan import FloorPlan, floor_plan
from course.pictures.layout import BOX, FIGURE_INCHES, THREE_AXES, THREE_PLACES, draw_layout
from course.pictures.painter import Canvas
from course.pictures.style import AXIS_COLOR, TINTS, group_letter, tint
from labkit.layout import ParallelLayout

LAYOUTS = [ParallelLayout(n, t, p) for n, t, p in ((16, 2, 4), (64, 4, 4), (256, 8, 4), (1024, 8, 8))]
GPUS_PER_NODE = 8


def rows() -> Iterator[tuple[str, float, float]]:
    canvas = Canvas(FIGURE_INCHES, THREE_PLACES)
    for layout in LAYOUTS:

        def redraw(layout=layout) -> bytes:
            return canvas.png(lambda *axes: draw_layout(layout, GPUS_PER_NODE, axes))

        ours = _median_seconds(redraw, repeats=15)
        theirs = _median_seconds(lambda layout=layout: naive_png(layout), repeats=3 if layout.world_size < 500 else 1)
        yield f"redraw the grids of {layout.world_size} GPUs, against one artist per box", ours, theirs


def naive_png(layout: ParallelLayout) -> bytes:
    """Draw the same three grids with one patch and up to two Texts per GPU."""
    figure = Figure(figsize=FIGURE_INCHES, dpi=100)
    for axis, place in zip(THREE_AXES, THREE_PLACES):
        ax = figure.add_axes(place)
        ax.set_axis_off()
        ax.set_title(f"{axis} groups", loc="left")
        plan = floor_plan(layout.world_size, GPUS_PER_NODE, 3.4, 4.4)
        ax.set_xlim(0, plan.size[0])
        ax.set_ylim(plan.size[1], 0)
        _add_frames(ax, plan)
        _add_boxes(ax, plan, layout, axis)
    file = io.BytesIO()
    figure.savefig(file, format="png")
    return file.getvalue()


def _add_frames(ax, plan: FloorPlan) -> None:
    for node, (x, y) in enumerate(plan.node_corners()):
        ax.add_patch(_rounded(x, y, *plan.frame, facecolor="whitesmoke", edgecolor="grey"))
        if plan.head:
            ax.text(x, y - 0.2, f"node {node}")


def _add_boxes(ax, plan: FloorPlan, layout: ParallelLayout, axis: str) -> None:
    centres = plan.gpu_centres()
    labelled = layout.world_size <= 256  # as in ours: letters and ranks in large boxes, letters in small ones
    for index, group in enumerate(layout.groups(axis)):
        color = tint(AXIS_COLOR[axis], TINTS[index % len(TINTS)])
        for rank in group:
            x, y = centres[rank]
            ax.add_patch(_rounded(x - BOX / 2, y - BOX / 2, BOX, BOX, facecolor=color, edgecolor="none"))
            if labelled:
                ax.text(x, y, group_letter(index), weight="bold", ha="center", va="center")
            if layout.world_size <= 64:
                ax.text(x, y + 0.25, str(rank), ha="center", va="center", size=8)


def _rounded(x: float, y: float, width: float, height: float, **colors) -> FancyBboxPatch:
    return FancyBboxPatch((x, y), width, height, boxstyle="round,pad=0,rounding_size=0.1", **colors)


def _median_seconds(draw: Callable[[], bytes], repeats: int) -> float:
    draw()  # the first call fills caches of fonts and outlines
    durations = []
    for _ in range(repeats):
        start = time.perf_counter()
        draw()
        durations.append(time.perf_counter() - start)
    return statistics.median(durations)
