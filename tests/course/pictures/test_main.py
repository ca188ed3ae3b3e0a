"""The command that writes the figures of the README and the notebooks."""

from pathlib import Path

from course.pictures.__main__ import FIGURES, write_figures
from course.publish.living import RESULTS

PICS = Path(__file__).parents[3] / "pics"


def test_every_figure_is_written_and_is_the_one_in_pics(tmp_path):
    paths = write_figures(tmp_path)
    assert [path.stem for path in paths] == list(FIGURES)
    assert sorted(path.name for path in PICS.iterdir()) == sorted(path.name for path in paths)
    assert [path.name for path in paths if path.read_text() != (PICS / path.name).read_text()] == []


def test_the_first_picture_of_notebook_07_answers_none_of_its_questions():
    shown = FIGURES["pipeline_schedules"]().alt
    for key in ("07.makespan", "07.larger_makespan"):
        assert f" {RESULTS[key]:g} time units" not in shown
    assert "1F1B" not in shown  # what it holds, compared with GPipe, and what interleaved and zero-bubble orders save
