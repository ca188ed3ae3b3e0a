"""A search over every plan for a large model. There is no peer: the rows name a goal instead."""

import math
from collections.abc import Iterator

from benchmarks.bench_layout import best_of
from course.sizing import DGX_A100, search, table_1


def rows() -> Iterator[tuple[str, float, float]]:
    """Goal: thousands of candidates within a second."""
    for published in table_1()[-2:]:
        model, plan = published.plan.model, published.plan
        found, seconds = best_of(3, search, model, plan.world_size, plan.batch_size, DGX_A100)
        name = f"search of {len(found):,} plans, {published.billions:g} billion parameters on {plan.world_size:,} GPUs"
        yield f"{name}, goal 1 s", seconds, math.nan
