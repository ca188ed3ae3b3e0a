"""Divides the experts of a layer among ranks, and sends each token to the ranks of the experts that
it chooses.
"""

from labkit.expert_parallel.layer import Experts, MoELayer, combine, dispatch
from labkit.expert_parallel.router import (
    Load,
    LoadBalancing,
    Router,
    Routing,
    attach_loss,
    drop_tokens,
    end_step,
)

__all__ = [
    "LoadBalancing", "Experts", "Load", "MoELayer", "Router", "Routing",
    "attach_loss", "combine", "dispatch", "drop_tokens", "end_step",
]  # fmt: skip
