"""Decide where each GPU's box goes: nodes side by side and below each other, with boxes as large as possible."""

from functools import lru_cache
from math import ceil
from typing import NamedTuple

PAD, GAP, HEAD = 0.12, 0.24, 0.50  # around a node's GPUs, between nodes, above a node for its name; one box is 1
FULL_ROWS = 1.25  # how much smaller boxes may get so that every row of nodes is full: patterns then line up
MAX_NAMED_NODES = 16  # with more, their names cost more room than they are worth
Point = tuple[float, float]


class FloorPlan(NamedTuple):
    """A grid of nodes, each a grid of GPUs; lengths are in boxes, and y goes down."""

    num_nodes: int
    node_size: int  # GPUs drawn in one frame
    columns: int  # GPUs side by side in a node
    nodes_across: int
    head: float  # above a node, for its name

    @property
    def frame(self) -> Point:
        """Width and height of a node's frame."""
        return self.columns + 2 * PAD, ceil(self.node_size / self.columns) + 2 * PAD

    def corner(self, node: int) -> Point:
        """Return the upper left corner of a node's frame."""
        down, across = divmod(node, self.nodes_across)
        return across * (self.frame[0] + GAP), down * (self.frame[1] + GAP + self.head) + self.head

    def centre(self, rank: int) -> Point:
        """Return the middle of a rank's box."""
        node, slot = divmod(rank, self.node_size)
        down, across = divmod(slot, self.columns)
        x, y = self.corner(node)
        return x + PAD + 0.5 + across, y + PAD + 0.5 + down

    @property
    def size(self) -> Point:
        """Width and height of all nodes."""
        right, bottom = self.corner(self.nodes_across - 1)[0], self.corner(self.num_nodes - 1)[1]
        return right + self.frame[0], bottom + self.frame[1]

    def box_length(self, width: float, height: float) -> float:
        """Return how long a box may be for the plan to fit into ``width`` by ``height``."""
        return min(width / self.size[0], height / self.size[1])


@lru_cache(maxsize=256)
def floor_plan(world_size: int, gpus_per_node: int, width: float, height: float) -> FloorPlan:
    """Return the plan with the largest boxes in a rectangle of these proportions; full rows of nodes may cost a little.

    >>> plan = floor_plan(16, gpus_per_node=8, width=8, height=1)
    >>> plan.columns, plan.nodes_across
    (8, 2)
    """
    node_size = min(gpus_per_node, world_size)
    columns = [c for c in range(node_size, 0, -1) if node_size % c == 0]
    num_nodes = ceil(world_size / node_size)
    head = HEAD if num_nodes <= MAX_NAMED_NODES else 0.0
    # The fewest nodes across for each possible number of nodes down: 2 sqrt(n) candidates instead of n.
    across = sorted({ceil(num_nodes / down) for down in range(1, num_nodes + 1)})
    plans = [FloorPlan(num_nodes, node_size, c, a, head) for c in columns for a in across]
    return max(plans, key=lambda p: p.box_length(width, height) * (1 if num_nodes % p.nodes_across else FULL_ROWS))
