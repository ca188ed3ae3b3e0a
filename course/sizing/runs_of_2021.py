"""Published runs to compare estimates with: table 1 of arXiv 2104.04473, on DGX A100 80GB."""

from collections.abc import Sequence
from dataclasses import replace
from math import inf
from typing import NamedTuple

from course.sizing.flops import flops_per_step
from course.sizing.hardware import Hardware
from course.sizing.plan import Plan
from course.sizing.step_seconds import step_time
from labkit.shape import GPT


class Published(NamedTuple):
    """One row of the table: its plan, and the measured FLOP/s per GPU."""

    billions: float
    plan: Plan
    flops_per_gpu: float

    @property
    def seconds(self) -> float:
        """The seconds of a step, which follow from the FLOP/s."""
        plan = self.plan
        return flops_per_step(plan.model, plan.batch_size) / (plan.world_size * self.flops_per_gpu)


def table_1() -> list[Published]:
    """Return the ten rows; t, p and the interleaving come from the paper's published run scripts."""
    return [
        Published(
            billions,
            Plan(GPT(layers, hidden, 2048, 51200, heads), gpus, batch, t, p, micro_batch, v, "full", gradient_bytes=2),
            teraflops * 1e12,
        )
        for billions, heads, hidden, layers, t, p, v, gpus, micro_batch, batch, teraflops in _ROWS
    ]


def fitted(rows: Sequence[Published], hardware: Hardware) -> Hardware:
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


# P/1e9, heads, h, l, t, p, v, n, b, B, teraFLOP/s per GPU
_ROWS = [
    (1.7, 24, 2304, 24, 1, 1, 1, 32, 16, 512, 137),
    (3.6, 32, 3072, 30, 2, 1, 1, 64, 16, 512, 138),
    (7.5, 32, 4096, 36, 4, 1, 1, 128, 16, 512, 142),
    (18.4, 48, 6144, 40, 8, 1, 1, 256, 8, 1024, 135),
    (39.1, 64, 8192, 48, 8, 2, 1, 512, 4, 1536, 138),
    (76.1, 80, 10240, 60, 8, 4, 3, 1024, 2, 1792, 140),
    (145.6, 96, 12288, 80, 8, 8, 2, 1536, 2, 2304, 148),
    (310.1, 128, 16384, 96, 8, 16, 2, 1920, 1, 2160, 155),
    (529.6, 128, 20480, 105, 8, 35, 3, 2520, 1, 2520, 163),
    (1008.0, 160, 25600, 128, 8, 64, 1, 3072, 1, 3072, 163),
]
