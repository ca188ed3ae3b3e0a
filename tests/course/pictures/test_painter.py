"""A plot in every form that a notebook shows: with words, and the same bytes each time."""

import base64
import re
from xml.etree import ElementTree

from matplotlib import pyplot
from matplotlib.figure import Figure

from course.pictures.painter import Plot


def plot(last=3):
    figure = Figure((8, 4), layout="constrained")
    ax = figure.subplots()
    ax.plot([1, 2, last], [1, 2, 3], "o", label="measured")
    ax.set_title("milliseconds")
    ax.legend()
    return Plot(figure, 'Milliseconds of "all" < 3')


def test_a_notebook_gets_the_plot_in_every_form_with_words():
    bundle = plot()._repr_mimebundle_()
    assert bundle["text/plain"] == 'Milliseconds of "all" < 3'
    image = ElementTree.fromstring(bundle["text/html"].replace("></div>", "/></div>"))[0]
    assert (image.get("alt"), image.get("width")) == (bundle["text/plain"], "576")
    assert base64.b64decode(image.get("src").partition(",")[2]).decode() == bundle["image/svg+xml"]
    texts = [text for text in ElementTree.fromstring(bundle["image/svg+xml"]).itertext() if text.strip()]
    assert {"milliseconds", "measured"} <= set(texts)  # real text, which a reader can search


def test_the_same_numbers_are_the_same_bytes_and_others_are_not():
    bundle = plot()._repr_mimebundle_()
    assert bundle == plot()._repr_mimebundle_()
    assert bundle["image/svg+xml"] != plot(last=4).svg()
    assert not re.search("20[0-9][0-9]-[0-9][0-9]-", bundle["image/svg+xml"])  # no date


def test_plots_leave_no_figure_behind():
    plot()._repr_mimebundle_()
    assert pyplot.get_fignums() == []
