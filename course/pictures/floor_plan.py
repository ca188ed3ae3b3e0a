"""Decide where each GPU's box goes: nodes side by side and below each other, with boxes as large as possible."""

from dataclasses import dataclass
from math import ceil

import numpy as np

PAD, GAP, HEAD = 0.12, 0.24, 0.50  # around a node's GPUs, between nodes, above a node for its name; one box is 1
FULL_ROWS = 1.25  # how much smaller boxes may get so that every row of nodes is full: patterns then line up
MAX_NAMED_NODES = 16  # with more, their names cost more room than they are worth


@dataclass(frozen=True)
class FloorPlan:
    """A grid of nodes, each a grid of GPUs; lengths are in boxes, and y goes down."""

    world_size: int
    node_size: int  # GPUs drawn in one frame
    columns: int  # GPUs side by side in a node
    nodes_across: int

    @property
    def num_nodes(self) -> int:
        return ceil(self.world_size / self.node_size)

    @property
    def head(self) -> float:
        return HEAD if self.num_nodes <= MAX_NAMED_NODES else 0.0

    @property
    def frame(self) -> tuple[float, float]:
        """Width and height of a node's frame."""
        return self.columns + 2 * PAD, ceil(self.node_size / self.columns) + 2 * PAD

    @property
    def size(self) -> tuple[float, float]:
        """Width and height of everything."""
        width, height = self.frame
        nodes_down = ceil(self.num_nodes / self.nodes_across)
        return self.nodes_across * (width + GAP) - GAP, nodes_down * (height + GAP + self.head) - GAP

    def node_corners(self) -> np.ndarray:
        """Return the upper left corner of each node's frame: [num_nodes, 2]."""
        width, height = self.frame
        down, across = np.divmod(np.arange(self.num_nodes), self.nodes_across)
        return np.stack([across * (width + GAP), down * (height + GAP + self.head) + self.head], axis=1)

    def gpu_centres(self) -> np.ndarray:
        """Return the middle of each rank's box: [world_size, 2]."""
        node, slot = np.divmod(np.arange(self.world_size), self.node_size)
        down, across = np.divmod(slot, self.columns)
        return self.node_corners()[node] + PAD + 0.5 + np.stack([across, down], axis=1)


def floor_plan(world_size: int, gpus_per_node: int, width: float, height: float) -> FloorPlan:
    """Return the plan with the largest boxes in a rectangle of these proportions; full rows of nodes may cost a little.

    >>> plan = floor_plan(16, gpus_per_node=8, width=8, height=1)
    >>> plan.columns, plan.nodes_across
    (8, 2)
    """
    node_size = min(gpus_per_node, world_size)
    columns = [c for c in range(node_size, 0, -1) if node_size % c == 0]
    num_nodes = ceil(world_size / node_size)
    # The fewest nodes across for each possible number of nodes down: 2 sqrt(n) candidates instead of n.
    across = sorted({ceil(num_nodes / down) for down in range(1, num_nodes + 1)})
    plans = [FloorPlan(world_size, node_size, c, a) for c in columns for a in across]
    return max(plans, key=lambda p: box_length(p, width, height) * (1 if num_nodes % p.nodes_across else FULL_ROWS))


def box_length(plan: FloorPlan, width: float, height: float) -> float:
    """Return how long a box may be for the plan to fit into ``width`` by ``height``."""
    return min(width / plan.size[0], height / plan.size[1])
