"""The frame of every explorer, around a picture of one word: what is said, what gives way, and how often it draws."""

import gc
import inspect
from collections import namedtuple

import comm
import pytest
from ipywidgets.widgets import widget

from course.explorers.base import Explorer, Parts, nearest_first
from course.explorers.choice import buttons, checkbox, menu, slider
from course.explorers.sharding import shard_explorer
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


def test_where_no_widget_can_be_shown_the_picture_says_how_to_bring_the_controls_back():
    html = pieces()._repr_mimebundle_()["text/html"]
    assert "Run this cell to bring them back." in html and html.index("Run this cell") < html.index("<img")


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
    assert explorer.says.value == '<div class="labkit-says" role="status"><b>2</b> each</div>'
    assert "<caption>cut</caption>" in explorer.facts.value
    assert "<tr><td>each</td><td>&gt; 1</td></tr>" in explorer.facts.value
    assert explorer.picture.scenes[0].by_key["word"].text == "2"
    assert repr(explorer) == "pieces(6, 3)"


def test_a_choice_that_does_not_fit_goes_on_and_says_so_in_the_names_of_the_controls(explorer):
    explorer.pieces.value = 4
    assert (explorer.choice, explorer.shown, explorer.num_drawn) == ((6, 6), 1, 2)
    assert explorer.says.value == (
        '<div class="labkit-says moved" role="alert"><b>pieces p is 6 now, not 4.</b> '
        "pieces p = 4 &lt; 1 &amp; does not divide length l = 6.</div>"
        '<div class="labkit-says" role="status"><b>1</b> each</div>'
    )
    explorer.pieces.value = 5  # downwards
    assert explorer.choice == (6, 3)


def test_if_it_gets_nowhere_the_other_gives_way_and_draws_nothing_of_its_own(explorer):
    explorer.pieces.value = 7
    assert (explorer.choice, explorer.num_drawn) == ((7, 7), 2)
    assert "length l is 7 now, not 6" in explorer.says.value


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
    assert explorer.pieces.hints == ["", "", "", "does not fit: pieces p = 4 < 1 & does not divide length l = 6"]
    assert explorer.length.hints == ["would set pieces p to 1", ""]
    assert explorer.paint.hints == ["", ""]


@pytest.mark.parametrize(("name", "index"), [("length", 0), ("length", 1), ("pieces", 0), ("pieces", 1)])
def test_the_click_does_what_was_said(name, index):
    explorer = marked_pieces()
    control, before = explorer.controls[name], explorer.choice
    said = control.hints[index]
    asked = before._replace(**{name: control.options[index]})
    control.set_state({"index": index})  # as the browser does
    changed = [f"{explorer.controls[each].description} to {value}" for each, value in explorer.choice._asdict().items()
               if value != getattr(asked, each)]  # fmt: skip
    assert said == (f"would set {' and '.join(changed)}" if changed else "")


def test_a_slider_says_nothing_beforehand(explorer):
    assert explorer.length.hints == explorer.pieces.hints == []


def test_redraws_leave_nothing_behind():
    explorer = shard_explorer()

    def redraw(times):
        for number in range(times):
            explorer.whole.value = not explorer.whole.value
            explorer.tp_size.value = (3, 2, 8)[number % 3]  # 3 does not fit
        gc.collect()
        num_scenes = sum(type(each) is Scene for each in gc.get_objects())
        return len(widget._instances), len(comm.get_comm_manager().comms), num_scenes

    first = redraw(10)
    assert redraw(100) == first
