"""Choose t, p and a schedule for 8 ranks, and train: who holds what, the losses as they come, and a stop button."""

import threading
from collections import namedtuple
from collections.abc import Mapping, Sequence
from dataclasses import replace
from html import escape
from typing import ClassVar

import ipywidgets as widgets
from IPython import get_ipython

from course.explorers.base import Explorer, says_html
from course.pictures.curves import LOOKS, losses_png
from course.pictures.painter import Canvas
from course.pictures.three_axes import FIGURE_INCHES, draw_holdings, holdings_text
from labkit.cuts import BatchCut
from labkit.launch import World, stream
from labkit.sizes import counted
from labkit.train import Step, TrainConfig, steps

NUM_RANKS = 8
SIZES = (1, 2, 4, 8)
SCHEDULES = ("gpipe", "1f1b", "zero-bubble")
WIDTH = "min(100%, 800px)"  # of the pictures
MOST_RUNS = len(LOOKS)
"""More curves than this cannot be told apart when they coincide."""


def training_explorer(config: TrainConfig) -> "TrainingExplorer":
    """Show how ``config`` is laid over 8 ranks, with controls for that and a button that trains it.

    Raises:
        ValueError: the config does not fit 8 ranks.
    """
    return TrainingExplorer(config)


class TrainingExplorer(Explorer):
    """Controls, the picture of who holds what, a button to start and stop, and the losses of the last runs.

    ``shown`` is a config. ``losses`` has one list per run, by its name.
    """

    function, choice_type = "training_explorer", namedtuple("Choice", "tp_size pp_size schedule")
    _training: ClassVar[set["TrainingExplorer"]] = set()

    def __init__(self, config: TrainConfig):
        config.layout(NUM_RANKS)
        self.losses: dict[str, list[float]] = {}
        self._thread: threading.Thread | None = None
        self._is_stopped = False
        self.tp_size = _selection("tensor t", SIZES, config.tp_size)
        self.pp_size = _selection("pipeline p", SIZES, config.pp_size)
        self.schedule = _selection("schedule", SCHEDULES, config.schedule)
        self.button = widgets.Button()
        self.bar = widgets.IntProgress(0, 0, config.steps, layout={"width": "300px"})
        self.progress = widgets.HTML()
        self.curves = widgets.Image(format="png", layout={"width": WIDTH})
        self.button.on_click(self._start_or_stop)
        self._canvas = Canvas(FIGURE_INCHES)
        super().__init__(config, below=[widgets.HBox([self.button, self.bar, self.progress]), self.curves])
        self.picture.layout.width = WIDTH
        self._draw_losses()
        kernel = getattr(get_ipython(), "kernel", None)
        if kernel is not None:  # while no cell runs, it would ignore the toolbar's stop button
            kernel.saved_sigint_handler = self._stop_all  # in force once this cell has ended

    def __repr__(self) -> str:
        """Return what the controls say, because the config is long."""
        return f"{self.function}(t={self.tp_size.value}, p={self.pp_size.value}, {self.schedule.value!r})"

    def close(self) -> None:
        """Close it, and stop its run after the step under way."""
        self._is_stopped = True
        super().close()

    def wait(self) -> None:
        """Wait until the run has ended: for tests, and for programs that click the button."""
        if self._thread is not None:
            self._thread.join()

    def _chosen(self) -> TrainConfig:
        config = replace(self.shown, **self.choice._asdict())
        config.layout(NUM_RANKS)
        return config

    def _parts(self) -> tuple[bytes, str, str]:
        sizes = self.shown.layout(NUM_RANKS), self.shown.num_layers, self.shown.batch_size
        picture = self._canvas.png(lambda ax: draw_holdings(*sizes, ax=ax))
        facts = f"<details><summary>who holds what, as text</summary><pre>{holdings_text(*sizes)}</pre></details>"
        return picture, _says(self.shown), facts

    def _update(self, change=None) -> None:
        super()._update(change)
        self._show_button()

    def _show_button(self) -> None:
        is_training = self in self._training
        look = ("Stop", "stop", "warning") if is_training else ("Train", "play", "primary")
        self.button.description, self.button.icon, self.button.button_style = look
        self.button.disabled = not (is_training or self.fits)

    @classmethod
    def _stop_all(cls, *_) -> None:
        for explorer in list(cls._training):
            explorer._is_stopped = True

    def _start_or_stop(self, button=None) -> None:
        if self in self._training:
            self._is_stopped = True
            return
        self._is_stopped = False
        self._training.add(self)
        self._show_button()
        # In its own thread: the kernel stays free for the click that stops it.
        self._thread = threading.Thread(target=self._train, args=(self.shown,), daemon=True)
        self._thread.start()

    def _train(self, config: TrainConfig) -> None:
        name = _name(config)
        self.losses = dict(list({**self.losses, name: []}.items())[-MOST_RUNS:])
        self.losses[name] = []
        self.bar.value, self.progress.value = 0, "starting ranks ..."
        try:
            with World(NUM_RANKS) as world:
                for ranks in stream(world, steps, config):
                    self._show(name, ranks[0])
                    if self._is_stopped:
                        break
            stopped = " Stopped." if len(self.losses[name]) < config.steps else ""
            self.progress.value = escape(f"{differences_text(self.losses)}{stopped}")
        except Exception as error:
            self.progress.value = f"<pre>{escape(str(error))}</pre>"
        finally:
            self._training.discard(self)
            self._show_button()
            self._draw_losses()

    def _show(self, name: str, step: Step) -> None:
        self.losses[name].append(step.loss)
        self.bar.value = step.number
        self.progress.value = f"step {step.number} of {self.bar.max}: loss {step.loss:.4f}, norm {step.grad_norm:.4f}"
        self._draw_losses()

    def _draw_losses(self) -> None:
        floor = self.shown.make_text().floor_nats
        self.curves.value = losses_png(self.losses, 4.0, floor_nats=floor, num_steps=self.shown.steps)


def differences_text(losses: Mapping[str, Sequence[float]]) -> str:
    """Say by how much the runs differ at most, over the steps that they all have.

    >>> differences_text({"one": [3.5, 3.0], "other": [3.5]})
    '2 runs: the losses of 1 step differ by 0e+00 at most.'
    """
    common = min(map(len, losses.values()))
    if len(losses) < 2 or common == 0:
        return f"{counted(common, 'step')} done. Now choose a different layout."
    largest = max(max(values) - min(values) for values in zip(*losses.values()))
    return f"{len(losses)} runs: the losses of {counted(common, 'step')} differ by {largest:.0e} at most."


def _name(config: TrainConfig) -> str:
    layout = config.layout(NUM_RANKS)
    return f"t={layout.tp_size} p={layout.pp_size} d={layout.dp_size}, {config.schedule}"


def _says(config: TrainConfig) -> str:
    layout = config.layout(NUM_RANKS)
    cut = BatchCut(config.batch_size, layout.dp_size, config.num_micro_batches(NUM_RANKS))
    return says_html(
        f"p · t · d = {layout.pp_size} · {layout.tp_size} · {layout.dp_size} = {NUM_RANKS}; each replica takes "
        f"{len(cut.rows_of_replica(0))} of {cut.batch_size} rows, in {counted(cut.num_micro_batches, 'micro-batch')}"
    )


def _selection(description: str, options: Sequence, value) -> widgets.ToggleButtons:
    look = {"button_width": "auto", "description_width": "5.5em"}
    return widgets.ToggleButtons(options=options, value=value, description=description, style=look)
