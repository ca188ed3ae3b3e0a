"""The page's view of explorers, without Jupyter: takes and answers the messages of page.js, as JSON.

It runs in the reader's browser, where worker.js hands over what page.js asks for.
"""

import json
from collections.abc import Mapping
from importlib import import_module
from typing import Any

from course.explorers.base import Explorer
from course.pictures.steps import difference, differences

MODULES = {
    "layout_explorer": "layout",
    "collective_explorer": "collectives",
    "shard_explorer": "sharding",
    "batch_explorer": "batch",
    "schedule_explorer": "schedule",
    "schedule_builder": "schedule_builder",
    "sizing_explorer": "sizing",
    "context_explorer": "context",
    "stage_explorer": "fully_sharded",
    "routing_explorer": "routing",
}
"""Each explorer that a page can show, and its module in `course.explorers`."""
STEPS = {"": "steps", "phone": "narrow_steps", "slide": "slide_steps"}
MOST_LETTERS = 3  # "tensor t" is t in an address, "GPUs per node" is gpus_per_node


class View:
    """An explorer on a page, which may be on a phone or a slide; each method returns what page.js then shows."""

    def __init__(self, name: str, values: list, named: Mapping[str, Any], screen: str = ""):
        module = import_module(f"course.explorers.{MODULES[name]}")
        self.explorer: Explorer = getattr(module, name)(*values, **named)
        self.first, self.first_picked = self.explorer.choice, self.explorer.picked
        last_words = {name: control.description.split()[-1] for name, control in self.explorer.controls.items()}
        self.short = {name: word if len(word) <= MOST_LETTERS else name for name, word in last_words.items()}
        self.screen = screen
        self.steps = self._drawn()

    def make(self) -> dict[str, Any]:
        """Return everything."""
        looks = {
            name: dict(description=each.description, look=each.look, words=each.words, hints=[])
            for name, each in self.explorer.controls.items()
        }
        stage = dict(steps=self.steps, seconds=self.explorer.seconds, clicks=self.explorer.clicks, unfolded=True)
        return {"looks": looks, "groups": self.explorer.groups, "stage": stage, **self._shown()}

    def choose(self, indices: Mapping[str, int]) -> dict[str, Any]:
        """Move controls, given by the number of the option."""
        controls = self.explorer.controls
        self.explorer.choose(**{name: controls[name].options[index] for name, index in indices.items()})
        return self._changed()

    def restore(self, words: Mapping[str, str]) -> dict[str, Any]:
        """Show what an address says: of each control an option in words, and what was picked, or else the first.

        Raises:
            ValueError: an option is not offered, or what was picked is not there to pick.
        """
        values = {}
        for name, control in self.explorer.controls.items():
            word = words.get(self.short[name], control.word(getattr(self.first, name)))
            if word not in control.words:
                offered = ", ".join(control.words)
                raise ValueError(f"{control.description} = {word} is not offered: use one of {offered}")
            values[name] = control.options[control.words.index(word)]
        self.explorer.pick({name: words.get(name, word) for name, word in self.first_picked.items()})
        self.explorer.choose(**values)
        return self._changed()

    def click(self, key: str) -> dict[str, Any]:
        """Take a click on a mark."""
        self.explorer.click(key)
        return self._changed()

    def drop(self, keys: list[str]) -> dict[str, Any]:
        """Take a mark that was dropped on a second one."""
        self.explorer.drop(*keys)
        return self._changed()

    def hints(self) -> dict[str, Any]:
        """Return what each option would change elsewhere, which takes as long as a few pictures."""
        return {"controls": {name: {"hints": each.hints} for name, each in self.explorer.controls.items()}}

    def _drawn(self) -> list[dict[str, Any]]:
        return differences(getattr(self.explorer, STEPS[self.screen]))

    def _changed(self) -> dict[str, Any]:
        before, self.steps = self.steps, self._drawn()
        if len(before) == len(self.steps) == 1:
            return {"stage": {"changes": difference(before[0], self.steps[0])}, **self._shown()}
        return {"stage": {"steps": self.steps}, **self._shown()}

    def _shown(self) -> dict[str, Any]:
        explorer = self.explorer
        controls = {
            name: dict(index=each.index, disabled=each.disabled, hidden=each.hidden)
            for name, each in explorer.controls.items()
        }
        moved = {
            self.short[name]: explorer.controls[name].word(value)
            for name, value in explorer.choice._asdict().items()
            if value != getattr(self.first, name)
        }
        cell = f"from course.explorers.jupyter import {type(explorer).__name__}\n\n{explorer!r}"
        moved |= {name: word for name, word in explorer.picked.items() if word != self.first_picked[name]}
        return dict(controls=controls, says=explorer.says, facts=explorer.facts.html, address=moved, cell=cell)


views: dict[str, View] = {}


def answer(message: str) -> str:
    """Answer what page.js asks of one view: ``{"view": its key, "ask": a method, "with": its argument}``, as JSON."""
    asked = json.loads(message)
    key, method, given = asked["view"], asked["ask"], asked["with"]
    try:
        if method == "make":
            views[key], given = View(*given), None
        ask = getattr(views[key], method)
        return json.dumps(ask() if given is None else ask(given))
    except ValueError as error:
        return json.dumps({"error": str(error)})
