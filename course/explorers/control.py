"""A control of an explorer: one of several options. It is plain data, which a view shows."""

from collections.abc import Callable, Iterable
from functools import partial
from html import escape
from typing import Any


class Control:
    """A choice of one of the ``options``. The first ``value`` is added if it is not among them, to a slider a number.

    ``look`` is "slider", "menu", "checkbox" or "buttons". ``hint``, if there is one, says of an option what choosing it
    would change elsewhere, or "" if it fits. ``leads_to`` says of an option what comes of it: a slider asks for one
    more and one less.
    """

    hint: Callable[[Any], str] | None = None
    leads_to: Callable[[Any], str] | None = None
    disabled = False
    hidden = False

    def __init__(self, description: str, options: Iterable, value: Any, look: str):
        self.description, self.look = description, look
        self.options: list = [*options]
        if look in ("menu", "buttons") or (look == "slider" and isinstance(value, int | float)):
            self.options = sorted({*options, value}) if look == "slider" else [*dict.fromkeys([*options, value])]
        self.index = self.index_of(value)

    @property
    def value(self) -> Any:
        """The option that is chosen."""
        return self.options[self.index]

    @property
    def words(self) -> list[str]:
        """How the options are written."""
        return list(map(self.word, self.options))

    @property
    def hints(self) -> list[str]:
        """The hint of each option, tried now; an empty list if there are none."""
        if self.leads_to:
            places = range(len(self.options))
            return [self.leads_to(self.options[i]) if abs(i - self.index) == 1 else "" for i in places]
        return [self.hint(option) for option in self.options] if self.hint else []

    def index_of(self, value: Any) -> int:
        """Return which option a value is; ValueError if it is not offered."""
        if value not in self.options:
            offered = ", ".join(map(str, self.options))
            raise ValueError(f"{self.description}={value!r} is not offered: use one of {offered}")
        return self.options.index(value)

    def word(self, value: Any) -> str:
        """Return how an option is written."""
        return {bool: ("off", "on").__getitem__, float: "{:g}".format}.get(type(value), str)(value)

    def dragged_by(self, number: int, name: str = "") -> str:
        """Return a number as HTML: dragged sideways, or by arrow keys, it moves this slider of numbers; see stage.js.

        It may be that of a different ``name`` which follows from this control's, as d follows from n.
        """
        most = int(self.options[-1] * number / self.value)
        about = f'aria-valuenow="{number}" aria-valuemin="1" aria-valuemax="{most}"'
        control, named = escape(self.description), escape(name or self.description)
        return (
            f'<span class="labkit-number" role="spinbutton" tabindex="0" aria-label="{named}" {about} '
            f'data-control="{control}" title="Drag it sideways, or press an arrow key">{number}</span>'
        )


slider, menu, buttons = (partial(Control, look=look) for look in ("slider", "menu", "buttons"))
"""Each is called with a description, the options, and the first value."""


def checkbox(description: str, value: bool) -> Control:
    return Control(description, (False, True), value, "checkbox")
