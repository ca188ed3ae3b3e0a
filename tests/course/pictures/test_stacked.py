"""Diagrams on a telephone: nothing is lost, letters have 16 pixels, and steps of one picture stand in the same way."""

import base64
import re
from pathlib import Path

import nbformat
import pytest

from course import working_copy
from course.explorers.collectives import collective_explorer
from course.pictures.narrow import LETTERS, WIDTH, scene_of
from course.pictures.scene import MARGIN, Scene, arrow, box, label, text_width
from course.pictures.scene import WIDTH as WIDE
from course.pictures.stacked import narrow, narrow_svgs, stack

ROOT = Path(__file__).parents[3]
STORED = re.compile(r"data:image/svg\+xml;base64,([^\"]+)")
COLUMNS = 6


def stored() -> list[tuple[str, list[str]]]:
    """Return the pictures of each output of the notebooks, and those of pics/."""
    found = [(path.stem, [path.read_text()]) for path in sorted((ROOT / "pics").glob("*.svg"))]
    for path in working_copy.notebooks(ROOT):
        for cell in nbformat.read(ROOT / path, as_version=4).cells:
            for output in cell.get("outputs", []):
                codes = STORED.findall(output.get("data", {}).get("text/html", ""))
                svgs = [base64.b64decode(code).decode() for code in codes]
                found += [(cell.id, svgs)] if svgs else []
    return found


def wrong(scene: Scene) -> list[str]:
    """Return what of a narrow picture is too small, outside of it, or written over the edge of its box."""
    letters = [mark.key for mark in scene.marks if mark.text and mark.size < LETTERS]
    outside = [mark.key for mark in scene.marks if not -1 <= mark.x <= mark.right <= WIDTH + MARGIN]
    below = [mark.key for mark in scene.marks if not -1 <= mark.y <= mark.bottom <= scene.height + MARGIN]
    boxes = [mark for mark in scene.marks if mark.shape == "box" and mark.text]
    over = [mark.key for mark in boxes if text_width(mark.text, mark.size, mark.bold) > mark.width + 3]
    return letters + outside + below + over


def table_of(rows: int, columns: int, word: str = "cell", **look) -> Scene:
    marks = [label(f"name{row}", 0, 60 + 40 * row, f"rank {row}", bold=True) for row in range(rows)]
    for row in range(rows):
        for column in range(columns):
            place = 80 + 140 * column, 48 + 40 * row, 120, 24
            marks.append(box(f"{row}.{column}", *place, "#ffffff", f"{word} {column}", edge="#000000", **look))
    return Scene("A table", "It has columns", marks, 60 + 40 * rows)


def test_columns_stand_below_each_other_and_names_of_rows_before_each_band():
    wide = table_of(2, COLUMNS)
    [scene] = stack([wide])
    assert wrong(scene) == [] and scene.width == WIDTH
    assert {mark.key.partition("~")[0] for mark in scene.marks} >= {mark.key for mark in wide.marks}
    cells = [[scene.by_key[f"{row}.{column}"] for column in range(COLUMNS)] for row in range(2)]
    tops = [mark.y for mark in cells[0]]
    assert tops == sorted(tops) and len(set(tops)) > 1
    for column in range(COLUMNS):
        assert cells[0][column].x == cells[1][column].x and cells[0][column].y < cells[1][column].y
    named = [mark.y for mark in scene.marks if mark.key.startswith("name0")]
    assert len(named) == len(set(tops))


def test_what_has_no_room_stays_as_it_is():
    long = table_of(2, 2 * COLUMNS, "indivisible")
    assert stack([long]) == []
    assert narrow([long]) == [long] and narrow_svgs([long.svg()]) == [""]


def test_steps_stand_in_the_same_way_or_all_as_they_are():
    steps = [table_of(2, COLUMNS), table_of(2, COLUMNS, "word")]
    places = [[(mark.x, mark.y) for mark in scene.marks if "." in mark.key] for scene in stack(steps)]
    assert places[0] == places[1]
    long = table_of(2, 2 * COLUMNS, "indivisible")
    assert narrow([*steps, long]) == [*steps, long]


def test_arrows_from_band_to_band_keep_a_picture_as_it_is():
    wide = table_of(4, COLUMNS)
    leads = [arrow(f"lead{row}", [(100, 60 + 40 * row), (WIDE - 100, 70 + 40 * row)], "#000000") for row in range(4)]
    assert stack([wide]) and not stack([Scene("A table", "", [*wide.marks, *leads], wide.height)])


def test_bars_keep_their_lengths_and_their_sums():
    marks = []
    for row, length in enumerate((500, 250, 40)):
        marks.append(label(f"{row}", 0, 60 + 32 * row, "a plan with a long name"[: 10 + 5 * row]))
        marks.append(box(f"{row}.bar", 190, 47 + 32 * row, length, 26, "#56B4E9", f"{length}"))
        marks.append(label(f"{row}.sum", 780, 60 + 32 * row, f"{length} GB: fits", bold=True))
    [scene] = stack([Scene("Bars", "", [label("title", 0, 11, "Bars", bold=True), *marks], 160)])
    assert wrong(scene) == []
    widths = [scene.by_key[f"{row}.bar"].width for row in range(3)]
    assert widths == pytest.approx([WIDTH, WIDTH / 2, WIDTH * 0.08])
    assert [scene.by_key[f"{row}.sum"].text for row in range(3)] == ["500 GB: fits", "250 GB: fits", "40 GB: fits"]


def test_stored_pictures_are_stacked_if_all_of_an_output_can_be():
    found = [(name, svgs, narrow_svgs(svgs)) for name, svgs in stored()]
    for name, _, narrowed in found:
        assert [wrong(scene_of(svg)) for svg in narrowed if svg] == [[] for svg in narrowed if svg], name
    stacked = [name for name, _, narrowed in found if all(narrowed)]
    assert len(stacked) > 0.6 * len(found)
    assert {"group_layout", "collectives", "column_parallel", "row_parallel", "tensor_parallel"} - {*stacked} == set()


def test_an_explorer_is_stacked_with_what_a_reader_clicks():
    explorer = collective_explorer()
    live = {mark.key for mark in explorer.steps[0].marks if mark.live}
    for scene in explorer.narrow_steps:
        assert wrong(scene) == [] and scene.width == WIDTH
    assert live and live <= explorer.narrow_steps[0].by_key.keys()
    first = explorer.narrow_steps[0]
    assert first.by_key["0..title"].y == min(mark.y for mark in first.marks)
    tops = [{first.by_key[f"0.{what}{rank}.3"].y for rank in range(4)} for what in ("start", "empty")]
    assert tops[0] == tops[1] and first.height < 400  # one band: both are in view while it plays
