"""Keeps float32 copies of bfloat16 weights, and lets the optimizer update those.

bfloat16 has 8 bits of precision: a weight of 1 cannot grow by 0.001. So the optimizer adds its
small steps to a float32 copy, the master weight, and the model gets that copy rounded. Source:
arXiv 1710.03740, section 3.1.
"""

import copy
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.optim import Optimizer


class MasterWeights(Optimizer):
    """A torch optimizer on float32 copies of the parameters, which it keeps as ``master_weight`` in
    its states.

    optimizer = MasterWeights(model.parameters(), torch.optim.AdamW, lr=1e-3)

    Parameters that are frozen when it is made have no copy, and must stay frozen.
    """

    def __init__(self, params: Iterable, optimizer_class: Callable[..., Optimizer], **options: Any):
        super().__init__(params, {})
        parameters = [p for each in self.param_groups for p in each["params"]]
        self.masters = {
            p: p.detach().float().clone().requires_grad_() for p in parameters if p.requires_grad
        }
        groups = [
            {**each, "params": [self.masters[p] for p in each["params"] if p in self.masters]}
            for each in self.param_groups
        ]
        self.inner = optimizer_class(groups, **options)
        self.defaults = self.inner.defaults
        copy_options(self.inner.param_groups, self.param_groups)
        self._show_states()

    @torch.no_grad()
    def step(self, closure: Callable | None = None):
        """Update the master weights, and round them to the parameters."""
        loss = None if closure is None else torch.enable_grad()(closure)()
        # A learning rate that a schedule has changed, say
        copy_options(self.param_groups, self.inner.param_groups)
        for parameter in (p for each in self.param_groups for p in each["params"]):
            if parameter.grad is not None and parameter not in self.masters:
                what = (
                    f"a parameter of shape {list(parameter.shape)} has a gradient, but was frozen"
                )
                raise ValueError(f"{what} when MasterWeights was made: make it anew")
        for parameter, master in self.masters.items():
            # No copy if it is float32
            master.grad = None if parameter.grad is None else parameter.grad.float()
        self.inner.step()
        self.inner.zero_grad()
        if self.masters:  # a rank may have nothing to train
            torch._foreach_copy_(list(self.masters), list(self.masters.values()))  # pyright: ignore - not in its stubs
        self._show_states()
        return loss

    def load_state_dict(self, state_dict: dict) -> None:
        """Load states as any optimizer does; the master weights come with them, and go to the
        parameters.
        """
        copy_options(state_dict["param_groups"], self.param_groups)
        parameters = [p for each in self.param_groups for p in each["params"]]
        for number, parameter in enumerate(parameters):
            if number in state_dict["state"] and parameter in self.masters:
                master, state = self.masters[parameter], copy.deepcopy(state_dict["state"][number])
                with torch.no_grad():
                    parameter.copy_(master.copy_(state.pop("master_weight")))
                self.inner.state[master] = state
        self._show_states()

    def _show_states(self) -> None:
        for parameter, master in self.masters.items():
            self.state[parameter] = {
                "master_weight": master.detach(),
                **self.inner.state.get(master, {}),
            }


def copy_options(given: list[dict], param_groups: list[dict]) -> None:
    """Copy what parameter groups say about their parameters, such as a learning rate, to groups of
    other parameters.
    """
    for source, target in zip(given, param_groups):
        target.update(
            {name: value for name, value in source.items() if name not in ("params", "param_names")}
        )
