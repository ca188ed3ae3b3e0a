"""Turns scenes into the data that stage.js reads: the first whole, then what differs from step to step."""

from collections.abc import Sequence
from typing import Any

from course.pictures.scene import Scene


def whole(scene: Scene) -> dict[str, Any]:
    """Return a scene as stage.js reads it."""
    marks = {key: mark.svg for key, mark in scene.by_key.items()}
    shown: dict[str, Any] = dict(
        title=scene.title, says=scene.says, view=scene.view, table=scene.table.html, panels=scene.panels
    )
    shown |= {"journeys": dict(scene.journeys), "clock": scene.clock}
    shown["lasts"] = scene.lasts
    shown["movers"] = [each.data for each in scene.travellers]
    return {**shown, "keys": [*marks], "marks": marks}


def difference(old: dict[str, Any], new: dict[str, Any]) -> dict[str, Any]:
    """Return what of `whole` differs: new values, and of the marks those that changed."""
    changed = {name: value for name, value in new.items() if value != old[name]}
    if "marks" in changed:
        changed["marks"] = {key: mark for key, mark in new["marks"].items() if old["marks"].get(key) != mark}
    return changed


def differences(scenes: Sequence[Scene]) -> list[dict[str, Any]]:
    """Return the first scene whole, and what differs from step to step."""
    steps = [*map(whole, scenes)]
    return [steps[0], *map(difference, steps, steps[1:])]
