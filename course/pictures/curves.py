"""Loss curves that should lie on each other: each is drawn so that those below it still show."""

from collections.abc import Mapping, Sequence

from matplotlib.axes import Axes
from matplotlib.ticker import MaxNLocator

from course.pictures.style import GREY, INK, LABEL_PT, MUTED, TITLE_PT

FIGURE_INCHES = (11.0, 4.8)
LOOKS = (
    {"color": GREY, "linewidth": 9, "alpha": 0.6},
    {"color": "#00204D", "linewidth": 2.2},
    {"color": "#C9A227", "linestyle": "", "marker": "o", "markersize": 10, "fillstyle": "none", "markeredgewidth": 2.5},
    {"color": INK, "linestyle": "", "marker": "x", "markersize": 8, "markeredgewidth": 2},
)
"""From below to above: a broad line, a thin one on it, rings, crosses; in none of the axes' colours."""


def draw_losses(
    curves: Mapping[str, Sequence[float]],
    *,
    floor_nats: float | None = None,
    num_steps: int | None = None,
    ax: Axes | None = None,
) -> Axes:
    """Draw the losses of each run over its steps; ``floor_nats`` as a line that none can pass.

    ``num_steps`` is how many there will be: the axis is as long from the start.
    """
    if len(curves) > len(LOOKS):
        raise ValueError(f"{len(curves)} curves on each other cannot be told apart: give {len(LOOKS)} or fewer")
    if ax is None:
        from matplotlib import pyplot

        ax = pyplot.figure(figsize=FIGURE_INCHES, layout="constrained").subplots()
    longest = max([num_steps or 1, *map(len, curves.values())])
    for (name, losses), look in zip(curves.items(), LOOKS):
        every = max(1, longest // 20) if "marker" in look else 1  # room between the marks
        ax.plot(range(1, len(losses) + 1), losses, label=name, markevery=every, **look)
    if floor_nats is not None:
        ax.axhline(floor_nats, color=INK, linewidth=1.8, linestyle=(0, (6, 4)), label="the text's floor")
    ax.set_xlim(0, longest + 1)
    ax.xaxis.set_major_locator(MaxNLocator(integer=True))
    ax.set_ylim(bottom=0)
    ax.set_title("loss", loc="left", size=TITLE_PT, weight="bold", color=INK)
    ax.set_xlabel("step", size=LABEL_PT, color=INK)
    ax.set_ylabel("nats per letter", size=LABEL_PT, color=INK)
    ax.tick_params(labelsize=LABEL_PT - 1, colors=MUTED)
    ax.grid(which="major", color="#E5E7EB")
    ax.set_axisbelow(True)
    ax.spines[["top", "right"]].set_visible(False)
    if ax.lines:
        ax.legend(loc="best", fontsize=LABEL_PT, frameon=False)
    return ax
