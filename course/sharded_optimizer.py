"""ZeRO-1 in its plainest form: each rank keeps the optimizer's states of a shard, updates that, and shares the weights.

Adam keeps two numbers per parameter, and plain data parallelism keeps them d times. Here parameters lie side by side in
buffers, each divided in d equal shards, wherever that divides a parameter. So a large embedding is divided too.
Source: Rajbhandari et al., arXiv 1910.02054, section 5.1.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from itertools import accumulate
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import LBFGS, Adafactor, Optimizer

from labkit.collectives import all_gather_single, reduce_scatter_single
from labkit.data_parallel.flat_parameter import ALIGNMENT_BYTES
from labkit.data_parallel.gradients import BUCKET_BYTES, in_buckets
from labkit.data_parallel.replicas import grad_dtype_of
from labkit.placement import Placement
from labtrain.master_weights import copy_options


class ShardedOptimizer(Optimizer):
    """A torch optimizer whose states are divided among the ranks of a group; use it like the optimizer itself.

        optimizer = ShardedOptimizer(model.parameters(), torch.optim.AdamW, groups.dp, lr=1e-3)

    `step` averages the gradients over the group, each rank its shard (reduce-scatter), updates the shard of the
    weights, and gathers the others' (all-gather). Together that sends what averaging whole gradients by all-reduce
    does, so `DataParallel` is not needed before it; if it was used, the average changes nothing. The parameters become
    views into the buffers. One without a gradient on any rank is left alone.

    It is right for every optimizer that treats numbers one by one (L-BFGS and Adafactor do not: a ValueError). Its
    state dict is the plain optimizer's. `labtrain` divides states by `FullyShardedDataParallel` instead, whose
    messages travel during forward and backward.

    Args:
        params: parameters or parameter groups, as for the optimizer; none can be added later.
        optimizer_class: called on every rank with the rank's own shards and the ``options``.
    """

    def __init__(
        self, params: Iterable, optimizer_class: Callable[..., Optimizer], group: dist.ProcessGroup, **options: Any
    ):
        if isinstance(optimizer_class, type) and issubclass(optimizer_class, LBFGS | Adafactor):
            name = optimizer_class.__name__
            raise ValueError(f"{name} does not treat numbers one by one: use it without ShardedOptimizer")
        super().__init__(params, {})
        self.group = group
        given = {p: Placement() for each in self.param_groups for p in each["params"]}
        buckets = in_buckets(given, BUCKET_BYTES)
        self._buffers = [_Buffer(list(parameters), group) for parameters in buckets]
        shards = {p: shard for buffer in self._buffers for p, shard in buffer.shards.items()}
        mine = [{**each, "params": [shards[p] for p in each["params"]]} for each in self.param_groups]
        self.local = optimizer_class(mine, **options)
        self.defaults, self.state = self.local.defaults, self.local.state
        copy_options(self.local.param_groups, self.param_groups)

    def step(self, closure: Callable | None = None):
        """Average the gradients, update this rank's shard, and gather all others; return what the closure gives."""
        with torch.enable_grad():
            loss = closure() if closure else None
        copy_options(self.param_groups, self.local.param_groups)  # a learning rate that a schedule has changed, say
        for buffer in self._buffers:
            buffer.average_gradients()
        self.local.step()
        for buffer in self._buffers:
            all_gather_single(buffer.buffer, buffer.mine, group=self.group)
        return loss

    def state_dict(self) -> dict:
        """Return the plain optimizer's state dict, whole on every rank. All ranks call this."""
        self.state = defaultdict(dict)
        try:
            for buffer in self._buffers:
                self.state.update(buffer.whole_states(self.local.state))
            return super().state_dict()
        finally:
            self.state = self.local.state

    def load_state_dict(self, state_dict: dict) -> None:
        """Load the plain optimizer's state dict: each rank keeps its shards."""
        super().load_state_dict({**state_dict, "state": {}})
        copy_options(self.param_groups, self.local.param_groups)
        parameters = [p for each in self.param_groups for p in each["params"]]
        own_part = {p: buffer.own_part for buffer in self._buffers for p in buffer.shards}
        states = {
            number: {key: own_part[p](p, key, value) for key, value in state_dict["state"][number].items()}
            for number, p in enumerate(parameters)
            if number in state_dict["state"]
        }
        # The optimizer itself loads the states: it knows their types.
        self.local.load_state_dict({"state": states, "param_groups": self.local.state_dict()["param_groups"]})
        self.state = self.local.state

    def add_param_group(self, param_group: dict) -> None:
        """Only for use while the optimizer is made: afterwards every number has its place."""
        if hasattr(self, "local"):
            raise ValueError("parameters cannot be added to a ShardedOptimizer: give it all groups when it is made")
        super().add_param_group(param_group)


class _Buffer:
    """Parameters of one kind side by side [n], and the ``shards`` of them that this rank updates [n/d]."""

    def __init__(self, parameters: list[nn.Parameter], group: dist.ProcessGroup):
        self.group, self.grad_dtype = group, grad_dtype_of(parameters[0])
        align = ALIGNMENT_BYTES // parameters[0].element_size()
        *starts, end = accumulate((-(-p.numel() // align) * align for p in parameters), initial=0)
        size = -(-end // group.size()) or 1
        self.begin = size * group.rank()
        self.buffer = parameters[0].detach().new_zeros(size * group.size())
        self.mine = self.buffer[self.begin :][:size]
        self.places = {p: slice(start, start + p.numel()) for p, start in zip(parameters, starts)}
        self.shards: dict[nn.Parameter, nn.Parameter] = {}
        for p, place in self.places.items():
            whole = self.buffer[place].view_as(p)
            p.data = whole.copy_(p.detach())
            self.shards[p] = nn.Parameter(self.mine[self.in_shard(p)], p.requires_grad)

    def in_shard(self, p: nn.Parameter) -> slice:
        """Return which numbers of this rank's shard are the parameter's."""
        start, stop = (
            min(max(at - self.begin, 0), len(self.mine)) for at in (self.places[p].start, self.places[p].stop)
        )
        return slice(start, stop)

    def average_gradients(self) -> None:
        """Give each shard its part of the average, or none if the parameter has no gradient on any rank."""
        gradients = torch.zeros_like(self.buffer, dtype=self.grad_dtype)
        for p, place in self.places.items():
            if p.grad is not None:  # divided before the sum, which then cannot overflow
                torch.div(p.grad.to_dense(), self.group.size(), out=gradients[place].view_as(p))
        average = torch.empty_like(self.mine, dtype=self.grad_dtype)
        reduce_scatter_single(average, gradients, group=self.group)
        here = [p.grad is not None for p in self.places]
        has_gradient = torch.tensor(here, dtype=torch.int32, device=average.device)
        dist.all_reduce(has_gradient, group=self.group)
        for (p, shard), anywhere in zip(self.shards.items(), has_gradient.tolist()):
            shard.grad = average[self.in_shard(p)] if anywhere else None

    def whole_states(self, states: Mapping[Any, dict]) -> dict[Any, dict]:
        """Return the optimizer's states of the whole parameters."""
        whole = {p: dict(states[shard]) for p, shard in self.shards.items() if shard in states}
        keys = {key for p, state in whole.items() for key, x in state.items() if self._is_sharded(p, x)}
        for key in sorted(keys):
            dtype = next(state[key].dtype for state in whole.values() if key in state)
            shard = torch.zeros_like(self.mine, dtype=dtype)
            having = [p for p in whole if key in whole[p]]  # one without a gradient until now has no averages
            for p in having:
                shard[self.in_shard(p)] = whole[p][key]
            everything = torch.empty_like(self.buffer, dtype=dtype)
            all_gather_single(everything, shard, group=self.group)
            for p in having:
                whole[p][key] = everything[self.places[p]].view_as(p)
        return whole

    def own_part(self, p: nn.Parameter, key: str, value: Any) -> Any:
        """Return this rank's part of a state that has its parameter's shape, and any other as it is."""
        if key == "step" or not isinstance(value, torch.Tensor) or value.shape != p.shape:
            return value
        start = max(self.begin - self.places[p].start, 0)
        return value.flatten()[start:][: self.shards[p].numel()].clone()  # a view would keep the whole in memory

    def _is_sharded(self, p: nn.Parameter, value: Any) -> bool:
        return isinstance(value, torch.Tensor) and value.shape == self.shards[p].shape
