"""What was published, to hold the estimates against: table 1 of arXiv 2104.04473, on DGX A100 80GB."""

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from course.sizing.hardware import Hardware
from course.sizing.plan import Plan
from course.sizing.step_seconds import step_time
from labkit.shape import GPT, flops_per_step


class Published(NamedTuple):
    """A row of the table: its plan, and the FLOP/s per GPU that were measured."""

    billions: float
    plan: Plan
    flops_per_gpu: float

    @property
    def seconds(self) -> float:
        """Of a step, as follows from the FLOP/s."""
        plan = self.plan
        return flops_per_step(plan.model, plan.batch_size) / (plan.world_size * self.flops_per_gpu)


def table_1() -> list[Published]:
    """The ten rows; t, p and the interleaving are those of the paper's published run scripts."""
    return [
        Published(
            billions,
            Plan(GPT(layers, hidden, 2048, 51200, heads), gpus, batch, t, p, micro_batch, v, "full", gradient_bytes=2),
            teraflops * 1e12,
        )
        for billions, heads, hidden, layers, t, p, v, gpus, micro_batch, batch, teraflops in _ROWS
    ]


def fitted(rows: Sequence[Published], hardware: Hardware) -> Hardware:
    """``hardware`` with the efficiency of products and the overhead of a layer that come closest to these rows.

    A step's time is a sum, with 1/efficiency and the overhead as factors of two of its parts: so this is linear, and
    least squares of the relative errors finds both.

    Raises:
        ValueError: fewer than two rows, for two unknowns.
    """
    if len(rows) < 2:
        raise ValueError(f"{len(rows)} rows cannot decide two numbers: give two or more")
    unit = replace(hardware, product_efficiency=1.0, layer_overhead_seconds=0.0)
    none = [step_time(row.plan, replace(unit, product_efficiency=np.inf)).total for row in rows]
    products = [step_time(row.plan, unit).total for row in rows]
    overhead = [step_time(row.plan, replace(unit, layer_overhead_seconds=1.0)).total for row in rows]
    rest, seconds = np.array(none), np.array([row.seconds for row in rows])
    columns = np.stack([(products - rest) / seconds, (np.array(overhead) - products) / seconds], axis=1)
    inverse_efficiency, overhead_seconds = np.linalg.lstsq(columns, 1 - rest / seconds, rcond=None)[0]
    return replace(
        hardware,
        product_efficiency=1 / float(inverse_efficiency),
        layer_overhead_seconds=float(overhead_seconds),
    )


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
