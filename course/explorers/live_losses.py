"""Loss curves that grow in the cell while ranks train: one picture, redrawn as losses come in."""

import time

from IPython.display import Image, display

from course.pictures.curves import losses_png
from labkit.launch.client import will_train

SECONDS_BETWEEN_DRAWINGS = 0.5  # the ranks wait while the cell draws, a tenth of a second

will_train()


class LiveLosses:
    """A picture of losses in the cell, redrawn until its block ends; the last one stays.

    >>> with LiveLosses(num_steps=2) as picture:  # doctest: +SKIP
    ...     picture.add("one process", 3.3)
    """

    def __init__(self, num_steps: int, floor_nats: float | None = None):
        self.num_steps, self.floor_nats = num_steps, floor_nats
        self.curves: dict[str, list[float]] = {}

    def add(self, name: str, *losses: float) -> None:
        """Lengthen a curve; the picture follows at once or a moment later."""
        self.curves.setdefault(name, []).extend(losses)
        if time.monotonic() - self._drawn > SECONDS_BETWEEN_DRAWINGS:
            self._redraw()

    def __enter__(self) -> "LiveLosses":
        self._place = display(self._image(), display_id=True)
        self._drawn = time.monotonic()
        return self

    def __exit__(self, *_) -> None:
        self._redraw()

    def _redraw(self) -> None:
        if self._place is not None:  # outside a notebook there is no place to redraw
            self._place.update(self._image())
        self._drawn = time.monotonic()

    def _image(self) -> Image:
        said = [f"{name}: {losses[0]:.2f} to {losses[-1]:.2f}" for name, losses in self.curves.items() if losses]
        picture = losses_png(self.curves, floor_nats=self.floor_nats, num_steps=self.num_steps)
        return Image(picture, alt="Loss curves. " + "; ".join(said))
