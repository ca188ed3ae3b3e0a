"""ZeRO-1: each data-parallel rank keeps the optimizer's states of some parameters, updates those, and shares them.

Adam keeps two numbers per parameter, and plain data parallelism keeps them d times. Here every parameter has one
owner in the group. Source: Rajbhandari et al., arXiv 1910.02054, section 5.1.
"""

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import LBFGS, Optimizer


class ShardedOptimizer(Optimizer):
    """Any torch optimizer, its states divided among the ranks of a group; use it like the optimizer itself.

        optimizer = ShardedOptimizer(model.parameters(), torch.optim.AdamW, groups.dp, lr=1e-3)

    The gradients must be the same on all ranks before `step`, as `DataParallel` leaves them. Each parameter has one
    owner, which is right for every optimizer that treats parameters one by one (L-BFGS does not, and raises a
    ValueError). The parameters become views into one buffer per owner, which travels as it is.

    `state_dict` is the plain optimizer's, with the states of this rank's parameters only; all ranks' together are
    the whole. A part says that it is "sharded", and has an empty state for a parameter of this rank without one.
    `load_state_dict` takes the whole, or any part that has at least this rank's.

    Args:
        params: parameters or parameter groups, as for the optimizer; none can be added later.
        optimizer_class: called on every rank with the rank's own parameters and the ``options``.
    """

    def __init__(
        self, params: Iterable, optimizer_class: Callable[..., Optimizer], group: dist.ProcessGroup, **options: Any
    ):
        if isinstance(optimizer_class, type) and issubclass(optimizer_class, LBFGS):
            raise ValueError("LBFGS makes one step of all parameters together: use it without ShardedOptimizer")
        super().__init__(params, {})
        self.group = group
        self._parameters = [parameter for each in self.param_groups for parameter in each["params"]]
        self.owner = deal_out(self._parameters, group.size())
        self._buffers = list(_share_memory(self.owner))
        mine = [{"params": [p for p in each["params"] if self.owner[p] == group.rank()]} for each in self.param_groups]
        copy_options(self.param_groups, mine)
        self.local = optimizer_class(mine, **options)
        self.defaults, self.state = self.local.defaults, self.local.state
        copy_options(self.local.param_groups, self.param_groups)

    def step(self, closure: Callable | None = None):
        """Update this rank's parameters, send them, and receive all others; return what the closure gives."""
        copy_options(self.param_groups, self.local.param_groups)  # a learning rate that a schedule has changed, say
        loss = self.local.step(closure)
        sent = [dist.broadcast(b, group_src=rank, group=self.group, async_op=True) for rank, b in self._buffers]
        for travelling in sent:
            assert travelling is not None  # this rank is in the group
            travelling.wait()
        return loss

    def state_dict(self) -> dict:
        """Return this rank's part of the plain optimizer's state dict."""
        saved = super().state_dict()
        return {**saved, "state": {n: saved["state"].get(n, {}) for n in self._mine()}, "sharded": True}

    def load_state_dict(self, state_dict: dict) -> None:
        """Take what belongs to this rank's parameters; ValueError if parts are given in which some of it is missing."""
        all_states, mine = state_dict["state"], self._mine()
        missing = [n for n in mine if n not in all_states]
        if missing and "sharded" in state_dict:
            raise ValueError(
                f"rank {self.group.rank()} owns parameters {mine}, but the state dict lacks {missing}: a different "
                "rank, or a different number of ranks, saved this part, so give the parts of all ranks together"
            )
        states = {number: all_states[n] for number, n in enumerate(mine) if all_states.get(n)}
        super().load_state_dict({**state_dict, "state": {}})
        copy_options(self.param_groups, self.local.param_groups)
        # The optimizer itself loads the states: it knows their types, and numbers its own parameters from 0.
        self.local.load_state_dict({"state": states, "param_groups": self.local.state_dict()["param_groups"]})
        self.state = self.local.state

    def add_param_group(self, param_group: dict) -> None:
        """Only for use while the optimizer is made: afterwards every parameter has its owner."""
        if hasattr(self, "local"):
            raise ValueError("parameters cannot be added to a ShardedOptimizer: give it all groups when it is made")
        super().add_param_group(param_group)

    def _mine(self) -> list[int]:
        """Return the numbers of the parameters that this rank owns."""
        return [n for n, parameter in enumerate(self._parameters) if self.owner[parameter] == self.group.rank()]


def copy_options(given: list[dict], param_groups: list[dict]) -> None:
    """Copy what parameter groups say about their parameters, such as a learning rate, to groups of other parameters."""
    for source, target in zip(given, param_groups):
        target.update({name: value for name, value in source.items() if name not in ("params", "param_names")})


def deal_out(parameters: list[nn.Parameter], num_ranks: int) -> dict[nn.Parameter, int]:
    """Return an owner for each parameter: the largest first, each to the rank that has the least so far."""
    load, owner = [0] * num_ranks, {}
    for parameter in sorted(parameters, key=torch.numel, reverse=True):
        owner[parameter] = load.index(min(load))
        load[owner[parameter]] += parameter.numel()
    return owner


def _share_memory(owner: dict[nn.Parameter, int]) -> Iterator[tuple[int, torch.Tensor]]:
    """Lay parameters side by side, in one buffer per owner, type and device; yield the owners with the buffers."""
    kinds: dict[tuple, list[nn.Parameter]] = {}
    for parameter, rank in owner.items():
        kinds.setdefault((rank, parameter.dtype, parameter.device), []).append(parameter)
    for (rank, *_), parameters in kinds.items():
        buffer = torch.cat([parameter.detach().flatten() for parameter in parameters])
        for parameter, view in zip(parameters, buffer.split([parameter.numel() for parameter in parameters])):
            parameter.data = view.view_as(parameter)
        yield rank, buffer
