"""What differs among the versions of torch that labkit runs on, each with the reason.

pyproject.toml has the oldest of them, and README those that were tried. When the oldest one
changes, what only older ones needed goes from here.
"""

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch.autograd.graph import GradientEdge

# torch 2.13 renamed the forms that take one tensor, and warns about the older names.
all_gather_single: Callable = (
    getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
)
reduce_scatter_single: Callable = (
    getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
)

# torch 2.13 is the first one that is known to keep a node of a Python function (an
# `autograd.Function`) alive for whoever holds it. In torch 2.11 only the graph above the node does,
# and a node that has lost it cannot be used.
NODES_OUTLIVE_THEIR_GRAPH = torch.__version__ >= "2.13"  # torch compares this as versions

# Before torch 2.13 the key ``Fake`` lies above those of dispatch modes and of DTensor, which hide
# it from all that they call. ``BackendSelect`` lies below them. Each thread includes it, always:
# once somebody has listened, calls pass through Python even when nobody does.
LISTENING_KEY = "Fake" if torch.__version__ >= "2.13" else "BackendSelect"


def graph_owner(output: GradientEdge) -> GradientEdge | None:
    """Return what keeps all nodes of an output's graph usable while it is held; None where each
    node does so itself.

    What nodes have saved is kept as well, and the loss with it: more memory than newer versions
    need.
    """
    return None if NODES_OUTLIVE_THEIR_GRAPH else output
