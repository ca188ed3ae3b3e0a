"""Runs an explorer: controls, a picture, and words. Its own file says which controls, what fits, and what to show."""

import re
from collections import namedtuple
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from html import escape
from inspect import Parameter, Signature
from itertools import combinations, product
from operator import itemgetter
from typing import Any, ClassVar, NamedTuple

import ipywidgets as widgets
from IPython import get_ipython

from course.explorers.choice import Choice
from course.pictures.scene import Scene
from course.pictures.stage import Stage
from course.table import Table

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


CONTROLS = "<p><em>The controls need a kernel. Run this cell to bring them back.</em></p>"
"""What a reader sees above the picture in a page without a kernel, or in a notebook that is not trusted."""


class Explorer(widgets.VBox):
    """A row of controls, and below it the result: a sentence, a picture and facts.

    ``shown`` is what the controls say, as `_fit` returns it. A choice that does not fit moves the controls that must
    give way, as few and as little as will do, and says so; a button that would do that says it beforehand. A subclass
    is named like a function, because cells call it: with the values of its ``table``. Its `_fit` and `_parts` decide
    what to show for them.
    """

    table: tuple[tuple, ...] = ()
    """For each control: its name, the function of choice.py that makes it, that one's arguments, the default value."""
    groups: Mapping[str, Sequence[str]] = {}  # the names of the controls in each; by default, there are none
    before: Any = None  # the choice until the last change
    keeps: tuple[str, ...] = ()  # names of controls that never give way
    _click: Callable[[str], None] | None = None  # takes the key of a mark
    _made: ClassVar[dict[str, tuple[str, list["Explorer"]]]] = {}  # by cell: the id of its last run, what that made

    def __init_subclass__(cls, **options):
        super().__init_subclass__(**options)
        kind = Parameter.POSITIONAL_OR_KEYWORD
        cls._arguments = Signature([Parameter(name, kind, default=usual) for name, *_, usual in cls.table])
        if cls.__init__ is Explorer.__init__:
            cls.__signature__ = cls._arguments  # what a cell's Shift+Tab shows

    def __init__(self, *values: Any, below: Sequence[widgets.Widget] = (), **named: Any):
        """Make each control, which is an attribute, too; ``below`` is under the picture."""
        given = self._arguments.bind(*values, **named)
        given.apply_defaults()
        rows = zip(self.table, self._in_table(**given.arguments))
        self.controls: dict[str, Choice] = {name: make(*about, value) for (name, make, *about, _), value in rows}
        vars(self).update(self.controls)
        self._choice_type, self._is_updating = namedtuple("Choice", self.controls), False
        self._misfit = lru_cache(1024)(self._misfit)  # buttons try the same choices at every redraw
        self._last = self.before = self.choice
        self.shown = self._fit(self.choice)
        parts = self._parts()
        self.says, self.facts, self.picture = widgets.HTML(), widgets.HTML(), Stage(*parts.steps, unfolded=True)
        row = widgets.Box([*self._grouped()], layout=widgets.Layout(flex_flow="row wrap"))
        super().__init__([row, self.says, self.picture, *below, self.facts], _dom_classes=("labkit-explorer",))
        self._say(parts)
        if self._click:
            self.picture.on_click(self._click)
        for control in self.controls.values():
            control.observe(self._update, "index")
        self._replace_earlier()

    def _grouped(self) -> Iterator[widgets.Widget]:
        """Yield the controls, or each of the ``groups`` with its name; a group keeps its place."""
        if not self.groups:
            yield from self.controls.values()
        for group, names in self.groups.items():
            inside = [widgets.HTML(f"<b>{group}</b>"), *(self.controls[name] for name in names)]
            yield widgets.Box(inside, _dom_classes=("labkit-group",))

    def __repr__(self) -> str:
        """Return the call that makes this explorer, without the last ticks if they are off."""
        values = [*self.choice]
        while values[-1] is False:
            values.pop()
        return f"{type(self).__name__}({', '.join(map(repr, values))})"

    def _repr_mimebundle_(self, **options) -> dict[str, Any]:
        """Return the widget and, for a reader without a kernel, the steps that it shows at first."""
        widget: dict[str, Any] = super()._repr_mimebundle_(**options)  # type: ignore[assignment]
        still = self.picture._repr_mimebundle_(**options)[0]
        return {**still, **widget, "text/html": CONTROLS + still["text/html"]}

    def close(self) -> None:
        """Close it with all its parts, which ipywidgets would keep, and JupyterLab save."""
        for part in _inside(self):
            part.close()
        super().close()

    def _replace_earlier(self) -> None:
        """Close what an earlier run of this cell made: it is seen no more."""
        request = getattr(get_ipython(), "get_parent", dict)()
        cell = request.get("metadata", {}).get("cellId")
        if cell is not None:
            run = request["header"]["msg_id"]
            last_run, explorers = self._made.get(cell, (run, []))
            for explorer in explorers if run != last_run else ():
                explorer.close()
            self._made[cell] = run, [*(explorers if run == last_run else ()), self]

    @property
    def choice(self) -> Any:
        """What the controls say now."""
        return self._choice_type(*(control.value for control in self.controls.values()))

    def _in_table(self, **given: Any) -> Iterable[Any]:
        """Return the values of the controls, from what was given to the class."""
        return given.values()

    def _fit(self, choice: Any) -> Any:
        """Return what to show for a choice; ValueError if it does not fit."""
        return choice

    def _parts(self) -> Parts:
        """Return what to show of ``shown``."""
        raise NotImplementedError

    def _update(self, change=None, **chosen) -> None:
        if self._is_updating:  # another control moved this one, not the reader
            return
        asked = self.choice._replace(**chosen)
        fitting = self._nearest(asked)
        moves = "; ".join(f"{name} is {new} now, not {old}" for name, old, new in self._moves(asked, fitting))
        moved = moves and WARNING.format(f"<b>{escape(moves)}.</b> {escape(self._why(asked))}.")
        self._is_updating = True
        for control, value in zip(self.controls.values(), fitting):
            control.value = value
        self._is_updating, self.before, self._last, self.shown = False, self._last, fitting, self._fit(fitting)
        parts = self._parts()
        self.picture.show(*parts.steps)
        self._say(parts, moved)

    def _say(self, parts: Parts, moved: str = "") -> None:
        self.says.value = moved + (WARNING if parts.warns else SENTENCE).format(parts.says)
        self.facts.value = parts.facts.html
        for name, control in self.controls.items():
            if control.look != "slider" and len(control.options) <= MOST_MARKED:
                control.hints = [self._hint(self.choice._replace(**{name: value})) for value in control.options]

    def _hint(self, asked: Any) -> str:
        """Say what a choice would change to fit; "" if it fits as it is."""
        fitting = self._nearest(asked)
        if fitting == self.choice != asked:
            return f"does not fit: {self._why(asked)}"
        moves = " and ".join(f"{name} to {new}" for name, _, new in self._moves(asked, fitting))
        return moves and f"would set {moves}"

    def _nearest(self, asked: Any, misfit: Callable[[Any], Any] | None = None, keeps: Sequence[str] = ()) -> Any:
        """Return the choice if it fits, or else the nearest that does, without moving the controls in ``keeps``."""
        free = {name: each.options for name, each in self.controls.items() if name not in (*self.keeps, *keeps)}
        misfit = misfit or self._misfit
        return next((each for each in nearest_first(asked, self._last, free) if not misfit(each)), self._last)

    def _moves(self, asked: Any, fitting: Any) -> list[tuple[str, str, str]]:
        """Return the name of each control that gives way, and its old and new value in words."""
        values = zip(self.controls.values(), asked, fitting)
        return [(each.description, each.word(old), each.word(new)) for each, old, new in values if old != new]

    def _misfit(self, choice: Any) -> str:
        """Return what is wrong with a choice; "" if it fits."""
        try:
            self._fit(choice)
        except ValueError as error:
            return str(error)
        return ""

    def _why(self, choice: Any) -> str:
        """Return the rule that a choice breaks, in the names that the controls have."""
        names = {name: control.description for name, control in self.controls.items()}
        why = self._misfit(choice).partition(": use")[0]
        return re.sub(r"(\w+)=", lambda name: f"{names.get(name[1], name[1].replace('_', ' '))} = ", why)


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


def _inside(widget: widgets.Widget) -> list[widgets.Widget]:
    own = [getattr(widget, name) for name in ("layout", "style") if hasattr(widget, name)]
    return own + [part for child in getattr(widget, "children", ()) for part in (child, *_inside(child))]
