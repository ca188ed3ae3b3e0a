"""Choose t, p and a schedule for 8 ranks, and train: who holds what, the loss while it comes, and a stop button."""

import io
import threading
from collections.abc import Mapping, Sequence
from dataclasses import replace
from html import escape

import ipywidgets as widgets
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from labkit.launch import World
from labkit.launch.stream import stream
from labkit.plots.curves import LOOKS, draw_losses
from labkit.plots.three_axes import FIGURE_INCHES, draw_holdings, holdings_text
from labkit.train import Step, TrainConfig, steps
from labkit.widgets import STYLE

NUM_RANKS = 8
SIZES = (1, 2, 4, 8)
SCHEDULES = ("gpipe", "1f1b", "zero-bubble")
MOST_RUNS = len(LOOKS)
"""More curves on each other cannot be told apart."""


def training_explorer(config: TrainConfig) -> "TrainingExplorer":
    """Controls for how ``config`` is laid over 8 ranks, and a button that trains it so.

    Raises:
        ValueError: the config does not fit 8 ranks.
    """
    return TrainingExplorer(config)


class TrainingExplorer(widgets.VBox):
    """Controls, the picture of who holds what, a button to start and stop, and the losses of the last runs.

    ``shown`` is the config in the picture: the last that fitted. ``losses`` has a list for each run, by its name.
    """

    def __init__(self, config: TrainConfig):
        config.layout(NUM_RANKS)
        self.shown, self.fits = config, True
        self.losses: dict[str, list[float]] = {}
        self._thread: threading.Thread | None = None
        self._is_stopped = threading.Event()
        self.tp_size = _selection("tensor t", SIZES, config.tp_size)
        self.pp_size = _selection("pipeline p", SIZES, config.pp_size)
        self.schedule = _selection("schedule", SCHEDULES, config.schedule)
        self.message, self.table = widgets.HTML(), widgets.HTML()
        self.holdings, self.curves = (
            widgets.Image(format="png", layout={"width": "min(100%, 800px)"}) for _ in range(2)
        )
        self.button = widgets.Button(description="Train", icon="play", button_style="primary")
        self.bar = widgets.IntProgress(0, 0, config.steps, layout={"width": "300px"})
        self.said = widgets.HTML()
        self.button.on_click(self._start_or_stop)
        controls = [self.tp_size, self.pp_size, self.schedule]
        super().__init__(
            [
                widgets.HTML(STYLE),
                widgets.Box(controls, layout=widgets.Layout(flex_flow="row wrap")),
                self.message,
                self.holdings,
                widgets.HBox([self.button, self.bar, self.said]),
                self.curves,
                self.table,
            ]
        )
        for control in controls:
            control.observe(self._update, "value")
        self._update()
        self._draw_losses()

    def __repr__(self) -> str:
        """Short, because it is what a stored notebook keeps of a widget."""
        return f"training_explorer(t={self.tp_size.value}, p={self.pp_size.value}, {self.schedule.value!r})"

    def wait(self) -> None:
        """Until the run that was started has ended: for tests, and for who clicks by program."""
        if self._thread is not None:
            self._thread.join()

    def _update(self, change=None) -> None:
        try:
            chosen = replace(
                self.shown,
                tp_size=self.tp_size.value,
                pp_size=self.pp_size.value,
                schedule=self.schedule.value,
            )
            chosen.layout(NUM_RANKS)
            self.shown, self.fits, misfit = chosen, True, ""
        except ValueError as error:
            self.fits, misfit = False, str(error)
        layout = self.shown.layout(NUM_RANKS)
        self.message.value = _says(self.shown, misfit)
        self.button.disabled = not self.fits
        sizes = layout, self.shown.num_layers, self.shown.batch_size
        self.holdings.value = _png(FIGURE_INCHES, lambda ax: draw_holdings(*sizes, ax=ax), is_filled=True)
        self.table.value = (
            f"<details><summary>who holds what, as text</summary><pre>{holdings_text(*sizes)}</pre></details>"
        )

    def _start_or_stop(self, button=None) -> None:
        if self._thread is not None and self._thread.is_alive():
            self._is_stopped.set()
            return
        self._is_stopped.clear()
        self.button.description, self.button.icon, self.button.button_style = "Stop", "stop", "warning"
        # In a thread of its own: the kernel stays free for the click that stops it.
        self._thread = threading.Thread(target=self._train, args=(self.shown,), daemon=True)
        self._thread.start()

    def _train(self, config: TrainConfig) -> None:
        name = _name(config)
        self.losses = dict(list({**self.losses, name: []}.items())[-MOST_RUNS:])
        self.losses[name] = []
        self.bar.value, self.said.value = 0, "starting ranks ..."
        try:
            with World(NUM_RANKS) as world:
                for ranks in stream(world, steps, config):
                    self._show(name, ranks[0])
                    if self._is_stopped.is_set():
                        break
            stopped = " Stopped." if len(self.losses[name]) < config.steps else ""
            self.said.value = escape(f"{differences_text(self.losses)}{stopped}")
        except Exception as error:
            self.said.value = f"<pre>{escape(str(error))}</pre>"
        finally:
            self.button.description, self.button.icon, self.button.button_style = "Train", "play", "primary"
            self._draw_losses()

    def _show(self, name: str, step: Step) -> None:
        self.losses[name].append(step.loss)
        self.bar.value = step.number
        self.said.value = f"step {step.number} of {self.bar.max}: loss {step.loss:.4f}, norm {step.grad_norm:.4f}"
        self._draw_losses()

    def _draw_losses(self) -> None:
        floor, num_steps = self.shown.make_text().floor_nats, self.shown.steps
        self.curves.value = _png(
            (11.0, 4.0), lambda ax: draw_losses(self.losses, floor_nats=floor, num_steps=num_steps, ax=ax)
        )


def differences_text(losses: Mapping[str, Sequence[float]]) -> str:
    """The largest difference between the runs, over the steps that they all have.

    >>> differences_text({"one": [3.5, 3.0], "other": [3.5]})
    '2 runs: the losses of 1 step differ by 0e+00 at most.'
    """
    common = min(map(len, losses.values()))
    if len(losses) < 2 or common == 0:
        return f"{common} step{'s' * (common != 1)} done. Now choose another layout."
    largest = max(max(values) - min(values) for values in zip(*losses.values()))
    steps_text = f"{common} step{'s' * (common != 1)}"
    return f"{len(losses)} runs: the losses of {steps_text} differ by {largest:.0e} at most."


def _name(config: TrainConfig) -> str:
    layout = config.layout(NUM_RANKS)
    return f"t={layout.tp_size} p={layout.pp_size} d={layout.dp_size}, {config.schedule}"


def _says(config: TrainConfig, misfit: str) -> str:
    if misfit:
        text = f"<b>This does not fit.</b> {escape(misfit)}. Below: the last that did."
        return f'<div class="labkit-says misfit" role="alert">{text}</div>'
    layout, m = config.layout(NUM_RANKS), config.num_micro_batches(NUM_RANKS)
    text = (
        f"p · t · d = {layout.pp_size} · {layout.tp_size} · {layout.dp_size} = {NUM_RANKS}; each replica takes "
        f"{config.batch_size // layout.dp_size} of {config.batch_size} rows, in {m} micro-batch{'es' * (m != 1)}"
    )
    return f'<div class="labkit-says" role="status">{text}</div>'


def _png(inches: tuple[float, float], draw, is_filled: bool = False) -> bytes:
    canvas = FigureCanvasAgg(Figure(figsize=inches, dpi=100, layout=None if is_filled else "constrained"))
    figure = canvas.figure
    draw(figure.add_axes((0, 0, 1, 1)) if is_filled else figure.subplots())
    file = io.BytesIO()
    canvas.print_png(file)
    return file.getvalue()


def _selection(description: str, options: Sequence, value) -> widgets.ToggleButtons:
    look = {"button_width": "auto", "description_width": "5.5em"}
    return widgets.ToggleButtons(options=options, value=value, description=description, style=look)
