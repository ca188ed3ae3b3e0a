"""ZeRO-1: each data-parallel rank keeps the optimizer's states of some parameters, updates those, and shares them.

Adam keeps two numbers for each parameter, and plain data parallelism keeps them d times. Here every parameter has
one owner in the group. Source: Rajbhandari et al., arXiv 1910.02054, section 5.1.
"""

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import LBFGS, Optimizer


class ShardedOptimizer(Optimizer):
    """Any torch optimizer, its states divided among the ranks of a group; to be used like the optimizer itself.

    The gradients must be the same on all ranks before `step`, as `DataParallel` leaves them. Whole parameters are dealt
    out, each to one owner, so it is right for every optimizer that treats parameters one by one. The
    parameters become views into one buffer for each owner, which travels as it is.

        optimizer = ShardedOptimizer(model.parameters(), torch.optim.AdamW, groups.dp, lr=1e-3)

    `state_dict` is the plain optimizer's with the states of this rank's parameters only: the ranks' together make
    the whole. `load_state_dict` takes the whole, or any part with at least those.

    Args:
        params: parameters or parameter groups, as for the optimizer; all of them now, none later.
        optimizer_class: made on every rank with the rank's own parameters and the ``options``.

    Raises:
        ValueError: for L-BFGS, whose step needs all parameters together.
    """

    def __init__(
        self, params: Iterable, optimizer_class: Callable[..., Optimizer], group: dist.ProcessGroup, **options: Any
    ):
        if isinstance(optimizer_class, type) and issubclass(optimizer_class, LBFGS):
            raise ValueError("LBFGS makes one step of all parameters together: use it without ShardedOptimizer")
        super().__init__(params, {})
        parameters = [parameter for each in self.param_groups for parameter in each["params"]]
        self.owner = deal_out(parameters, group.size())
        self.group, me = group, group.rank()
        self._buffers = [
            (rank, buffer)
            for rank in range(group.size())
            for buffer in _share_memory([p for p in parameters if self.owner[p] == rank])
        ]
        mine = [
            _options(each) | {"params": [p for p in each["params"] if self.owner[p] == me]}
            for each in self.param_groups
        ]
        self.local = optimizer_class(mine, **options)
        self.defaults, self.state = self.local.defaults, self.local.state
        for each, local in zip(self.param_groups, self.local.param_groups):
            each.update(_options(local))

    def step(self, closure: Callable | None = None):
        """Update this rank's parameters, send them, and receive all others; returns what the closure gives."""
        for each, local in zip(self.param_groups, self.local.param_groups):
            local.update(_options(each))  # a learning rate that a scheduler has changed, say
        loss = self.local.step(closure)
        sent = [dist.broadcast(b, group_src=rank, group=self.group, async_op=True) for rank, b in self._buffers]
        for travelling in sent:
            assert travelling is not None  # this rank is in the group
            travelling.wait()
        return loss

    def load_state_dict(self, state_dict: dict) -> None:
        """Take from a state dict what belongs to this rank's parameters.

        Raises:
            ValueError: there are states, but none of this rank's: a state dict that another rank saved alone.
        """
        parameters = [parameter for each in self.param_groups for parameter in each["params"]]
        mine = [n for n, parameter in enumerate(parameters) if self.owner[parameter] == self.group.rank()]
        states = {number: state_dict["state"][n] for number, n in enumerate(mine) if n in state_dict["state"]}
        if state_dict["state"] and not states and any(parameters[n].requires_grad for n in mine):
            raise ValueError(
                f"the state dict has states of parameters {sorted(state_dict['state'])}, rank {self.group.rank()} owns "
                f"{mine}: each rank saves its own part, give the parts of all ranks together"
            )
        super().load_state_dict({**state_dict, "state": {}})
        # The states are for the optimizer itself to take: it knows their types, and numbers its own parameters from 0.
        numbers = iter(range(len(mine)))
        local_groups = [
            _options(each) | {"params": [next(numbers) for _ in local["params"]]}
            for each, local in zip(self.param_groups, self.local.param_groups)
        ]
        self.local.load_state_dict({"state": states, "param_groups": local_groups})
        self.state = self.local.state

    def add_param_group(self, param_group: dict) -> None:
        """Only while the optimizer is made: afterwards every parameter has its owner."""
        if hasattr(self, "local"):
            raise ValueError("parameters cannot be added to a ShardedOptimizer: give it all groups when it is made")
        super().add_param_group(param_group)


def deal_out(parameters: list[nn.Parameter], num_ranks: int) -> dict[nn.Parameter, int]:
    """An owner for each parameter: the largest first, always to the rank that has least so far."""
    load, owner = [0] * num_ranks, {}
    for parameter in sorted(parameters, key=torch.numel, reverse=True):
        owner[parameter] = load.index(min(load))
        load[owner[parameter]] += parameter.numel()
    return owner


def _share_memory(parameters: list[nn.Parameter]) -> Iterator[torch.Tensor]:
    """Lay parameters side by side in one buffer for each type and device, and yield the buffers."""
    kinds = dict.fromkeys((p.dtype, p.device) for p in parameters)
    for kind in kinds:
        chosen = [p for p in parameters if (p.dtype, p.device) == kind]
        buffer = torch.cat([p.detach().flatten() for p in chosen])
        for parameter, view in zip(chosen, buffer.split([p.numel() for p in chosen])):
            parameter.data = view.view_as(parameter)
        yield buffer


def _options(param_group: dict) -> dict:
    """What a parameter group says about its parameters, without the parameters."""
    return {name: value for name, value in param_group.items() if name not in ("params", "param_names")}
