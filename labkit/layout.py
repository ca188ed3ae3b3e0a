"""Places ranks in two grids, one for the experts and a dense one for all other layers, and lists
their groups.

A mixture-of-experts layer has many MLPs, its *experts*, and sends each token to a few of them.
Ranks may share experts in other groups than they share all other, *dense*, layers: hence two grids.
Without experts the dense grid is all you need.

Integers only: no torch, no process. Source: the order of groups and of their members, and the
experts' grid, are Megatron-LM's (arXiv 2104.04473, section 3; ``RankGenerator`` in its
``parallel_state.py``).
"""

import itertools
import math
from dataclasses import KW_ONLY, dataclass
from functools import cached_property
from typing import NamedTuple

from labkit.grid import Grid
from labkit.partition import check_divides, multiples_near
from labkit.sizes import (
    Misfit,
    check_size,
    divisors,
    does_not_divide,
    either,
    ranks_text,
)

# The axes of the dense grid: tensor, context, data and pipeline parallel. Ranks share every layer,
# every sequence, the batch, the list of layers. In Megatron-LM's default order, the fastest first.
AXES = ("tp", "cp", "dp", "pp")
OPTIONAL_AXES = {"cp"}  # may be left out of an order, and is not shown, while its size is 1
EXPERT_AXES = ("expert_tp", "ep", "expert_dp")  # of the expert grid, which also has pp
# Without an expert grid of its own, each expert axis stands for these dense axes; ep has size 1.
AS_DENSE = {"expert_tp": ("tp",), "ep": (), "expert_dp": ("dp", "cp")}


class Coords(NamedTuple):
    """A rank's coordinate on each dense axis."""

    tp: int
    cp: int
    dp: int
    pp: int


@dataclass(frozen=True)
class ParallelLayout:
    """``world_size`` ranks in two grids, ``dense`` (tp, cp, dp, pp) and ``expert`` (expert_tp, ep,
    expert_dp, pp).

    ``order`` lists the axes fastest first, in any permutation; ``cp`` may be left out while
    ``cp_size`` is 1. In the expert grid, expert_tp replaces tp, expert_dp replaces dp, and ep
    stands where ``order`` has it, or else before expert_dp. By default the expert grid equals the
    dense one: expert_tp is tp, and expert_dp is cp and dp together.

    Raises:
        ValueError: a size does not fit, or the pipelines of the two grids differ; the message says
            what would fit.

    >>> sizes = dict(pp_size=2, tp_size=2, ep_size=4, expert_tp_size=1)
    >>> layout = ParallelLayout(8, order="tp-dp-pp", **sizes)
    >>> layout.dp_size, layout.groups("dp"), layout.groups("ep")
    (2, [[0, 2], [1, 3], [4, 6], [5, 7]], [[0, 1, 2, 3], [4, 5, 6, 7]])
    """

    world_size: int
    tp_size: int = 1
    pp_size: int = 1
    cp_size: int = 1
    order: str = "tp-cp-dp-pp"
    _: KW_ONLY
    ep_size: int = 1
    expert_tp_size: int = None  # pyright: ignore[reportAssignmentType]  (tp_size unless given)

    def __post_init__(self):
        if self.expert_tp_size is None:
            object.__setattr__(self, "expert_tp_size", self.tp_size)
        for name in ("world_size", "tp_size", "pp_size", "cp_size", "ep_size", "expert_tp_size"):
            # The class is frozen: it has no other way to normalize a size.
            object.__setattr__(self, name, check_size(name, getattr(self, name)))
        self._check_order()
        n = self.world_size
        sizes = {"tp": self.tp_size, "cp": self.cp_size, "pp": self.pp_size}
        product = math.prod(sizes.values())
        if n % product:
            fits = either(multiples_near(n, product))
            raise _misfit(sizes, "world_size", n, more_advice=f", or world_size {fits}")
        if self.has_expert_grid:
            self._check_experts()

    @property
    def dp_size(self) -> int:
        """The number of data-parallel replicas: d = n / (t * c * p)."""
        return self.world_size // (self.tp_size * self.cp_size * self.pp_size)

    @property
    def expert_dp_size(self) -> int:
        """How many ranks have copies of the same experts."""
        return self.world_size // (self.expert_tp_size * self.ep_size * self.pp_size)

    @property
    def has_expert_grid(self) -> bool:
        """Whether the experts lie in a grid of their own."""
        return self.ep_size != 1 or self.expert_tp_size != self.tp_size

    @cached_property
    def axes(self) -> tuple[str, ...]:
        """The dense axes, fastest first; those that ``order`` leaves out, of size 1, come last."""
        named = [axis for axis in self.order.split("-") if axis != "ep"]
        return tuple(dict.fromkeys([*named, *AXES]))

    @cached_property
    def dense(self) -> Grid:
        """The grid of all layers but the experts."""
        return Grid({axis: getattr(self, f"{axis}_size") for axis in self.axes})

    @cached_property
    def expert(self) -> Grid:
        """The grid of the experts, with the same ranks and pipelines; by default the dense grid
        itself.
        """
        if not self.has_expert_grid:
            return self.dense
        axes = self.order.split("-")
        if "ep" not in axes:
            axes.insert(axes.index("dp"), "ep")
        names = {"tp": "expert_tp", "ep": "ep", "dp": "expert_dp", "pp": "pp"}  # it has no cp
        expert_axes = [names[axis] for axis in axes if axis in names]
        return Grid({axis: getattr(self, f"{axis}_size") for axis in expert_axes})

    def size(self, axis: str) -> int:
        """Return the number of ranks in one group of ``axis``."""
        grid, names = self._grid_of((axis,))
        return math.prod(grid.sizes[name] for name in grid.known(names))

    def groups(self, *axes: str) -> list[list[int]]:
        """Return the groups of one axis, or of several of one grid taken together, as lists of
        global ranks.

        ``groups("tp", "pp")`` are the model replicas. Groups and members come in Megatron-LM's
        order, which depends on the layout's ``order``, not on that of the arguments.

        >>> ParallelLayout(8, tp_size=2, pp_size=2).groups("tp", "pp")
        [[0, 1, 4, 5], [2, 3, 6, 7]]
        """
        grid, names = self._grid_of(axes)
        return grid.groups(*names)

    def group_of(self, rank: int, *axes: str) -> list[int]:
        """Return the one group of ``axes`` that ``rank`` is a member of."""
        grid, names = self._grid_of(axes)
        return grid.group_of(rank, *names)

    def coords(self, rank: int) -> Coords:
        """Return the coordinate of ``rank`` on each dense axis.

        >>> ParallelLayout(16, tp_size=2, pp_size=4).coords(6)
        Coords(tp=0, cp=0, dp=1, pp=1)
        """
        return Coords(**self.dense.coords(rank))

    def rank_at(self, tp: int = 0, cp: int = 0, dp: int = 0, pp: int = 0) -> int:
        """Return the rank at these coordinates: the inverse of `coords`."""
        return self.dense.rank_at(tp=tp, cp=cp, dp=dp, pp=pp)

    def experts_of(self, rank: int, num_experts: int) -> range:
        """Return which of a layer's experts a rank has: as many consecutive ones as any other rank
        of its ep group.

        >>> ParallelLayout(8, ep_size=4).experts_of(5, num_experts=8)
        range(2, 4)
        """
        check_divides(self.ep_size, "num_experts", num_experts, parts_name="ep_size")
        size = num_experts // self.ep_size
        ep_rank = self.group_of(rank, "ep").index(rank)
        return range(ep_rank * size, (ep_rank + 1) * size)

    def crossings(self, axis: str, gpus_per_node: int) -> list[list[int]]:
        """Return the groups of an axis that span more than one node of ``gpus_per_node`` ranks."""
        groups = self.groups(axis)
        size = check_size("gpus_per_node", gpus_per_node)
        return [group for group in groups if group[0] // size != group[-1] // size]

    def shard_groups(
        self, shard_size: int, experts: bool = False
    ) -> tuple[list[list[int]], list[list[int]]]:
        """Return the shard groups of hybrid sharding, and its replicate groups.

        A shard group holds one copy of the weights, divided among its ranks, and there are several
        copies. A replicate group joins the ranks that hold the same shard of different copies.

        A shard group is ``shard_size`` consecutive members of a dp_cp group. With ``experts``, each
        expert_dp group is split into equally many shard groups, so that there are as many copies.

        >>> ParallelLayout(8).shard_groups(4)
        ([[0, 1, 2, 3], [4, 5, 6, 7]], [[0, 4], [1, 5], [2, 6], [3, 7]])
        >>> ParallelLayout(8, ep_size=2).shard_groups(4, experts=True)
        ([[0, 2], [4, 6], [1, 3], [5, 7]], [[0, 4], [2, 6], [1, 5], [3, 7]])
        """
        self.check_shard_size(shard_size)
        groups = self.groups("expert_dp") if experts else self.groups("dp", "cp")
        num_copies = self.dp_size * self.cp_size // shard_size
        ranks_per_copy = len(groups[0]) // num_copies
        shard = []
        replicate = []
        for group in groups:
            for start in range(0, len(group), ranks_per_copy):
                shard.append(group[start : start + ranks_per_copy])
            for start in range(ranks_per_copy):
                replicate.append(group[start::ranks_per_copy])
        return shard, replicate

    def check_shard_size(self, shard_size: int) -> None:
        """Raise a ValueError unless shard groups of this size divide the replicas, and each copy
        has whole sets of experts.
        """
        num_replicas = self.dp_size * self.cp_size
        sizes = {"expert_tp": self.expert_tp_size, "ep": self.ep_size}
        expert_size = math.prod(sizes.values())
        # One copy of a stage lies on tp_size * size ranks. It must contain whole sets of experts,
        # each on expert_tp_size * ep_size ranks.
        fits = [size for size in divisors(num_replicas) if size * self.tp_size % expert_size == 0]
        if num_replicas % check_size("shard_size", shard_size):
            fault = f"shard_size={shard_size} does not divide dp_size * cp_size = {num_replicas}"
            rule = "shard_size must divide dp_size * cp_size"
            raise Misfit(rule, fault, f"use {either(fits)}")
        if shard_size not in fits:
            ranks = self.tp_size * shard_size
            more_advice = f", or shard_size {either(fits)}"
            raise _misfit(sizes, "a copy's tp_size*shard_size", ranks, more_advice)

    def __str__(self) -> str:
        """Return a table: one row per pipeline stage, one column per dp (and cp) rank, a tp group
        in each cell.
        """
        sizes = _shown_axes(self.dense.sizes)
        stages = min(self.pp_size, 16)
        head = len(f"pp {stages - 1}")
        rows = [" " * head, *(f"pp {pp}".ljust(head) for pp in range(stages))]
        shown = 0
        for dp, cp in itertools.product(range(self.dp_size), range(self.cp_size)):
            column = [f"dp {dp} cp {cp}" if "cp" in sizes else f"dp {dp}"]
            for pp in range(stages):
                column.append(_cell(self.group_of(self.rank_at(dp=dp, cp=cp, pp=pp), "tp")))
            width = max(map(len, column))
            if shown and len(rows[0]) + 3 + width > 120:
                break
            rows = [f"{row} | {cell.ljust(width)}" for row, cell in zip(rows, column)]
            shown += 1
        factors = _product_text(sizes)
        if self.expert is not self.dense:
            factors += f" = {_product_text(self.expert.sizes)}"
        lines = [f"{self.world_size} ranks = {factors}, fastest axis first", *map(str.rstrip, rows)]
        replicas = self.dp_size * self.cp_size
        if shown < replicas or stages < self.pp_size:
            stages_text = f"{stages} of {self.pp_size} stages"
            lines.append(f"(only {stages_text}, {shown} of {replicas} replicas shown)")
        return "\n".join(lines)

    def _grid_of(self, axes: tuple[str, ...]) -> tuple[Grid, list[str]]:
        """Return the grid that has these axes, and what they are called there."""
        if not axes:
            raise ValueError(f"a group needs at least one axis: use {either([*map(repr, AXES)])}")
        if set(axes).isdisjoint(EXPERT_AXES):
            return self.dense, list(axes)
        if self.expert is not self.dense:
            return self.expert, list(axes)
        names = []
        for axis in axes:
            names += AS_DENSE.get(axis, (axis,))
        return self.dense, names

    def _check_order(self) -> None:
        """Raise a ValueError unless ``order`` names each axis once; ep, and cp of size 1, may be
        left out.
        """
        named = self.order.split("-") if isinstance(self.order, str) else []
        if len(set(named)) != len(named) or OPTIONAL_AXES.union(named) - {"ep"} != set(AXES):
            rule = "use each of tp, dp, pp (and cp, ep) once, as in 'tp-cp-ep-dp-pp'"
            raise ValueError(f"order={self.order!r} is not an order of the axes: {rule}")
        for axis in OPTIONAL_AXES.difference(named):
            if (size := getattr(self, f"{axis}_size")) > 1:
                left_out = f"order={self.order!r} leaves out {axis} while {axis}_size={size}"
                rule = f"order must name {axis} if {axis}_size is above 1"
                raise Misfit(rule, left_out, f"name {axis} in it, as in 'tp-cp-dp-pp'")

    def _check_experts(self) -> None:
        ranks = self.world_size // self.pp_size
        sizes = {"expert_tp": self.expert_tp_size, "ep": self.ep_size}
        if ranks % math.prod(sizes.values()):
            raise _misfit(sizes, "the expert grid's world_size/pp_size", ranks)
        dense = self.dense.group_of(0, "pp")
        expert = self.expert.group_of(0, "pp")
        if dense != expert:  # one is enough: all pipelines of a grid have the same stride
            fault = f"order={self.order!r} makes pipelines such as {ranks_text(dense)} in the dense"
            fault += f" grid, but {ranks_text(expert)} in the expert grid"
            rule = "both grids must have the same pipelines"
            raise Misfit(rule, fault, "name pp last, as in 'tp-cp-dp-pp'")


def _shown_axes(sizes: dict[str, int]) -> dict[str, int]:
    return {axis: size for axis, size in sizes.items() if size > 1 or axis not in OPTIONAL_AXES}


def _product_text(sizes: dict[str, int]) -> str:
    return " x ".join(f"{axis} {size}" for axis, size in sizes.items())


def _misfit(sizes: dict[str, int], name: str, ranks: int, more_advice: str = "") -> Misfit:
    """Return the error that the product of the sizes does not divide a number of ranks, with what
    would fit.
    """
    sizes = _shown_axes(sizes)
    product = math.prod(sizes.values())
    ways = []
    for axis, size in sizes.items():
        others = product // size
        if ranks % others == 0:
            ways.append(f"{axis}_size {either(divisors(ranks // others))}")
    if not ways:  # no single size can be blamed: say what their product may be
        ways.append(f"sizes whose product is {either(divisors(ranks))}")
    factors = {f"{axis}_size": size for axis, size in sizes.items()}
    rule = f"{' * '.join(factors)} must divide {name}"
    fault = does_not_divide(name, ranks, **factors)
    return Misfit(rule, fault, f"use {', or '.join(ways)}{more_advice}")


def _cell(ranks: list[int]) -> str:
    return " ".join(map(str, ranks)) if len(ranks) <= 4 else f"{ranks[0]} {ranks[1]} .. {ranks[-1]}"
