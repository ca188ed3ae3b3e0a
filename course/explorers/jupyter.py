"""Jupyter's view of an explorer: its controls, its sentence, its picture and its facts as widgets."""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from inspect import signature
from typing import Any, ClassVar

import ipywidgets as widgets
from IPython import get_ipython

from course.explorers import batch, context, fully_sharded, layout, routing, schedule, sharding, sizing
from course.explorers import schedule_builder as builder
from course.explorers.base import Explorer
from course.explorers.choice import Choice
from course.pictures.stage import Stage

CONTROLS = "<p><em>The controls need a kernel. Run this cell to bring them back.</em></p>"
"""What a reader sees above the picture in a page without a kernel, or in a notebook that is not trusted."""


class View(widgets.VBox):
    """A row of controls, and below it the result: a sentence, a picture, the widgets ``below`` it, and facts.

    What a reader moves, clicks or drops goes to the ``explorer``, and what that then says is shown.
    """

    _made: ClassVar[dict[str, tuple[str, list["View"]]]] = {}  # by cell: the id of its last run, what that made

    def __init__(self, explorer: Explorer, below: Sequence[widgets.Widget] = ()):
        self.explorer = explorer
        self.controls = {name: Choice(control) for name, control in explorer.controls.items()}
        self.says, self.facts = widgets.HTML(), widgets.HTML()
        self.picture = Stage(*explorer.steps, seconds=explorer.seconds, unfolded=True)
        row = widgets.Box([*self._grouped()], layout=widgets.Layout(flex_flow="row wrap"))
        super().__init__([row, self.says, self.picture, *below, self.facts], _dom_classes=("labkit-explorer",))
        self._say()
        if explorer.clicks:
            self.picture.on_click(self._then_show(explorer.click))
        if explorer.drops:
            self.picture.on_drop(self._then_show(explorer.drop))
        for name, choice in self.controls.items():
            choice.observe(partial(self._moved, name), "index")
        self._replace_earlier()

    @property
    def choice(self) -> Any:
        """What the controls say now."""
        return self.explorer.choice

    @property
    def shown(self) -> Any:
        """What is shown for that."""
        return self.explorer.shown

    def __repr__(self) -> str:
        """Return the call that makes this explorer."""
        return repr(self.explorer)

    def _repr_mimebundle_(self, **options) -> dict[str, Any]:
        """Return the widget and, for a reader without a kernel, the steps that it shows at first."""
        widget: dict[str, Any] = super()._repr_mimebundle_(**options)  # type: ignore[assignment]
        still = self.picture._repr_mimebundle_(**options)[0]
        whole = {"text/plain": repr(self), "text/html": CONTROLS + still["text/html"]}  # ipywidgets cuts a long call
        return {**still, **widget, **whole}

    def close(self) -> None:
        """Close it with all its parts, which ipywidgets would keep, and JupyterLab save."""
        for part in _inside(self):
            part.close()
        super().close()

    def _grouped(self) -> Iterator[widgets.Widget]:
        """Yield the controls, or each group of them with its name; a group keeps its place."""
        if not self.explorer.groups:
            yield from self.controls.values()
        for group, names in self.explorer.groups.items():
            inside = [widgets.HTML(f"<b>{group}</b>"), *(self.controls[name] for name in names)]
            yield widgets.Box(inside, _dom_classes=("labkit-group",))

    def _moved(self, name: str, change) -> None:
        control = self.explorer.controls[name]
        if change.new != control.index:  # else the explorer moved it, not the reader
            self._then_show(self.explorer.choose)(**{name: control.options[change.new]})

    def _then_show(self, act: Callable[..., None]) -> Callable[..., None]:
        def acted(*values, **named) -> None:
            act(*values, **named)
            for choice in self.controls.values():
                choice.index = choice.control.index
            self.picture.show(*self.explorer.steps)
            self._say()

        return acted

    def _say(self) -> None:
        self.says.value, self.facts.value = self.explorer.says, self.explorer.facts.html
        for choice in self.controls.values():
            choice.update()

    def _replace_earlier(self) -> None:
        """Close what an earlier run of this cell made: it is seen no more."""
        request = getattr(get_ipython(), "get_parent", dict)()
        cell = request.get("metadata", {}).get("cellId")
        if cell is not None:
            run = request["header"]["msg_id"]
            last_run, views = self._made.get(cell, (run, []))
            for view in views if run != last_run else ():
                view.close()
            self._made[cell] = run, [*(views if run == last_run else ()), self]


def in_jupyter(make: type[Explorer]) -> Callable[..., View]:
    """Return a class with the arguments and the name of this explorer, which shows it in a cell."""

    def init(self, *values: Any, below: Sequence[widgets.Widget] = (), **named: Any) -> None:
        View.__init__(self, make(*values, **named), below)

    about = {"__init__": init, "__doc__": make.__doc__, "__signature__": signature(make), "__module__": __name__}
    return type(make.__name__, (View,), about)


def _inside(widget: widgets.Widget) -> list[widgets.Widget]:
    own = [getattr(widget, name) for name in ("layout", "style") if hasattr(widget, name)]
    return own + [part for child in getattr(widget, "children", ()) for part in (child, *_inside(child))]


batch_explorer = in_jupyter(batch.batch_explorer)
context_explorer = in_jupyter(context.context_explorer)
layout_explorer = in_jupyter(layout.layout_explorer)
routing_explorer = in_jupyter(routing.routing_explorer)
schedule_builder = in_jupyter(builder.schedule_builder)
schedule_explorer = in_jupyter(schedule.schedule_explorer)
shard_explorer = in_jupyter(sharding.shard_explorer)
sizing_explorer = in_jupyter(sizing.sizing_explorer)
stage_explorer = in_jupyter(fully_sharded.stage_explorer)
