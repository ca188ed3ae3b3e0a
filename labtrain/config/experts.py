"""Options of layers with experts, beside the model's shape: how even their loads are kept."""

import math
from dataclasses import dataclass, fields
from numbers import Real

from labkit.expert_parallel import LoadBalancing
from labkit.shape import GPT

OF_BALANCE = tuple(field.name for field in fields(LoadBalancing))
OF_EXPERTS = (*OF_BALANCE, "top_k", "capacity_factor", "moe_layer_freq")


@dataclass(frozen=True)
class ExpertOptions(LoadBalancing):
    """How a layer's experts share its tokens."""

    # An expert drops what is above this multiple of an even load of a rank's tokens, so the loss
    # depends on the layout; by default nothing is dropped.
    capacity_factor: float | None = None

    @property
    def balance(self) -> LoadBalancing:
        """How the loads of experts are kept even."""
        return LoadBalancing(**{name: getattr(self, name) for name in OF_BALANCE})

    def _check_balance(self, model: GPT) -> None:
        LoadBalancing.__post_init__(self)
        factor = self.capacity_factor
        if factor is not None and not (isinstance(factor, Real) and 0 < float(factor) < math.inf):
            fault = f"capacity_factor={factor!r} must be a number above 0"
            raise ValueError(f"{fault}: leave it out to drop no token")
        if model.num_experts is not None:
            return
        for name in OF_EXPERTS:
            if getattr(self, name) != getattr(type(self), name):
                fault = f"{name}={getattr(self, name)!r} is for experts"
                raise ValueError(f"{fault}: give num_experts too, or leave {name} out")
