"""The page's view of explorers, as page.js asks it: in JSON, and without a browser."""

import json

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
    assert made["controls"]["tp_size"] == {"index": 1, "disabled": False}
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
    assert "= 16 = n" in restored["says"]
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


def test_every_explorer_of_a_page_can_be_made():
    for name in page.MODULES:
        assert ask("make", [name, [], {}], name)["stage"]["steps"]
