"""Pictures of a cut matrix: true proportions, every shard with its rank's number, and dealt to its rank's row."""

import re
from itertools import combinations

import pytest

from course.pictures.sharding import draw_cut, draw_stride
from course.pictures.style import FRAME_FILL, TP, tints
from course.sizing.linear_cut import LinearCut
from labkit.partition import chunks_of_rank
from tests.support.pictures import marks

CUTS = ["column", "row"]


def parts(scene, name):
    """The boxes of one tensor, in rank order."""
    return [mark for mark in scene.marks if re.fullmatch(rf"{name}\.\d+", mark.key)]


def sizes(scene, name):
    return [pytest.approx((mark.width, mark.height)) for mark in parts(scene, name)]


def test_cut_by_columns_a_y_and_b_are_in_shards_and_x_is_whole():
    scene = draw_cut(LinearCut("column", 1024, 512, 2))
    for name in "YAb":
        assert [mark.fill for mark in parts(scene, name)] == tints(TP, 2)
        assert [mark.text for mark in parts(scene, name)] == ["rank 0", "rank 1"]
        left, right = parts(scene, name)
        assert right.x == pytest.approx(left.x + left.width)
        assert right.y == left.y
    (a, _), (x, _), (y, _) = (parts(scene, name) for name in "AXY")
    assert x.fill == FRAME_FILL
    assert (a.width / x.width, a.height / x.height) == pytest.approx((256 / 1024, 1024 / 256))  # true proportions
    assert (y.width, y.height) == pytest.approx((a.width, x.height))


@pytest.mark.parametrize(
    ("tp_size", "drawn", "pluses"), [(1, [0], []), (2, [0, 1], ["+"]), (4, [0, 1, 2, 3], ["+"] * 3),
                                     (16, [0, 1, 15], ["+", "+ … +"])]
)  # fmt: skip
def test_cut_by_rows_y_is_a_sum_of_sheets_as_large_as_y(tp_size, drawn, pluses):
    scene = draw_cut(LinearCut("row", 1024, 512, tp_size))
    sheets = parts(scene, "Y")
    assert [mark.text for mark in sheets] == [f"rank {rank}" for rank in drawn]
    (a, *_), (x, *_) = parts(scene, "A"), parts(scene, "X")
    for sheet in sheets:
        assert (sheet.width, sheet.height) == pytest.approx((a.width, x.height))  # not cut: all rows and columns of Y
    assert [mark.text for mark in marks(scene, "plus")] == pluses
    assert len(parts(scene, "A")) == len(parts(scene, "X")) == tp_size
    assert parts(scene, "A")[-1].y == pytest.approx(a.y + a.height * (tp_size - 1))
    assert {mark.fill for mark in parts(scene, "b")} == {FRAME_FILL}


@pytest.mark.parametrize("cut", CUTS)
def test_dealing_moves_each_shard_to_its_ranks_row(cut):
    whole, dealt = (draw_cut(LinearCut(cut, 1024, 512, 4), flag) for flag in (False, True))
    names = [f"{name}.{rank}" for name in "YXAb" for rank in range(4)]
    assert set(names) <= set(whole.by_key)
    assert set(names) <= set(dealt.by_key)
    for rank in range(4):
        for name in "YXAb":
            mark = dealt.by_key[f"{name}.{rank}"]
            assert mark.y + mark.height / 2 == pytest.approx(dealt.by_key[f"rank{rank}"].y)
            assert mark.tags == mark.lights == (f"rank{rank}",)
            assert mark.fill == whole.by_key[mark.key].fill
    shard = LinearCut(cut, 1024, 512, 4).tensors["A"].shard
    [(wide, high), *others] = [(mark.width, mark.height) for mark in parts(dealt, "A")]
    assert all(other == (wide, high) for other in others)
    if cut == "row":
        assert high / wide == pytest.approx(shard[0] / shard[1])
        assert "b.sign0" not in dealt.by_key  # the bias is added to the sum, not to each part


def test_of_many_ranks_the_first_two_and_the_last_have_a_row():
    scene = draw_cut(LinearCut("column", 1024, 512, 16), dealt=True)
    assert [mark.text for mark in marks(scene, "rank")] == ["rank 0", "rank 1", "rank 15"]
    assert [mark.key for mark in parts(scene, "A")] == ["A.0", "A.1", "A.15"]
    assert scene.by_key["dots"].text == "…"


def test_a_ranks_shards_light_each_other_and_copies_that_lie_on_each_other_light_for_all():
    scene = draw_cut(LinearCut("column", 1024, 512, 2))
    assert scene.by_key["A.1"].lights == scene.by_key["Y.1"].tags == scene.by_key["b.1"].tags == ("rank1",)
    assert scene.by_key["X.1"].tags == ("rank0", "rank1")


def test_facts_say_what_a_rank_has_with_shapes_and_bytes():
    scene, row = (draw_cut(LinearCut(cut, 1024, 512, 2)) for cut in CUTS)
    said = "Rank 1: A_1 [1024, 256], 1.05 MB, columns 256 to 511 of A, stored as weight [256, 1024]"
    assert scene.by_key["A.1"].fact == said
    assert scene.by_key["X.0"].fact == "Rank 0: all of X [256, 1024], 1.05 MB, as on every rank"
    assert row.by_key["X.1"].fact == "Rank 1: X_1 [256, 512], 524 kB, columns 512 to 1023 of X"
    assert row.by_key["Y.1"].fact == "Rank 1: X_1 A_1 [256, 512], 524 kB, a part of all of Y"


@pytest.mark.parametrize("cut", CUTS)
@pytest.mark.parametrize("dealt", [False, True])
@pytest.mark.parametrize(
    "numbers", [(1024, 512, 2), (64, 4096, 4), (4096, 64, 4), (64, 64, 4, 4096), (8192, 8192, 8, 8192), (512, 512, 16)]
)
def test_nothing_leaves_the_picture_or_covers_something_else(cut, dealt, numbers):
    scene = draw_cut(LinearCut(cut, *numbers), dealt)
    boxes = [mark for mark in scene.marks if "." in mark.key and mark.shape == "box" and "legend" not in mark.key]
    for mark in boxes:
        assert mark.x >= 0 and mark.x + mark.width <= scene.width + 1
        assert mark.y >= 60 and mark.y + mark.height <= scene.height - 20
    boxes = [mark for mark in boxes if not mark.live]
    copies = "" if dealt else "X" if cut == "column" else "b"
    for one, other in combinations([mark for mark in boxes if mark.key[0] != copies], 2):
        apart = one.x + one.width <= other.x + 0.1 or other.x + other.width <= one.x + 0.1
        assert apart or one.y + one.height <= other.y + 0.1 or other.y + other.height <= one.y + 0.1


def test_a_matrix_too_thin_to_see_is_drawn_thicker_and_the_picture_says_so():
    assert "thin matrices are drawn thicker" in draw_cut(LinearCut("column", 64, 4096, 4)).title
    assert "thicker" not in draw_cut(LinearCut("column", 1024, 512, 2)).title


def test_numbers_are_written_in_all_shards_or_in_none():
    for tp_size in range(1, 17):
        scene = draw_cut(LinearCut("column", 1024, 720720, tp_size))
        assert len({bool(mark.text) for mark in parts(scene, "A")}) == 1


@pytest.mark.parametrize(("tp_size", "stride"), [(2, 1), (2, 3), (4, 1), (2, 2)])
def test_stripes_are_the_chunks_of_the_stride_rule(tp_size, stride):
    for scene in draw_stride(12, tp_size, stride):
        assert scene.alt.endswith("rank r has chunks r, r + t, r + 2t and so on.")
        stripes = marks(scene, "row")
        first_rows = {rank: [int(m.key[3:]) for m in stripes if m.tags == (f"rank{rank}",)] for rank in range(tp_size)}
        size = 12 // len(stripes)
        for rank, rows in first_rows.items():
            own = [row for rows in chunks_of_rank(12, tp_size, rank, stride) for row in rows]
            assert [row + i for row in rows for i in range(size)] == own
        assert [mark.fill for mark in stripes] == [tints(TP, tp_size)[int(mark.tags[0][4:])] for mark in stripes]


def test_stride_3_gives_each_rank_its_part_of_each_matrix_and_stride_1_does_not():
    held = {
        stride: [row[2] for row in draw_stride(12, 2, stride)[0].table.rows if row[0] == "rank 0"] for stride in (1, 3)
    }
    assert held == {1: ["Q 0 to 1", "Q 2 to 3", "K 0 to 1"], 3: ["Q 0 to 1", "K 0 to 1", "V 0 to 1"]}
    keys = [set(scene.by_key) for stride in (1, 3) for scene in draw_stride(12, 2, stride)]
    assert keys[0] == keys[1] == keys[2] == keys[3]  # so they can be steps of one stage


def test_dealt_stripes_stand_in_their_ranks_row():
    whole, dealt = draw_stride(16, 2, 2, ("gate", "up"))
    assert {mark.y for mark in marks(whole, "row")} == {76}
    for mark in marks(dealt, "row"):
        assert mark.y + mark.height / 2 == dealt.by_key[mark.tags[0]].y
    assert [mark.text for mark in marks(whole, "matrix")] == ["gate", "up"]


def test_the_table_says_every_shape_and_the_bytes_of_a_shard():
    rows = {name: cells for name, *cells in draw_cut(LinearCut("row", 1024, 512, 2, batch_size=128)).table.rows}
    assert rows == {
        "Y": ["[128, 512]", "[128, 512] of partial sums", "262 kB"],
        "X": ["[128, 1024]", "[128, 512]", "262 kB"],
        "A": ["[1024, 512]", "[512, 512]", "1.05 MB"],
        "stored weight": ["[512, 1024]", "[512, 512]", "1.05 MB"],
        "b": ["[512]", "the same", "2.05 kB"],
    }


def test_a_row_of_x_is_followed_to_where_it_is_sent_and_what_that_costs():
    """4 bytes a number; an all-reduce sends 2 (t - 1) / t times the size on a ring."""
    cut = LinearCut("row", 1024, 512, tp_size=4, batch_size=256)
    for scene in (draw_cut(cut), draw_cut(cut, dealt=True)):
        assert [tag for tag in scene.journeys if tag] == ["follow0", "follow1"]
        assert scene.journeys["follow0"] == (
            "Followed: row 32 of X: 256 elements on each of 4 ranks; "
            "row 32 of Y: a part of all 512 sums on each of 4 ranks; "
            "forward, the all-reduce of Y has 2.05 kB of it; each rank sends 3.07 kB on a ring; "
            "backward, nothing of it is sent."
        )
        strips = [mark for mark in scene.marks if "follow0" in mark.tags]
        assert {mark.key for mark in strips} == {f"follow0.{name}.{rank}" for name in "XY" for rank in range(4)}
        for mark in strips:
            whole = scene.by_key[mark.key.removeprefix("follow0.")]
            assert (mark.x, mark.width) == (whole.x, whole.width)
            assert mark.y + mark.height / 2 == pytest.approx(whole.y + 32.5 / 256 * whole.height)
        assert all(mark.fact not in scene.svg() for mark in strips)  # a still picture cannot be clicked
    column = draw_cut(LinearCut("column", 1024, 512, 2), whole=True).journeys["follow1"]
    assert "row 223 of X: all 1,024 elements on each of 2 ranks" in column
    assert "forward, the all-gather of Y has 2.05 kB of it; each rank sends 1.02 kB" in column
    assert "backward, the all-reduce of dX has 4.1 kB of it; each rank sends 4.1 kB" in column
