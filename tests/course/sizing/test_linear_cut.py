"""How Y = XA + b is cut: the shapes that the literature has, and messages that add up."""

import pytest

from course.sizing.linear_cut import LinearCut, Message

# layer, t -> a rank's part of A, the weight as stored, partition size; for in 1024 and out 512
KNOWN = {
    ("column", 2): ((1024, 256), (256, 1024), 256),
    ("row", 2): ((512, 512), (512, 512), 512),
    ("column", 16): ((1024, 32), (32, 1024), 32),
    ("row", 16): ((64, 512), (512, 64), 64),
}


@pytest.mark.parametrize(("cut", "tp_size"), KNOWN)
def test_shards_have_the_known_shapes(cut, tp_size):
    shape = LinearCut(cut, 1024, 512, tp_size)
    assert (shape.tensors["A"].shard, shape.weight_shard, len(shape.part_of(0))) == KNOWN[cut, tp_size]


@pytest.mark.parametrize("cut", ["column", "row"])
def test_the_parts_of_all_ranks_are_the_whole_in_order(cut):
    shape = LinearCut(cut, 12, 8, tp_size=4)
    assert [number for rank in range(4) for number in shape.part_of(rank)] == [*range(8 if cut == "column" else 12)]


@pytest.mark.parametrize("cut", ["column", "row"])
def test_the_product_of_the_shards_has_the_shape_of_ys_shard(cut):
    y, x, a, b = (tensor.shard for tensor in LinearCut(cut, 12, 8, tp_size=4, batch_size=5).tensors.values())
    assert x[1] == a[0]
    assert y == (x[0], a[1])
    assert b == (y[1],)


def test_messages_of_each_cut_with_cut_and_with_whole_ends():
    column, row = (LinearCut(cut, 12, 8, tp_size=4, batch_size=5) for cut in ("column", "row"))
    all_reduce_x, all_reduce_y = Message("all_reduce", "dX", (5, 12)), Message("all_reduce", "Y", (5, 8))
    assert column.messages() == ([], [all_reduce_x])
    assert column.messages(whole=True) == ([Message("all_gather", "Y", (5, 8))], [all_reduce_x])
    assert row.messages() == ([all_reduce_y], [])
    assert row.messages(whole=True) == ([all_reduce_y], [Message("all_gather", "dX", (5, 12))])
    assert all_reduce_x.size_bytes() == 5 * 12 * 4


@pytest.mark.parametrize("cut", ["column", "row"])
def test_a_group_of_one_is_silent(cut):
    assert LinearCut(cut, 12, 8, tp_size=1).messages(whole=True) == ([], [])
