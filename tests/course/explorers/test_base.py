"""The frame of every explorer, around a picture of one word: what is said, what gives way, and how often it draws."""

import inspect
from collections import namedtuple

import pytest

from course.explorers.base import Explorer, Parts, nearest_first
from course.explorers.control import buttons, checkbox, menu, slider
from course.pictures.scene import Scene, label
from course.table import Table


class pieces(Explorer):
    """``length`` cut in ``pieces``, which must divide it."""

    table = (
        ("length", slider, "length l", range(1, 11), 6),
        ("pieces", slider, "pieces p", range(1, 8), 3),
    )
    num_drawn = 0

    def _fit(self, choice):
        length, pieces = choice[:2]
        if length % pieces:
            raise ValueError(f"pieces={pieces} < 1 & does not divide length={length}: use 1")
        return length // pieces

    def _parts(self):
        self.num_drawn += 1
        scene = Scene("pieces", "", [label("word", 0, 9, str(self.shown))], 20)
        return Parts([scene], f"<b>{self.shown}</b> each", Table((), [("each", f"> {self.shown - 1}")], "cut"))


class marked_pieces(pieces):
    """The same with controls that can say what they would change."""

    table = (
        ("length", menu, "length l", (5, 6), 6),
        ("pieces", buttons, "pieces p", (1, 2, 3, 4), 3),
        ("paint", checkbox, "paint", False),
    )


@pytest.fixture
def explorer():
    return pieces(6, 3)


def test_it_shows_the_start_once(explorer):
    assert (explorer.shown, explorer.num_drawn) == (2, 1)
    assert explorer.says == '<div class="labkit-says" role="status"><b>2</b> each</div>'
    assert "<caption>cut</caption>" in explorer.facts.html
    assert "<tr><td>each</td><td>&gt; 1</td></tr>" in explorer.facts.html
    assert explorer.steps[0].by_key["word"].text == "2"
    assert repr(explorer) == "pieces(6, 3)"


def test_a_choice_that_does_not_fit_goes_on_and_says_so_in_the_names_of_the_controls(explorer):
    explorer.choose(pieces=4)
    assert (explorer.choice, explorer.shown, explorer.num_drawn) == ((6, 6), 1, 2)
    assert explorer.says == (
        '<div class="labkit-says moved" role="alert"><b>pieces p is 6 now, not 4.</b> '
        "pieces p = 4 &lt; 1 &amp; does not divide length l = 6.</div>"
        '<div class="labkit-says" role="status"><b>1</b> each</div>'
    )
    explorer.choose(pieces=5)  # downwards
    assert explorer.choice == (6, 3)


def test_if_it_gets_nowhere_the_other_gives_way_and_draws_nothing_of_its_own(explorer):
    explorer.choose(pieces=7)
    assert (explorer.choice, explorer.num_drawn) == ((7, 7), 2)
    assert "length l is 7 now, not 6" in explorer.says


def test_without_a_way_out_the_last_choice_stays():
    pair = namedtuple("pair", "a b")

    assert (1, 1) not in nearest_first(pair(2, 1), pair(1, 1), {"a": [1, 2], "b": [1]})


def test_the_controls_are_the_arguments():
    assert str(inspect.signature(pieces)) == "(length=6, pieces=3)"
    assert pieces(pieces=2).choice == (6, 2)
    with pytest.raises(TypeError, match="sides"):
        pieces(sides=2)
    with pytest.raises(ValueError, match=r"pieces=4 .* does not divide length=6"):
        pieces(6, 4)


def test_a_small_control_says_before_the_click_what_that_would_change():
    explorer = marked_pieces()
    hints = explorer.controls["pieces"].hints
    assert hints == ["", "", "", "does not fit: pieces p = 4 < 1 & does not divide length l = 6"]
    assert explorer.controls["length"].hints == ["would set pieces p to 1", ""]
    assert explorer.controls["paint"].hints == ["", ""]


@pytest.mark.parametrize(("name", "index"), [("length", 0), ("length", 1), ("pieces", 0), ("pieces", 1)])
def test_the_click_does_what_was_said(name, index):
    explorer = marked_pieces()
    control, before = explorer.controls[name], explorer.choice
    said = control.hints[index]
    asked = before._replace(**{name: control.options[index]})
    explorer.choose(**{name: control.options[index]})
    changed = [f"{explorer.controls[each].description} to {value}" for each, value in explorer.choice._asdict().items()
               if value != getattr(asked, each)]  # fmt: skip
    assert said == (f"would set {' and '.join(changed)}" if changed else "")


def test_a_slider_says_nothing_beforehand(explorer):
    assert [control.hints for control in explorer.controls.values()] == [[], []]


def test_what_is_not_offered_changes_nothing(explorer):
    with pytest.raises(ValueError, match=r"pieces p=8 is not offered: use one of 1, 2, 3, 4, 5, 6, 7"):
        explorer.choose(length=10, pieces=8)
    assert (explorer.choice, explorer.num_drawn) == ((6, 3), 1)


def test_only_one_that_overrides_them_listens_to_clicks_and_drops(explorer):
    class listening(pieces):
        def click(self, key):
            self.choose(pieces=1)

    assert (explorer.clicks, explorer.drops) == (False, False)
    assert (listening().clicks, listening().drops) == (True, False)
