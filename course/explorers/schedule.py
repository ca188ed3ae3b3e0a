"""Choose a schedule, its sizes and the times of its ops: its timeline, its bubble, and what each rank holds."""

from collections import namedtuple
from dataclasses import replace
from functools import lru_cache, partial

from course.explorers.base import Explorer, says_html
from course.explorers.choice import menu, slider
from course.pictures.scene import Scene, Table
from course.pictures.timeline import draw_timelines, peaks_in_flight
from labkit.schedules import Schedule, gpipe, interleaved, one_f_one_b, zero_bubble
from labkit.timeline import Timeline, simulate

NAMES = ("GPipe", "1F1B", "interleaved", "zero bubble (ZB-H1)", "zero bubble (ZB-H2)")
QUARTERS = [quarter / 4 for quarter in range(17)]


class Choice(namedtuple("Choice", "name num_stages num_micro_batches num_chunks forward backward message")):
    """What the controls say."""

    def schedule(self) -> Schedule:
        """Return the chosen schedule at these sizes."""
        p, m = self.num_stages, self.num_micro_batches
        makers = gpipe, one_f_one_b, partial(interleaved, num_chunks=self.num_chunks), zero_bubble
        make = [*makers, partial(zero_bubble, extra_in_flight=p - 1)][NAMES.index(self.name)]
        return make(p, m)


@lru_cache(maxsize=64)
def _timeline(choice: Choice) -> Timeline:
    return simulate(choice.schedule(), choice.forward, choice.backward, message_seconds=choice.message)


def schedule_explorer(
    name="1F1B", num_stages=4, num_micro_batches=8, num_chunks=2, forward=1.0, backward=2.0, message=0.0
) -> "ScheduleExplorer":
    """Show the timeline of a schedule, with a control for everything that decides it."""
    return ScheduleExplorer(Choice(name, num_stages, num_micro_batches, num_chunks, forward, backward, message))


class ScheduleExplorer(Explorer):
    """Controls, a picture, and a table of all schedules at these sizes; ``shown`` is what the controls say."""

    function, choice_type = "schedule_explorer", Choice

    def __init__(self, choice: Choice):
        self.name = menu("schedule", NAMES, choice.name)
        self.num_stages = slider("ranks p", range(1, 9), choice.num_stages)
        self.num_micro_batches = slider("micro-batches m", range(1, 25), choice.num_micro_batches)
        self.num_chunks = slider("chunks per rank v", range(1, 5), choice.num_chunks)
        self.forward = slider("forward t_f", QUARTERS[1:], choice.forward)
        self.backward = slider("backward t_b", QUARTERS[1:], choice.backward)
        self.message = slider("message time", QUARTERS[:9], choice.message)
        super().__init__()

    def _fit(self, choice: Choice) -> Choice:
        return choice

    def _parts(self) -> tuple[Scene, str, str]:
        timeline, self.num_chunks.disabled = _timeline(self.shown), self.shown.name != "interleaved"
        scene = draw_timelines([timeline], [self.shown.schedule().name], in_flight=True, unit="time units")
        return replace(scene, table=_table(self.shown)), _says(self.shown, timeline), ""


def _says(choice: Choice, timeline: Timeline) -> str:
    """Say how long the schedule takes, and its bubble by both definitions."""
    ideal = choice.num_micro_batches * (choice.forward + choice.backward)
    return says_html(
        f"{timeline.makespan_seconds:.4g} time units, of which {ideal:.4g} would do if no rank ever waited. Bubble: "
        f"<b>{timeline.bubble_over_ideal:.3f} idle / ideal</b>, {timeline.bubble_share:.1%} of the total"
    )


def _table(choice: Choice) -> Table:
    """Return the same facts of every schedule at these sizes."""
    rows = []
    for name in NAMES:
        timeline = _timeline(choice._replace(name=name))
        label = f"{name}, v = {choice.num_chunks}" if name == "interleaved" else name
        cells = f"{timeline.makespan_seconds:.4g}", f"{timeline.bubble_over_ideal:.3f}", f"{timeline.bubble_share:.1%}"
        held = ", ".join(f"{peak:.3g}" for peak in peaks_in_flight(timeline))
        rows.append((label + " (shown)" * (name == choice.name), *cells, held))
    heads = "schedule", "makespan", "idle / ideal", "idle / total", "micro-batches held, rank by rank"
    return Table(heads, rows, "all schedules at these sizes, simulated")
