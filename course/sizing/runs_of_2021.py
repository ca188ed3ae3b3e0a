"""Published runs to compare estimates with: table 1 of arXiv 2104.04473, on DGX A100 80GB."""

from collections.abc import Sequence
from dataclasses import replace
from math import inf

from course.sizing.hardware import Hardware
from course.sizing.runs import Run, read_runs
from course.sizing.step_seconds import step_time


def table_1() -> list[Run]:
    """Return the ten rows; t, p and the interleaving come from the paper's published run scripts."""
    return read_runs("runs_of_2021.csv")


def fitted(rows: Sequence[Run], hardware: Hardware) -> Hardware:
    """Return ``hardware`` with the product efficiency and the layer overhead that fit these rows best.

    The time of a step is a sum in which 1/efficiency and the overhead are factors of one part each. So the problem is
    linear, and least squares of the relative errors finds both.

    Raises:
        ValueError: fewer than two rows for the two unknowns.
    """
    if len(rows) < 2:
        raise ValueError(f"{len(rows)} rows cannot determine two numbers: give two or more")

    def seconds(efficiency: float, overhead: float) -> list[float]:
        changed = replace(hardware, product_efficiency=efficiency, layer_overhead_seconds=overhead)
        return [step_time(row.plan, changed).total / row.seconds for row in rows]

    rest = seconds(inf, 0.0)
    products = [part - r for part, r in zip(seconds(1.0, 0.0), rest)]
    overheads = [part - r for part, r in zip(seconds(inf, 1.0), rest)]
    missing = [1 - r for r in rest]
    shadow = _slope(products, overheads)  # what products explain of the overheads; the rest of them finds the overhead
    overhead = _slope([o - shadow * p for o, p in zip(overheads, products)], missing)
    inverse_efficiency = _slope(products, [m - overhead * o for m, o in zip(missing, overheads)])
    return replace(hardware, product_efficiency=1 / inverse_efficiency, layer_overhead_seconds=overhead)


def _slope(x: Sequence[float], y: Sequence[float]) -> float:
    return sum(a * b for a, b in zip(x, y)) / sum(a * a for a in x)
