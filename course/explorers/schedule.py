"""Choose a schedule, its sizes and the times of its ops: its timeline, its bubble, and what each rank holds."""

from collections import namedtuple
from functools import lru_cache, partial

from matplotlib.figure import Figure

from course.explorers.base import Controls, Explorer, says_html, table_html
from course.pictures.in_flight import peaks_in_flight
from course.pictures.painter import png
from course.pictures.timeline import draw_timelines
from labkit.schedules import Schedule, gpipe, interleaved, one_f_one_b, zero_bubble
from labkit.timeline import Timeline, simulate

NAMES = ("GPipe", "1F1B", "interleaved", "zero bubble (ZB-H1)", "zero bubble (ZB-H2)")
FIGURE_INCHES = (12.5, 5.2)


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
    name: str = "1F1B",
    num_stages: int = 4,
    num_micro_batches: int = 8,
    num_chunks: int = 2,
    forward: float = 1.0,
    backward: float = 2.0,
    message: float = 0.0,
) -> "ScheduleExplorer":
    """Show the timeline of a schedule, with a control for everything that decides it."""
    return ScheduleExplorer(Choice(name, num_stages, num_micro_batches, num_chunks, forward, backward, message))


class ScheduleExplorer(Explorer):
    """Controls, a picture, and a table of all schedules at these sizes; ``shown`` is what the controls say."""

    function, choice_type = "schedule_explorer", Choice

    def __init__(self, choice: Choice):
        make = Controls("310px", "9.5em")
        self.name = make.dropdown("schedule", NAMES, choice.name)
        self.num_stages = make.slider("ranks p", choice.num_stages, 1, 8)
        self.num_micro_batches = make.slider("micro-batches m", choice.num_micro_batches, 1, 24)
        self.num_chunks = make.slider("chunks a rank v", choice.num_chunks, 1, 4)
        self.forward = make.time("forward t_f", choice.forward, 0.25, 4)
        self.backward = make.time("backward t_b", choice.backward, 0.25, 4)
        self.message = make.time("message time", choice.message, 0, 2)
        super().__init__(choice)

    def _chosen(self) -> Choice:
        self.num_chunks.disabled = self.name.value != "interleaved"
        return self.choice

    def _parts(self) -> tuple[bytes, str, str]:
        timelines = {name: _timeline(self.shown._replace(name=name)) for name in NAMES}
        timeline = timelines[self.shown.name]
        figure, title = Figure(figsize=FIGURE_INCHES, dpi=100), self.shown.schedule().name
        draw_timelines([timeline], [title], in_flight=True, unit="time units", figure=figure)
        return png(figure), _says(self.shown, timeline), facts_table(self.shown, timelines)


def _says(choice: Choice, timeline: Timeline) -> str:
    """Say how long the schedule takes, and its bubble by both definitions."""
    ideal = choice.num_micro_batches * (choice.forward + choice.backward)
    return says_html(
        f"{timeline.makespan_seconds:.4g} time units, of which {ideal:.4g} would do if no rank ever waited. Bubble: "
        f"<b>{timeline.bubble_over_ideal:.3f} idle / ideal</b>, {timeline.bubble_share:.1%} of the total"
    )


def facts_table(choice: Choice, timelines: dict[str, Timeline]) -> str:
    """Return the same facts of every schedule as an HTML table, the chosen one in bold."""
    rows = {}
    for name, timeline in timelines.items():
        held = ", ".join(f"{peak:.3g}" for peak in peaks_in_flight(timeline))
        cells = f"{timeline.makespan_seconds:.4g}", f"{timeline.bubble_over_ideal:.3f}", f"{timeline.bubble_share:.1%}"
        mark = "b" if name == choice.name else "span"
        label = f"{name}, v = {choice.num_chunks}" if name == "interleaved" else name
        rows[label] = [f"<{mark}>{cell}</{mark}>" for cell in (*cells, held)]
    heads = "schedule", "makespan", "idle / ideal", "idle / total", "micro-batches held, rank by rank"
    return table_html("all schedules at these sizes, simulated", rows, heads)
