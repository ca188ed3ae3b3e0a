"""A reader's own copy: no answer below its question, links that lead somewhere, and nothing that is written over."""

import copy
import json
import re
import shutil

import nbformat
import pytest
from nbformat.sign import NotebookNotary

from course import about_earlier_copy, working_copy
from course import open as opened
from tests.test_notebooks import LINK

code, text = nbformat.v4.new_code_cell, nbformat.v4.new_markdown_cell


@pytest.fixture(autouse=True)
def own_home(tmp_path_factory, monkeypatch):
    monkeypatch.setenv("JUPYTER_DATA_DIR", str(tmp_path_factory.mktemp("jupyter")))


@pytest.fixture
def lab(tmp_path):
    """A small lab that can change: its notebooks and pictures."""
    root = tmp_path / "lab"
    (root / "notebooks").mkdir(parents=True)
    for name in working_copy.notebooks(working_copy.ROOT)[:2]:
        shutil.copy(working_copy.ROOT / name, root / name)
    (root / "pics").mkdir()
    return root


def change(root, name="notebooks/01_group_layout.ipynb"):
    notebook = nbformat.read(root / name, as_version=4)
    notebook.cells[0].source += "\n\nMore."
    nbformat.write(notebook, root / name)


def test_what_answers_a_question_is_hidden_up_to_the_next_heading():
    def out(source):
        return code(source, outputs=[nbformat.v4.new_output("stream", text="8\n")], execution_count=1)

    cells = [
        out("before"),
        out("predict.d"),
        out("predict.d.compare(8)"),
        out("more"),
        text("It is 8.\n\n## Next\n\nNew."),
    ]
    cells += [
        out("free"),
        text("Seen."),
        out("predict.t"),
        out("predict.t.compare(2)"),
        text("It is 2.\n\nSee why:"),
        out("too"),
    ]
    notebook = nbformat.v4.new_notebook(cells=[*cells, text("About too.")])
    working_copy.hide_answers(notebook)
    assert [len(cell.outputs) for cell in notebook.cells if cell.cell_type == "code"] == [1, 1, 0, 0, 1, 1, 0, 0]
    folded, seen, second, about = [cell.source for cell in notebook.cells if cell.cell_type == "markdown"]
    assert folded == f"{working_copy.SUMMARY}\n\nIt is 8.\n\n</details>\n\n## Next\n\nNew."
    assert second == f"{working_copy.SUMMARY}\n\nIt is 2.\n\n</details>\n\nSee why:" and (seen, about) == (
        "Seen.",
        "About too.",
    )
    once = copy.deepcopy(notebook)
    working_copy.hide_answers(notebook)
    assert notebook == once


@pytest.mark.parametrize(
    ("source", "tags", "in_sight"),
    [
        ("It is 8.", [], ""),
        ("It is 8.\n\nNow the rest:", [], "Now the rest:"),
        ("Now the rest:", ["introduction"], "Now the rest:"),
        ("Is it 8?\n\nNow the rest:", ["introduction"], "Is it 8?\n\nNow the rest:"),
        ("It is 8.\n\nSo 8 it is.", ["explanation"], ""),
        ("It is 8.\n\n## Next", ["explanation"], "## Next"),
    ],
)
def test_a_tag_says_what_is_folded_and_without_one_the_last_paragraph_introduces(source, tags, in_sight):
    own = text(source, metadata={"tags": tags})
    working_copy.hide_answers(nbformat.v4.new_notebook(cells=[code("predict.d.compare(8)"), own, code("rest")]))
    folded = re.escape(working_copy.SUMMARY) + r".*?</details>\s*"
    assert re.sub(folded, "", own.source, flags=re.DOTALL) == in_sight


def test_an_explanation_is_folded_also_where_code_stands_between():
    own = text("Still 8.", metadata={"tags": ["explanation"]})
    cells = [code("predict.d.compare(8)"), text("It is 8.\n\nAnd now:"), code("more"), own]
    working_copy.hide_answers(nbformat.v4.new_notebook(cells=cells))
    assert own.source.startswith(working_copy.SUMMARY)


def test_a_question_in_words_hides_its_answer_too():
    out = nbformat.v4.new_output("stream", text="8\n")
    run, later = code("run()", outputs=[out]), code("later()", outputs=[out])
    cells = [text("**Predict.** How long?"), code("def run(): ..."), run, text("8."), text("## Next"), later]
    working_copy.hide_answers(notebook := nbformat.v4.new_notebook(cells=cells))
    assert [cell.source for cell in cells if cell.cell_type == "markdown"] == [
        "**Predict.** How long?", f"{working_copy.SUMMARY}\n\n8.\n\n</details>", "## Next",
    ]  # fmt: skip
    assert not run.outputs and later.outputs
    once = copy.deepcopy(notebook)
    working_copy.hide_answers(notebook)
    assert notebook == once


def test_tags_of_the_lab_are_known_ones():
    """A tag that is misspelt would do nothing."""
    for path in working_copy.notebooks(working_copy.ROOT):
        notebook = nbformat.read(working_copy.ROOT / path, as_version=4)
        tags = {tag for cell in notebook.cells if cell.cell_type == "markdown" for tag in cell.metadata.get("tags", [])}
        assert tags <= {"introduction", "explanation"}, path


def test_every_question_of_the_lab_stands_without_its_answer(tmp_path):
    assert working_copy.make(tmp_path) == []
    for name in working_copy.notebooks(working_copy.ROOT):
        stored, own = (nbformat.read(root / name, as_version=4) for root in (working_copy.ROOT, tmp_path))
        hidden = [cell for cell in own.cells if working_copy.COMPARES.search(cell.source) and cell.cell_type == "code"]
        assert hidden and all(not cell.outputs for cell in hidden)
        sources = [[cell.source for cell in each.cells if cell.cell_type == "code"] for each in (stored, own)]
        assert sources[0] == sources[1]
        links = LINK.findall("\n".join(cell.source for cell in own.cells if cell.cell_type == "markdown"))
        local = [link for link in links if "://" not in link]
        assert local and not [link for link in local if not (tmp_path / name.parent / link).exists()]
        assert NotebookNotary().check_signature(own), "JupyterLab would not trust it, and drop its widgets"


def test_a_copy_is_never_written_over_and_a_newer_version_stands_beside_it(lab, tmp_path):
    own = tmp_path / "own" / "notebooks" / "01_group_layout.ipynb"
    working_copy.make(tmp_path / "own", lab)
    mine = json.loads(own.read_text())
    mine["cells"][0]["source"] = "What I think of it."
    own.write_text(json.dumps(mine))
    before = own.read_text()
    assert working_copy.make(tmp_path / "own", lab) == []
    for number in (2, 3):
        change(lab)
        newer = own.with_stem(f"{own.stem}-{number}")
        assert working_copy.make(tmp_path / "own", lab) == [newer]
        assert re.search("More", newer.read_text()) and own.read_text() == before
        assert working_copy.make(tmp_path / "own", lab) == [], "it was offered already"
    own.write_text("damaged")
    assert working_copy.make(tmp_path / "own", lab) == [] and own.read_text() == "damaged"


def test_links_follow_a_lab_that_has_moved(lab, tmp_path):
    (lab / "labkit").mkdir()
    working_copy.make(tmp_path / "own", lab)
    lab.rename(tmp_path / "moved")
    working_copy.make(tmp_path / "own", tmp_path / "moved")
    assert (tmp_path / "own" / "labkit").readlink() == tmp_path / "moved" / "labkit"


def test_pictures_are_copied_also_where_an_earlier_lab_has_left_a_link(lab, tmp_path):
    """Jupyter's server answers 403 for what a link has outside its folder."""
    own, picture = tmp_path / "own" / "pics" / "a.svg", lab / "pics" / "a.svg"
    picture.write_text("before")
    picture.chmod(0o444)  # as in a lab that is installed for all accounts
    (tmp_path / "own").mkdir()
    own.parent.symlink_to(lab / "pics")
    working_copy.make(tmp_path / "own", lab)
    assert not own.parent.is_symlink() and own.read_text() == "before"
    (own.parent / "mine.svg").write_text("my own")
    picture.unlink()
    picture.write_text("after")
    working_copy.make(tmp_path / "own", lab)
    assert own.read_text() == "after" and (own.parent / "mine.svg").read_text() == "my own"


def test_a_copy_of_before_the_new_numbers_stays_as_it_is(tmp_path, lab, monkeypatch, capsys):
    old = tmp_path / "my_copy"
    (old / "notebooks").mkdir(parents=True)
    assert about_earlier_copy(old / "notebooks") == "" and working_copy.without_earlier(old) == old
    (old / "notebooks" / "05_vocabulary_parallel.ipynb").touch()
    new = working_copy.without_earlier(old)
    assert about_earlier_copy(old / "notebooks").endswith(f"puts the new one into {new}.")
    make, seen = working_copy.make, []
    monkeypatch.setattr(working_copy, "make", lambda folder: seen.append(folder) or [])
    monkeypatch.setattr(opened, "start", lambda options: None)
    monkeypatch.setattr(opened, "folders_to_mend", list)
    monkeypatch.setattr("sys.argv", ["course.open", "--folder", str(old)])
    opened.main()
    assert seen == [new] == [tmp_path / "my_copy-2"]
    assert capsys.readouterr().out.startswith(f"{old} is of an earlier version of the lab. It stays as it is.\n")
    make(new, lab)
    assert working_copy.without_earlier(old) == new
