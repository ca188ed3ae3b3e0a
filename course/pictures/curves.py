"""Draws loss curves that should coincide, each in a look that lets those below it show; and the metrics of a run."""

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path

from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from course.pictures.painter import LABEL_PT, Plot, label_plot
from course.pictures.style import GREY, INK, PP

LOOKS = (
    {"color": GREY, "linewidth": 9, "alpha": 0.6},
    {"color": "#00204D", "linewidth": 2.2},
    {"color": "#C9A227", "linestyle": "", "marker": "o", "markersize": 10, "fillstyle": "none", "markeredgewidth": 2.5},
    {"color": INK, "linestyle": "", "marker": "x", "markersize": 8, "markeredgewidth": 2},
)  # from the bottom up: a broad line, a thin one on it, rings, crosses; in none of the axes' colours


def draw_losses(
    curves: Mapping[str, Sequence[float]], *, floor_nats: float | None = None, num_steps: int = 1, note: str = ""
) -> Plot:
    """Draw the losses of each run over its steps, and ``floor_nats`` as a line that no run can pass.

    The axis has room for ``num_steps`` from the start. A run that began later has NaN before. The ``note`` is written
    above the curves.
    """
    if len(curves) > len(LOOKS):
        raise ValueError(f"{len(curves)} curves on each other cannot be told apart: give {len(LOOKS)} or fewer")
    figure = Figure((11.0, 4.4), layout="constrained")
    ax = figure.subplots()
    longest = max([num_steps, *map(len, curves.values())])
    said = []
    for (name, losses), look in zip(curves.items(), LOOKS):
        every = max(1, longest // 20) if "marker" in look else 1  # room between the marks
        ax.plot(range(1, len(losses) + 1), losses, label=name, markevery=every, **look)
        if losses:
            first = next((loss for loss in losses if not math.isnan(loss)), math.nan)
            said.append(f"{name}: {first:.2f} to {losses[-1]:.2f} at step {len(losses)}")
    if floor_nats is not None:
        ax.axhline(floor_nats, color=INK, linewidth=1.8, linestyle=(0, (6, 4)), label="the text's floor")
        said.append(f"The text's floor: {floor_nats:.2f}")
    ax.set_xlim(0, longest + 1)
    ax.xaxis.set_major_locator(MaxNLocator(integer=True))
    if not any(map(len, curves.values())) and floor_nats is None:
        ax.set_yticks([])  # nothing says yet how large a loss is
    ax.set_ylim(bottom=0)
    label_plot(ax, "loss", "step", "nats per letter")
    ax.set_title(note, loc="right", size=LABEL_PT, color=PP)
    if ax.lines:
        ax.legend(loc="best", fontsize=LABEL_PT, frameon=False)
    return Plot(figure, ". ".join(filter(None, ["Loss curves, in nats per letter", *said, note])) + ".")


def draw_metrics(path: str | Path) -> Plot:
    """Draw the file of `labtrain --metrics`: loss, gradient norm and speed of each step, and where it resumed.

    Of several runs in one file it is the last one. Raises a ValueError for a file without steps.
    """
    lines = [json.loads(line) for line in Path(path).read_text().splitlines() if line.endswith("}")]
    steps = []
    for line in (line for line in lines if "step" in line):
        if steps and line["step"] <= steps[-1]["step"]:
            steps.clear()  # a new run begins
        steps.append(line)
    if not steps:
        raise ValueError(f"{path} has no steps: name a file that labtrain wrote with --metrics")
    resumed = [step["resumed_after"] for step in steps if "resumed_after" in step]
    figure = Figure((13.0, 4.4), layout="constrained")
    kinds = {"loss": "nats per token", "grad_norm": "norm of the gradients", "tokens_per_second": "tokens per second"}
    for ax, (name, unit) in zip(figure.subplots(1, 3), kinds.items()):
        label_plot(ax, name.replace("_", " ").replace("grad", "gradient"), "step", unit)
        ax.plot([step["step"] for step in steps], [step[name] for step in steps], color=INK, linewidth=2.2)
        ax.xaxis.set_major_locator(MaxNLocator(integer=True))
        ax.set_ylim(bottom=0)
        for after in resumed:
            ax.axvline(after + 0.5, color=PP, linewidth=1.8, linestyle=(0, (6, 4)))
    evaluated = [step for step in steps if step["evaluation_loss"] is not None]
    at, found = [step["step"] for step in evaluated], [step["evaluation_loss"] for step in evaluated]
    if evaluated:
        figure.axes[0].plot(at, found, "o", color=PP, label="evaluation")
        figure.axes[0].legend(fontsize=LABEL_PT, frameon=False)
    first, last = steps[0], steps[-1]
    said = [f"Steps {first['step']} to {last['step']}: loss {first['loss']:.2f} to {last['loss']:.2f}"]
    said += [f"Evaluation: {found[-1]:.2f} at step {at[-1]}"] if evaluated else []
    said += [f"Resumed after step {', '.join(map(str, resumed))} (dashed)"] if resumed else []
    return Plot(figure, ". ".join(said) + ".")
