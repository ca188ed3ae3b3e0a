"""The frame of every explorer, around a picture of one word: what is said, what stays, and how often it draws."""

from collections import namedtuple

import pytest
from matplotlib.figure import Figure

from course.explorers.base import Controls, Explorer, facts_html, misfit_html, says_html
from course.pictures.painter import png


class Pieces(Explorer):
    """``length`` cut in ``pieces``, of which there are at most as many as it is long."""

    function, choice_type = "pieces", namedtuple("Choice", "length pieces")

    def __init__(self, length, pieces):
        make = Controls("300px", "5em")
        self.length = make.slider("length", length, 1, 10)
        self.pieces = make.slider("pieces", pieces, 1, length)
        self.num_drawn = 0
        super().__init__(length // pieces)

    def _chosen(self):
        self.pieces.max = self.length.value
        length, pieces = self.choice
        if length % pieces:
            raise ValueError(f"{pieces} < 1 & does not divide {length}")
        return length // pieces

    def _parts(self):
        self.num_drawn += 1
        figure = Figure(figsize=(1, 1))
        figure.text(0, 0, str(self.shown))
        return png(figure), says_html(f"<b>{self.shown}</b> each"), facts_html("cut", {"each": f"> {self.shown - 1}"})


@pytest.fixture
def explorer():
    return Pieces(6, 3)


def test_it_shows_the_start_once(explorer):
    assert (explorer.shown, explorer.fits, explorer.num_drawn) == (2, True, 1)
    assert explorer.says.value == '<div class="labkit-says" role="status"><b>2</b> each</div>'
    assert "<caption>cut</caption><tbody><tr><th>each</th><td>&gt; 1</td></tr></tbody>" in explorer.facts.value
    assert bytes(explorer.picture.value).startswith(b"\x89PNG")
    assert "labkit-grids" in explorer.picture._dom_classes
    assert repr(explorer) == "pieces(6, 3)"


def test_a_misfit_is_explained_above_the_last_that_fitted(explorer):
    picture, facts = explorer.picture.value, explorer.facts.value
    explorer.pieces.value = 4
    assert (explorer.shown, explorer.fits) == (2, False)
    assert explorer.says.value == misfit_html("4 < 1 & does not divide 6. Below: the last that did.")
    assert 'role="alert"' in explorer.says.value and "4 &lt; 1 &amp; does" in explorer.says.value
    assert explorer.facts.value == f'<div class="labkit-stale">{facts}</div>'
    explorer.pieces.value = 3
    assert (explorer.fits, explorer.picture.value, explorer.facts.value) == (True, picture, facts)


def test_a_control_that_another_moves_draws_nothing_of_its_own(explorer):
    explorer.pieces.value = 6
    explorer.length.value = 3
    assert (explorer.choice, explorer.shown, explorer.num_drawn) == ((3, 3), 1, 3)
