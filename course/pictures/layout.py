"""Draw a layout: every GPU is a box, every node a frame, every group a tint and a letter.

``draw_grid`` shows the groups of one axis; ``draw_layout`` the tensor, data and pipeline groups in three grids;
``draw_orders`` those of several orders of the axes. A grid is a handful of collections, never one artist per box,
because the explorer redraws it at every step of a slider.
"""

from collections.abc import Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.collections import PathCollection
from matplotlib.patches import FancyBboxPatch
from matplotlib.transforms import Affine2D

from course.pictures.floor_plan import FloorPlan, box_length, floor_plan
from course.pictures.glyphs import draw_heading, draw_labels
from course.pictures.painter import inches, new_figure
from course.pictures.style import (
    AXIS_COLOR,
    AXIS_NAME,
    EM,
    FRAME,
    FRAME_FILL,
    GREY,
    INK,
    MUTED,
    TINTS,
    TITLE_PT,
    group_letter,
    text_on,
    tint,
)
from labkit.layout import ParallelLayout
from labkit.sizes import counted

THREE_AXES = ("tp", "dp", "pp")
THREE_PLACES = tuple((0.008 + column / 3, 0.02, 0.31, 0.845) for column in range(3))
"""Where the three grids stand in their figure, side by side, with room for headings above."""
FIGURE_INCHES = (11.0, 5.2)
"""The size of three grids: at 100 dots per inch about as wide as a notebook's cell, so that text keeps its size."""
BOX = 0.92
"""The side of a GPU's box; the rest is the gap to its neighbour."""
SMALLEST_LABEL_INCHES = 0.085
"""Smaller labels are left out; the text table beside the picture says the same facts."""


def draw_layout(
    layout: ParallelLayout,
    gpus_per_node: int = 8,
    axes: Sequence[Axes] | None = None,
    *,
    follow: int | None = None,
    dimmed: bool = False,
) -> list[Axes]:
    """Draw the tensor, data and pipeline groups of one layout in three grids."""
    if axes is None:
        figure = new_figure(*FIGURE_INCHES)
        axes = [figure.add_axes(place) for place in THREE_PLACES]
    for axis, ax in zip(THREE_AXES, axes, strict=True):
        draw_grid(layout, axis, gpus_per_node, ax, follow=follow, dimmed=dimmed)
    return list(axes)


def draw_grid(
    layout: ParallelLayout,
    axis: str,
    gpus_per_node: int = 8,
    ax: Axes | None = None,
    *,
    follow: int | None = None,
    dimmed: bool = False,
) -> Axes:
    """Draw every GPU in its node, tinted and lettered by its group of ``axis``.

    ``follow`` puts one rank and its peers in the foreground. ``dimmed`` greys what is no longer current.
    """
    ax = ax or new_figure(5, 5).add_axes((0.02, 0.02, 0.96, 0.83))
    ax.set_axis_off()
    color = GREY if dimmed else AXIS_COLOR[axis]
    width, height = inches(ax)
    plan = floor_plan(layout.world_size, gpus_per_node, width, height)
    box_inches = box_length(plan, width, height)
    ax.set(xlim=(0, width / box_inches), ylim=(height / box_inches, 0))  # ranks go down

    title, says = f"{AXIS_NAME[axis]} groups", describe_groups(layout, axis, gpus_per_node)
    points = 72 * box_inches  # in a box's side, which is 1 in data coordinates
    draw_heading(ax, 0, title, -36 / points, says, -15 / points, color, GREY if dimmed else INK)
    _draw_nodes(ax, plan, box_inches)
    _draw_gpus(ax, plan, box_inches, layout, axis, color, dimmed, follow)
    return ax


def draw_orders(
    layouts: Sequence[ParallelLayout], gpus_per_node: int = 8, *, follow: int | None = None
) -> list[list[Axes]]:
    """Draw layouts that differ in their order side by side: one column per layout, one row per axis."""
    figure = new_figure(11, 7.6)
    width = 1 / len(layouts)
    rows = []
    for row, axis in enumerate(THREE_AXES):
        rects = [(column * width + 0.01, 0.66 - row * 0.32, width - 0.03, 0.185) for column in range(len(layouts))]
        rows.append([figure.add_axes(rect) for rect in rects])
        for layout, ax in zip(layouts, rows[-1], strict=True):
            draw_grid(layout, axis, gpus_per_node, ax, follow=follow)
    for column, layout in enumerate(layouts):
        figure.text(column * width + 0.01, 0.965, f"order {layout.order}", size=TITLE_PT + 3, weight="bold", color=INK)
    return rows


def describe_groups(layout: ParallelLayout, axis: str, gpus_per_node: int) -> str:
    """Say how many groups there are, how large, and how many of them leave a node: the heading of a grid.

    >>> describe_groups(ParallelLayout(16, tp_size=2, pp_size=4), "pp", gpus_per_node=8)
    '4 groups of 4, all cross nodes'
    """
    size, crossing = layout.size(axis), len(layout.crossings(axis, gpus_per_node))
    groups = layout.world_size // size
    sizes = f"{counted(groups, 'group')} of {size}"
    if size == 1:
        return f"{sizes}: nobody to talk to"
    if not crossing:
        return f"{sizes}, each inside a node" if groups > 1 else f"{sizes}, inside a node"
    who = "all cross" if crossing == groups > 1 else "crosses" if groups == 1 else f"{crossing} cross"
    return f"{sizes}, {who} nodes"


def _draw_nodes(ax: Axes, plan: FloorPlan, box_inches: float) -> None:
    corners = plan.node_corners()
    middles = corners + np.array(plan.frame) / 2
    _stamp(ax, (*plan.frame, 0.2), middles, box_inches, facecolors=FRAME_FILL, edgecolors=FRAME)
    if plan.head:
        names = [f"node {node}" for node in range(plan.num_nodes)]
        draw_labels(ax, names, corners + (0.1, -0.22), min(0.34 * box_inches, EM), MUTED, align="left")


def _draw_gpus(
    ax, plan: FloorPlan, box_inches: float, layout: ParallelLayout, axis: str, color, dimmed, follow
) -> None:
    strength = 0.4 if dimmed else 1.0
    groups = np.array(layout.groups(axis))
    group_of = np.empty(layout.world_size, dtype=int)
    group_of[groups.ravel()] = np.repeat(np.arange(len(groups)), groups.shape[1])
    palette = np.array([tint(color, strength * each) for each in TINTS])
    fills = palette[group_of % len(TINTS)]
    if follow is not None:
        peers = group_of == group_of[follow]
        fills = np.where(peers[:, None], tint(color, strength), tint(color, 0.15 * strength))

    centres, box = plan.gpu_centres(), (BOX, BOX, 0.12)
    _stamp(ax, box, centres, box_inches, facecolors=fills)
    if follow is not None:
        edge, width = GREY if dimmed else INK, float(np.clip(7 * box_inches, 2.0, 3.5))
        _stamp(ax, box, centres[[follow]], box_inches, facecolors="none", edgecolors=edge, linewidths=width)
    inks = GREY if dimmed else np.array([text_on(tuple(fill)) for fill in fills])
    _draw_names(ax, centres, box_inches, [group_letter(index) for index in group_of], inks)


def _draw_names(ax: Axes, centres: np.ndarray, box_inches: float, letters: list[str], inks) -> None:
    """Write the group's letter above the rank; in small boxes the letter alone, in tiny ones nothing."""
    if 0.35 * box_inches >= SMALLEST_LABEL_INCHES:
        draw_labels(ax, letters, centres - (0, 0.19), 0.42 * box_inches, inks, bold=True)
        draw_labels(ax, [str(rank) for rank in range(len(centres))], centres + (0, 0.24), 0.35 * box_inches, inks)
    elif 0.5 * box_inches >= SMALLEST_LABEL_INCHES:
        draw_labels(ax, letters, centres, 0.5 * box_inches, inks, bold=True)


def _stamp(ax: Axes, box: tuple[float, float, float], centres: np.ndarray, box_inches: float, **colors) -> None:
    """Draw rectangles as one artist; ``box`` is their width, height and corners' radius, in boxes."""
    width, height, corner = box
    shape = f"round,pad=0,rounding_size={corner}"
    path = FancyBboxPatch((-width / 2, -height / 2), width, height, boxstyle=shape).get_path()
    scale = Affine2D().scale(box_inches) + ax.figure.dpi_scale_trans
    stamps = PathCollection(
        [path], offsets=centres, offset_transform=ax.transData, transform=scale, clip_on=False, **colors
    )
    ax.add_collection(stamps, autolim=False)
