"""Jupyter's view of the explorers: what the reader moves goes to the explorer, and what that says is shown."""

import gc
import inspect
import random

import comm
import ipywidgets as widgets
import pytest
from ipywidgets.widgets import widget

from course.explorers import jupyter
from course.explorers.jupyter import View, layout_explorer, schedule_builder, shard_explorer, sizing_explorer
from course.pictures.scene import Scene
from course.pictures.steps import differences

EXPLORERS = [each for each in vars(jupyter).values() if inspect.isclass(each) and issubclass(each, View)]
EXPLORERS.remove(View)


def shown(view):
    """What the widgets show."""
    controls = [(each.index, each.disabled, each.hints) for each in view.controls.values()]
    return controls, view.picture.steps, view.says.value, view.facts.value


def said(explorer):
    controls = [(each.index, each.disabled, each.hints) for each in explorer.controls.values()]
    return controls, differences(explorer.steps), explorer.says, explorer.facts.html


@pytest.mark.parametrize("make", EXPLORERS, ids=lambda make: make.__name__)
def test_it_is_called_like_the_explorer_and_shows_what_that_says(make):
    view, explorer = make(), make().explorer
    assert explorer.__class__.__name__ == make.__name__ and repr(view) == repr(explorer)
    assert inspect.signature(make) == inspect.signature(type(explorer)) and make.__doc__ == type(explorer).__doc__
    assert shown(view) == said(explorer)
    draw = random.Random(0)
    for name in draw.choices(list(view.controls), k=6):
        index = draw.randrange(len(explorer.controls[name].options))
        view.controls[name].set_state({"index": index})  # as the browser does
        if index != explorer.controls[name].index:
            explorer.choose(**{name: explorer.controls[name].options[index]})
        assert shown(view) == said(explorer)
        assert (view.choice, view.shown) == (explorer.choice, explorer.shown)


def test_a_program_can_move_a_control_too():
    view = layout_explorer(16, 2)
    view.controls["tp_size"].value = 3
    assert view.choice.tp_size == view.controls["tp_size"].value == 4
    assert "tensor t is 4 now, not 3" in view.says.value


def test_widgets_can_stand_below_the_picture():
    note = widgets.HTML("note")
    view = shard_explorer(tp_size=4, below=[note])
    assert view.children == (view.children[0], view.says, view.picture, note, view.facts)
    assert view.choice.tp_size == 4


def test_clicks_and_drops_reach_the_explorer():
    view = schedule_builder(2, 2)
    view.picture._handle_custom_msg({"click": "op.0.F0"}, [])
    view.picture._handle_custom_msg({"drop": ["op.0.F1", "op.0.F0"]}, [])
    assert repr(view) == "schedule_builder(2, 2, ['F1 F0', ''])"
    assert view.picture.clicks and view.picture.steps == differences(view.explorer.steps)
    assert not shard_explorer().picture.clicks


def test_controls_stand_in_their_groups():
    view = sizing_explorer()
    groups = [group.children for group in view.children[0].children]
    assert [group[0].value for group in groups] == ["<b>Model</b>", "<b>Cluster</b>", "<b>Plan</b>"]
    assert {control for group in groups for control in group[1:]} == {*view.controls.values()}


def test_where_no_widget_can_be_shown_the_picture_says_how_to_bring_the_controls_back():
    html = shard_explorer()._repr_mimebundle_()["text/html"]
    assert "Run this cell to bring them back." in html and html.index("Run this cell") < html.index("<img")


def test_redraws_leave_nothing_behind():
    view = shard_explorer()

    def redraw(times):
        for number in range(times):
            view.controls["whole"].value = not view.choice.whole
            view.controls["tp_size"].value = (3, 2, 8)[number % 3]  # 3 does not fit
        gc.collect()
        num_scenes = sum(type(each) is Scene for each in gc.get_objects())
        return len(widget._instances), len(comm.get_comm_manager().comms), num_scenes

    first = redraw(10)
    assert redraw(100) == first
