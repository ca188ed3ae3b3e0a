"""Pictures of a sequence that is cut: each pair once, in its rank's tint; a ring brings all keys to all queries."""

import re
from itertools import pairwise

import pytest

from course.pictures.context_parallel import draw_merge, draw_triangle, ring_steps, ulysses_steps
from course.pictures.style import CP, FRAME_FILL, INK, tints
from course.sizing.context import attention_pairs
from labkit.context_parallel import part_with_work, positions
from labkit.partition import tokens_of_rank
from tests.support.pictures import lit, marks

MERGE = [[1, 3], [12, 4]], [[10, 20], [30, 40]]


@pytest.mark.parametrize("zigzag", [False, True])
def test_a_row_of_the_triangle_is_one_token_and_as_wide_as_what_it_sees(zigzag):
    scene = draw_triangle(16, 4)
    rows = sorted(marks(scene, f"pairs{zigzag}"), key=lambda row: row.y)
    assert [row.width / rows[0].width for row in rows] == pytest.approx(range(1, 17))
    held = {token: rank for rank in range(4) for part in tokens_of_rank(16, 4, rank, zigzag) for token in part}
    assert [int(row.text) for row in rows] == [held[token] for token in range(16)]
    assert [row.fill for row in rows] == [tints(CP, 4)[held[token]] for token in range(16)]
    keys = sorted(marks(scene, f"keys{zigzag}"), key=lambda key: key.x)
    assert [key.text for key in keys] == [f"rank {held[token]}" for token in range(0, 16, 2 if zigzag else 4)]


def test_bars_are_the_work_on_one_scale_and_the_pace_is_said():
    scene = draw_triangle(4096, 4)
    for zigzag in (False, True):
        done = [sum(row) for row in attention_pairs(4096, 4, zigzag)]
        bars = [mark.height for mark in marks(scene, f"bar{zigzag}")]
        assert [bar / sum(bars) for bar in bars] == pytest.approx([pairs / sum(done) for pairs in done])
    assert sum(m.height for m in marks(scene, "barFalse")) == pytest.approx(
        sum(m.height for m in marks(scene, "barTrue"))
    )
    assert scene.says == "consecutive: ranks compute 57.1% of the time; zigzag: ranks compute 100.0% of the time"
    assert scene.table.rows[3] == ["Consecutive", "3", "3072-4095", "43.7%"]
    assert scene.table.rows[5] == ["Zigzag", "1", "512-1023, 3072-3583", "25.0%"]


def test_pointing_at_a_rank_lights_its_tokens_its_pairs_and_its_bar():
    pairs = {f"pairsTrue.2.{token}" for token in (4, 5, 10, 11)}
    assert lit(draw_triangle(16, 4), "barTrue.2") == {"barTrue.2", "keysTrue.2.0", "keysTrue.2.1", *pairs}


@pytest.mark.parametrize(("c", "zigzag"), [(2, True), (4, True), (4, False)])
def test_a_ring_computes_every_pair_once_each_by_the_rank_of_its_query(c, zigzag):
    steps, seen = ring_steps(c, zigzag), []
    for number, scene in enumerate(steps):
        now = {mark.key.rsplit(".", 1)[0]: mark for mark in marks(scene, "block") if mark.edge == INK}
        seen += now
        shares = attention_pairs(8 * c, c, zigzag)
        for rank in range(c):
            own = [mark for mark in marks(scene, "block") if mark.edge == INK and f"rank{rank}" in mark.tags]
            area = sum(mark.width * mark.height for mark in own)
            has_work = shares[rank][(rank - number) % c] > 0
            assert bool(area) == has_work == ("nothing" not in scene.by_key[f"work{rank}"].text)
        filled = [mark for mark in marks(scene, "block") if mark.fill != FRAME_FILL]
        assert {mark.key.rsplit(".", 1)[0] for mark in filled} == set(seen)
    chunks = c * (2 if zigzag else 1)
    assert sorted(seen) == sorted(f"block{q}.{k}" for q in range(chunks) for k in range(q + 1))


@pytest.mark.parametrize("zigzag", [True, False])
def test_what_the_picture_says_is_what_the_ring_of_labkit_computes(zigzag):
    """With one token for each chunk, a slice of `part_with_work` is a list of chunks."""
    chunks = [positions(8 if zigzag else 4, 4, rank, zigzag) for rank in range(4)]
    for number, scene in enumerate(ring_steps(4, zigzag)):
        for rank in range(4):
            source = (rank - number) % 4
            said = scene.by_key[f"work{rank}"].text.split("\n")[0]
            part = part_with_work(rank, source, len(chunks[0]), causal=True, zigzag=zigzag)
            if part is None:
                assert said.startswith("nothing")
            else:
                parts = chunks[rank][part.queries].tolist(), chunks[source][part.keys].tolist()
                assert said == "Q {} × K {}".format(*(", ".join(map(str, part)) for part in parts))


def test_balanced_all_ranks_have_the_same_work_in_each_step():
    for scene in ring_steps(4):
        areas = []
        for rank in range(4):
            own = [mark for mark in marks(scene, "block") if mark.edge == INK and f"rank{rank}" in mark.tags]
            areas.append(sum(mark.width * mark.height for mark in own))
        assert areas == pytest.approx([areas[0]] * 4)


def test_keys_move_on_to_the_next_rank_and_queries_stay():
    for before, after in pairwise(ring_steps(4)):
        places = [before.by_key[f"kv{source}"].y for source in range(4)]
        assert [after.by_key[f"kv{source}"].y for source in range(4)] == [
            sorted(places)[(sorted(places).index(place) + 1) % 4] for place in places
        ]
        assert [before.by_key[f"q{rank}"] for rank in range(4)] == [after.by_key[f"q{rank}"] for rank in range(4)]
    first, *_, last = ring_steps(4)
    assert "around" in first.by_key and "around" not in last.by_key  # nothing is sent in the last step
    assert first.table.rows[1] == ["1", "chunks 1, 6", "chunks 1, 6 of rank 1", "Q 1, 6 × K 1, 6 with the causal mask"]
    assert last.table.rows[1] == ["1", "chunks 1, 6", "chunks 2, 5 of rank 2", "Q 6 × K 2, 5"]


def test_ulysses_moves_every_piece_along_its_tokens_to_the_rank_of_its_heads():
    before, after = ulysses_steps(4, 8)
    pieces = marks(before, "piece")
    assert len(pieces) == 4 * 4 * 2
    for piece in pieces:
        rank, group = map(int, re.findall(r"\d+", piece.key)[:2])
        moved = after.by_key[piece.key]
        assert (moved.x, moved.width, moved.fill) == (piece.x, piece.width, tints(CP, 4)[rank])
        assert piece.tags[0] == f"rank{rank}" and moved.tags[0] == f"rank{group}"
        assert f"frame{group}" in after.by_key and moved.y >= after.by_key[f"frame{group}"].y
    assert before.table.rows[1] == ["1", "1, 6", "all"] and after.table.rows[1] == ["1", "all", "2-3"]


def test_blocks_are_as_wide_as_their_weight_and_the_whole_is_the_mean_of_all():
    scene = draw_merge(*MERGE)
    first, second = scene.by_key["block0"], scene.by_key["block1"]
    assert (second.width + 2) / (first.width + 2) == pytest.approx(4)
    assert [scene.by_key[key].text for key in ("block0", "block1", "whole")] == [
        "weight 4\nmean 17.5", "weight 16\nmean 32.5", "weight 20\nmean 29.5"
    ]  # fmt: skip
