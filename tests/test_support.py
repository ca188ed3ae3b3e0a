"""What `make test` counts and what `make notebooks` stores."""

import os
import subprocess
import sys

import nbformat
import pytest
from nbformat.v4 import new_code_cell, new_notebook, new_output

from course.publish import store_notebooks
from tests.support import closing_line

TEST_FILE = """
import pytest
def test_passes(): pass
def test_fails(): assert False
@pytest.fixture
def broken(): raise OSError
def test_errs(broken): pass
@pytest.mark.skip
def test_skipped(): pass
"""


def test_a_real_run_of_pytest_is_counted(tmp_path):
    (tmp_path / "test_four.py").write_text(TEST_FILE)
    subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "--junit-xml", "four.xml", "test_four.py"],
        cwd=tmp_path,
        capture_output=True,
        env=os.environ | {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"},  # importing all of them takes a second
    )
    assert closing_line.counts((tmp_path / "four.xml").read_text()) == (1, 2, 1)


@pytest.mark.parametrize(
    ("tests", "pytest_status", "line", "status"),
    [
        ('tests="3" failures="0" errors="0" skipped="1"', "0", "2 passed, 0 failed, 1 skipped", 0),
        ('tests="3" failures="1" errors="0" skipped="0"', "1", "2 passed, 1 failed", 1),
        ('tests="3" failures="0" errors="0" skipped="0"', "2", "3 passed, 1 failed", 1),  # interrupted after three
        ('tests="0" failures="0" errors="0" skipped="0"', "5", "0 passed, 1 failed", 1),  # found no test
        (None, "134", "0 passed, 1 failed", 1),  # crashed before it wrote anything
    ],
)
def test_whatever_went_wrong_shows_in_the_closing_line(tmp_path, capsys, tests, pytest_status, line, status):
    if tests:
        (tmp_path / "tests.xml").write_text(f"<testsuites><testsuite {tests}/></testsuites>")
    assert closing_line.main(str(tmp_path / "tests.xml"), pytest_status=pytest_status) == status
    assert capsys.readouterr().out == line + "\n"


def test_the_closing_line_adds_up_both_runs(tmp_path, capsys):
    for name in ("first", "second"):
        (tmp_path / name).write_text('<testsuite tests="3" failures="0" errors="0" skipped="1"/>')
    assert closing_line.main(str(tmp_path / "first"), str(tmp_path / "second"), pytest_status="0") == 0
    assert closing_line.main(str(tmp_path / "first"), str(tmp_path / "missing"), pytest_status="0") == 1
    assert capsys.readouterr().out == "4 passed, 0 failed, 2 skipped\n2 passed, 1 failed, 1 skipped\n"


def notebook(*texts, tags=()):
    outputs = [new_output("stream", name="stdout", text=text) for text in texts]
    cell = new_code_cell("measure()", id="measure", execution_count=1, outputs=outputs, metadata={"tags": list(tags)})
    return new_notebook(cells=[cell])


def stored_text(new, old):
    store_notebooks.keep_stored(new, old)
    return new.cells[0].outputs[0].text


def test_times_that_are_not_compared_stay_as_stored():
    tags = ["nbval-ignore-output"]
    assert stored_text(notebook("took  9.5 ms", tags=tags), notebook("took 10.1 ms", tags=tags)) == "took 10.1 ms"
    assert stored_text(notebook("6.1e-05 GB/s", tags=tags), notebook(" 1,024 GB/s", tags=tags)) == " 1,024 GB/s"
    assert stored_text(notebook("needed 9.5 ms", tags=tags), notebook("took 10.1 ms", tags=tags)) == "needed 9.5 ms"


def test_a_picture_that_is_not_compared_stays_as_stored():
    def book(drawn, alt="a picture of 3 ms"):
        picture = {
            "image/svg+xml": f'<svg a="{drawn}"/>',
            "image/png": drawn,
            "text/html": f'<img alt="{alt}" src="data:image/svg+xml;base64,{drawn}">',
        }
        made = notebook(tags=["nbval-ignore-output"])
        made.cells[0].outputs = [new_output("display_data", data=picture)]
        return made

    def stored(new, old):
        store_notebooks.keep_stored(new, old)
        return new.cells[0].outputs[0].data["image/png"]

    assert stored(book("new", "a picture of 4 ms"), book("old+/=")) == "old+/="
    assert stored(book("new", "a graph"), book("old")) == "new"


def test_times_are_stored_anew_where_a_compared_output_changed():
    def book(loss, time):
        (compared,), (ignored,) = notebook(loss).cells, notebook(time, tags=["nbval-ignore-output"]).cells
        compared.id = "compared"
        return new_notebook(cells=[ignored, compared])

    assert stored_text(book("loss 3.0", "took 9 ms"), book("loss 3.0", "took 10 ms")) == "took 10 ms"
    assert stored_text(book("loss 2.9", "took 9 ms"), book("loss 3.0", "took 10 ms")) == "took 9 ms"


def test_what_is_compared_is_stored_as_it_is_now():
    assert stored_text(notebook("sum 9"), notebook("sum 10")) == "sum 9"


def test_stripping_leaves_outputs_and_takes_what_belongs_to_a_session():
    book = notebook("[rank 0] a\n", "[rank 1] b\n")
    cell = book.cells[0]
    cell.metadata.execution = {"iopub.execute_input": "2026-01-01T00:00:00Z"}
    book.metadata.widgets = {"state": {}}
    view = {"application/vnd.jupyter.widget-view+json": {"model_id": "5f0c"}, "text/plain": "layout_explorer()"}
    cell.outputs.append(new_output("display_data", data=view))
    cell.outputs.insert(1, new_output("display_data", data={}))  # the place of a bar or a note
    store_notebooks.strip(book)
    nbformat.validate(book)
    printed, widget = cell.outputs
    assert printed.text == "[rank 0] a\n[rank 1] b\n"
    assert widget.data == {"text/plain": "layout_explorer()"}
    assert "execution" not in cell.metadata
    assert "widgets" not in book.metadata
    assert cell.execution_count == 1
