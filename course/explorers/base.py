"""Runs an explorer: what its controls say, what fits, and what is shown for it. A view draws that (see jupyter.py)."""

import re
from collections import namedtuple
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import lru_cache, partial
from html import escape
from inspect import Parameter, Signature
from itertools import combinations, product
from operator import itemgetter
from typing import Any, NamedTuple

from course.explorers.control import Control
from course.pictures.scene import Scene
from course.pictures.slide import on_slide
from course.pictures.stacked import narrow
from course.table import Table
from labkit.sizes import Misfit

LETTERS = {"world_size": "n", "tp_size": "t", "cp_size": "c", "pp_size": "p", "dp_size": "d", "ep_size": "ep"}
MOST_MARKED = 8  # options of a control that say beforehand what else they would change: each is tried at every redraw
SENTENCE = '<div class="labkit-says" role="status">{}</div>'
WARNING = '<div class="labkit-says moved" role="alert">{}</div>'
"""What a screen reader reads out when it changes, a warning at once."""


class Parts(NamedTuple):
    """What to show for a choice: one picture or several as steps, a sentence in HTML, and facts that no picture has."""

    steps: Sequence[Scene]
    says: str
    facts: Table = Table()
    warns: bool = False  # whether the sentence says that something is wrong


class Explorer:
    """The controls of a picture, and what is shown for their ``choice``: ``steps``, ``says`` (in HTML) and ``facts``.

    ``shown`` is what the controls say, as `_fit` returns it. A choice that does not fit moves the controls that must
    give way, as few and as little as will do, and says so; a button that would do that says it beforehand. A subclass
    is named like a function, because cells call it: with the values of its ``table``. Its `_fit` and `_parts` decide
    what to show for them. One that listens to its picture overrides `click` or `drop`.
    """

    table: tuple[tuple, ...] = ()
    """For each control: its name, the function of control.py that makes it, its arguments, the default value."""
    groups: Mapping[str, Sequence[str]] = {}  # the names of the controls in each; by default, there are none
    keeps: tuple[str, ...] = ()  # names of controls that never give way
    seconds = 1.0  # how long a step lasts when played

    def __init_subclass__(cls, **options):
        super().__init_subclass__(**options)
        kind = Parameter.POSITIONAL_OR_KEYWORD
        cls._arguments = Signature([Parameter(name, kind, default=usual) for name, *_, usual in cls.table])
        if cls.__init__ is Explorer.__init__:
            cls.__signature__ = cls._arguments  # what a cell's Shift+Tab shows

    def __init__(self, *values: Any, **named: Any):
        """Make each control; ValueError if the values do not fit together."""
        given = self._arguments.bind(*values, **named)
        given.apply_defaults()
        rows = zip(self.table, self._in_table(**given.arguments))
        self.controls: dict[str, Control] = {name: make(*about, value) for (name, make, *about, _), value in rows}
        for name, control in self.controls.items():
            if control.look != "slider" and len(control.options) <= MOST_MARKED:
                control.hint = partial(self._hint, name)
        self._misfit = lru_cache(1024)(self._misfit)  # buttons try the same choices at every redraw
        values_now = (control.value for control in self.controls.values())
        self.choice: Any = namedtuple("Choice", self.controls)(*values_now)
        self._show(self.choice)

    def __repr__(self) -> str:
        """Return the call that makes this explorer, without the last ticks if they are off."""
        values = [*self.choice]
        while values[-1] is False:
            values.pop()
        return f"{type(self).__name__}({', '.join(map(repr, values))})"

    def choose(self, **values: Any) -> None:
        """Move controls, as a reader does: others give way so that all fits, and ``says`` tells which and why.

        Raises:
            ValueError: a value is not among the options of its control.
        """
        for name, value in values.items():
            if name not in self.controls:
                raise ValueError(f"{name} is not a control: use one of {', '.join(self.controls)}")
            self.controls[name].index_of(value)
        asked = self.choice._replace(**values)
        fitting = self._nearest(asked)
        moves = "; ".join(f"{name} is {new} now, not {old}" for name, old, new in self._moves(asked, fitting))
        self._show(fitting, moves and WARNING.format(f"<b>{escape(moves)}.</b> {escape(self._why(asked))}."))

    def click(self, key: str) -> None:
        """Take a click on the mark with this key."""

    def drop(self, key: str, zone: str) -> None:
        """Take the mark with the first key, dropped on that with the second."""

    @property
    def narrow_steps(self) -> Sequence[Scene]:
        """The same steps for a narrow screen."""
        return narrow(self.steps)

    @property
    def slide_steps(self) -> Sequence[Scene]:
        """The same steps for a slide."""
        return [*map(on_slide, self.steps)]

    @property
    def picked(self) -> dict[str, str]:
        """What a reader picked in the picture, in words for an address; the names are always the same."""
        return {}

    def pick(self, words: Mapping[str, str]) -> None:
        """Take such words, for the next choice to show; ValueError if they say nothing."""

    @property
    def clicks(self) -> bool:
        """Whether clicks on the picture are listened to."""
        return type(self).click is not Explorer.click

    @property
    def drops(self) -> bool:
        """Whether marks can be dropped on others."""
        return type(self).drop is not Explorer.drop

    def _in_table(self, **given: Any) -> Iterable[Any]:
        """Return the values of the controls, from what was given to the class."""
        return given.values()

    def _fit(self, choice: Any) -> Any:
        """Return what to show for a choice; ValueError if it does not fit."""
        return choice

    def _parts(self) -> Parts:
        """Return what to show of ``shown``; ``before`` is the choice until the last change."""
        raise NotImplementedError

    def _show(self, fitting: Any, moved: str = "") -> None:
        self.before, self.choice, self.shown = self.choice, fitting, self._fit(fitting)
        for control, value in zip(self.controls.values(), fitting):
            control.index = control.index_of(value)
        self.steps, says, self.facts, warns = self._parts()
        self.says = moved + (WARNING if warns else SENTENCE).format(says)

    def _hint(self, name: str, value: Any) -> str:
        """Say what an option would change to fit; "" if it fits as it is."""
        asked = self.choice._replace(**{name: value})
        fitting = self._nearest(asked)
        if fitting == self.choice != asked:
            return f"does not fit: {self._why(asked)}"
        moves = " and ".join(f"{name} to {new}" for name, _, new in self._moves(asked, fitting))
        return moves and f"would set {moves}"

    def _nearest(self, asked: Any, misfit: Callable[[Any], Any] | None = None, keeps: Sequence[str] = ()) -> Any:
        """Return the choice if it fits, or else the nearest that does, without moving the controls in ``keeps``."""
        free = {name: each.options for name, each in self.controls.items() if name not in (*self.keeps, *keeps)}
        misfit = misfit or self._misfit
        return next((each for each in nearest_first(asked, self.choice, free) if not misfit(each)), self.choice)

    def _moves(self, asked: Any, fitting: Any) -> list[tuple[str, str, str]]:
        """Return the name of each control that gives way, and its old and new value in words."""
        values = zip(self.controls.values(), asked, fitting)
        return [(each.description, each.word(old), each.word(new)) for each, old, new in values if old != new]

    def _misfit(self, choice: Any) -> str:
        """Return what is wrong with a choice, without the way out; "" if it fits."""
        try:
            self._fit(choice)
        except Misfit as misfit:
            return misfit.fault
        except ValueError as error:
            return str(error).partition(": use")[0]
        return ""

    def _why(self, choice: Any) -> str:
        """Return what is wrong with a choice, in the names that the controls have."""
        return self._worded(self._misfit(choice))

    def _worded(self, fault: str) -> str:
        """Write the names of fields as the controls do, and others as formulas do."""
        names = {name: control.description for name, control in self.controls.items()}
        value = r"(?<!_size \* )\b(\w+)="  # not the last factor of a product
        fault = re.sub(value, lambda name: f"{names.get(name[1], name[1].replace('_', ' '))} = ", fault)
        fault = re.sub(r"\w+_size\b", lambda name: LETTERS.get(name[0], name[0]), fault)
        return re.sub(r"(\w)=(\d)", r"\1 = \2", fault)


def nearest_first(choice: Any, last: Any, options: Mapping[str, list]) -> Iterator[Any]:
    """Yield the choice, and those that could be shown instead: on the way from ``last``, or else beside it.

    First, what the reader moved goes on in the same direction. Then other fields give way: as few as possible, at most
    two, by the fewest steps among their options, the last fields first.
    """
    yield choice
    moved = [name for name in options if getattr(choice, name) != getattr(last, name)]
    if len(moved) == 1:
        [name] = moved
        now, before = (options[name].index(getattr(each, name)) for each in (choice, last))
        for value in options[name][now:] if now > before else options[name][now::-1]:
            yield choice._replace(**{name: value})
    others = {name: options[name].index(getattr(choice, name)) for name in reversed(list(options)) if name not in moved}
    for num_changed in (1, 2):
        beside = []
        for names in combinations(others, num_changed):
            for steps in product(*(range(len(options[name])) for name in names)):
                far = sum(abs(step - others[name]) for step, name in zip(steps, names))
                beside.append((far, {name: options[name][step] for name, step in zip(names, steps)}))
        for _, changed in sorted(beside, key=itemgetter(0)):
            yield choice._replace(**changed)
