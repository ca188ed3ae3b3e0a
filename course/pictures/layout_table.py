"""Write the facts of a layout's picture as text: for screen readers, for searching, and for the exact lists."""

import math
from collections.abc import Mapping
from html import escape

from course.pictures.style import AXIS_COLOR, AXIS_NAME, group_letter
from course.sizing import Traffic
from labkit.layout import ParallelLayout
from labkit.sizes import ranks_text

MOST_GROUPS = 16  # of a longer list the rest is counted, not shown


def layout_table(
    layout: ParallelLayout,
    gpus_per_node: int = 8,
    *,
    follow: int | None = None,
    traffic: Mapping[str, Traffic] | None = None,
    traffic_of: str = "",
) -> str:
    """Return an HTML table with two rows per axis: its numbers, and the ranks of its groups under their letters.

    ``traffic`` adds the bytes that each axis sends in a step, in all and between nodes; ``traffic_of`` names the model.
    """
    columns = ["axis", "groups", "cross nodes"]
    caption = f"{layout.world_size} GPUs, {gpus_per_node} per node, order {layout.order}"
    if traffic is not None:
        columns += ["bytes a step", "between nodes"]
        caption += f"; bytes of {traffic_of}"
    if follow is not None:
        columns.append(f"group of GPU {follow}")
    axes = [axis for axis in ("tp", "cp", "dp", "pp") if axis != "cp" or layout.cp_size > 1]
    rows = "".join(_rows(layout, axis, gpus_per_node, follow, traffic) for axis in axes)
    heads = "".join(f'<th scope="col">{column}</th>' for column in columns)
    return (
        f'<table class="labkit-facts"><caption>{escape(caption)}</caption><thead><tr>{heads}</tr></thead>{rows}</table>'
    )


def bytes_text(number: float) -> str:
    """Write a volume with three digits and its unit, in powers of 1000.

    >>> bytes_text(927_712_935_936), bytes_text(4.3e12), bytes_text(0)
    ('928 GB', '4.3 TB', 'none')
    """
    if number == 0:
        return "none"
    power = min(int(math.log10(number)) // 3, 5)
    return f"{number / 1000**power:.3g} {('B', 'kB', 'MB', 'GB', 'TB', 'PB')[power]}"


def groups_text(groups: list[list[int]]) -> list[str]:
    """Write each group with the letter that it has in the picture.

    >>> groups_text([[0, 1], [2, 3]])
    ['A [0, 1]', 'B [2, 3]']
    """
    shown = [f"{group_letter(i)} {ranks_text(group)}" for i, group in enumerate(groups[:MOST_GROUPS])]
    hidden = len(groups) - len(shown)
    return shown + ([f"and {hidden} more"] if hidden else [])


def _rows(layout: ParallelLayout, axis: str, gpus_per_node: int, follow: int | None, traffic) -> str:
    groups, crossing = layout.groups(axis), len(layout.crossings(axis, gpus_per_node))
    cells = [f"{len(groups)} of {layout.size(axis)}", str(crossing) if crossing else "none"]
    if traffic is not None:
        cells += [bytes_text(volume) for volume in traffic[axis]] if axis in traffic else ["not counted", ""]
    if follow is not None:
        index = next(i for i, group in enumerate(groups) if follow in group)
        cells.append(f"{group_letter(index)} {ranks_text(groups[index])}")
    look = f"border-left: .5em solid {AXIS_COLOR[axis]}; padding-left: .5em"  # words in it would be pale on a dark page
    name = f'<span style="{look}">{AXIS_NAME[axis]} ({axis} {layout.size(axis)})</span>'
    lists = " ".join(f"<span>{text}</span>" for text in groups_text(groups))  # a span stays on one line
    return (
        f'<tbody><tr><th scope="rowgroup" rowspan="2">{name}</th><td>{"</td><td>".join(cells)}</td></tr>'
        f'<tr><td colspan="{len(cells)}">{lists}</td></tr></tbody>'
    )
