"""A search over every plan for a large model. There is no peer: the rows name a goal instead."""

import math
from collections.abc import Iterator
from functools import partial

from benchmarks.bench_layout import best_of
from course.sizing import FITTED, search
from course.sizing.runs import LLAMA_70B
from course.sizing.shapes import MIXTRAL_8X22B


def rows() -> Iterator[tuple[str, float, float]]:
    """Goal: more than a hundred thousand candidates within two seconds."""
    for name, model, world_size in (("Llama 3 70B", LLAMA_70B, 1024), ("Mixtral 8x22B", MIXTRAL_8X22B, 256)):
        call = partial(search, fused_attention=True, sequence_parallel=True, gradient_bytes=2)
        found, seconds = best_of(3, call, model, world_size, 1024, FITTED["H100"])
        yield f"search of {len(found):,} plans for {name} on {world_size:,} GPUs, goal 2 s", seconds, math.nan
