"""Draw estimates of published runs against what was measured."""

from collections.abc import Sequence
from math import log10
from typing import Any

from course.pictures import style
from course.pictures.parts import titled
from course.pictures.scene import WIDTH, Mark, Scene, box, label, line
from course.pictures.style import GREY, INK, MUTED, tint
from course.sizing import RUNS, Run, published
from course.sizing.runs import SECTIONS

LEFT, TOP, RIGHT, BOTTOM = 70.0, 60.0, WIDTH - 10, 520.0  # of the axes
TICKS = 0.5, 1, 2, 5, 10, 20, 50
POINT, NEAR = 11.0, 0.2  # pixels of a point; the relative error of the dashed lines
COLORS = dict(zip(SECTIONS, (style.TP, style.PP, style.CP, style.DP, style.EP)))


def draw_runs(runs: Sequence[Run] = RUNS) -> Scene:
    """Draw a point for each run, its estimated over its measured seconds of a step; it says which run it is.

    Both axes are logarithmic, so that the same relative error is the same distance from the diagonal. A hollow point is
    a run to which no constant was fitted.

    Raises:
        ValueError: no runs.
    """
    if not runs:
        raise ValueError("draw_runs got no runs: give one or more")
    seconds = [each for run in runs for each in (run.seconds, run.estimate)]
    least, most = log10(min(seconds) / 1.3), log10(max(seconds) * 1.3)

    def at(measured: float, estimated: float) -> tuple[float, float]:
        across, up = ((log10(each) - least) / (most - least) for each in (measured, estimated))
        return LEFT + across * (RIGHT - LEFT), BOTTOM - up * (BOTTOM - TOP)

    start, end = 10**least, 10**most
    marks: list[Mark] = [line("left", [(LEFT, TOP), (LEFT, BOTTOM)], GREY)]
    marks.append(line("bottom", [(LEFT, BOTTOM), (RIGHT, BOTTOM)], GREY))
    for tick in (each for each in TICKS if start < each < end):
        x, y = at(tick, tick)
        marks.append(line(f"x{tick}.line", [(x, BOTTOM), (x, BOTTOM + 5)], GREY))
        marks.append(label(f"x{tick}", x, BOTTOM + 16, f"{tick:g}", anchor="middle"))
        marks.append(line(f"y{tick}.line", [(LEFT - 5, y), (LEFT, y)], GREY))
        marks.append(label(f"y{tick}", LEFT - 9, y, f"{tick:g}", anchor="end"))
    marks.append(label("x", (LEFT + RIGHT) / 2, BOTTOM + 38, "measured seconds of a step", anchor="middle", ink=MUTED))
    marks.append(label("y", LEFT + 12, TOP + 6, "estimated seconds of a step", ink=MUTED))
    marks.append(line("same", [at(start, start), at(end, end)], GREY, fact="estimated as measured"))
    ratio = 1 + NEAR
    for key, ends, says in (
        ("above", [(start, start * ratio), (end / ratio, end)], f"{NEAR:.0%} too slow"),
        ("below", [(start * ratio, start), (end, end / ratio)], f"as much too fast: {1 / ratio - 1:.0%}"),
    ):
        marks.append(line(key, [at(*each) for each in ends], GREY, 1.0, dashed=True, fact=says))
    for run in sorted(runs, key=lambda each: each.fits):  # those that were fitted are on top
        x, y = at(run.seconds, run.estimate)
        color = COLORS[run.section]
        look: dict[str, Any] = dict(fill=color, edge="#ffffff", means=f"{run.section}, fitted")
        if not run.fits:
            look = dict(fill=tint(color, 0.15), edge=color, means=f"{run.section}, not fitted", edge_width=1.5)
        fact = f"{run}: {run.seconds:.3g} s measured, {run.estimate:.3g} s estimated, {run.error:+.1%}"
        fact += f"; assumed: {run.assumed}" if run.assumed else ""
        place = x - POINT / 2, y - POINT / 2, POINT, POINT
        marks.append(box(f"run.{run.name}", *place, **look, radius=POINT / 2, fact=fact, ink=INK))
    words = [_words(each, name) for name, each in _fitted_or_not(runs).items() if each]
    says = "; ".join([*words, f"dashed: {NEAR:.0%}"])
    return titled("Estimated against measured", says, marks, published(runs), says, BOTTOM + 44, LEFT)


def _fitted_or_not(runs: Sequence[Run]) -> dict[str, list[Run]]:
    return {name: [run for run in runs if run.fits == fits] for name, fits in (("fitted", True), ("not fitted", False))}


def _words(runs: Sequence[Run], name: str) -> str:
    worst = max(runs, key=lambda run: abs(run.error))
    mean = sum(abs(run.error) for run in runs) / len(runs)
    return f"{len(runs)} runs {name}: mean error {mean:.1%}, largest {worst.error:+.1%} ({worst.name})"
