"""Pictures of experts: every copy is in each step, a lane is as long as a load, and a bar as high."""

import pytest

from course.pictures.experts import BARS, draw_loads, routing_steps
from course.sizing.routing import drawn_logits, route

CASES = {
    f"{ranks} ranks, {tokens} tokens, {experts} experts, k {k}, skew {skew}": route(
        drawn_logits(ranks, tokens, experts), k, skew
    )
    for ranks, tokens, experts, k, skew in [(4, 4, 8, 2, 0), (8, 8, 16, 4, 3), (1, 8, 16, 1, 1), (2, 2, 2, 1, 0)]
}
LOADS = {"one": [4.0, 0, 0, 0], "two": [1.0, 1, 1, 1]}


def copies(scene):
    return {mark.key: mark for mark in scene.marks if mark.key.startswith("c")}


@pytest.mark.parametrize("name", CASES)
def test_every_copy_is_in_each_of_six_steps(name):
    routed = CASES[name]
    keys = {f"c{each.rank}.{each.token}.{each.place}" for each in routed.copies}
    assert [set(copies(scene)) == keys for scene in routing_steps(routed)] == 6 * [True]


@pytest.mark.parametrize("name", CASES)
def test_no_two_copies_lie_on_each_other(name):
    for scene in routing_steps(CASES[name])[:5]:
        assert len({(round(mark.x, 3), mark.y) for mark in copies(scene).values()}) == len(copies(scene))


@pytest.mark.parametrize("name", CASES)
def test_a_lane_holds_the_load_of_its_expert(name):
    routed, scene = CASES[name], routing_steps(CASES[name])[3]
    for expert, load in enumerate(routed.loads):
        lane = scene.by_key[f"lane{expert}"]
        inside = [mark for mark in copies(scene).values() if lane.y < mark.y < lane.bottom and mark.x > lane.x]
        assert len(inside) == load and all(f"e{expert}" in mark.tags for mark in inside)
    assert [row[2] for row in scene.table.rows] == list(map(str, routed.loads))


def test_what_is_weighed_is_as_wide_as_its_probability():
    routed = CASES["4 ranks, 4 tokens, 8 experts, k 2, skew 0"]
    scene = routing_steps(routed)[5]
    wide = {key: mark.width for key, mark in copies(scene).items()}
    first = routed.probs[0][0]
    assert wide["c0.0.0"] / wide["c0.0.1"] == pytest.approx(first[0] / first[1])
    assert scene.table.rows[0][1].startswith(f"a0 = {first[0]:.2f} · {routed.experts[0][0][0]} + ")


def test_the_table_of_sending_counts_rows():
    routed = CASES["4 ranks, 4 tokens, 8 experts, k 2, skew 0"]
    rows = routing_steps(routed)[2].table.rows
    assert [row[1:5] for row in rows] == [list(map(str, row)) for row in routed.rows]
    assert [int(row[5]) for row in rows] == [sum(row[rank] for row in routed.rows) for rank in range(4)]


def test_a_bar_is_as_high_as_its_load_and_the_line_is_the_mean():
    scene = draw_loads(LOADS, ep_size=2, most=4, title="Loads")
    assert scene.by_key["bar0.0"].height == BARS and scene.by_key["bar1.0"].height == BARS / 4
    assert scene.by_key["even0"].y == pytest.approx(scene.by_key["bar1.0"].y)
    assert [scene.by_key[f"bar0.{expert}"].means for expert in range(4)] == 2 * ["on rank 0"] + 2 * ["on rank 1"]
    assert scene.says == "one: at most 4.0 times the mean; two: at most 1.0 times the mean"
