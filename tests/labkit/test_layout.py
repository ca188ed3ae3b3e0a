"""ParallelLayout against an independent definition: nested loops over coordinates, written out here."""

import itertools
import pickle
import re
from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from labkit.grid import Grid
from labkit.layout import AXES, EXPERT_AXES, ParallelLayout
from tests.support.sweep import IS_SWEEP

MEGATRON_AXES = ("tp", "cp", "ep", "dp", "pp")
OURS = {"tp": "expert_tp", "ep": "ep", "dp": "expert_dp", "pp": "pp"}  # what Megatron-LM's names mean among experts
ORDERS = ["-".join(order) for axes in (AXES, ("tp", "dp", "pp")) for order in itertools.permutations(axes)]
ORDERS_WITH_EP = ["-".join(order) for order in itertools.permutations(MEGATRON_AXES)]
WORLD_SIZES = (*range(1, 9), 12, 16, 24) if IS_SWEEP else (1, 8, 12)
SUBSETS = [axes for k in (1, 2, 3, 4) for axes in itertools.combinations(AXES, k)]


def shapes(world_size: int, length: int) -> list[tuple[int, ...]]:
    """Every way to write world_size as a product of ``length`` sizes."""
    if length == 1:
        return [(world_size,)]
    first = [k for k in range(1, world_size + 1) if world_size % k == 0]
    return [(k, *rest) for k in first for rest in shapes(world_size // k, length - 1)]


def coords_by_loops(order: str, sizes: dict[str, int]) -> list[dict[str, int]]:
    """Coordinates of each rank: a loop for each axis, that of the order's first axis innermost."""
    outermost_first = order.split("-")[::-1]
    turns = itertools.product(*(range(sizes[axis]) for axis in outermost_first))
    return [dict(zip(outermost_first, numbers)) for numbers in turns]


def groups_by_loops(order: str, sizes: dict[str, int], *within: str) -> list[list[int]]:
    """Megatron-LM's rule: ranks that agree on all other axes, by their first members."""
    groups: dict[tuple[int, ...], list[int]] = {}
    for rank, coords in enumerate(coords_by_loops(order, sizes)):
        outside = tuple(number for axis, number in coords.items() if axis not in within)
        groups.setdefault(outside, []).append(rank)
    return list(groups.values())


@pytest.mark.parametrize("order", ORDERS)
def test_every_layout_agrees_with_nested_loops(order):
    """Every shape: the groups of each axis and of several together, coordinates and their inverse."""
    axes = order.split("-")
    for shape in itertools.chain.from_iterable(shapes(n, len(axes)) for n in WORLD_SIZES):
        sizes = {"cp": 1} | dict(zip(axes, shape))
        world_size = sizes["tp"] * sizes["cp"] * sizes["dp"] * sizes["pp"]
        layout = ParallelLayout(world_size, sizes["tp"], sizes["pp"], sizes["cp"], order)
        assert {axis: layout.size(axis) for axis in AXES} == sizes
        for within in SUBSETS:
            expected = groups_by_loops(order, sizes, *within)
            assert layout.groups(*within) == layout.groups(*within[::-1], within[0]) == expected, (layout, within)
            assert layout.group_of(world_size // 3, *within) in expected
            assert world_size // 3 in layout.group_of(world_size // 3, *within)
        for rank, coords in enumerate(coords_by_loops(order, sizes)):
            assert layout.coords(rank)._asdict() == {"cp": 0} | coords
            assert layout.rank_at(**coords) == rank
        experts_lie_as_dense_layers_do(layout)


def experts_lie_as_dense_layers_do(layout):
    """Unless the experts' sizes are given."""
    assert (layout.ep_size, layout.expert_tp_size) == (1, layout.tp_size)
    assert [layout.size(axis) for axis in EXPERT_AXES] == [layout.tp_size, 1, layout.expert_dp_size]
    assert layout.groups("expert_tp") == layout.groups("tp")
    assert layout.groups("ep") == [[rank] for rank in range(layout.world_size)]
    assert layout.groups("expert_dp") == layout.groups("cp", "dp")
    assert layout.groups("expert_tp", "expert_dp") == layout.groups("tp", "cp", "dp")
    assert layout.group_of(0, "expert_dp") == layout.groups("expert_dp")[0]


def test_crossings_are_the_groups_with_members_in_two_nodes():
    for shape, order, axis in itertools.product(shapes(24, 4), ORDERS[:24:7], AXES):
        sizes = dict(zip(AXES, shape))
        layout = ParallelLayout(24, sizes["tp"], sizes["pp"], sizes["cp"], order)
        for gpus_per_node in (1, 3, 4, 64):
            nodes_of_groups = [{rank // gpus_per_node for rank in group} for group in layout.groups(axis)]
            leaving = [group for group, nodes in zip(layout.groups(axis), nodes_of_groups) if len(nodes) > 1]
            assert layout.crossings(axis, gpus_per_node) == leaving


# The 16 GPUs of two DGX-1 boxes; and t = c = d = p = 2 with four times four experts, each unsharded.
BOXES = ParallelLayout(16, tp_size=2, pp_size=4)
EXPERTS = ParallelLayout(16, 2, 2, 2, ep_size=4, expert_tp_size=1)


@pytest.mark.parametrize(
    ("layout", "axes", "groups"),
    [
        (BOXES, "tp", [[0, 1], [2, 3], [4, 5], [6, 7], [8, 9], [10, 11], [12, 13], [14, 15]]),
        (BOXES, "dp", [[0, 2], [1, 3], [4, 6], [5, 7], [8, 10], [9, 11], [12, 14], [13, 15]]),
        (BOXES, "pp", [[0, 4, 8, 12], [1, 5, 9, 13], [2, 6, 10, 14], [3, 7, 11, 15]]),
        (BOXES, "tp pp", [[0, 1, 4, 5, 8, 9, 12, 13], [2, 3, 6, 7, 10, 11, 14, 15]]),
        (EXPERTS, "ep", [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11], [12, 13, 14, 15]]),
    ],
)
def test_published_group_lists(layout, axes, groups):
    assert layout.groups(*axes.split()) == groups


def test_tensor_groups_stay_inside_a_box_of_eight():
    assert [BOXES.crossings(axis, 8) for axis in ("tp", "dp", "pp")] == [[], [], BOXES.groups("pp")]
    inside, across = (ParallelLayout(8, ep_size=4, order=order) for order in ("tp-cp-ep-dp-pp", "tp-cp-dp-ep-pp"))
    assert inside.crossings("ep", 4) == across.crossings("expert_dp", 4) == []
    assert across.crossings("ep", 4) == [[0, 2, 4, 6], [1, 3, 5, 7]]


@given(st.permutations(MEGATRON_AXES), st.lists(st.integers(1, 4), min_size=5, max_size=5), st.data())
def test_a_grid_of_any_axes_follows_the_rule(order, shape, data):
    sizes = dict(zip(order, shape))
    grid = Grid(sizes)
    within = data.draw(st.lists(st.sampled_from(order), min_size=1, unique=True))
    groups = groups_by_loops("-".join(order), sizes, *within)
    assert grid.groups(*within) == groups
    rank = data.draw(st.integers(0, grid.world_size - 1))
    assert grid.group_of(rank, *within) == next(group for group in groups if rank in group)
    assert grid.rank_at(**grid.coords(rank)) == rank


@settings(max_examples=5000 if IS_SWEEP else 300)
@given(
    st.sampled_from(ORDERS + ORDERS_WITH_EP),
    *[st.sampled_from(sizes) for sizes in ((1, 2), (1, 2), (1, 2, 3), (1, 2, 4), (1, 2, 3, 4))],
)
def test_both_grids_of_a_layout_are_megatron_s(order, tp, cp, pp, etp, ep):
    """ep stands before dp unless it is named, as in Megatron-LM's default order; pipelines that differ are refused."""
    cp = cp if "cp" in order else 1
    dense = {"tp": tp, "cp": cp, "ep": 1, "dp": 48 // (tp * cp * pp), "pp": pp}
    experts = {"tp": etp, "cp": 1, "ep": ep, "dp": 48 // (etp * ep * pp), "pp": pp}
    with_ep = order if "ep" in order else order.replace("dp", "ep-dp")
    is_as_dense = (etp, ep) == (tp, 1)
    refusal = None
    if 48 // pp % (etp * ep):
        refusal = r"does not divide the expert grid's world_size/pp_size=\d+: use "
    elif not is_as_dense and groups_by_loops(with_ep, dense, "pp") != groups_by_loops(with_ep, experts, "pp"):
        refusal = "makes pipelines such as .* in the dense grid, but .* name pp last"
        assert not order.endswith("pp")
    if refusal:
        with pytest.raises(ValueError, match=refusal):
            ParallelLayout(48, tp, pp, cp, order, ep_size=ep, expert_tp_size=etp)
        return
    layout = ParallelLayout(48, tp, pp, cp, order, ep_size=ep, expert_tp_size=etp)
    assert layout.groups("pp") == layout.expert.groups("pp") == groups_by_loops(with_ep, dense, "pp")
    if not is_as_dense:
        assert layout.expert_dp_size == layout.size("expert_dp") == experts["dp"]
        for axes in [("tp",), ("ep",), ("dp",), ("tp", "ep"), ("tp", "ep", "dp"), ("ep", "dp", "pp")]:
            assert layout.groups(*(OURS[axis] for axis in axes)) == groups_by_loops(with_ep, experts, *axes)
    each_expert_is_once_in_each_of_its_shards(layout)


def each_expert_is_once_in_each_of_its_shards(layout):
    num_experts = 3 * layout.ep_size
    for ranks in layout.groups("expert_tp", "ep"):
        found = Counter(expert for rank in ranks for expert in layout.experts_of(rank, num_experts))
        assert found == dict.fromkeys(range(num_experts), layout.expert_tp_size)
    for ranks in layout.groups("expert_dp"):
        assert len({layout.experts_of(rank, num_experts) for rank in ranks}) == 1


# ---- what does not fit: the sentences are in test_refusals.py


def suggestions(message: str) -> dict[str, list[int]]:
    """The numbers offered after 'use', by the name of the size they are offered for."""
    way_out = message.split(": use ")[1]
    found = re.findall(r"(\w+_size|product is) ([\d, or.]+)", way_out)
    return {name: [int(number) for number in re.findall(r"\d+", numbers)] for name, numbers in found}


@settings(max_examples=5000 if IS_SWEEP else 300)
@given(
    st.integers(1, 64) | st.integers(1, 200_000),
    *[st.integers(1, 8) | st.integers(1, 300)] * 3,
)
def test_sizes_stand_exactly_when_they_divide_the_world_and_those_offered_do(world_size, tp_size, pp_size, cp_size):
    sizes = {"tp_size": tp_size, "pp_size": pp_size, "cp_size": cp_size}
    product = tp_size * pp_size * cp_size
    if world_size % product == 0:
        layout = ParallelLayout(world_size, **sizes)
        assert layout.dp_size == world_size // product
        return
    with pytest.raises(ValueError, match=f"size={pp_size} = {product} does not divide world_size={world_size}") as told:
        ParallelLayout(world_size, **sizes)
    for name, numbers in suggestions(str(told.value)).items():
        for number in numbers:
            if name == "product is":
                assert world_size % number == 0
            else:
                ParallelLayout(**{"world_size": world_size} | sizes | {name: number})


# ---- as an object


def test_numpy_integers_are_whole_numbers():
    layout = ParallelLayout(np.int64(16), tp_size=np.int32(2), pp_size=np.int8(4))
    assert layout == BOXES
    assert type(layout.world_size) is int
    assert layout.coords(np.int64(6)) == (0, 0, 1, 1)
    assert all(type(number) is int for number in layout.coords(np.int64(6)))


def test_frozen_hashable_and_picklable_after_use():
    BOXES.groups("dp")
    with pytest.raises(AttributeError):
        BOXES.tp_size = 4  # type: ignore[misc]
    copy = pickle.loads(pickle.dumps(BOXES))
    assert copy == BOXES
    assert hash(copy) == hash(BOXES)
    assert copy.groups("dp") == BOXES.groups("dp")


def test_table_of_a_small_layout_shows_every_rank():
    assert str(BOXES).split("\n") == [
        "16 ranks = tp 2 x dp 2 x pp 4, fastest axis first",
        "     | dp 0  | dp 1",
        "pp 0 | 0 1   | 2 3",
        "pp 1 | 4 5   | 6 7",
        "pp 2 | 8 9   | 10 11",
        "pp 3 | 12 13 | 14 15",
    ]


@pytest.mark.parametrize("order", ["tp-cp-dp-pp", "pp-dp-cp-tp"])
@pytest.mark.parametrize("sizes", [(100_000, 8, 25, 2), (512, 1, 64, 1), (3072, 8, 64, 1), (96, 4, 2, 3), (1, 1, 1, 1)])
def test_table_is_narrow_and_says_what_it_leaves_out(sizes, order):
    layout = ParallelLayout(*sizes, order)
    summary, heads, *rows = str(layout).split("\n")
    assert max(map(len, [summary, heads, *rows])) <= 120
    shown = heads.count(" | ")
    replicas = layout.dp_size * layout.cp_size
    if shown < replicas or layout.pp_size > 16:
        assert rows.pop() == f"(only {len(rows)} of {layout.pp_size} stages, {shown} of {replicas} replicas shown)"
    assert len(rows) == min(layout.pp_size, 16)
    for pp, row in enumerate(rows):
        first_replica = [number for number in row.split(" | ")[1].split() if number != ".."]
        tps = range(layout.tp_size) if layout.tp_size <= 4 else (0, 1, layout.tp_size - 1)
        assert [int(number) for number in first_replica] == [layout.rank_at(tp=tp, pp=pp) for tp in tps]


def test_shard_groups_cut_the_replicas_in_neighbours_and_across():
    layout = ParallelLayout(16, tp_size=2, cp_size=2)  # 8 ranks have copies of the same weights
    shards, replicas = layout.shard_groups(4)
    assert shards[0] == layout.groups("dp", "cp")[0][:4]
    check_shards(shards, replicas)


def check_shards(shards, replicas):
    assert sorted(itertools.chain(*shards)) == sorted(itertools.chain(*replicas)) == list(range(16))
    assert all(len({*shard} & {*across}) <= 1 for shard in shards for across in replicas)


@pytest.mark.parametrize(("shard_size", "members"), [(8, 4), (4, 2), (2, 1)])
@pytest.mark.parametrize("order", ["tp-cp-dp-pp", "tp-cp-dp-ep-pp"])
def test_experts_have_as_many_copies_as_all_else(order, shard_size, members):
    layout = ParallelLayout(16, tp_size=2, ep_size=4, expert_tp_size=1, order=order)
    shards, replicas = layout.shard_groups(shard_size, experts=True)
    assert {*map(len, shards)} == {members} and {*map(len, replicas)} == {8 // shard_size}
    check_shards(shards, replicas)
    for ranks in layout.groups("expert_dp"):
        neighbours = [ranks[at : at + members] for at in range(0, len(ranks), members)]
        assert [shard for shard in shards if {*shard} <= {*ranks}] == neighbours
