"""Write the facts of a layout's picture as text: for screen readers, for searching, and for the exact lists."""

import math
from collections.abc import Mapping

from course.pictures.scene import Table
from course.pictures.style import AXIS_NAME, group_letter
from course.sizing import Traffic
from labkit.layout import ParallelLayout
from labkit.sizes import ranks_text

MOST_GROUPS = 16  # of a longer list the rest is counted, not shown


def layout_table(
    layout: ParallelLayout, gpus_per_node: int = 8, traffic: Mapping[str, Traffic] | None = None, traffic_of: str = ""
) -> Table:
    """Return a row per axis: its numbers, and the ranks of its groups under their letters.

    ``traffic`` adds the bytes that each axis sends in a step, in all and between nodes; ``traffic_of`` names the model.
    """
    bytes_heads = [] if traffic is None else ["bytes a step", "between nodes"]
    rows = []
    for axis in axes_in_use(layout):
        groups, crossing = layout.groups(axis), len(layout.crossings(axis, gpus_per_node))
        cells = [f"{AXIS_NAME[axis]} ({axis} {layout.size(axis)})", f"{len(groups)} of {layout.size(axis)}"]
        cells.append(str(crossing) if crossing else "none")
        if traffic is not None:
            cells += map(bytes_text, traffic[axis]) if axis in traffic else ["not counted", ""]
        lists = [f"{group_letter(index)} {ranks_text(group)}" for index, group in enumerate(groups[:MOST_GROUPS])]
        more = [f"and {len(groups) - MOST_GROUPS} more"] if len(groups) > MOST_GROUPS else []
        rows.append([*cells, " ".join(lists + more)])
    caption = f"Bytes of {traffic_of}." if traffic_of else ""
    return Table(["axis", "groups", "cross nodes", *bytes_heads, "ranks"], rows, caption)


def axes_in_use(layout: ParallelLayout) -> list[str]:
    """Return the axes that have a grid and a row: context parallelism only where it is in use."""
    return [axis for axis in ("tp", "cp", "dp", "pp") if axis != "cp" or layout.cp_size > 1]


def bytes_text(number: float) -> str:
    """Write a volume with three digits and its unit, in powers of 1000.

    >>> bytes_text(927_712_935_936), bytes_text(4.3e12), bytes_text(0)
    ('928 GB', '4.3 TB', 'none')
    """
    if number == 0:
        return "none"
    power = min(int(math.log10(number)) // 3, 5)
    return f"{number / 1000**power:.3g} {('B', 'kB', 'MB', 'GB', 'TB', 'PB')[power]}"
