"""Show a scene, or several as steps, in a notebook: marks move, say their facts and take clicks. See also stage.js."""

from collections.abc import Callable, Sequence
from html import escape
from pathlib import Path
from typing import Any

import anywidget
import traitlets

from course.pictures.scene import Scene
from course.pictures.steps import difference, differences

MOST_PICTURES = 12  # steps: of more, a page without a kernel has a picture of the first only, and a table of each


class Stage(anywidget.AnyWidget):
    """A widget that shows ``steps``: one scene, or several that a reader plays and steps through.

    `show` replaces what is shown, and sends only what differs. ``seconds`` is how long a step lasts when played.
    """

    _esm = Path(__file__).with_name("stage.js")
    _css = Path(__file__).with_name("stage.css")
    steps = traitlets.List().tag(sync=True)  # the first scene whole, then what differs from step to step
    changes = traitlets.Dict().tag(sync=True)  # since the scene shown last; stage.js puts them into ``steps``
    seconds = traitlets.Float(1.0).tag(sync=True)
    clicks = traitlets.Bool(False).tag(sync=True)  # whether somebody listens: marks that take clicks are buttons then
    unfolded = traitlets.Bool(False).tag(sync=True)  # whether the table below the picture is open at first

    def __init__(self, *steps: Scene, seconds: float = 1.0, **options: Any):
        self.scenes: Sequence[Scene] = steps
        self._sends_changes, self._heard = False, {}
        super().__init__(steps=differences(steps), seconds=seconds, **options)
        self.on_msg(self._hear)

    def show(self, *scenes: Scene) -> None:
        """Show these instead: marks that both have move, the others fade."""
        before, steps, self.scenes = self.steps, differences(scenes), scenes
        self._sends_changes = len(before) == len(steps) == 1
        if self._sends_changes:
            number = self.changes.get("number", 0) + 1  # else a change that was made before would not be sent
            self.changes = {**difference(before[0], steps[0]), "number": number}
        self.steps = steps

    def on_click(self, call: Callable[[str], None]) -> None:
        """Call ``call`` with the key of each mark that the reader clicks, or presses Enter on."""
        self._heard["click"], self.clicks = call, True

    def on_drop(self, call: Callable[[str, str], None]) -> None:
        """Call ``call`` with the keys of the mark that the reader drags, and of that it is dropped on."""
        self._heard["drop"] = lambda keys: call(*keys)

    def _hear(self, _, message: dict[str, Any], buffers) -> None:
        for what in message.keys() & self._heard:
            self._heard[what](message[what])

    def _should_send_property(self, key: str, value: Any) -> bool:
        from_changes = key == "steps" and self._sends_changes  # stage.js makes them
        return not from_changes and super()._should_send_property(key, value)

    def _repr_mimebundle_(self, **options):
        bundle = super()._repr_mimebundle_(**options)
        data, metadata = bundle if isinstance(bundle, tuple) else (bundle, {})
        first, *later = self.scenes
        still, shown = first._repr_mimebundle_(), len(self.scenes) <= MOST_PICTURES
        for step in later:
            inside = step.html() if shown else step.table.html
            still["text/html"] += f"<details><summary>Then: {escape(step.says)}</summary>{inside}</details>"
        return {**still, **(data or {}), "text/plain": str(first)}, metadata
