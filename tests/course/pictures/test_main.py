"""The command that writes the figures of the README and the notebooks."""

from matplotlib import pyplot

from course.pictures.__main__ import FIGURES, write_figures


def test_every_figure_is_written(tmp_path):
    paths = write_figures(tmp_path)
    assert [path.stem for path in paths] == list(FIGURES)
    assert all(path.read_bytes().startswith(b"\x89PNG") for path in paths)
    assert pyplot.get_fignums() == []
