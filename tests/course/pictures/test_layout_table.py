"""The facts of a layout as text: what the grids show, and the bytes that they carry."""

from course.pictures.layout_table import layout_table
from course.sizing import Traffic
from labkit.layout import ParallelLayout

TWO_NODES = ParallelLayout(16, tp_size=2, pp_size=4, order="tp-dp-pp")


def test_a_row_says_how_many_groups_there_are_and_whose():
    table = layout_table(TWO_NODES, 8)
    assert table.heads == ["axis", "groups", "cross nodes", "ranks"]
    tensor, _, pipeline = table.rows
    assert tensor[:3] == ["tensor (tp 2)", "8 of 2", "none"]
    assert pipeline == [
        "pipeline (pp 4)", "4 of 4", "4",
        "A [0, 4, 8, 12] B [1, 5, 9, 13] C [2, 6, 10, 14] D [3, 7, 11, 15]",
    ]  # fmt: skip
    assert [row[0] for row in layout_table(ParallelLayout(16, 2, 2, 2), 8).rows][1] == "context (cp 2)"


def test_bytes_are_those_of_the_traffic_and_long_lists_are_counted():
    table = layout_table(ParallelLayout(1024, 8, 8), traffic={"tp": Traffic(4e12, 0)}, traffic_of="a model")
    assert table.rows[0][3:5] == ["4 TB", "none"] and table.rows[1][3:5] == ["not counted", ""]
    assert table.rows[0][-1].endswith("P [120, 121, 122, 123, 124, 125, 126, 127] and 112 more")
    assert table.caption == "Bytes of a model."
