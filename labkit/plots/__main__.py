"""Write the figures of README and notebooks: ``python -m labkit.plots pics``.

One line in ``FIGURES`` a picture: its file's name and the call that draws it.
"""

import sys
from pathlib import Path

import matplotlib

from labkit.layout import ParallelLayout
from labkit.plots.layout import draw_layout, draw_orders

TWO_NODES = ParallelLayout(16, tp_size=2, pp_size=4)  # the 16 GPUs of notebook 01
OTHER_ORDER = ParallelLayout(16, tp_size=2, pp_size=4, order="tp-pp-dp")

FIGURES = {
    "group_layout": lambda: draw_layout(TWO_NODES, gpus_per_node=8),
    "group_layout_orders": lambda: draw_orders([TWO_NODES, OTHER_ORDER], gpus_per_node=8),
}


def write_figures(folder: Path) -> list[Path]:
    """Draw every figure into ``folder`` as PNG, and say which files those are."""
    from matplotlib import pyplot

    folder.mkdir(parents=True, exist_ok=True)
    paths = []
    for name, draw in FIGURES.items():
        draw()
        path = folder / f"{name}.png"
        pyplot.gcf().savefig(path, dpi=120, metadata={"Software": None})  # the same bytes from every matplotlib release
        pyplot.close()
        paths.append(path)
    return paths


if __name__ == "__main__":
    matplotlib.use("agg")
    for path in write_figures(Path(sys.argv[1] if len(sys.argv) > 1 else "pics")):
        print(path)
