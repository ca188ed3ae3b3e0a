"""What all explorers share: controls, a sentence on what they come to, a picture, and its facts as text.

An explorer's own file has its controls, its picture and its facts.
"""

from collections.abc import Iterable, Mapping, Sequence
from html import escape
from typing import Any, ClassVar, NamedTuple

import ipywidgets as widgets
from IPython import get_ipython

from course.pictures.style import DP, INK, PP

STYLE = f"""<style>
img.labkit-grids {{ width: 100%; max-width: 1250px; height: auto; }}
.labkit-says {{ padding: .4em .8em; line-height: 1.4; border-left: 6px solid {DP}; }}
.labkit-says.misfit {{ border-color: {PP}; background: #FFF1E6; color: {INK}; }}
.labkit-facts {{ border-collapse: collapse; line-height: 1.45; }}
.labkit-facts caption {{ text-align: left; padding: .3em 0; }}
.labkit-facts th, .labkit-facts td {{ text-align: left; vertical-align: top; padding: .2em 1.2em .2em 0; }}
table.labkit-facts tbody {{ border-top: 1px solid var(--jp-border-color2, #ddd); }}
.labkit-facts span {{ white-space: nowrap; margin-right: .7em; }}
.labkit-stale {{ opacity: .45; }}
.labkit-explorer .jupyter-widgets-disconnected::before {{ content: none; }}
.labkit-explorer.jupyter-widgets-disconnected > .widget-box {{ opacity: .45; pointer-events: none; }}
.labkit-explorer.jupyter-widgets-disconnected::before {{ color: inherit; font: inherit; font-style: italic;
  content: "From an earlier session. Run the cell to change it."; }}
</style>"""


class Explorer(widgets.VBox):
    """A row of controls, and below it what they come to: as a sentence, as a picture, and as facts.

    ``shown`` is what the picture shows: the last choice that fitted. ``fits`` says whether the controls still say that.
    A subclass has ``function`` and ``choice_type``, makes its controls before it calls ``__init__`` here, and says in
    `_chosen` and `_parts` what they come to.
    """

    function: str
    """The name of the function that makes the explorer."""
    choice_type: Any
    """A named tuple of what the controls say: its fields are the controls' names, and the function's arguments."""
    _made: ClassVar[dict[str, tuple[str, list["Explorer"]]]] = {}  # by cell: the id of its last run, what that made

    def __init__(self, shown: Any, *, others: Sequence = (), row: Sequence = (), below: Sequence = ()):
        """``others`` are controls that no choice names; ``row`` puts all in order; ``below`` is under the picture."""
        inputs = [*(getattr(self, name) for name in self.choice_type._fields), *others]
        self.shown, self.fits, self._is_updating = shown, True, False
        self.says, self.picture, self.facts = widgets.HTML(), widgets.Image(format="png"), widgets.HTML()
        self.picture.add_class("labkit-grids")
        controls = widgets.Box(row or inputs, layout=widgets.Layout(flex_flow="row wrap"))
        children = [widgets.HTML(STYLE), controls, self.says, self.picture, *below, self.facts]
        super().__init__(children, _dom_classes=("labkit-explorer",))
        for control in inputs:
            control.observe(self._update, "value")
        self._update()
        self._replace_earlier()

    def __repr__(self) -> str:
        """Return the call that makes this explorer: it is all that a stored notebook keeps of a widget."""
        return f"{self.function}({', '.join(map(repr, self.choice))})"

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
        """What the controls say now; it need not fit."""
        return self.choice_type(*(getattr(self, name).value for name in self.choice_type._fields))

    def _chosen(self) -> Any:
        """Limit the controls by each other, and return what to show; ValueError if the choice does not fit."""
        raise NotImplementedError

    def _parts(self) -> tuple[bytes, str, str]:
        """Return the picture of what is shown as PNG, and the sentence on it and its facts as HTML."""
        raise NotImplementedError

    def _update(self, change=None) -> None:
        if self._is_updating:  # another control moved this one, not the reader
            return
        self._is_updating, misfit = True, ""
        try:
            self.shown, self.fits = self._chosen(), True
        except ValueError as error:
            self.fits, misfit = False, misfit_html(f"{error}. Below: the last that did.")
        finally:
            self._is_updating = False
        self.picture.value, says, facts = self._parts()
        self.facts.value = facts if self.fits else f'<div class="labkit-stale">{facts}</div>'
        self.says.value = misfit or says


def _parts(widget: widgets.Widget) -> list[widgets.Widget]:
    own = [getattr(widget, name) for name in ("layout", "style") if hasattr(widget, name)]
    return own + [part for child in getattr(widget, "children", ()) for part in (child, *_parts(child))]


def says_html(text: str) -> str:
    """Say what the choice comes to (``text`` is HTML); a screen reader reads it out when it changes."""
    return f'<div class="labkit-says" role="status">{text}</div>'


def misfit_html(why: str) -> str:
    """Say that the choice does not fit, and ``why``; a screen reader reads it out at once."""
    return f'<div class="labkit-says misfit" role="alert"><b>This does not fit.</b> {escape(why)}</div>'


def facts_html(caption: str, facts: Mapping[str, str]) -> str:
    """Return a table with one row per fact, each under its name."""
    return table_html(caption, {name: [escape(text)] for name, text in facts.items()})


def table_html(caption: str, rows: Mapping[str, Sequence[str]], heads: Sequence[str] = ()) -> str:
    """Return a table with one row per name, whose cells are HTML; ``heads`` name its columns."""
    head = "".join(f"<th>{name}</th>" for name in heads)
    body = "".join(f"<tr><th>{name}</th><td>{'</td><td>'.join(cells)}</td></tr>" for name, cells in rows.items())
    thead = f"<thead><tr>{head}</tr></thead>" if heads else ""
    return f'<table class="labkit-facts"><caption>{escape(caption)}</caption>{thead}<tbody>{body}</tbody></table>'


class Controls(NamedTuple):
    """Makes controls of one width, so that they stand in columns; both widths are CSS."""

    width: str
    description_width: str

    def slider(self, description: str, value: int, low: int, high: int) -> widgets.IntSlider:
        return widgets.IntSlider(value, low, max(high, value), description=description, **self._look())

    def time(self, description: str, value: float, low: float, high: float) -> widgets.FloatSlider:
        """Return a slider in steps of a quarter."""
        return widgets.FloatSlider(
            value, min=low, max=max(high, value), step=0.25, description=description, **self._look()
        )

    def selection(self, description: str, usual: Sequence[int], value: int) -> widgets.SelectionSlider:
        """Return a slider over the ``usual`` numbers and ``value``."""
        options = sorted({*usual, value})
        return widgets.SelectionSlider(options=options, value=value, description=description, **self._look())

    def dropdown(self, description: str, usual: Iterable, value: Any) -> widgets.Dropdown:
        """Return a menu of the ``usual`` values and ``value``."""
        options = list(dict.fromkeys([*usual, value]))
        return widgets.Dropdown(options=options, value=value, description=description, **self._look())

    def _look(self) -> dict[str, Any]:
        return {"layout": {"width": self.width}, "style": {"description_width": self.description_width}}


def checkbox(description: str, value: bool, tooltip: str | None = None) -> widgets.Checkbox:
    """Return a checkbox that is only as wide as its words need."""
    return widgets.Checkbox(value, description=description, tooltip=tooltip, indent=False, layout={"width": "165px"})
