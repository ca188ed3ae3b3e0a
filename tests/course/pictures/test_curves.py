"""Pictures of notebook 06: a layer with its messages, losses on each other, a picture that grows while ranks work."""

import matplotlib

matplotlib.use("agg")

import pytest
from matplotlib import pyplot
from matplotlib.colors import to_hex
from matplotlib.patches import Rectangle

from course.explorers import live_losses
from course.explorers.live_losses import LiveLosses
from course.pictures import transformer
from course.pictures.curves import draw_losses
from course.pictures.style import CP, FRAME_FILL, TINTS, TP, tint
from course.pictures.transformer import draw_transformer_layers


@pytest.fixture(autouse=True)
def close_figures():
    yield
    pyplot.close("all")


@pytest.fixture
def written(monkeypatch):
    """Every label of a drawing with its place, for each Axes."""
    labels, draw_labels = {}, transformer.draw_labels

    def remember(ax, texts, centres, *args, **kwargs):
        labels.setdefault(ax, []).extend(zip(texts, centres))
        return draw_labels(ax, texts, centres, *args, **kwargs)

    monkeypatch.setattr(transformer, "draw_labels", remember)
    return labels


def test_messages_stand_where_the_operators_are(written):
    without, with_sequence = draw_transformer_layers(tp_size=2)

    def messages(ax):
        names = ("nothing", "all-reduce", "all-gather", "reduce-scatter")
        places = sorted((y, x, text) for text, (x, y) in written[ax] if text in names)
        return [text for _, _, text in places[:4]], [text for _, _, text in places[4:]]

    assert messages(without) == (["nothing", "all-reduce"] * 2, ["all-reduce", "nothing"] * 2)
    assert messages(with_sequence) == (["all-gather", "reduce-scatter"] * 2, ["reduce-scatter", "all-gather"] * 2)


@pytest.mark.parametrize("tp_size", [1, 2, 4])
def test_each_rank_has_a_row_and_the_colour_says_what_is_cut(tp_size, written):
    without, with_sequence = draw_transformer_layers(tp_size)
    for ax, around in ((without, None), (with_sequence, CP)):
        texts = [text for text, _ in written[ax]]
        assert [text for text in texts if text.startswith("rank")] == [f"rank {rank}" for rank in range(tp_size)]
        assert texts.count("Q K V") == texts.count("heads") == texts.count("down") == tp_size
        fills = {to_hex(patch.get_facecolor()) for patch in ax.patches if isinstance(patch, Rectangle)}
        cut = {to_hex(tint(TP, TINTS[rank])) for rank in range(tp_size)}
        whole = {to_hex(tint(around, TINTS[rank])) for rank in range(tp_size)} if around else {FRAME_FILL.lower()}
        assert fills == cut | whole | {"#ffffff"}


def test_everything_is_inside_the_picture(written):
    for ax in draw_transformer_layers(tp_size=4):
        (left, right), (bottom, top) = ax.get_xlim(), ax.get_ylim()
        for patch in ax.patches:
            box = patch.get_bbox()
            assert left < box.x0 < box.x1 < right
            assert top < box.y0 < box.y1 < bottom


def test_curves_on_each_other_can_be_told_apart():
    curves = {"1 process": [3.0, 2.0, 1.5], "2 ranks": [3.0, 2.0, 1.5], "4 ranks": [3.0, 2.0]}
    ax = draw_losses(curves, floor_nats=0.5, num_steps=40)
    lines = {line.get_label(): line for line in ax.lines}
    assert list(lines) == [*curves, "the text's floor"]
    for name, losses in curves.items():
        assert list(lines[name].get_ydata()) == losses
        assert list(lines[name].get_xdata()) == list(range(1, len(losses) + 1))
    looks = [(line.get_linewidth(), line.get_linestyle(), line.get_marker()) for line in ax.lines]
    assert len(set(looks)) == len(looks)  # without colour too
    assert ax.get_xlim() == (0, 41)
    assert ax.get_ylim()[0] == 0
    assert set(lines["the text's floor"].get_ydata()) == {0.5}
    assert [text.get_text() for text in ax.get_legend().get_texts()] == list(lines)


def test_more_curves_than_looks_are_refused():
    with pytest.raises(ValueError, match="5 curves on each other cannot be told apart: give 4 or fewer"):
        draw_losses({str(i): [1.0] for i in range(5)})


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
