"""Trains with a whole file on a rank, and notes what its ways on are about: shards, messages, the order of work."""

import ast
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook

from course.communication import communication_log
from course.exercises.calling import limited
from course.project.probes import MOST_SECONDS, prepared

NUM_STEPS = 3


@dataclass(frozen=True)
class Facts:
    """What one rank shows of a training run."""

    history: list[tuple[float, float]]  # loss and norm of each step
    num_parameters: int
    num_states: int  # numbers in the optimizers' states
    messages: list[tuple[str, int, int]]  # operation, size of the group, bytes
    norm_inputs: list[tuple[int, ...]]  # shapes of what goes into each nn.LayerNorm of a block
    layers: list[int]  # the blocks that are on this rank
    work: list[tuple[str, int]]  # ("F" or "B", the number of a block), in order


def has_option(source: str, name: str) -> bool:
    """Return whether a file's ``options`` have this one."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Dict) and any(isinstance(key, ast.Constant) and key.value == name for key in node.keys):
            return True
    return False


def watch(source: str, filename: str, options: dict[str, Any]) -> Facts:
    """Run a whole file for three steps on this rank, and return what it shows."""
    scope = prepared(filename, options | {"steps": NUM_STEPS})
    with limited(MOST_SECONDS), communication_log() as log, noted_blocks() as (norm_inputs, work):
        for node in ast.parse(source).body:
            exec(compile(ast.Module([node], []), filename, "exec"), scope)
            if isinstance(node, ast.FunctionDef) and node.name == "parameter":
                scope["parameter"] = with_name(scope["parameter"])
    modules = {id(module): module for module in found(scope, nn.Module)}
    params = {id(param): param for module in modules.values() for param in module.parameters()}
    states = [state for optimizer in found(scope, torch.optim.Optimizer) for state in optimizer.state.values()]
    kept = [value for state in states for value in state.values() if isinstance(value, torch.Tensor)]
    numbers = {block_number(param) for param in params.values()}
    return Facts(
        history=scope["history"],
        num_parameters=sum(param.numel() for param in params.values()),
        num_states=sum(value.numel() for value in kept if value.dim()),  # a step's number has no dim
        messages=[(record.operation, len(record.group), record.message_bytes) for record in log.records],
        norm_inputs=norm_inputs,
        layers=sorted(number for number in numbers if number is not None),
        work=work,
    )


def found(scope: dict[str, Any], kind: type) -> Iterator[Any]:
    """Yield the objects of a kind among a file's globals, also those in its lists, tuples and dicts."""
    for value in scope.values():
        inside = value.values() if isinstance(value, dict) else value if isinstance(value, (list, tuple)) else [value]
        yield from (each for each in inside if isinstance(each, kind))


def with_name(parameter):
    """Return the file's `parameter`, so that each tensor also knows its name."""

    def named(name, *shape, **options):
        param = parameter(name, *shape, **options)
        param.drawn_as = name
        return param

    return named


def block_number(param: nn.Parameter) -> int | None:
    """Return the number of the block that a parameter was drawn for, if it was."""
    said = re.match(r"block (\d+)", getattr(param, "drawn_as", ""))
    return int(said[1]) if said else None


@contextmanager
def noted_blocks() -> Iterator[tuple[list, list]]:
    """Note the input's shape of each norm in a block, and when a block runs forward or begins backward."""
    norm_inputs: list[tuple[int, ...]] = []
    work: list[tuple[str, int]] = []
    inside: set[int] = set()  # the modules of blocks

    def before(module: nn.Module, inputs: tuple) -> None:
        if type(module).__name__ == "Block":
            inside.update(map(id, module.modules()))
        if isinstance(module, nn.LayerNorm) and id(module) in inside:
            norm_inputs.append(tuple(inputs[0].shape))

    def after(module: nn.Module, inputs: tuple, output) -> None:
        if type(module).__name__ != "Block" or not isinstance(output, torch.Tensor) or not output.requires_grad:
            return
        drawn = [block_number(param) for param in module.parameters()]
        number = next(number for number in drawn if number is not None)
        work.append(("F", number))
        output.register_hook(lambda grad: work.append(("B", number)))

    hooks = [register_module_forward_pre_hook(before), register_module_forward_hook(after)]
    try:
        yield norm_inputs, work
    finally:
        for hook in hooks:
            hook.remove()
