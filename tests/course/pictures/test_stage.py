"""The widget sends a scene once, then what differs, and hears what the reader touches."""

from dataclasses import replace

import pytest

from course.pictures.scene import Scene, box, label
from course.pictures.stage import MOST_PICTURES, Stage
from course.pictures.steps import difference, whole
from course.table import Table


def scene(x, *more):
    return Scene("T", f"x is {x}", [box("moves", x, 0, 10, 10, "#ffffff"), label("stays", 0, 0, "s"), *more], 20)


@pytest.fixture
def sent(monkeypatch):
    """The names of the traits that were sent."""
    names = []
    monkeypatch.setattr(Stage, "send_state", lambda self, key=None: names.append(key))
    return names


def shown(steps):
    """What stage.js makes of the steps: each is the one before, and what differs."""
    made = [steps[0]]
    for step in steps[1:]:
        made.append({**made[-1], **step, "marks": {**made[-1]["marks"], **step.get("marks", {})}})
    return made


def differ(old, new):
    return difference(whole(old), whole(new))


def test_a_difference_has_only_the_marks_that_changed():
    changed = differ(scene(1), scene(5))
    assert changed.keys() == {"says", "marks"} and changed["marks"].keys() == {"moves"}
    added = differ(scene(1), scene(1, label("new", 0, 0, "n")))
    assert added["keys"] == ["moves", "stays", "new"] and added["marks"].keys() == {"new"}
    assert differ(scene(1, label("new", 0, 0, "n")), scene(1)) == {"keys": ["moves", "stays"], "marks": {}}


def test_steps_are_sent_as_differences_that_give_each_scene_again():
    steps = [scene(1), scene(5), scene(5, label("new", 0, 0, "n")), scene(2)]
    for made, step in zip(shown(Stage(*steps).steps), steps, strict=True):
        assert made["keys"] == whole(step)["keys"] and made["says"] == step.says
        assert {key: made["marks"][key] for key in made["keys"]} == whole(step)["marks"]


def test_one_scene_after_another_sends_what_changed_and_no_more(sent):
    stage = Stage(scene(1))
    sent.clear()
    stage.show(scene(5))
    assert sent == ["changes"] and stage.changes["marks"].keys() == {"moves"}
    assert stage.steps == [whole(scene(5))]  # for a page that opens later
    stage.show(scene(1), scene(2))
    stage.show(scene(3))
    assert sent == ["changes", "steps", "steps"]


def test_clicks_and_drops_reach_python():
    stage, heard = Stage(scene(1)), []
    stage.on_click(heard.append)
    stage.on_drop(lambda *keys: heard.append(keys))
    stage._handle_custom_msg({"click": "moves"}, [])
    stage._handle_custom_msg({"drop": ["moves", "stays"]}, [])
    assert heard == ["moves", ("moves", "stays")]


def test_without_a_browser_it_is_its_first_scene():
    data, _ = Stage(scene(1), scene(2))._repr_mimebundle_()
    assert data["image/svg+xml"] == scene(1).svg() and data["text/plain"] == str(scene(1))
    assert "application/vnd.jupyter.widget-view+json" in data


def test_without_a_browser_later_steps_are_folded_pictures():
    then = replace(scene(2), says="It has moved", table=Table(("place",), [("<there>",)]))
    html = Stage(scene(1), then)._repr_mimebundle_()[0]["text/html"]
    assert html == scene(1).html() + f"<details><summary>Then: It has moved</summary>{then.html()}</details>"
    assert "&lt;there&gt;" in html


def test_of_many_steps_the_later_ones_are_text():
    html = Stage(*[scene(x) for x in range(MOST_PICTURES + 1)])._repr_mimebundle_()[0]["text/html"]
    assert html.count("<details><summary>Then: x is") == MOST_PICTURES and html.count("<img") == 1


def test_marks_take_clicks_where_somebody_listens():
    stage = Stage(scene(1))
    assert stage.clicks is False
    stage.on_click(print)
    assert stage.clicks is True


def test_the_same_change_is_sent_again(sent):
    """After steps between, which are sent whole."""
    stage = Stage(scene(1))
    for steps in ([scene(5)], [scene(1), scene(2)], [scene(1)], [scene(5)]):
        sent.clear()
        stage.show(*steps)
    assert sent == ["changes"]
