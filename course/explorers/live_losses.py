"""Loss curves that grow in the cell while ranks train: one plot, redrawn as losses come in."""

import time

from IPython.display import display

from course.pictures.curves import draw_losses
from course.pictures.painter import Plot
from labkit.launch.client import will_train

SECONDS_BETWEEN_DRAWINGS = 0.5  # the ranks wait while the cell draws, a tenth of a second
UNDER_WAY = "not finished: if nothing moves, run the cell again"
"""What a plot says until the last one: a notebook that is closed and opened again shows it as it was then."""
QUICK = ["text/plain", "text/html"]  # a plot that will be replaced needs no PNG

will_train()


class LiveLosses:
    """A plot of losses in the cell, redrawn until its block ends; the last one stays.

    >>> with LiveLosses(num_steps=2) as picture:  # doctest: +SKIP
    ...     picture.add("one process", 3.3)
    """

    def __init__(self, num_steps: int, floor_nats: float | None = None):
        self.num_steps, self.floor_nats = num_steps, floor_nats
        self.curves: dict[str, list[float]] = {}

    def add(self, name: str, *losses: float) -> None:
        """Lengthen a curve; the plot follows at once or a moment later."""
        self.curves.setdefault(name, []).extend(losses)
        if time.monotonic() - self._drawn > SECONDS_BETWEEN_DRAWINGS:
            self._redraw(UNDER_WAY, include=QUICK)

    def __enter__(self) -> "LiveLosses":
        self._place = display(self._plot(UNDER_WAY), display_id=True, include=QUICK)
        self._drawn = time.monotonic()
        return self

    def __exit__(self, *_) -> None:
        self._redraw("")

    def _redraw(self, note: str, **options) -> None:
        if self._place is not None:  # outside a notebook there is no place to redraw
            self._place.update(self._plot(note), **options)
        self._drawn = time.monotonic()

    def _plot(self, note: str) -> Plot:
        return draw_losses(self.curves, floor_nats=self.floor_nats, num_steps=self.num_steps, note=note)
