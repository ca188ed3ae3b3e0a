"""Choose t, p and a schedule for 8 ranks, and train: who holds what, the losses as they come, and a stop button."""

import threading
from collections.abc import Mapping, Sequence
from dataclasses import replace
from html import escape
from typing import ClassVar

import ipywidgets as widgets
from IPython import get_ipython

from course.explorers.base import Explorer, Parts
from course.explorers.control import buttons
from course.explorers.jupyter import View
from course.pictures.curves import LOOKS, draw_losses
from course.pictures.three_axes import draw_holdings
from course.sizing import step_traffic
from course.stream import stream
from labkit.launch import World
from labkit.partition import layers_of_stage, rows_of_replica
from labkit.sizes import counted
from labtrain import TrainConfig, steps

NUM_RANKS = 8


class Layouts(Explorer):
    """How ``config`` is laid over 8 ranks, with controls for that; ``shown`` is a config."""

    table = (
        ("tp_size", buttons, "tensor t", (1, 2, 4, 8), 1),
        ("pp_size", buttons, "pipeline p", (1, 2, 4, 8), 1),
        ("schedule", buttons, "schedule", ("gpipe", "1f1b", "zero-bubble"), "1f1b"),
    )

    def __init__(self, config: TrainConfig):
        self._config = config
        super().__init__(config.tp_size, config.pp_size, config.schedule)

    def __repr__(self) -> str:
        """Return what the controls say, because the config is long."""
        return "training_explorer(t={}, p={}, {!r})".format(*self.choice)

    def _fit(self, choice) -> TrainConfig:
        config = replace(self._config, **choice._asdict())
        config.layout(NUM_RANKS)
        return config

    def _parts(self) -> Parts:
        config, layout = self.shown, self.shown.layout(NUM_RANKS)
        sizes = dict(bytes_per_element=config.dtype.itemsize, gradient_bytes_per_element=config.dtype.itemsize)
        place = dict(gpus_per_node=NUM_RANKS, batch_size=config.batch_size)
        traffic = step_traffic(config.shape, layout, sequence_parallel=config.sequence_parallel, **place, **sizes)
        rows, m = rows_of_replica(config.batch_size, layout.dp_size, 0), config.num_micro_batches(NUM_RANKS)
        says = f"p · t · d = {layout.pp_size} · {layout.tp_size} · {layout.dp_size} = {NUM_RANKS}; each replica takes "
        says += f"{len(rows)} of {config.batch_size} rows, in {counted(m, 'micro-batch')}"
        stages, split = config.make_schedule(NUM_RANKS).stages, config.layers_per_stage(config.num_layers)
        held = [[layers_of_stage(sum(split), stage, len(split), split) for stage in mine] for mine in stages]
        return Parts([draw_holdings(layout, config.num_layers, config.batch_size, traffic, held)], says)


class training_explorer(View):
    """Show how ``config`` is laid over 8 ranks, with controls for that and a button that trains it.

    ``losses`` has one list per run, by its name; those of the last runs are drawn.
    """

    _training: ClassVar[set["training_explorer"]] = set()

    def __init__(self, config: TrainConfig):
        self._is_stopped = False
        self.losses: dict[str, list[float]] = {}
        self.bar = widgets.IntProgress(0, 0, config.steps, layout={"width": "300px"})
        self.button, self.progress, self.curves = widgets.Button(), widgets.HTML(), widgets.HTML()
        self.button.on_click(self._start_or_stop)
        below = [widgets.HBox([self.button, self.bar, self.progress]), self.curves]
        super().__init__(Layouts(config), below)
        self.picture.unfolded = False  # else its table would part the picture and the curves
        self._show_button()
        self._draw_losses()
        kernel = getattr(get_ipython(), "kernel", None)
        if kernel is not None:  # while no cell runs, it would ignore the toolbar's stop button
            kernel.saved_sigint_handler = self._stop_all  # in force once this cell has ended

    def close(self) -> None:
        """Close it, and stop its run after the step under way."""
        self._is_stopped = True
        super().close()

    def _show_button(self) -> None:
        look = ("Stop", "stop", "warning") if self in self._training else ("Train", "play", "primary")
        self.button.description, self.button.icon, self.button.button_style = look

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
        layout = config.layout(NUM_RANKS)
        name = f"t={layout.tp_size} p={layout.pp_size} d={layout.dp_size}, {config.schedule}"
        # More curves than LOOKS cannot be told apart when they coincide.
        self.losses = dict(list({**self.losses, name: []}.items())[-len(LOOKS) :])
        self.bar.value, self.progress.value = 0, f"{name}: starting ranks ..."
        try:
            with World(NUM_RANKS) as world:
                for step, *_ in stream(world, steps, config):
                    self.losses[name].append(step.loss)
                    said = f"step {step.step} of {config.steps}: loss {step.loss:.4f}, norm {step.grad_norm:.4f}"
                    self.bar.value, self.progress.value = step.step, f"{name} is training: {said}"
                    self._draw_losses()
                    if self._is_stopped:
                        break
            stopped = " Stopped." if len(self.losses[name]) < config.steps else ""
            self.progress.value = escape(f"{name}: {differences_text(self.losses)}{stopped}")
        except Exception as error:
            self.progress.value = f"{name}:<pre>{escape(str(error))}</pre>"
        finally:
            self._training.discard(self)
            self._show_button()
            self._draw_losses()

    def _draw_losses(self) -> None:
        floor = self.shown.make_dataset().floor_nats
        self.curves.value = draw_losses(self.losses, floor_nats=floor, num_steps=self.shown.steps).html()


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
