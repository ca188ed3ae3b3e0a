"""The page's view of explorers, as page.js asks it: in JSON, and without a browser."""

import json
import re

import pytest

from course.explorers import page
from course.explorers.layout import layout_explorer
from course.explorers.schedule_builder import schedule_builder
from course.pictures.steps import differences


def ask(method, given=None, view="layout"):
    return json.loads(page.answer(json.dumps({"view": view, "ask": method, "with": given})))


@pytest.fixture
def made():
    return ask("make", ["layout_explorer", [16], {"tp_size": 2}])


def test_a_view_is_made_with_all_that_a_page_shows(made):
    explorer = layout_explorer(16, tp_size=2)
    assert made["stage"]["steps"] == json.loads(json.dumps(differences(explorer.steps)))
    assert made["stage"]["clicks"] is True and made["says"] == explorer.says
    assert made["looks"]["order"]["words"][0] == "tp-dp-pp" and made["looks"]["order"]["look"] == "menu"
    assert made["controls"]["tp_size"] == {"index": 1, "disabled": False, "hidden": False}
    assert made["cell"] == f"from course.explorers.jupyter import layout_explorer\n\n{explorer!r}"
    assert made["address"] == {}


def test_what_is_chosen_comes_back_as_changes_with_an_address(made):
    explorer = layout_explorer(16, tp_size=2)
    explorer.choose(tp_size=4)
    chosen = ask("choose", {"tp_size": 3})
    assert chosen["stage"]["changes"]["keys"] == [*explorer.steps[0].by_key]
    marks = made["stage"]["steps"][0]["marks"] | chosen["stage"]["changes"]["marks"]
    assert {key: marks[key] for key in explorer.steps[0].by_key} == {
        key: mark.svg for key, mark in explorer.steps[0].by_key.items()
    }
    assert chosen["address"] == {"t": "4"}


def test_an_address_is_restored_from_any_choice_and_what_is_not_offered_is_refused(made):
    ask("choose", {"world_size": 4})
    restored = ask("restore", {"t": "4", "gpus_per_node": "4"})
    assert restored["address"] == {"t": "4", "gpus_per_node": "4"}
    assert "= 16 = n" in re.sub("<[^>]*>", "", restored["says"])
    assert ask("restore", {})["address"] == {}
    refused = ask("restore", {"t": "64"})
    assert refused == {"error": "tensor t = 64 is not offered: use one of " + ", ".join(map(str, range(1, 17)))}


def test_hints_are_those_of_the_controls(made):
    explorer = layout_explorer(16, tp_size=2)
    hints = ask("hints")["controls"]
    assert {name: each["hints"] for name, each in hints.items()} == {
        name: each.hints for name, each in explorer.controls.items()
    }
    assert any(map(any, (each["hints"] for each in hints.values())))


def test_clicks_and_drops_reach_an_explorer_that_listens():
    explorer = schedule_builder(2, 2)
    ask("make", ["schedule_builder", [2, 2], {}], "builder")
    explorer.click("op.0.F0")
    explorer.drop("op.1.F0", "row.1")
    ask("click", "op.0.F0", "builder")
    assert ask("drop", ["op.1.F0", "row.1"], "builder")["cell"].endswith(repr(explorer))


def test_an_address_keeps_what_was_picked_in_a_picture(made):
    ask("choose", {"world_size": len(made["looks"]["world_size"]["words"]) - 1})
    clicked = ask("click", "tp.block5")
    assert clicked["address"] == {"n": "1024", "node": "5"}
    assert ask("restore", {})["address"] == {}
    restored = ask("restore", clicked["address"])
    assert restored["address"] == clicked["address"]
    marks = restored["stage"]["changes"]["marks"]
    assert any("GPU 40:" in mark for mark in marks.values()) and not any("GPU 48:" in mark for mark in marks.values())


def test_an_address_keeps_the_rows_of_a_schedule():
    ask("make", ["schedule_builder", [2, 2], {"rows": ["F0"]}], "builder")
    assert ask("choose", {"pp_size": 2}, "builder")["address"] == {"p": "3"}
    ask("restore", {}, "builder")
    dropped = ask("drop", ["op.1.F1", "row.1"], "builder")
    assert dropped["address"] == {"rows": "F0-F1"}
    assert ask("click", "clear", "builder")["address"] == {"rows": ""}
    assert ask("restore", {}, "builder")["address"] == {}
    assert ask("restore", {"rows": "F0-F1"}, "builder")["cell"] == dropped["cell"]


@pytest.mark.parametrize(("view", "words", "fault"), [
    ("layout", {"node": "x"}, "node = x must be the number of a node: use 0 or more"),
    ("layout", {"node": "-1"}, "node = -1 must be the number of a node: use 0 or more"),
    ("layout", {"node": "9" * 5000}, "Exceeds the limit"),
    ("layout", {"t": "64", "node": "1"}, "tensor t = 64 is not offered"),
    ("builder", {"rows": "F0 X1-"}, "'X1' is not an op"),
    ("builder", {"rows": "F0 F0"}, "rows = F0 F0 must not have an op twice in a row: leave one out"),
])  # fmt: skip
def test_an_address_that_says_nothing_changes_nothing(made, view, words, fault):
    ask("make", ["schedule_builder", [2, 2], {}], "builder")
    assert fault in ask("restore", words, view)["error"]
    assert ask("choose", {}, view)["address"] == {}
    assert ask("restore", {"node": "99"})["address"] == {}  # there are two nodes
    beyond = {"rows": "F0 F7 W0 F0.1-B0-F0"}  # of other micro-batches, kinds, chunks and ranks
    assert ask("restore", beyond, "builder")["address"] == {"rows": "F0-B0"}


def test_every_explorer_of_a_page_can_be_made():
    for name in page.MODULES:
        assert ask("make", [name, [], {}], name)["stage"]["steps"]
