"""Draw what schedules cost against each other: how long their ranks are idle, over what the fullest rank holds."""

from collections.abc import Mapping, Sequence
from typing import Any

from matplotlib.figure import Figure

from course.pictures.painter import LABEL_PT, Plot, label_plot
from course.pictures.style import GREY, INK, PP
from course.pictures.timeline import peaks_in_flight
from course.timeline import Timeline


def draw_trade(named: Mapping[str, Timeline], curve: Sequence[Timeline] = (), curve_name: str = "") -> Plot:
    """Draw a point for each schedule, and behind them a line through those of the ``curve``, from little memory on.

    Memory is in micro-batches whose activations the fullest rank holds, the bubble is idle over ideal. The plot is as
    high as the points need; a curve may leave it at the top.
    """
    if not named:
        raise ValueError("draw_trade got no schedules: name one or more, each with its timeline")
    points: dict[tuple[float, float], list[str]] = {}
    for name, timeline in named.items():
        points.setdefault(_place(timeline), []).append(name)  # schedules at one place share their label
    behind = sorted(set(map(_place, curve)))
    figure = Figure((11.0, 4.6), layout="constrained")
    ax = figure.subplots()
    if behind:
        look: dict[str, Any] = dict(color=GREY, linewidth=2.2, marker="o", markersize=5, drawstyle="steps-post")
        ax.plot(*zip(*behind), label=curve_name, **look)
        ax.legend(fontsize=LABEL_PT, frameon=False, loc="upper right")
    for (held, bubble), names in points.items():
        ax.plot(held, bubble, "o", color=PP, markersize=11)
        side, x = ("left", 7) if held == max(points)[0] else ("right", -5)
        end, y = ("top", -5) if (held, bubble) in behind else ("bottom", 3)  # where no line is in its way
        look: dict[str, Any] = dict(ha=side, va=end, size=LABEL_PT, color=INK)
        ax.annotate(", ".join(names), (held, bubble), (x, y), textcoords="offset points", **look)
    ax.set_xlim(0, 1.15 * max(held for held, _ in (*points, *behind)))
    ax.set_ylim(0, 1.3 * max(bubble for _, bubble in points) or 1)
    label_plot(ax, "bubble against memory", "micro-batches held by the fullest rank", "idle / ideal")
    said = [f"{', '.join(names)}: {_words(place)}" for place, names in points.items()]
    said += [f"{curve_name}: {'; '.join(map(_words, behind))}"] if behind else []
    return Plot(figure, f"Idle over ideal, and micro-batches that the fullest rank holds. {'. '.join(said)}.")


def _place(timeline: Timeline) -> tuple[float, float]:
    return max(peaks_in_flight(timeline)), timeline.bubble_over_ideal


def _words(place: tuple[float, float]) -> str:
    return f"{place[1]:.3f} with {place[0]:.3g}"
