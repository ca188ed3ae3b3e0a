"""A control is one of its options, whether a program or the browser chooses."""

import pytest

from course.explorers.choice import buttons, checkbox, menu, slider


def test_value_and_index_follow_each_other():
    control = slider("tensor t", [1, 2, 4], 2)
    assert (control.value, control.index, control.words) == (2, 1, ["1", "2", "4"])
    control.set_state({"index": 2})  # as the browser does
    assert control.value == 4
    control.value = 1
    assert control.index == 0


def test_a_start_beside_the_usual_is_among_the_options():
    assert slider("n", [8, 16], 12).options == [8, 12, 16]
    assert menu("order", ["a", "b"], "c").options == ["a", "b", "c"]
    assert (checkbox("whole", True).value, buttons("schedule", ["gpipe", "1f1b"], "1f1b").index) == (True, 1)


def test_new_options_keep_the_value_or_take_the_last():
    control = slider("root", range(4), 3)
    control.options = [0, 3, 5]
    assert (control.value, control.index) == (3, 1)
    control.options = [0, 1]
    assert (control.value, control.index, control.words) == (1, 1, ["0", "1"])


def test_what_is_not_offered_is_refused():
    with pytest.raises(ValueError, match=r"tensor t=3 is not offered: use one of 1, 2, 4"):
        slider("tensor t", [1, 2, 4], 2).value = 3
