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
    options = traitlets.List()
    value = traitlets.Any()

    def __init__(self, description: str, options: Sequence, value: Any, look: str = "slider"):
        super().__init__(description=description, look=look)
        self.options = list(options)
        self.value = value

    @traitlets.validate("value")
    def _is_an_option(self, proposal: dict[str, Any]) -> Any:
        if proposal["value"] not in self.options:
            offered = ", ".join(map(str, self.options))
            raise ValueError(f"{self.description}={proposal['value']!r} is not offered: use one of {offered}")
        return proposal["value"]

    @traitlets.observe("options")
    def _name_options(self, change: dict[str, Any]) -> None:
        with self.hold_sync():
            self.words = [f"{option:g}" if isinstance(option, float) else str(option) for option in self.options]
            if self.value is not None and self.value not in self.options:
                self.value = self.options[-1]
            elif self.value is not None:
                self.index = self.options.index(self.value)

    @traitlets.observe("value")
    def _find(self, change: dict[str, Any]) -> None:
        self.index = self.options.index(self.value)

    @traitlets.observe("index")
    def _take(self, change: dict[str, Any]) -> None:
        self.value = self.options[self.index]


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
