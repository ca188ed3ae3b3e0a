"""Draw estimates next to published numbers."""

from collections.abc import Sequence

from matplotlib.figure import Figure

from course.pictures.painter import LABEL_PT, Plot, label_plot
from course.pictures.style import INK, PP
from course.sizing import Hardware, Published, step_time


def draw_published(rows: Sequence[Published], hardware: Hardware) -> Plot:
    """Draw each row's published FLOP/s per GPU as a ring and its estimate as a cross, with the error above both."""
    figure, places = Figure((13, 4.2), layout="constrained"), range(len(rows))
    ax = figure.subplots()
    estimated = [step_time(row.plan, hardware).flops_per_gpu / 1e12 for row in rows]
    published = [row.flops_per_gpu / 1e12 for row in rows]
    errors = [f"{ours / theirs - 1:+.1%}" for ours, theirs in zip(estimated, published)]
    ax.plot(places, published, "o", color=INK, markersize=13, fillstyle="none", markeredgewidth=2.5, label="published")
    ax.plot(places, estimated, "x", color=PP, markersize=10, markeredgewidth=3, label="estimated")
    for place, error in enumerate(errors):
        ax.text(place, max(estimated[place], published[place]) + 9, error, size=LABEL_PT, color=INK, ha="center")
    ax.set_xticks(places, [f"{row.billions:g}" for row in rows])
    ax.set_ylim(0, max(estimated + published) * 1.15)
    label_plot(ax, "teraFLOP/s per GPU", "billion parameters", "")
    ax.legend(fontsize=LABEL_PT, frameon=False, loc="lower right", ncols=2)
    said = "; ".join(f"{row.billions:g} billion parameters {error}" for row, error in zip(rows, errors))
    return Plot(figure, f"Estimated over published teraFLOP/s per GPU, the error of each row: {said}.")
