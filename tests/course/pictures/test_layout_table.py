"""The table beside a layout's picture says the same."""

from course.pictures.layout_table import layout_table
from course.pictures.style import group_letter
from labkit.layout import ParallelLayout

TWO_NODES = ParallelLayout(16, tp_size=2, pp_size=4, order="tp-dp-pp")


def test_the_table_has_every_group_of_the_picture():
    table = layout_table(TWO_NODES, 8, follow=6)
    for axis in ("tp", "dp", "pp"):
        for index, group in enumerate(TWO_NODES.groups(axis)):
            assert f"<span>{group_letter(index)} {group}</span>" in table
    assert "context" not in table
    assert "context (cp 2)" in layout_table(ParallelLayout(16, 2, 2, 2), 8)


def test_a_long_table_counts_what_it_leaves_out():
    table = layout_table(ParallelLayout(1024, 8, 8), 8)
    assert "and 112 more" in table  # 128 tensor groups, 16 of them listed
    assert len(table) < 8000
