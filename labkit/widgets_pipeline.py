"""Choose a schedule, its sizes and the times of its ops: the timeline, the bubble, and what each rank holds."""

import io
from functools import lru_cache, partial
from html import escape
from typing import Any, NamedTuple

import ipywidgets as widgets
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from labkit.plots.in_flight import peaks_in_flight
from labkit.plots.timeline import draw_timelines
from labkit.schedules import Schedule, gpipe, interleaved, one_f_one_b, zero_bubble
from labkit.timeline import Timeline, simulate
from labkit.widgets import STYLE

NAMES = ("GPipe", "1F1B", "interleaved", "zero bubble (ZB-H1)", "zero bubble (ZB-H2)")
FIGURE_INCHES = (12.5, 5.2)


class Choice(NamedTuple):
    """What the controls say."""

    name: str
    num_stages: int
    num_micro_batches: int
    num_chunks: int
    forward: float
    backward: float
    message: float

    def schedule(self) -> Schedule:
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
    """The timeline of a schedule with a control for everything that decides it."""
    return ScheduleExplorer(Choice(name, num_stages, num_micro_batches, num_chunks, forward, backward, message))


class ScheduleExplorer(widgets.VBox):
    """Controls, a picture, and a table of all schedules at these sizes."""

    def __init__(self, choice: Choice):
        self.name = widgets.Dropdown(options=NAMES, value=choice.name, description="schedule", **_LOOK)
        self.num_stages = _slider("ranks p", choice.num_stages, 1, 8)
        self.num_micro_batches = _slider("micro-batches m", choice.num_micro_batches, 1, 24)
        self.num_chunks = _slider("chunks a rank v", choice.num_chunks, 1, 4)
        self.forward = _time("forward t_f", choice.forward, 0.25, 4)
        self.backward = _time("backward t_b", choice.backward, 0.25, 4)
        self.message = _time("message time", choice.message, 0, 2)
        self.says, self.facts = widgets.HTML(), widgets.HTML()
        self.picture = widgets.Image(format="png")
        self.picture.add_class("labkit-grids")
        inputs = [getattr(self, name) for name in Choice._fields]
        controls = widgets.Box(inputs, layout=widgets.Layout(flex_flow="row wrap"))
        super().__init__([widgets.HTML(STYLE), controls, self.says, self.picture, self.facts])
        for control in inputs:
            control.observe(self._update, "value")
        self._update()

    def __repr__(self) -> str:
        """Short, because it is what a stored notebook keeps of a widget."""
        return f"schedule_explorer({', '.join(map(repr, self.choice))})"

    @property
    def choice(self) -> Choice:
        """What the controls say now."""
        return Choice(*(getattr(self, name).value for name in Choice._fields))

    def _update(self, change=None) -> None:
        choice = self.choice
        self.num_chunks.disabled = choice.name != "interleaved"
        timelines = {name: _timeline(choice._replace(name=name)) for name in NAMES}
        self.picture.value = _png(timelines[choice.name], choice.schedule().name)
        self.says.value = _says(choice, timelines[choice.name])
        self.facts.value = _table(choice, timelines)


def _png(timeline: Timeline, title: str) -> bytes:
    canvas = FigureCanvasAgg(Figure(figsize=FIGURE_INCHES, dpi=100))
    draw_timelines([timeline], [title], in_flight=True, unit="time units", figure=canvas.figure)
    file = io.BytesIO()
    canvas.print_png(file, pil_kwargs={"compress_level": 1})  # quick: this is not sent far
    return file.getvalue()


def _says(choice: Choice, timeline: Timeline) -> str:
    """The makespan, and the bubble by both of its definitions."""
    ideal = choice.num_micro_batches * (choice.forward + choice.backward)
    text = (
        f"{timeline.makespan_seconds:.4g} time units, of which {ideal:.4g} would do if no rank ever waited. Bubble: "
        f"<b>{timeline.bubble_over_ideal:.3f} idle / ideal</b>, {timeline.bubble_share:.1%} of the total"
    )
    return f'<div class="labkit-says" role="status">{text}</div>'


def _table(choice: Choice, timelines: dict[str, Timeline]) -> str:
    """The same facts for every schedule, the chosen one in bold."""
    rows = []
    for name, timeline in timelines.items():
        held = ", ".join(f"{peak:.3g}" for peak in peaks_in_flight(timeline))
        cells = f"{timeline.makespan_seconds:.4g}", f"{timeline.bubble_over_ideal:.3f}", f"{timeline.bubble_share:.1%}"
        mark = "b" if name == choice.name else "span"
        label = f"{name}, v = {choice.num_chunks}" if name == "interleaved" else name
        body = "".join(f"<td><{mark}>{escape(cell)}</{mark}></td>" for cell in (*cells, held))
        rows.append(f"<tr><th>{escape(label)}</th>{body}</tr>")
    names = ("schedule", "makespan", "idle / ideal", "idle / total", "micro-batches held, rank by rank")
    head = "".join(f"<th>{name}</th>" for name in names)
    caption = "<caption>all schedules at these sizes, simulated</caption>"
    return f'<table class="labkit-facts">{caption}<thead><tr>{head}</tr></thead><tbody>{"".join(rows)}</tbody></table>'


_LOOK: dict[str, Any] = {"layout": {"width": "310px"}, "style": {"description_width": "9.5em"}}


def _slider(description: str, value: int, low: int, high: int) -> widgets.IntSlider:
    return widgets.IntSlider(value, low, max(high, value), description=description, **_LOOK)


def _time(description: str, value: float, low: float, high: float) -> widgets.FloatSlider:
    high = max(high, value)
    return widgets.FloatSlider(value, min=low, max=high, step=0.25, description=description, **_LOOK)
