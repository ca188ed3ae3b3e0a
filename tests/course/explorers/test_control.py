"""A control is one of its options."""

import pytest

from course.explorers.control import buttons, checkbox, menu, slider


def test_its_value_is_the_option_at_its_index():
    control = slider("tensor t", [1, 2, 4], 2)
    assert (control.value, control.index, control.words) == (2, 1, ["1", "2", "4"])
    control.index = 2
    assert control.value == 4


def test_a_start_beside_the_usual_is_among_the_options():
    assert slider("n", [8, 16], 12).options == [8, 12, 16]
    assert menu("order", ["a", "b"], "c").options == ["a", "b", "c"]
    assert (checkbox("whole", True).value, buttons("schedule", ["gpipe", "1f1b"], "1f1b").index) == (True, 1)


def test_words_are_what_a_reader_would_write():
    assert slider("t", [0.25, 2.0], 2.0).words == ["0.25", "2"]
    assert checkbox("whole", True).words == ["off", "on"]


def test_what_is_not_offered_is_refused():
    with pytest.raises(ValueError, match=r"tensor t=3 is not offered: use one of 1, 2, 4"):
        slider("tensor t", [1, 2, 4], 2).index_of(3)
