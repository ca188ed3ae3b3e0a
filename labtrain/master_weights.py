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
        self.masters: dict[torch.Tensor, torch.Tensor] = {}
        groups = []
        for group in self.param_groups:
            masters = []
            for param in group["params"]:
                if param.requires_grad:
                    master = param.detach().float().clone().requires_grad_()
                    self.masters[param] = master
                    masters.append(master)
            groups.append({**group, "params": masters})
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
        for param in self._params():
            if param.grad is not None and param not in self.masters:
                fault = f"a parameter of shape {list(param.shape)} has a gradient, but was frozen"
                raise ValueError(f"{fault} when MasterWeights was made: make it anew")
        for parameter, master in self.masters.items():
            # No copy if it is float32
            master.grad = None if parameter.grad is None else parameter.grad.float()
        self.inner.step()
        self.inner.zero_grad()
        if self.masters:  # a rank may have nothing to train
            params = list(self.masters)
            masters = list(self.masters.values())
            torch._foreach_copy_(params, masters)  # pyright: ignore - it is not in its stubs
        self._show_states()
        return loss

    def load_state_dict(self, state_dict: dict) -> None:
        """Load states as any optimizer does; the master weights come with them, and go to the
        parameters.
        """
        copy_options(state_dict["param_groups"], self.param_groups)
        for number, param in enumerate(self._params()):
            if number in state_dict["state"] and param in self.masters:
                master = self.masters[param]
                state = copy.deepcopy(state_dict["state"][number])
                with torch.no_grad():
                    master.copy_(state.pop("master_weight"))
                    param.copy_(master)
                self.inner.state[master] = state
        self._show_states()

    def _params(self) -> list[torch.Tensor]:
        return [param for group in self.param_groups for param in group["params"]]

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
        for name, value in source.items():
            if name not in ("params", "param_names"):
                target[name] = value
