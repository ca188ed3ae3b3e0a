"""Shows a control of an explorer in a notebook, as a native element of the browser. The rest is choice.js.

ipywidgets' own sliders have no name for a screen reader, and say an option's number instead of the option.
"""

from pathlib import Path
from typing import Any

import anywidget
import traitlets

from course.explorers.control import Control


class Choice(anywidget.AnyWidget):
    """The widget of a control, which has its index; `update` reads the rest again."""

    _esm = Path(__file__).with_name("choice.js")
    _css = Path(__file__).with_name("choice.css")
    description = traitlets.Unicode().tag(sync=True)
    look = traitlets.Unicode().tag(sync=True)
    words = traitlets.List(traitlets.Unicode()).tag(sync=True)
    index = traitlets.Int().tag(sync=True)
    disabled = traitlets.Bool(False).tag(sync=True)
    hidden = traitlets.Bool(False).tag(sync=True)
    hints = traitlets.List(traitlets.Unicode()).tag(sync=True)

    def __init__(self, control: Control):
        self.control = control
        super().__init__(description=control.description, look=control.look, words=control.words, index=control.index)

    @property
    def value(self) -> Any:
        """The option that is chosen."""
        return self.control.options[self.index]

    @value.setter
    def value(self, value: Any) -> None:
        self.index = self.control.index_of(value)

    def update(self) -> None:
        """Show what of the control has changed beside its index."""
        self.disabled, self.hidden = self.control.disabled, self.control.hidden
        self.hints = self.control.hints
