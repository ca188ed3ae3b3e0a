"""Choose a schedule, its sizes and the times of its ops: its timeline, its bubble, and what each rank holds."""

from dataclasses import replace
from functools import lru_cache, partial

from course.explorers.base import Explorer, Parts
from course.explorers.choice import menu, slider
from course.pictures.timeline import draw_timelines, peaks_in_flight
from course.sizing import simulate
from course.table import Table
from course.timeline import Timeline
from labkit.schedules import gpipe, interleaved, one_f_one_b, zero_bubble

NAMES = ("GPipe", "1F1B", "interleaved", "zero bubble (ZB-H1)", "zero bubble (ZB-H2)")
QUARTERS = [quarter / 4 for quarter in range(17)]


@lru_cache(maxsize=64)
def _timeline(name: str, p: int, m: int, num_chunks: int, forward: float, backward: float, message: float) -> Timeline:
    """Simulate a schedule."""
    makers = gpipe, one_f_one_b, partial(interleaved, num_chunks=num_chunks), zero_bubble
    make = [*makers, partial(zero_bubble, extra_in_flight=p - 1)][NAMES.index(name)]
    return simulate(make(p, m), forward, backward, message_seconds=message)


class schedule_explorer(Explorer):
    """Show the timeline of a schedule, with a control for everything that decides it, and a table of all schedules."""

    table = (
        ("name", menu, "schedule", NAMES, "1F1B"),
        ("pp_size", slider, "ranks p", range(1, 9), 4),
        ("num_micro_batches", slider, "micro-batches m", range(1, 25), 8),
        ("num_chunks", slider, "chunks per rank v", range(1, 5), 2),
        ("forward", slider, "forward t_f", QUARTERS[1:], 1.0),
        ("backward", slider, "backward t_b", QUARTERS[1:], 2.0),
        ("message", slider, "message time", QUARTERS[:9], 0.0),
    )

    def _parts(self) -> Parts:
        choice, timeline = self.shown, _timeline(*self.shown)
        self.controls["num_chunks"].disabled = choice.name != "interleaved"
        scene = draw_timelines([timeline], [choice.name], in_flight=True, unit="time units")
        ideal = choice.num_micro_batches * (choice.forward + choice.backward)
        says = (
            f"{timeline.makespan_seconds:.4g} time units, of which {ideal:.4g} would do if no rank ever waited. "
            f"Bubble: <b>{timeline.bubble_over_ideal:.3f} idle / ideal</b>, {timeline.bubble_share:.1%} of the total"
        )
        rows = []
        for name in NAMES:
            each = _timeline(*choice._replace(name=name))
            label = f"{name}, v = {choice.num_chunks}" if name == "interleaved" else name
            cells = f"{each.makespan_seconds:.4g}", f"{each.bubble_over_ideal:.3f}", f"{each.bubble_share:.1%}"
            held = ", ".join(f"{peak:.3g}" for peak in peaks_in_flight(each))
            rows.append((label + " (shown)" * (name == choice.name), *cells, held))
        heads = "schedule", "makespan", "idle / ideal", "idle / total", "micro-batches held, rank by rank"
        table = Table(heads, rows, "all schedules at these sizes, simulated")
        return Parts([replace(scene, table=table)], says)
