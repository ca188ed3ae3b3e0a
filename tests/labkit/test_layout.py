"""ParallelLayout against an independent definition: nested loops over coordinates, written out here.

A layout is a shape (the sizes along ``order``, fastest first) and names for its axes. The loops look at
shapes only, so one brute-force answer serves all orders that lead to the same shape: that makes it
possible to cover every size up to 8 ranks, and 12, 16 and 24, under every one of the 24 + 6 orders.
"""

import itertools
import math
import pickle
import re
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from labkit.grid import Grid
from labkit.layout import AXES, EXPERT_AXES, Coords, ParallelLayout

LARGEST_WORLD = 32
WORLD_SIZES = (*range(1, 9), 12, 16, 24)  # the others have the factors of one of these, or are primes
ORDERS = ["-".join(order) for order in itertools.permutations(AXES)]
ORDERS_WITHOUT_CP = ["-".join(order) for order in itertools.permutations(("tp", "dp", "pp"))]
ORDERS_WITH_EP = [
    "-".join(order) for axes in (AXES, ("tp", "dp", "pp")) for order in itertools.permutations(("ep", *axes))
]
SUBSETS = [subset for k in (1, 2, 3, 4) for subset in itertools.combinations(range(4), k)]  # of positions in the order


def shapes(world_size: int, length: int = 4) -> list[tuple[int, ...]]:
    """Every way to write world_size as a product of ``length`` sizes."""
    if length == 1:
        return [(world_size,)]
    first = [k for k in range(1, world_size + 1) if world_size % k == 0]
    return [(k, *rest) for k in first for rest in shapes(world_size // k, length - 1)]


def brute_force(shape: tuple[int, ...]) -> tuple[list[tuple[int, ...]], dict[tuple[int, ...], list[list[int]]]]:
    """Coordinates of each rank, and the groups of each subset of positions, by four nested loops."""
    coords_of_ranks = []
    for d in range(shape[3]):
        for c in range(shape[2]):
            for b in range(shape[1]):
                for a in range(shape[0]):  # the fastest
                    coords_of_ranks.append((a, b, c, d))
    groups = {}
    for subset in SUBSETS:
        outside = [i for i in range(4) if i not in subset]
        members: dict[tuple[int, ...], list[int]] = {}
        for rank, coords in enumerate(coords_of_ranks):  # rank order, so groups come by first member and members ascend
            members.setdefault(tuple(coords[i] for i in outside), []).append(rank)
        groups[subset] = list(members.values())
    return coords_of_ranks, groups


def build(order: str, shape: tuple[int, ...]) -> ParallelLayout:
    sizes = dict(zip(order.split("-"), shape))
    return ParallelLayout(math.prod(shape), sizes["tp"], sizes["pp"], sizes.get("cp", 1), order)


@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_every_layout_agrees_with_nested_loops(world_size):
    """Every shape and order: the groups of each axis and of all axes together, coordinates and their inverse."""
    for shape in shapes(world_size):
        coords_of_ranks, groups = brute_force(shape)
        for order in ORDERS:
            axes, layout = order.split("-"), build(order, shape)
            assert tuple(map(layout.size, axes)) == shape
            for subset in SUBSETS:
                named = [axes[i] for i in subset]
                assert layout.groups(*named) == groups[subset], (layout, named)
            for rank in {0, world_size // 3, world_size - 1}:
                coords = Coords(**dict(zip(axes, coords_of_ranks[rank])))
                assert layout.coords(rank) == coords
                assert layout.rank_at(**coords._asdict()) == rank


@pytest.mark.parametrize("order", ORDERS)
def test_every_rank_of_every_layout_of_12_ranks(order):
    """What is asked rank by rank: coordinates, the group of a rank."""
    axes = order.split("-")
    stage_at = axes.index("pp")
    for shape in itertools.chain.from_iterable(shapes(n) for n in (1, 8, 12)):
        coords_of_ranks, groups = brute_force(shape)
        layout = build(order, shape)
        for rank, coords in enumerate(coords_of_ranks):
            assert layout.coords(rank) == Coords(**dict(zip(axes, coords)))
            assert layout.rank_at(**dict(zip(axes, coords))) == rank
            for subset in ((stage_at,), (0, 2), (0, 1, 2, 3)):
                expected = next(group for group in groups[subset] if rank in group)
                assert layout.group_of(rank, *(axes[i] for i in subset)) == expected


@pytest.mark.parametrize("gpus_per_node", [1, 2, 3, 4, 8, 64])
def test_crossings_are_the_groups_with_members_in_two_nodes(gpus_per_node):
    for shape in itertools.chain.from_iterable(shapes(n) for n in (8, 12, 16, 48)):
        for order in ("tp-cp-dp-pp", "dp-pp-cp-tp"):
            layout = build(order, shape)
            for axis in AXES:
                leaving = []
                for group in layout.groups(axis):
                    if len({rank // gpus_per_node for rank in group}) > 1:
                        leaving.append(group)
                assert layout.crossings(axis, gpus_per_node) == leaving


@pytest.mark.parametrize("order", ORDERS_WITHOUT_CP)
def test_an_order_without_cp_is_one_with_cp_of_size_one_anywhere(order):
    axes = order.split("-")
    for world_size in range(1, LARGEST_WORLD + 1):
        for a, b, c in shapes(world_size, 3):
            layout = build(order, (a, b, c))
            groups = brute_force((a, b, c, 1))[1] if world_size <= 16 else None
            full = [build("-".join([*axes[:i], "cp", *axes[i:]]), (*(a, b, c)[:i], 1, *(a, b, c)[i:])) for i in (0, 3)]
            for i, axis in enumerate(axes):
                assert layout.groups(axis) == full[0].groups(axis) == full[1].groups(axis)
                assert groups is None or layout.groups(axis) == groups[(i,)]
            assert layout.groups("tp", "pp") == full[0].groups("tp", "cp", "pp")
            assert layout.groups("cp") == [[rank] for rank in range(world_size)]


def test_the_order_in_which_axes_are_named_does_not_matter():
    layout = ParallelLayout(48, tp_size=2, pp_size=4, cp_size=3, order="cp-dp-tp-pp")
    for axes in itertools.permutations(("dp", "cp", "pp")):
        assert layout.groups(*axes) == layout.groups("dp", "cp", "pp")
    assert layout.groups("dp", "dp") == layout.groups("dp")


# The 16 GPUs of two DGX-1 boxes, and the other order in use.
GOLDEN = [
    (
        ParallelLayout(16, tp_size=2, pp_size=4),
        [[0, 1], [2, 3], [4, 5], [6, 7], [8, 9], [10, 11], [12, 13], [14, 15]],
        [[0, 2], [1, 3], [4, 6], [5, 7], [8, 10], [9, 11], [12, 14], [13, 15]],
        [[0, 4, 8, 12], [1, 5, 9, 13], [2, 6, 10, 14], [3, 7, 11, 15]],
        [[0, 1, 4, 5, 8, 9, 12, 13], [2, 3, 6, 7, 10, 11, 14, 15]],
    ),
    (
        ParallelLayout(16, tp_size=4, pp_size=2, order="tp-dp-pp"),
        [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11], [12, 13, 14, 15]],
        [[0, 4], [1, 5], [2, 6], [3, 7], [8, 12], [9, 13], [10, 14], [11, 15]],
        [[0, 8], [1, 9], [2, 10], [3, 11], [4, 12], [5, 13], [6, 14], [7, 15]],
        [[0, 1, 2, 3, 8, 9, 10, 11], [4, 5, 6, 7, 12, 13, 14, 15]],
    ),
    (
        ParallelLayout(8, tp_size=2, pp_size=2, order="tp-pp-dp"),
        [[0, 1], [2, 3], [4, 5], [6, 7]],
        [[0, 4], [1, 5], [2, 6], [3, 7]],
        [[0, 2], [1, 3], [4, 6], [5, 7]],
        [[0, 1, 2, 3], [4, 5, 6, 7]],
    ),
]


@pytest.mark.parametrize(("layout", "tp", "dp", "pp", "replicas"), GOLDEN)
def test_published_group_lists(layout, tp, dp, pp, replicas):
    assert layout.dp_size == 2
    assert layout.groups("tp") == tp
    assert layout.groups("dp") == dp
    assert layout.groups("pp") == pp
    assert layout.groups("tp", "pp") == replicas
    assert len(tp) == layout.world_size // layout.tp_size


def test_tensor_groups_stay_inside_a_box_of_eight():
    layout = ParallelLayout(16, tp_size=2, pp_size=4)
    assert layout.crossings("tp", 8) == []
    assert layout.crossings("dp", 8) == []
    assert layout.crossings("pp", 8) == layout.groups("pp")
    inside, across = (ParallelLayout(8, ep_size=4, order=order) for order in ("tp-cp-ep-dp-pp", "tp-cp-dp-ep-pp"))
    assert inside.crossings("ep", 4) == across.crossings("expert_dp", 4) == []
    assert across.crossings("ep", 4) == [[0, 2, 4, 6], [1, 3, 5, 7]]


# ---- two grids over the same ranks

MEGATRON_AXES = ("tp", "cp", "ep", "dp", "pp")
OURS = {"tp": "expert_tp", "ep": "ep", "dp": "expert_dp", "pp": "pp"}  # what Megatron-LM's names mean among experts


def megatron_groups(order: str, sizes: dict[str, int], *within: str) -> list[list[int]]:
    """Megatron-LM's rule: five nested loops, the last axis of the order outermost; one that is left out has size 1."""
    named = [*order.split("-"), *(axis for axis in MEGATRON_AXES if axis not in order.split("-"))]
    assert all(sizes[axis] == 1 for axis in named if axis not in order.split("-"))
    groups: dict[tuple[int, ...], list[int]] = {}
    ranks = itertools.count()
    for e in range(sizes[named[4]]):
        for d in range(sizes[named[3]]):
            for c in range(sizes[named[2]]):
                for b in range(sizes[named[1]]):
                    for a in range(sizes[named[0]]):
                        coords = dict(zip(named, (a, b, c, d, e)))
                        outside = tuple(coords[axis] for axis in named if axis not in within)
                        groups.setdefault(outside, []).append(next(ranks))
    return list(groups.values())


GENERATORS = [  # the dense one has no ep, the experts' no cp
    {"tp": 2, "cp": 3, "ep": 1, "dp": 2, "pp": 2},
    {"tp": 2, "cp": 1, "ep": 3, "dp": 2, "pp": 2},
    {"tp": 1, "cp": 1, "ep": 4, "dp": 3, "pp": 2},
]


@pytest.mark.parametrize("sizes", GENERATORS, ids=str)
def test_a_grid_follows_megatron_s_rule_in_every_order(sizes):
    needed = {axis for axis, size in sizes.items() if size > 1}
    orders = [order for k in range(len(needed), 6) for order in itertools.permutations(MEGATRON_AXES, k)]
    for order in orders:
        if needed <= set(order):
            grid = Grid({axis: sizes[axis] for axis in order})
            for within in itertools.chain.from_iterable(itertools.combinations(order, k) for k in (1, 2, 3)):
                groups = megatron_groups("-".join(order), sizes, *within)
                assert grid.groups(*within) == groups, (order, within)
                assert grid.group_of(17, *within) == next(group for group in groups if 17 in group)


def test_a_grid_knows_its_axes():
    grid = Grid({"a": 2, "b": 3})
    assert [grid.rank_at(**grid.coords(rank)) for rank in range(6)] == list(range(6))
    for question in (lambda: grid.rank_at(d=0), lambda: grid.groups("d"), lambda: grid.group_of(0, "d")):
        with pytest.raises(ValueError, match="axis 'd' is unknown: use one of a, b"):
            question()


@pytest.mark.parametrize("order", ORDERS + ORDERS_WITHOUT_CP + ORDERS_WITH_EP[::5])
def test_both_grids_of_a_layout_are_megatron_s(order):
    """ep stands before dp unless it is named, as in Megatron-LM's default order; pipelines that differ are refused."""
    stood = 0
    cp_sizes = (1, 2) if "cp" in order else (1,)
    for tp, cp, pp, etp, ep in itertools.product((1, 2), cp_sizes, (1, 2, 3), (1, 2, 4), (1, 2, 3, 4)):
        if (etp, ep) == (tp, 1):
            continue  # the default, below
        dense = {"tp": tp, "cp": cp, "ep": 1, "dp": 48 // (tp * cp * pp), "pp": pp}
        if 48 // pp % (etp * ep):
            with pytest.raises(ValueError, match=r"does not divide the expert grid's world_size/pp_size=\d+: use "):
                ParallelLayout(48, tp, pp, cp, order, ep_size=ep, expert_tp_size=etp)
            continue
        experts = {"tp": etp, "cp": 1, "ep": ep, "dp": 48 // (etp * ep * pp), "pp": pp}
        with_ep = order if "ep" in order else order.replace("dp", "ep-dp")
        if megatron_groups(with_ep, dense, "pp") != megatron_groups(with_ep, experts, "pp"):
            with pytest.raises(ValueError, match=r"makes pipelines such as .* in the dense grid, but .* name pp last"):
                ParallelLayout(48, tp, pp, cp, order, ep_size=ep, expert_tp_size=etp)
            assert not order.endswith("pp")
            continue
        layout = ParallelLayout(48, tp, pp, cp, order, ep_size=ep, expert_tp_size=etp)
        stood += 1
        assert layout.expert_dp_size == layout.size("expert_dp") == experts["dp"]
        for axes in [("tp",), ("ep",), ("dp",), ("tp", "ep"), ("tp", "ep", "dp"), ("ep", "dp", "pp")]:
            groups = megatron_groups(with_ep, experts, *axes)
            assert layout.groups(*(OURS[axis] for axis in axes)) == groups, (layout, axes)
        for axis in AXES:
            assert layout.groups(axis) == megatron_groups(with_ep, dense, axis)
        assert layout.groups("pp") == layout.expert.groups("pp")
        for rank in (0, 17, 47):
            assert layout.expert.rank_at(**layout.expert.coords(rank)) == rank
            for axis in EXPERT_AXES:
                assert layout.group_of(rank, axis)[layout.expert.coords(rank)[axis]] == rank
    assert stood


@pytest.mark.parametrize("order", ORDERS)
def test_experts_lie_as_dense_layers_do_unless_their_sizes_are_given(order):
    for shape in itertools.chain.from_iterable(shapes(n) for n in (1, 8, 12, 24)):
        layout = build(order, shape)
        assert (layout.ep_size, layout.expert_tp_size) == (1, layout.tp_size)
        assert layout.groups("expert_tp") == layout.groups("tp")
        assert layout.groups("expert_dp") == layout.groups("cp", "dp")
        assert layout.groups("expert_tp", "expert_dp") == layout.groups("tp", "cp", "dp")
        assert layout.groups("ep") == [[rank] for rank in range(layout.world_size)]
        assert [layout.size(axis) for axis in EXPERT_AXES] == [layout.tp_size, 1, layout.expert_dp_size]
        for rank in {0, layout.world_size // 3, layout.world_size - 1}:
            for axis in EXPERT_AXES:
                assert rank in layout.group_of(rank, axis)
                assert layout.group_of(rank, axis) in layout.groups(axis)


@pytest.mark.parametrize("order", ["tp-cp-dp-pp", "tp-cp-ep-dp-pp"])
def test_experts_of_sixteen_ranks(order):
    """t = c = d = p = 2, with four times four experts, each whole: ep takes the place of tp and cp."""
    layout = ParallelLayout(16, 2, 2, 2, order, ep_size=4, expert_tp_size=1)
    assert layout.groups("cp") == [[0, 2], [1, 3], [4, 6], [5, 7], [8, 10], [9, 11], [12, 14], [13, 15]]
    assert layout.groups("dp") == [[0, 4], [1, 5], [2, 6], [3, 7], [8, 12], [9, 13], [10, 14], [11, 15]]
    assert layout.groups("ep") == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11], [12, 13, 14, 15]]
    assert layout.groups("expert_dp") == [[0, 4], [1, 5], [2, 6], [3, 7], [8, 12], [9, 13], [10, 14], [11, 15]]
    assert layout.groups("expert_tp") == [[rank] for rank in range(16)]


@pytest.mark.parametrize("order", ORDERS)
def test_the_ranks_of_a_tp_ep_group_have_each_expert_once_in_each_of_its_shards(order):
    for tp, pp, etp, ep in itertools.product((1, 2), (1, 2), (1, 2, 4), (1, 2, 4)):
        try:
            layout = ParallelLayout(16, tp, pp, order=order, ep_size=ep, expert_tp_size=etp)
        except ValueError:
            continue  # the pipelines of its grids differ
        for ranks in layout.groups("expert_tp", "ep"):
            found = Counter(expert for rank in ranks for expert in layout.experts_of(rank, 12 * ep))
            assert found == dict.fromkeys(range(12 * ep), etp)
        for ranks in layout.groups("expert_dp"):
            assert len({layout.experts_of(rank, 4 * ep) for rank in ranks}) == 1


def test_experts_that_cannot_be_divided_are_refused():
    with pytest.raises(ValueError, match="ep_size=4 does not divide num_experts=6: use ep_size 1, 2, 3 or 6, or num_e"):
        ParallelLayout(8, ep_size=4).experts_of(0, 6)


# ---- what does not fit


def suggestions(message: str) -> dict[str, list[int]]:
    """The numbers offered after 'use', by the name of the size they are offered for."""
    way_out = message.split(": use ")[1]
    found = re.findall(r"(\w+_size|product is) ([\d, or.]+)", way_out)
    return {name: [int(number) for number in re.findall(r"\d+", numbers)] for name, numbers in found}


def check_way_out(message: str, sizes: dict[str, int]) -> None:
    """Every number that the message offers makes a legal layout when it is taken."""
    offered = suggestions(message)
    assert offered, message
    for name, numbers in offered.items():
        assert numbers, message
        for number in numbers:
            if name == "product is":
                assert sizes["world_size"] % number == 0, message
            else:
                taken = {**sizes, name: number}
                assert taken["world_size"] % (taken["tp_size"] * taken["pp_size"] * taken["cp_size"]) == 0, message


def try_sizes(world_size: int, tp_size: int, pp_size: int, cp_size: int) -> bool:
    """True when the layout stands; a refusal must name the numbers and offer sizes that are legal."""
    sizes = {"world_size": world_size, "tp_size": tp_size, "pp_size": pp_size, "cp_size": cp_size}
    try:
        layout = ParallelLayout(world_size, tp_size, pp_size, cp_size)
    except ValueError as error:
        message = str(error)
        product = tp_size * pp_size * cp_size
        assert f" = {product} does not divide world_size={world_size}: use " in message
        assert f"tp_size={tp_size} * " in message
        assert f"pp_size={pp_size} = " in message
        assert (cp_size == 1) or f"cp_size={cp_size}" in message
        if product <= 2 * LARGEST_WORLD:  # larger products: their way out is left to the next test
            check_way_out(message, sizes)
        return False
    assert (layout.world_size, layout.tp_size, layout.pp_size, layout.cp_size) == tuple(sizes.values())
    return True


@pytest.mark.parametrize("cp_size", range(1, LARGEST_WORLD + 1))
def test_sizes_stand_exactly_when_they_multiply_to_the_world(cp_size):
    """Every tp, pp and cp up to 32, in every world up to 32; one world each where the product is above 64."""
    sizes = range(1, LARGEST_WORLD + 1)
    for tp_size, pp_size in itertools.product(sizes, sizes):
        product = tp_size * pp_size * cp_size
        worlds = sizes if product <= 2 * LARGEST_WORLD else [(5 * tp_size + 7 * pp_size) % LARGEST_WORLD + 1]
        for world_size in worlds:
            legal = any(product * dp_size == world_size for dp_size in range(1, world_size // product + 1))
            assert try_sizes(world_size, tp_size, pp_size, cp_size) == legal


@given(st.integers(1, 200_000), *[st.integers(1, 300)] * 3)
def test_offered_sizes_are_legal_for_any_world(world_size, tp_size, pp_size, cp_size):
    sizes = {"world_size": world_size, "tp_size": tp_size, "pp_size": pp_size, "cp_size": cp_size}
    try:
        ParallelLayout(**sizes)
    except ValueError as error:
        check_way_out(str(error), sizes)


MESSAGES = [
    ({"world_size": 16, "tp_size": 3}, "tp_size=3 * pp_size=1 = 3 does not divide world_size=16: "
     "use tp_size 1, 2, 4, 8 or 16, or world_size 15 or 18"),
    ({"world_size": 16, "tp_size": 2, "pp_size": 3, "cp_size": 2}, "tp_size=2 * cp_size=2 * pp_size=3 = 12 "
     "does not divide world_size=16: use pp_size 1, 2 or 4, or world_size 12 or 24"),
    ({"world_size": 8, "tp_size": 16, "pp_size": 16}, "tp_size=16 * pp_size=16 = 256 does not divide world_size=8: "
     "use sizes whose product is 1, 2, 4 or 8, or world_size 256"),
    ({"world_size": 0}, "world_size=0 must be at least 1"),
    ({"world_size": 8, "tp_size": -2}, "tp_size=-2 must be at least 1"),
    ({"world_size": 8, "pp_size": 2.0}, "pp_size=2.0 must be a whole number"),
    ({"world_size": 8, "cp_size": True}, "cp_size=True must be a whole number"),
    ({"world_size": "8"}, "world_size='8' must be a whole number"),
    ({"world_size": None}, "world_size=None must be a whole number"),
    *[({"world_size": 8, "order": order}, f"order={order!r} is not an order of the axes: "
       "use each of tp, dp, pp (and cp, ep) once, as in 'tp-cp-ep-dp-pp'")
      for order in ("tp-dp", "tp-dp-pp-tp", "ep-tp-dp-pp-ep", "tp-dp-pp-xp", "", "tp_dp_pp", "tp-dp-pp-", None,
                    ("tp", "dp", "pp"))],
    ({"world_size": 8, "cp_size": 2, "order": "tp-dp-pp"},
     "order='tp-dp-pp' leaves out cp while cp_size=2: name cp in it, as in 'tp-cp-dp-pp'"),
    ({"world_size": 16, "tp_size": 2, "pp_size": 2, "ep_size": 3}, "expert_tp_size=2 * ep_size=3 = 6 does not divide "
     "the expert grid's world_size/pp_size=8: use ep_size 1, 2 or 4"),
    ({"world_size": 16, "pp_size": 2, "ep_size": 2, "expert_tp_size": 8}, "expert_tp_size=8 * ep_size=2 = 16 does not "
     "divide the expert grid's world_size/pp_size=8: use expert_tp_size 1, 2 or 4, or ep_size 1"),
    ({"world_size": 16, "pp_size": 2, "ep_size": 3, "expert_tp_size": 5}, "expert_tp_size=5 * ep_size=3 = 15 does not "
     "divide the expert grid's world_size/pp_size=8: use sizes whose product is 1, 2, 4 or 8"),
    ({"world_size": 16, "ep_size": 0}, "ep_size=0 must be at least 1"),
    ({"world_size": 16, "expert_tp_size": 1.5}, "expert_tp_size=1.5 must be a whole number"),
    ({"world_size": 16, "tp_size": 2, "pp_size": 2, "expert_tp_size": 1, "order": "tp-pp-dp"},
     "order='tp-pp-dp' makes pipelines such as [0, 2] in the dense grid, but [0, 1] in the expert grid: "
     "name pp last, as in 'tp-cp-dp-pp'"),
]  # fmt: skip


@pytest.mark.parametrize(("sizes", "message"), MESSAGES)
def test_refusals_name_the_value_the_rule_and_the_way_out(sizes, message):
    with pytest.raises(ValueError) as refusal:
        ParallelLayout(**sizes)
    assert str(refusal.value) == message


CALLS = [
    (lambda it: it.groups(), "a group needs at least one axis: use 'tp', 'cp', 'dp' or 'pp'"),
    (lambda it: it.group_of(0), "a group needs at least one axis: use 'tp', 'cp', 'dp' or 'pp'"),
    (lambda it: it.groups("tensor"), "axis 'tensor' is unknown: use one of tp, cp, dp, pp"),
    (lambda it: it.crossings("tensor", 8), "axis 'tensor' is unknown: use one of tp, cp, dp, pp"),
    (
        lambda it: replace(it, ep_size=2).groups("ep", "tp"),
        "axis 'tp' is unknown: use one of expert_tp, ep, expert_dp, pp",
    ),
    (lambda it: it.size("world"), "axis 'world' is unknown: use one of tp, cp, dp, pp"),
    (lambda it: it.crossings("tp", 0), "gpus_per_node=0 must be at least 1"),
    (lambda it: it.coords(16), "rank=16 must be a whole number from 0 to 15: world_size is 16"),
    (lambda it: it.coords(1.5), "rank=1.5 must be a whole number from 0 to 15: world_size is 16"),
    (lambda it: it.coords(-1), "rank=-1 must be a whole number from 0 to 15: world_size is 16"),
    (lambda it: it.group_of("3", "tp"), "rank='3' must be a whole number from 0 to 15: world_size is 16"),
    (lambda it: it.rank_at(tp=2), "tp=2 must be a whole number from 0 to 1: tp_size is 2"),
    (lambda it: it.rank_at(tp=1.5), "tp=1.5 must be a whole number from 0 to 1: tp_size is 2"),
    (lambda it: it.rank_at(pp=-1), "pp=-1 must be a whole number from 0 to 3: pp_size is 4"),
]


@pytest.mark.parametrize(("call", "message"), CALLS)
def test_wrong_questions_are_refused_in_words(call, message):
    with pytest.raises(ValueError) as refusal:
        call(ParallelLayout(16, tp_size=2, pp_size=4))
    assert str(refusal.value) == message


# ---- as an object


def test_numpy_integers_are_whole_numbers():
    layout = ParallelLayout(np.int64(16), tp_size=np.int32(2), pp_size=np.int8(4))
    assert layout == ParallelLayout(16, tp_size=2, pp_size=4)
    assert type(layout.world_size) is int
    assert layout.coords(np.int64(6)) == (0, 0, 1, 1)
    assert all(type(number) is int for number in layout.coords(np.int64(6)))


def test_frozen_hashable_and_picklable_after_use():
    layout = ParallelLayout(16, tp_size=2, pp_size=4)
    layout.groups("dp")
    with pytest.raises(AttributeError):
        layout.tp_size = 4  # type: ignore[misc]
    copy = pickle.loads(pickle.dumps(layout))
    assert copy == layout
    assert hash(copy) == hash(layout)
    assert copy.groups("dp") == layout.groups("dp")


def test_table_of_a_small_layout_shows_every_rank():
    assert str(ParallelLayout(16, tp_size=2, pp_size=4)).split("\n") == [
        "16 ranks = tp 2 x dp 2 x pp 4, fastest axis first",
        "     | dp 0  | dp 1",
        "pp 0 | 0 1   | 2 3",
        "pp 1 | 4 5   | 6 7",
        "pp 2 | 8 9   | 10 11",
        "pp 3 | 12 13 | 14 15",
    ]


@pytest.mark.parametrize("order", ORDERS)
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
    assert sorted(itertools.chain(*shards)) == sorted(itertools.chain(*replicas)) == list(range(16))
    assert all(len({*shard} & {*across}) <= 1 for shard in shards for across in replicas)
    with pytest.raises(ValueError, match=r"shard_size=3 does not divide dp_size \* cp_size = 8: use 1, 2, 4 or 8"):
        layout.shard_groups(3)


def test_experts_have_as_many_copies_as_all_else():
    for order in ("tp-cp-dp-pp", "tp-cp-dp-ep-pp"):
        for shard_size, members in ((8, 4), (4, 2), (2, 1)):
            layout = ParallelLayout(16, tp_size=2, ep_size=4, expert_tp_size=1, order=order)
            shards, replicas = layout.shard_groups(shard_size, experts=True)
            assert {*map(len, shards)} == {members} and {*map(len, replicas)} == {8 // shard_size}
            for groups in (shards, replicas):
                assert sorted(itertools.chain(*groups)) == [*range(16)]
            for shard, across in itertools.product(shards, replicas):
                assert len({*shard} & {*across}) <= 1
            for ranks in layout.groups("expert_dp"):
                assert [shard for shard in shards if {*shard} <= {*ranks}] == [
                    ranks[at : at + members] for at in range(0, len(ranks), members)
                ]
    fault = (
        r"expert_tp_size=1 \* ep_size=4 = 4 does not divide a copy's tp_size\*shard_size=2: use .*ep_size 1 or 2, or"
    )
    with pytest.raises(ValueError, match=f"{fault} shard_size 2, 4 or 8"):
        layout.shard_groups(1)
    with pytest.raises(ValueError, match=r"shard_size=3 does not divide dp_size \* cp_size = 8: use 2, 4 or 8"):
        layout.shard_groups(3)
