"""Run every benchmarks/bench_*.py, or those named, and print one table of ratios.

Each has ``rows()``, which yields what was measured with its peer named, our seconds and the peer's seconds (nan where
there is no peer, only a goal).

usage: python -m benchmarks [layout launch ...]
"""

import contextlib
import importlib
import io
import math
import sys
from pathlib import Path

from tqdm import tqdm

from labtrain.command_line import run_command

NAME_WIDTH = 78


def line(name: str, ours_seconds: float, peer_seconds: float) -> str:
    """One row of the table. The ratio is the peer's seconds to ours: above 1, labkit is faster."""
    peer, ratio = seconds(peer_seconds), f"{peer_seconds / ours_seconds:.1f} x"
    if math.isnan(peer_seconds):
        peer = ratio = "-"
    return f"{name:<{NAME_WIDTH}} {seconds(ours_seconds):>10} {peer:>10} {ratio:>9}"


def seconds(value: float) -> str:
    """A duration with three digits and a unit that fits it."""
    unit, scale = next(((u, s) for u, s in (("s", 1), ("ms", 1e-3)) if value >= s), ("us", 1e-6))
    return f"{value / scale:.3g} {unit}"


def main(*names: str) -> None:
    names = names or sorted(path.stem.removeprefix("bench_") for path in Path(__file__).parent.glob("bench_*.py"))
    bar = tqdm(names, unit="benchmark")
    bar.write(f"{'measured, against':<{NAME_WIDTH}} {'labkit':>10} {'peer':>10} {'ratio':>9}")
    for name in bar:
        bar.set_description(name)
        rows = importlib.import_module(f"benchmarks.bench_{name}").rows()
        with contextlib.redirect_stderr(io.StringIO()):  # launch's "No news for 6 s" would stand between the rows
            for row in rows:
                bar.write(line(*row))


if __name__ == "__main__":
    run_command(main, *sys.argv[1:])
