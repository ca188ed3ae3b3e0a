"""The picture of losses that grows in the cell while ranks work."""

import pytest

from course.explorers import live_losses
from course.explorers.live_losses import LiveLosses


class Place:
    def __init__(self):
        self.images = []

    def update(self, image):
        self.images.append(image)


@pytest.fixture
def place(monkeypatch):
    place = Place()
    monkeypatch.setattr(live_losses, "display", lambda image, display_id: place.update(image) or place)
    return place


def test_the_picture_grows_and_the_last_one_has_everything(place, monkeypatch):
    monkeypatch.setattr(live_losses, "SECONDS_BETWEEN_DRAWINGS", 0.0)
    with LiveLosses(num_steps=4, floor_nats=0.5) as picture:
        picture.add("one", 3.0, 2.0)
        picture.add("one", 1.0)
        picture.add("two", 3.0)
    assert picture.curves == {"one": [3.0, 2.0, 1.0], "two": [3.0]}
    assert len(place.images) == 5  # empty, three times more, and the end
    assert all(image.data.startswith(b"\x89PNG") for image in place.images)
    assert len({image.data for image in place.images}) == 4
    assert place.images[-1].alt == "Loss curves. one: 3.00 to 1.00; two: 3.00 to 3.00"


def test_it_is_not_drawn_more_often_than_one_can_see(place):
    with LiveLosses(num_steps=1000) as picture:
        for step in range(1000):
            picture.add("one", float(step))
    assert len(place.images) < 20
    assert picture.curves["one"][-1] == 999.0


def test_losses_are_kept_when_training_fails(place):
    def fails():
        with LiveLosses(num_steps=2) as picture:
            picture.add("one", 2.5)
            raise KeyError

    with pytest.raises(KeyError):
        fails()
    assert "2.50" in place.images[-1].alt


def test_outside_a_notebook_nothing_fails(monkeypatch):
    monkeypatch.setattr(live_losses, "display", lambda image, display_id: None)
    with LiveLosses(num_steps=1) as picture:
        picture.add("one", 1.0)
