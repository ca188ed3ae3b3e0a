"""A control's widget follows the browser, and shows what an explorer says of it."""

import pytest

from course.explorers.choice import Choice
from course.explorers.control import slider


def test_value_and_index_follow_each_other():
    widget = Choice(slider("tensor t", [1, 2, 4], 2))
    assert (widget.value, widget.index, widget.words) == (2, 1, ["1", "2", "4"])
    widget.set_state({"index": 2})  # as the browser does
    assert widget.value == 4
    widget.value = 1
    assert widget.index == 0
    with pytest.raises(ValueError, match=r"tensor t=3 is not offered: use one of 1, 2, 4"):
        widget.value = 3


def test_it_shows_what_has_changed_of_its_control():
    control = slider("tensor t", [1, 2], 1)
    widget = Choice(control)
    control.disabled, control.hint = True, "would set p to {}".format
    widget.update()
    assert (widget.disabled, widget.hints) == (True, ["would set p to 1", "would set p to 2"])
