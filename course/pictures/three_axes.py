"""Draw who holds what when all three axes are cut: each rank's layers, its part of them, and its rows of the batch."""

from typing import Any

from matplotlib.axes import Axes
from matplotlib.patches import FancyArrowPatch, FancyBboxPatch

from course.pictures.painter import new_figure
from course.pictures.style import DP, FRAME, FRAME_FILL, INK, LABEL_PT, MUTED, PP, TITLE_PT, TP, tint
from labkit.cuts import BatchCut, layers_of_stage
from labkit.layout import ParallelLayout

FIGURE_INCHES = (11.0, 4.6)
LEFT, TOP, BOTTOM = 0.155, 0.86, 0.03  # where the ranks begin and end, as shares of the figure
MIDDLE: dict[str, Any] = dict(ha="center", va="center")


def draw_holdings(layout: ParallelLayout, num_layers: int, batch_size: int, ax: Axes | None = None) -> Axes:
    """Draw one replica per row, its stages from left to right, and the ranks that share a stage side by side.

    Arrows show who talks to whom: within a stage (tp), to the next stage (pp), between replicas (dp).
    """
    ax = ax or new_figure(*FIGURE_INCHES).add_axes((0, 0, 1, 1))
    ax.set_axis_off()
    ax.set(xlim=(0, 1), ylim=(0, 1))
    t, p, d = layout.tp_size, layout.pp_size, layout.dp_size
    batch = BatchCut(batch_size, d)
    row, column = (TOP - BOTTOM) / d, (0.985 - LEFT) / p
    gap = 0.03 if p > 1 else 0.0  # between stages, for the arrows
    width, height = (column - gap) / t, min(row * 0.72, 0.3)
    centres = {}
    for stage in range(p):
        middle = LEFT + stage * column + (column - gap) / 2
        name = f"stage {stage}\n" if p > 1 else ""
        layers = layers_of_stage(num_layers, stage, p)
        says = f"{name}{_range('layer', layers)}"
        ax.text(middle, 0.93, says, size=LABEL_PT, weight="bold", color=PP, linespacing=1.3, **MIDDLE)
    for dp_rank in range(d):
        y = TOP - (dp_rank + 0.5) * row
        name = f"replica {dp_rank}\n" if height > 0.1 else ""
        says = f"{name}{_range('row', batch.rows_of_replica(dp_rank))}"
        ax.text(0.012, y, says, va="center", size=LABEL_PT, weight="bold", color=DP, linespacing=1.4)
        for stage in range(p):
            x = LEFT + stage * column
            ax.add_patch(_box(x - 0.004, y - height / 2 - 0.016, t * width + 0.008, height + 0.032, FRAME_FILL, FRAME))
            for tp_rank in range(t):
                rank = layout.rank_at(tp=tp_rank, dp=dp_rank, pp=stage)
                left = x + tp_rank * width
                centres[tp_rank, dp_rank, stage] = left + width / 2, y
                strength = 0.16 if tp_rank % 2 == 0 else 0.34
                ax.add_patch(_box(left + 0.006, y - height / 2, width - 0.012, height, tint(TP, strength), TP))
                _label(ax, left + width / 2, y, rank, tp_rank, t, width, height)
    _draw_arrows(ax, layout, centres, width, height, row, gap)
    return ax


def holdings_text(layout: ParallelLayout, num_layers: int, batch_size: int) -> str:
    """Say the same as text, one line per rank.

    >>> print(holdings_text(ParallelLayout(2, tp_size=2), num_layers=4, batch_size=16))
    rank 0: layers 0 to 3, part 1 of 2; rows 0 to 15
    rank 1: layers 0 to 3, part 2 of 2; rows 0 to 15
    """
    lines = []
    for rank in range(layout.world_size):
        place = layout.coords(rank)
        part = f", part {place.tp + 1} of {layout.tp_size}" if layout.tp_size > 1 else ""
        layers = _range("layer", layers_of_stage(num_layers, place.pp, layout.pp_size))
        rows = _range("row", BatchCut(batch_size, layout.dp_size).rows_of_replica(place.dp))
        lines.append(f"rank {rank}: {layers}{part}; {rows}")
    return "\n".join(lines)


def _label(ax: Axes, x: float, y: float, rank: int, tp_rank: int, t: int, width: float, height: float) -> None:
    if height < 0.1:
        ax.text(x, y, f"rank {rank}", size=LABEL_PT - 2, color=INK, weight="bold", **MIDDLE)
        return
    name, above = f"rank {rank}" if width > 0.12 else str(rank), 0.035 if t > 1 else 0.0
    ax.text(x, y + above, name, size=TITLE_PT - 1, weight="bold", color=INK, **MIDDLE)
    if t > 1:
        part = f"part {tp_rank + 1} of {t}" if width > 0.14 else f"{tp_rank + 1} of {t}"
        ax.text(x, y - 0.05, part, size=LABEL_PT - 1, color=MUTED, **MIDDLE)


def _draw_arrows(ax: Axes, layout: ParallelLayout, centres: dict, width: float, height: float, row: float, gap) -> None:
    for (tp_rank, dp_rank, stage), (x, y) in centres.items():
        rank = layout.rank_at(tp=tp_rank, dp=dp_rank, pp=stage)
        if tp_rank + 1 < layout.tp_size:
            ax.add_patch(_arrow((x + width / 2 - 0.016, y), (x + width / 2 + 0.016, y), TP))
            _name_first(ax, rank, "tp", x + width / 2, y + 0.045, TP)
        if dp_rank + 1 < layout.dp_size and row - height > 0.05:
            below = (x, y - height / 2 - 0.012), (x, y - row + height / 2 + 0.012)
            ax.add_patch(_arrow(*below, DP))
            _name_first(ax, rank, "dp", x + 0.02, y - row / 2, DP)
        if stage + 1 < layout.pp_size and tp_rank == layout.tp_size - 1:
            ax.add_patch(_arrow((x + width / 2 - 0.004, y), (x + width / 2 + gap + 0.004, y), PP))
            _name_first(ax, rank - layout.tp_size + 1, "pp", x + width / 2 + gap / 2, y + 0.045, PP)


def _name_first(ax: Axes, rank: int, axis: str, x: float, y: float, color: str) -> None:
    """Name the arrow's axis if the arrow is the first of its kind."""
    if rank == 0:
        behind = {"facecolor": "white", "edgecolor": "none", "pad": 1.5}
        ax.text(x, y, axis, size=LABEL_PT - 1, weight="bold", color=color, bbox=behind, **MIDDLE)


def _arrow(start, end, color) -> FancyArrowPatch:
    look: dict[str, Any] = dict(arrowstyle="<|-|>", mutation_scale=15, linewidth=2.2, shrinkA=0, shrinkB=0, zorder=3)
    return FancyArrowPatch(start, end, color=color, **look)


def _box(x, y, width, height, fill, edge) -> FancyBboxPatch:
    shape = "round,pad=0,rounding_size=0.008"
    return FancyBboxPatch((x, y), width, height, boxstyle=shape, facecolor=fill, edgecolor=edge, linewidth=1.4)


def _range(what: str, numbers: range) -> str:
    if len(numbers) == 1:
        return f"{what} {numbers[0]}"
    return f"{what}s {numbers[0]} to {numbers[-1]}"
