"""The heat map: the days of each plan, and why the others do not fit."""

import pytest

from course.pictures.plans import CHOSEN, draw_plans
from course.pictures.style import IDLE, _luminance
from course.sizing import DGX_A100, Plan, fullest, step_time
from labkit.shape import GPT
from labkit.sizes import Misfit

GPT_3 = GPT(96, 12288, 2048, 51200, 96)


@pytest.fixture
def scene():
    return draw_plans(Plan(GPT_3, 1024, 1536, 8, 8), DGX_A100)


def cells(scene):
    """The boxes of the map by t and p."""
    found = {}
    for mark in scene.marks:
        t, _, p = mark.key.partition(".p")
        if p:
            found[int(t[1:]), int(p)] = mark
    return found


def test_every_cell_says_what_its_plan_comes_to(scene):
    for (t, p), mark in cells(scene).items():
        try:
            plan = Plan(GPT_3, 1024, 1536, t, p)
        except Misfit:
            assert (mark.text, mark.fill) == ("–", IDLE) and "does not divide" in mark.fact
            continue
        needs, shown = fullest(plan).total, mark.text.removeprefix("▸ ")
        if needs > DGX_A100.memory_bytes:
            assert shown.endswith("GB") and f"needs {shown}, a GPU has 80" in mark.fact and mark.dashed
        else:
            days = f"{step_time(plan, DGX_A100).days(300e9):.3g}"
            assert shown == days and f"{days} days" in mark.fact
    assert {(1, 1), (8, 4), (8, 8), (4, 16), (32, 32)} <= set(cells(scene))


def test_fewer_days_are_darker_and_the_fewest_are_said(scene):
    days = {mark.text: mark.fill for mark in cells(scene).values() if mark.text.replace(".", "").isdigit()}
    darkness = [sum(bytes.fromhex(days[text][1:])) for text in sorted(days, key=float)]
    assert darkness == sorted(darkness) and darkness[0] < darkness[-1]
    best = min(days, key=float)
    assert f"the fastest is t = 4, p = 16, d = 16: {best} days" in scene.says
    assert [mark.text for mark in cells(scene).values() if mark.bold] == [best]


def test_the_chosen_plan_is_marked_by_more_than_a_colour(scene):
    assert [size for size, mark in cells(scene).items() if mark.text.startswith("▸")] == [(8, 8)]


def test_a_misfit_says_what_does_not_divide():
    scene = draw_plans(Plan(GPT_3, 1024, 1536, 8, 8, num_chunks=2), DGX_A100)
    why = "pp_size=32 * num_chunks=2 = 64 does not divide num_layers=96"
    assert scene.by_key["t2.p32"].fact == f"t = 2, p = 32: {why}"


def test_the_table_has_the_same_cells(scene):
    marks = cells(scene)
    sizes = [int(head[4:]) for head in scene.table.heads[1:]]
    for row in scene.table.rows:
        t = int(row[0][4:])
        assert [marks[t, p].text.removeprefix("▸ ") for p in sizes] == list(row[1:])


def test_nothing_fits():
    scene = draw_plans(Plan(GPT_3, 8, 8), DGX_A100)
    assert scene.says == f"0 of {len(cells(scene))} fit"


def test_every_number_stands_out_and_the_frame_is_no_part_of_the_legend():
    for t, p in ((8, 8), (8, 2)):  # one that fits, one that is too large
        scene = draw_plans(Plan(GPT_3, 1024, 1536, t, p), DGX_A100)
        for mark in cells(scene).values():
            light, ink = (_luminance(color) + 0.05 for color in (mark.fill, mark.ink))
            assert max(light / ink, ink / light) >= 4.5, mark.text
        keys = [mark for mark in scene.marks if mark.key.startswith("legend.")]
        assert keys and all(mark.edge != CHOSEN for mark in keys)
        assert scene.by_key["chosen"].edge == CHOSEN
        assert (scene.by_key["chosen"].x, scene.by_key["chosen"].y) == (cells(scene)[t, p].x, cells(scene)[t, p].y)
