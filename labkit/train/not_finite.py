"""Where did the NaN come from? After one or two ops it is everywhere; this looks for the place where it was first."""

from typing import Any

import torch.distributed as dist
from torch import nn


def first_not_finite(trainer: Any, inputs, targets, loss: float, norm: float) -> str:
    """A sentence with the step, the rank and the module or parameter in which a number first was not finite.

    The parameters are those before the step. They are looked at first; then the batch runs forward once more,
    now with an eye on what every module gives; what is left is the backward pass. To be called on every rank.
    """
    place, layout = trainer.groups.coords, trainer.groups.layout
    found = []
    for number, chunk in enumerate(trainer.chunks):
        stage = trainer.schedule.stage_of(place.pp, number)
        for name, parameter in chunk.module.named_parameters():
            if not parameter.isfinite().all():
                found.append(
                    (0, stage, 0, place.tp, trainer.groups.rank, f"the parameter {name} has it before the step")
                )
    outputs = _Outputs(trainer)
    trainer._run(trainer.schedule.forward_only(), inputs, targets)
    found += outputs.found
    outputs.remove()
    for number, chunk in enumerate(trainer.chunks):
        stage = trainer.schedule.stage_of(place.pp, number)
        for name, parameter in reversed(list(chunk.module.named_parameters())):
            if parameter.grad is not None and not parameter.grad.isfinite().all():
                found.append((2, -stage, 0, place.tp, trainer.groups.rank, f"the gradient of {name}"))
                break
    everywhere: list[Any] = [None] * layout.world_size
    dist.all_gather_object(everywhere, min(found, default=None))
    first = min((each for each in everywhere if each is not None), default=None)
    values = f"step {trainer.steps_done + 1}: the loss is {loss:g}, the gradient norm {norm:g}"
    if first is None:
        return f"{values}; no rank could find where it came from"
    *_, rank, what = first
    return f"{values}. First on rank {rank}, {layout.coords(rank)}: {what}. Nothing was updated in this step."


class _Outputs:
    """Hooks that note the first module on this rank whose output is not finite."""

    def __init__(self, trainer: Any):
        self.found: list[tuple] = []
        self.trainer, self.calls, self.handles = trainer, 0, []
        for number, chunk in enumerate(trainer.chunks):
            stage = trainer.schedule.stage_of(trainer.groups.coords.pp, number)
            for name, module in chunk.module.named_modules():
                if not list(module.children()):
                    self.handles.append(module.register_forward_hook(self._look(name, stage)))

    def _look(self, name: str, stage: int):
        def look(module: nn.Module, inputs: tuple, output: Any) -> None:
            self.calls += 1
            tensor = output[0] if isinstance(output, tuple) else output
            if not self.found and not tensor.isfinite().all():
                place = self.trainer.groups.coords
                text = f"the output of {name} in stage {stage}"
                self.found.append((1, stage, self.calls, place.tp, self.trainer.groups.rank, text))

        return look

    def remove(self) -> None:
        for handle in self.handles:
            handle.remove()
