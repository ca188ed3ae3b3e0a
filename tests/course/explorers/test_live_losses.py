"""The plot of losses that grows in the cell while ranks work."""

import pytest
from IPython.core.formatters import DisplayFormatter

from course.explorers import live_losses
from course.explorers.live_losses import UNDER_WAY, LiveLosses


class Place:
    def __init__(self):
        self.plots = []

    def update(self, plot, **options):
        self.plots.append((plot, options))


@pytest.fixture
def place(monkeypatch):
    place = Place()
    show = lambda plot, display_id, **options: place.update(plot, **options) or place  # noqa: E731
    monkeypatch.setattr(live_losses, "display", show)
    return place


def test_the_plot_grows_and_the_last_one_has_everything(place, monkeypatch):
    monkeypatch.setattr(live_losses, "SECONDS_BETWEEN_DRAWINGS", 0.0)
    with LiveLosses(num_steps=4, floor_nats=0.5) as picture:
        picture.add("one", 3.0, 2.0)
        picture.add("one", 1.0)
        picture.add("two", 3.0)
    assert picture.curves == {"one": [3.0, 2.0, 1.0], "two": [3.0]}
    assert len(place.plots) == 5  # empty, three times more, and the end
    assert len({plot.svg() for plot, _ in place.plots}) == 5
    last, _ = place.plots[-1]
    assert "one: 3.00 to 1.00 at step 3. two: 3.00 to 3.00 at step 1" in last.alt


def test_a_plot_that_is_not_the_last_says_so(place):
    """A tab that was closed while ranks trained shows it when it is opened again."""
    with LiveLosses(num_steps=4) as picture:
        picture.add("one", 3.0)
        assert all(UNDER_WAY in plot.alt and UNDER_WAY in plot.svg() for plot, _ in place.plots)
    last, _ = place.plots[-1]
    assert UNDER_WAY not in last.alt + last.svg()


def test_a_plot_that_will_be_replaced_is_html_alone(place):
    with LiveLosses(num_steps=4) as picture:
        picture.add("one", 3.0)
    (first, options), (last, no_options) = place.plots[0], place.plots[-1]
    shown, kept = DisplayFormatter().format(first, **options)[0], DisplayFormatter().format(last, **no_options)[0]
    assert set(shown) == {"text/plain", "text/html"} and "image/svg+xml" in kept


def test_it_is_not_drawn_more_often_than_one_can_see(place):
    with LiveLosses(num_steps=1000) as picture:
        for step in range(1000):
            picture.add("one", float(step))
    assert len(place.plots) < 20
    assert picture.curves["one"][-1] == 999.0


def test_losses_are_kept_when_training_fails(place):
    def fails():
        with LiveLosses(num_steps=2) as picture:
            picture.add("one", 2.5)
            raise KeyError

    with pytest.raises(KeyError):
        fails()
    assert "2.50" in place.plots[-1][0].alt


def test_outside_a_notebook_nothing_fails(monkeypatch):
    monkeypatch.setattr(live_losses, "display", lambda plot, display_id, **options: None)
    with LiveLosses(num_steps=1) as picture:
        picture.add("one", 1.0)
