"""A control of an explorer: one of several options, by a native element of the browser. The rest is choice.js.

ipywidgets' own sliders have no name for a screen reader, and say an option's number instead of the option.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import anywidget
import traitlets


class Choice(anywidget.AnyWidget):
    """A choice of one of the ``options``: ``value``. It looks like a "slider", a "menu", a "checkbox" or "buttons"."""

    _esm = Path(__file__).with_name("choice.js")
    _css = Path(__file__).with_name("choice.css")
    description = traitlets.Unicode().tag(sync=True)
    look = traitlets.Unicode("slider").tag(sync=True)
    words = traitlets.List(traitlets.Unicode()).tag(sync=True)
    index = traitlets.Int().tag(sync=True)
    disabled = traitlets.Bool(False).tag(sync=True)
    hints = traitlets.List(traitlets.Unicode()).tag(sync=True)
    """What each option would change elsewhere, or "" if it fits; none if nobody has looked."""

    def __init__(self, description: str, options: Sequence, value: Any, look: str = "slider"):
        self.options = list(options)
        super().__init__(description=description, look=look, words=list(map(self.word, options)))
        self.value = value

    @property
    def value(self) -> Any:
        """The option that is chosen."""
        return self.options[self.index]

    @value.setter
    def value(self, value: Any) -> None:
        if value not in self.options:
            offered = ", ".join(map(str, self.options))
            raise ValueError(f"{self.description}={value!r} is not offered: use one of {offered}")
        self.index = self.options.index(value)

    def word(self, value: Any) -> str:
        """Return how an option is written."""
        return {bool: ("off", "on").__getitem__, float: "{:g}".format}.get(type(value), str)(value)


def slider(description: str, options: Sequence, value: Any) -> Choice:
    """Return a slider over numbers in ascending order, with ``value`` among them."""
    return Choice(description, sorted({*options, value}), value)


def menu(description: str, options: Sequence, value: Any) -> Choice:
    """Return a menu; ``value`` is added if it is not among the options."""
    return Choice(description, list(dict.fromkeys([*options, value])), value, "menu")


def buttons(description: str, options: Sequence, value: Any) -> Choice:
    """Return a row of buttons, one of which is pressed."""
    return Choice(description, options, value, "buttons")


def checkbox(description: str, value: bool) -> Choice:
    """Return a checkbox."""
    return Choice(description, [False, True], value, "checkbox")
