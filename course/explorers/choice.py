"""A control of an explorer: one of several options, by a native element of the browser. The rest is choice.js.

ipywidgets' own sliders have no name for a screen reader, and say an option's number instead of the option.
"""

from collections.abc import Iterable
from functools import partial
from pathlib import Path
from typing import Any

import anywidget
import traitlets


class Choice(anywidget.AnyWidget):
    """A choice of one of the ``options``. The first ``value`` is added if it is not among them; a slider sorts them."""

    _esm = Path(__file__).with_name("choice.js")
    _css = Path(__file__).with_name("choice.css")
    description = traitlets.Unicode().tag(sync=True)
    look = traitlets.Unicode().tag(sync=True)  # "slider", "menu", "checkbox" or "buttons"
    words = traitlets.List(traitlets.Unicode()).tag(sync=True)
    index = traitlets.Int().tag(sync=True)
    disabled = traitlets.Bool(False).tag(sync=True)
    hints = traitlets.List(traitlets.Unicode()).tag(sync=True)
    """What each option would change elsewhere, or "" if it fits; an empty list if nobody has looked."""

    def __init__(self, description: str, options: Iterable, value: Any, look: str):
        self.options = sorted({*options, value}) if look == "slider" else [*dict.fromkeys([*options, value])]
        super().__init__(description=description, look=look, words=list(map(self.word, self.options)))
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


slider, menu, buttons = (partial(Choice, look=look) for look in ("slider", "menu", "buttons"))
"""Each is called with a description, the options, and the first value."""


def checkbox(description: str, value: bool) -> Choice:
    return Choice(description, (False, True), value, "checkbox")
