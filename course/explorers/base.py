"""What all explorers share: controls, a sentence on what they come to, a picture, and its facts as text.

An explorer's own file has its controls, its picture and its facts.
"""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from html import escape
from itertools import combinations, product
from operator import itemgetter
from typing import Any, ClassVar

import ipywidgets as widgets
from IPython import get_ipython

from course.pictures.scene import Scene
from course.pictures.stage import Stage
from course.pictures.style import DP, INK, PP

STYLE = f"""<style>
.labkit-says {{ padding: .4em .8em; line-height: 1.4; border-left: 6px solid {DP}; }}
.labkit-says.moved, .labkit-says.misfit {{ border-color: {PP}; background: #FFF1E6; color: {INK}; }}
.labkit-facts {{ border-collapse: collapse; line-height: 1.45; }}
.labkit-facts caption {{ text-align: left; padding: .3em 0; }}
.labkit-facts th, .labkit-facts td {{ text-align: left; vertical-align: top; padding: .2em 1.2em .2em 0; }}
table.labkit-facts tbody {{ border-top: 1px solid var(--jp-border-color2, #ddd); }}
.labkit-facts span {{ white-space: nowrap; margin-right: .7em; }}
.labkit-explorer .jupyter-widgets-disconnected::before {{ content: none; }}
.labkit-explorer.jupyter-widgets-disconnected > .widget-box {{ opacity: .45; pointer-events: none; }}
.labkit-explorer.jupyter-widgets-disconnected::before {{ color: inherit; font: inherit; font-style: italic;
  content: "From an earlier session. Run the cell to change it."; }}
</style>"""


class Explorer(widgets.VBox):
    """A row of controls, and below it what they come to: as a sentence, as a picture, and as facts.

    ``shown`` is what the controls say, as `_fit` returns it. A choice that does not fit moves the controls that must
    give way, as few and as little as will do, and says so. A subclass has ``function`` and ``choice_type``, makes its
    controls before it calls ``__init__`` here, and says in `_fit` and `_parts` what they come to.
    """

    function: str
    """The name of the function that makes the explorer."""
    choice_type: Any
    """A named tuple of what the controls say: its fields are the controls' names, and the function's arguments."""
    _made: ClassVar[dict[str, tuple[str, list["Explorer"]]]] = {}  # by cell: the id of its last run, what that made

    def __init__(self, *, others: Sequence = (), row: Sequence = (), below: Sequence = ()):
        """``others`` are controls that no choice names; ``row`` puts all in order; ``below`` is under the picture."""
        self._controls = {name: getattr(self, name) for name in self.choice_type._fields}
        self._is_updating, self._last = False, self.choice
        self.shown = self._fit(self.choice)
        picture, says, facts = self._parts()
        self.says, self.facts = widgets.HTML(says), widgets.HTML(facts)
        self.picture = Stage(*_scenes(picture), unfolded=True)
        inputs = [*self._controls.values(), *others]
        controls = widgets.Box(row or inputs, layout=widgets.Layout(flex_flow="row wrap"))
        children = [widgets.HTML(STYLE), controls, self.says, self.picture, *below, self.facts]
        super().__init__(children, _dom_classes=("labkit-explorer",))
        for control in inputs:
            control.observe(self._update, "value")
        self._replace_earlier()

    def __repr__(self) -> str:
        """Return the call that makes this explorer."""
        return f"{self.function}({', '.join(map(repr, self.choice))})"

    def _repr_mimebundle_(self, **options) -> dict[str, Any]:
        """Return the widget and, for a reader without a kernel, the picture that it shows at first."""
        widget: dict[str, Any] = super()._repr_mimebundle_(**options)  # type: ignore[assignment]
        return {**self.picture.scenes[0]._repr_mimebundle_(), **widget}

    def close(self) -> None:
        """Close it with all its parts, which ipywidgets would keep, and JupyterLab save."""
        for part in _parts(self):
            part.close()
        super().close()

    def _replace_earlier(self) -> None:
        """Close what an earlier run of this cell made: it is seen no more."""
        request = getattr(get_ipython(), "get_parent", dict)()
        cell = request.get("metadata", {}).get("cellId")
        if cell is not None:
            run = request["header"]["msg_id"]
            last_run, explorers = self._made.get(cell, (run, []))
            if run != last_run:
                for explorer in explorers:
                    explorer.close()
                explorers = []
            self._made[cell] = run, [*explorers, self]

    @property
    def choice(self) -> Any:
        """What the controls say now."""
        return self.choice_type(*(control.value for control in self._controls.values()))

    def _fit(self, choice: Any) -> Any:
        """Return what to show for a choice; ValueError if it does not fit."""
        raise NotImplementedError

    def _parts(self) -> tuple[Scene | Sequence[Scene], str, str]:
        """Return the picture of what is shown, or its steps, and the sentence on it and its facts as HTML."""
        raise NotImplementedError

    def _update(self, change=None) -> None:
        if self._is_updating:  # another control moved this one, not the reader
            return
        self._is_updating, moved = True, ""
        try:
            fitting = nearest_that_fits(self._fit, self.choice, self._last, self._options())
            if fitting != self.choice:
                moved = moved_html(self._controls, self._why_not(self.choice), self.choice, fitting)
            for control, value in zip(self._controls.values(), fitting):
                control.value = value
            self._last, self.shown = fitting, self._fit(fitting)
        finally:
            self._is_updating = False
        picture, says, self.facts.value = self._parts()
        self.says.value = moved + says
        self.picture.show(*_scenes(picture))

    def _options(self) -> dict[str, list]:
        return {name: list(control.options) for name, control in self._controls.items()}

    def _why_not(self, choice: Any) -> str:
        """Return the rule that a choice breaks, in the names that the controls have."""
        try:
            self._fit(choice)
        except ValueError as error:
            why = str(error).partition(": use")[0]
            for name, control in self._controls.items():
                why = re.sub(rf"\b{name}=", f"{control.description} = ", why)
            return why
        return ""


def nearest_that_fits(fit: Callable, choice: Any, last: Any, options: Mapping[str, list]) -> Any:
    """Return the choice if it fits, or else the nearest that does: on the way from ``last``, or else beside it.

    First, what the reader moved goes on in the same direction. If it gets nowhere, other fields give way: as few as
    possible, at most two, by the fewest steps among their options, the last fields first. Else ``last`` is returned.
    """

    def fits(candidate) -> bool:
        try:
            fit(candidate)
        except ValueError:
            return False
        return True

    return next(filter(fits, _nearest_first(choice, last, options)), last)


def _nearest_first(choice: Any, last: Any, options: Mapping[str, list]) -> Iterator[Any]:
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


def _scenes(picture: Scene | Sequence[Scene]) -> Sequence[Scene]:
    return [picture] if isinstance(picture, Scene) else picture


def _parts(widget: widgets.Widget) -> list[widgets.Widget]:
    own = [getattr(widget, name) for name in ("layout", "style") if hasattr(widget, name)]
    return own + [part for child in getattr(widget, "children", ()) for part in (child, *_parts(child))]


def says_html(text: str, *, warns: bool = False) -> str:
    """Say what the choice comes to (``text`` is HTML); a screen reader reads it out when it changes."""
    return f'<div class="labkit-says{" moved" * warns}" role="status">{text}</div>'


def moved_html(controls: Mapping[str, Any], why: str, asked: Any, fitting: Any) -> str:
    """Say which controls gave way, and why; a screen reader reads it out at once."""
    moves = [
        f"{controls[name].description} is {new} now, not {old}"
        for name, old, new in zip(asked._fields, asked, fitting)
        if old != new
    ]
    return f'<div class="labkit-says moved" role="alert"><b>{escape("; ".join(moves))}.</b> {escape(why)}.</div>'


def facts_html(caption: str, facts: Mapping[str, str]) -> str:
    """Return a table with one row per fact, each under its name."""
    return table_html(caption, {name: [escape(text)] for name, text in facts.items()})


def table_html(caption: str, rows: Mapping[str, Sequence[str]], heads: Sequence[str] = ()) -> str:
    """Return a table with one row per name, whose cells are HTML; ``heads`` name its columns."""
    head = "".join(f"<th>{name}</th>" for name in heads)
    body = "".join(f"<tr><th>{name}</th><td>{'</td><td>'.join(cells)}</td></tr>" for name, cells in rows.items())
    thead = f"<thead><tr>{head}</tr></thead>" if heads else ""
    return f'<table class="labkit-facts"><caption>{escape(caption)}</caption>{thead}<tbody>{body}</tbody></table>'
