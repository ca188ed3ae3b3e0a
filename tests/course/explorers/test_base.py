"""The frame of every explorer, around a picture of one word: what is said, what gives way, and how often it draws."""

from collections import namedtuple

import pytest

from course.explorers.base import Explorer, facts_html, nearest_that_fits, says_html
from course.explorers.choice import slider
from course.pictures.scene import Scene, label


class Pieces(Explorer):
    """``length`` cut in ``pieces``, which must divide it."""

    function, choice_type = "pieces", namedtuple("Choice", "length pieces")

    def __init__(self, length, pieces):
        self.length = slider("length l", range(1, 11), length)
        self.pieces = slider("pieces p", range(1, 8), pieces)
        self.num_drawn = 0
        super().__init__()

    def _fit(self, choice):
        length, pieces = choice
        if length % pieces:
            raise ValueError(f"pieces={pieces} < 1 & does not divide length={length}: use 1")
        return length // pieces

    def _parts(self):
        self.num_drawn += 1
        scene = Scene("pieces", "", [label("word", 0, 9, str(self.shown))], 20)
        return scene, says_html(f"<b>{self.shown}</b> each"), facts_html("cut", {"each": f"> {self.shown - 1}"})


@pytest.fixture
def explorer():
    return Pieces(6, 3)


def test_it_shows_the_start_once(explorer):
    assert (explorer.shown, explorer.num_drawn) == (2, 1)
    assert explorer.says.value == '<div class="labkit-says" role="status"><b>2</b> each</div>'
    assert "<caption>cut</caption><tbody><tr><th>each</th><td>&gt; 1</td></tr></tbody>" in explorer.facts.value
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

    def fit(choice):
        if choice != (1, 1):
            raise ValueError

    assert nearest_that_fits(fit, pair(2, 1), pair(1, 1), {"a": [1, 2], "b": [1]}) == (1, 1)
