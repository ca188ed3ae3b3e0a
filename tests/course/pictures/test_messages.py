"""Scenes of messages: pieces move to the next rank, sums appear, bytes count up."""

from itertools import pairwise

import pytest

from course.pictures import messages
from course.pictures.collectives import ROW
from course.pictures.messages import message_steps, ring_steps, tree_and_ring
from course.pictures.style import RANK_COLOR
from course.sizing.messages import on_a_ring
from tests.support.pictures import marks

START = [[0, 1, 2], [10, 20, 30], [100, 200, 300]]


def texts(scene, prefix="0."):
    """What is written in the ranks' own boxes, in rank order."""
    return [[scene.by_key[f"{prefix}{rank}.{piece}"].text for piece in range(3)] for rank in range(3)]


def test_a_piece_keeps_its_key_and_moves_to_the_next_rank():
    scenes = ring_steps(START)
    places = [(scene.by_key["0.token0"].x, scene.by_key["0.token0"].y) for scene in scenes]
    assert len({x for x, _ in places}) == 1
    steps = [after - before for (_, before), (_, after) in pairwise(places)]
    assert steps == [ROW, ROW, -2 * ROW, ROW]  # the last rank's neighbour is the first


def test_what_travels_is_what_was_sent_and_the_sum_appears_where_it_arrives():
    scenes = ring_steps(START)
    assert [scene.by_key["0.token0"].text for scene in scenes] == ["0", "0", "10", "110", "110"]
    assert texts(scenes[0]) == [["0", "1", "2"], ["10", "20", "30"], ["100", "200", "300"]]
    assert texts(scenes[1]) == [["0", "1", "+ 2 = 302"], ["+ 10 = 10", "20", "30"], ["100", "+ 200 = 220", "300"]]
    assert texts(scenes[-1]) == [["110", "221", "332"]] * 3


def test_a_sum_has_a_stripe_of_each_ranks_colour():
    cell = ring_steps(START)[2]
    stripes = marks(cell, "0.2.0<")
    assert [mark.fill for mark in stripes] == list(RANK_COLOR[:3])
    assert cell.by_key["0.2.0"].fact == "Rank 2, piece 0: 10 + 100 = 110, data of ranks 0, 1, 2"
    assert set(stripes[0].lights) < set(cell.by_key["0.2.0"].tags)


def test_bytes_count_up():
    scenes = ring_steps(START)
    assert [scene.by_key["0.sent1"].text for scene in scenes] == [f"{4 * sent} of 16 B" for sent in range(5)]
    widths = [scene.by_key["0.bar1"].width for scene in scenes]
    assert widths == sorted(widths)
    assert (widths[0], widths[-1]) == (0, scenes[0].by_key["0.all1"].width)
    assert [row[-1] for row in scenes[2].table.rows] == ["8"] * 3


def test_the_steps_say_what_happens():
    says = [scene.says.partition(": ")[2] for scene in ring_steps(START)]
    assert says == ["the start", *["what arrived was added"] * 2, *["what arrived was kept"] * 2]
    assert all("simulated" in scene.title for scene in ring_steps(START))
    assert message_steps({"by 3 ranks": on_a_ring(START, "all-reduce")})[0].title == "by 3 ranks"


def test_in_an_all_gather_what_is_missing_is_empty_until_it_arrives():
    scenes = ring_steps([[1], [2], [3]], "all-gather")
    empty = [[key for key, mark in scene.by_key.items() if mark.dashed] for scene in scenes]
    assert [len(keys) for keys in empty] == [6, 3, 0]
    assert scenes[0].by_key["0.1.0"].fact == "Rank 1, piece 0: nothing"
    assert texts(scenes[-1]) == [["1", "2", "3"]] * 3


def test_in_a_reduce_scatter_each_rank_keeps_its_own_piece():
    rows = ring_steps(START, "reduce-scatter")[-1].table.rows
    assert [row[1] for row in rows] == ["110; nothing; nothing", "nothing; 221; nothing", "nothing; nothing; 332"]


def test_tree_and_ring_are_on_one_clock_and_one_scale():
    start = [[element + rank for element in range(8)] for rank in range(8)]
    scenes = tree_and_ring(start)
    assert len(scenes) == 1 + 14
    assert "tree (simulated) after 6 of 6 messages" in scenes[-1].says
    assert "ring (simulated) after 14 of 14 messages" in scenes[-1].says
    tree, ring = (scenes[-1].by_key[f"{number}.all0"] for number in (0, 1))
    assert tree.width / ring.width == pytest.approx(3 / 1.75)
    assert scenes[-1].by_key["0.7.0"].text == "28, 36, 44, 52, 60, 68, 76, 84"
    assert ", ".join(scenes[-1].by_key[f"1.7.{piece}"].text for piece in range(8)) == scenes[-1].by_key["0.7.0"].text
    assert scenes[1].by_key["0.token1"].y == scenes[1].by_key["0.rank0"].y  # rank 1's tensor went to rank 0
    framed = [{mark.y for mark in marks(scene, "0.token") if mark.edge_width > 2} for scene in scenes]
    ranks = [scenes[0].by_key[f"0.rank{rank}"].y for rank in range(8)]
    assert framed[2] == {ranks[0], ranks[4]}  # a piece that has not left yet hides no frame
    assert framed[-1] == {*ranks[1::2]}


def test_the_clock_counts_a_latency_and_the_bytes_of_a_piece_for_each_message():
    clocks = [scene.by_key["0.clock"].text for scene in ring_steps(START)]
    assert clocks == ["0 α + 0 S/B", "1 α + 1/3 S/B", "2 α + 2/3 S/B", "3 α + 1 S/B", "4 α + 4/3 S/B"]


@pytest.mark.parametrize(("size_bytes", "tree", "ring"), [(1e4, 61, 140), (1e7, 1260, 490)])
def test_a_small_tensor_is_faster_on_a_tree_and_a_large_one_on_a_ring(size_bytes, tree, ring):
    """8 ranks, 10 µs a message, 50 GB/s: 6 (10 + S/50 GB) and 14 (10 + S/8/50 GB) µs."""
    scenes = tree_and_ring([[element + rank for element in range(8)] for rank in range(8)], size_bytes)
    assert scenes[-1].by_key["0.clock"].text == f"done in {tree:,} µs = 6 α + 6 S/B"
    assert scenes[-1].by_key["1.clock"].text == f"done in {ring:,} µs = 14 α + 7/4 S/B"
    done = [
        [scene.by_key[f"{number}.clock"].text.startswith("done") for scene in scenes].index(True) for number in "01"
    ]
    assert (done[0] < done[1]) == (tree < ring)
    assert sum(scene.lasts for scene in scenes[1:]) == pytest.approx(messages.RACE_STEPS)
    lengths = [scene.lasts / messages.RACE_STEPS * max(tree, ring) for scene in scenes]
    assert sum(lengths[: done[0] + 1]) == pytest.approx(tree, rel=0.02)  # what is seen takes as long as it says


def test_in_a_race_a_message_is_as_far_as_its_time():
    """The tree's first message takes 210 µs, the ring's 35: after one of the ring's, the tree's is a sixth there."""
    scenes = tree_and_ring([[element + rank for element in range(8)] for rank in range(8)], 1e7)
    start, sixth, end = (scenes[number].by_key["0.token1"].y for number in (0, 1, 6))
    assert sixth - start == pytest.approx((end - start) / 6)
    assert scenes[1].by_key["0.sent1"].text == "none" and scenes[6].by_key["0.sent1"].text == "10 MB"
