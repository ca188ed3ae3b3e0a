"""Choose a schedule, its sizes and the times of its ops: its timeline, its bubble, and what each rank holds."""

from dataclasses import replace
from functools import lru_cache, partial

from course.explorers.base import Explorer, Parts
from course.explorers.control import menu, slider
from course.pictures.timeline import draw_timelines, peaks_in_flight
from course.sizing import simulate
from course.table import Table
from course.timeline import Timeline
from labkit import schedules

GREEDY = "greedy V"
NAMES = (
    "GPipe", "1F1B", "interleaved", "zero bubble (ZB-H1)", "zero bubble (ZB-H2)",
    "zero bubble V (ZB-V)", "V-Half", "V-Min", "DualPipeV", GREEDY,
)  # fmt: skip
MOST = 512  # passes of micro-batches through ranks
QUARTERS = [quarter / 4 for quarter in range(17)]


@lru_cache(maxsize=64)
def _schedule(name: str, p: int, m: int, num_chunks: int, limit: int) -> schedules.Schedule:
    """Make a schedule; ValueError if it has no order for these sizes."""
    makers = (
        schedules.gpipe, schedules.one_f_one_b, partial(schedules.interleaved, num_chunks=num_chunks),
        schedules.zero_bubble, partial(schedules.zero_bubble, extra_in_flight=p - 1), schedules.zero_bubble_v,
        schedules.v_half, schedules.v_min, schedules.dualpipe_v, partial(schedules.greedy, max_in_flight=limit),
    )  # fmt: skip
    return makers[NAMES.index(name)](p, m)


@lru_cache(maxsize=64)
def _timeline(
    name: str, p: int, m: int, num_chunks: int, forward: float, backward: float, message: float, limit: int
) -> Timeline:
    """Simulate a schedule."""
    return simulate(_schedule(name, p, m, num_chunks, limit), forward, backward, message_seconds=message)


def _raced(choice) -> list[str]:
    """Return the schedule that is shown and, if there is one, its rival."""
    return [choice.name, *({choice.rival} - {False, choice.name})]


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
        ("limit", slider, "memory limit in chunks", range(2, 18), 8),
        ("rival", menu, "race against", (False, *NAMES), False),
    )
    keeps = ("name", "rival")

    def _fit(self, choice):
        if choice.name not in NAMES:
            raise ValueError(f"schedule={choice.name!r} is unknown: use {', '.join(NAMES)}")
        if choice.pp_size * choice.num_micro_batches > MOST:
            sizes = f"pp_size={choice.pp_size} * num_micro_batches={choice.num_micro_batches}"
            raise ValueError(f"{sizes} is more than {MOST}, which takes too long to draw: use less of one")
        for name in _raced(choice):
            _schedule(name, choice.pp_size, choice.num_micro_batches, choice.num_chunks, choice.limit)
        return choice

    def _parts(self) -> Parts:
        choice, names = self.shown, _raced(self.shown)
        self.controls["num_chunks"].disabled = "interleaved" not in names
        self.controls["limit"].disabled = GREEDY not in names
        timelines = [_timeline(*choice._replace(name=name)[:-1]) for name in names]
        scene = draw_timelines(timelines, names, in_flight=True, unit="time units")
        says = "<br>".join(f"{name}: {self._result(each)}" for name, each in zip(names, timelines))
        says = self._result(timelines[0]) if len(names) == 1 else says
        heads = "schedule", "makespan", "idle / ideal", "idle / total", "micro-batches held, rank by rank"
        rows = [self._row(name) for name in NAMES if name in (*names, *NAMES[:-1])]
        table = Table(heads, rows, "all schedules at these sizes, simulated")
        return Parts([replace(scene, table=table)], says)

    def _result(self, timeline: Timeline) -> str:
        ideal = self.shown.num_micro_batches * (self.shown.forward + self.shown.backward)
        return (
            f"{timeline.makespan_seconds:.4g} time units, of which {ideal:.4g} would do if no rank ever waited. "
            f"Bubble: <b>{timeline.bubble_over_ideal:.3f} idle / ideal</b>, {timeline.bubble_share:.1%} of the total"
        )

    def _row(self, name: str) -> tuple[str, ...]:
        """Return what a schedule takes and holds at these sizes."""
        choice = self.shown._replace(name=name, rival=False)
        labels = {"interleaved": f"{name}, v = {choice.num_chunks}", GREEDY: f"{name}, limit {choice.limit}"}
        label = labels.get(name, name) + " (shown)" * (name in _raced(self.shown))
        if self._misfit(choice):
            return label, self._why(choice), "", "", ""
        each = _timeline(*choice[:-1])
        held = ", ".join(f"{peak:.3g}" for peak in peaks_in_flight(each))
        return label, f"{each.makespan_seconds:.4g}", f"{each.bubble_over_ideal:.3f}", f"{each.bubble_share:.1%}", held
