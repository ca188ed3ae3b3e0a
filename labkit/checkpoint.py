"""Checkpoints that do not know the layout: saved by any ranks, resumed by any others.

Each tensor is stored as the whole model has it, under its name; every rank writes and reads its part by
torch.distributed.checkpoint. A checkpoint is written under another name and renamed when it is complete, so a run
that is killed while it saves leaves the one before.
"""

import json
import os
import shutil
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.state_dict_loader import load as load_tensors
from torch.distributed.checkpoint.state_dict_saver import save as save_tensors
from torch.distributed.tensor import DTensor
from torch.distributed.tensor import Shard as DTensorShard

from labkit.groups import ProcessGroups
from labkit.layers import shard_of
from labkit.sizing import GPT

DESCRIPTION = "labkit.json"


@dataclass(frozen=True)
class State:
    """What a rank saves and restores: its parts of the model, and their states in the optimizer."""

    models: Sequence[nn.Module]
    optimizer: torch.optim.Optimizer
    groups: ProcessGroups
    shape: GPT


def save(folder: str | Path, state: State, step: int) -> Path:
    """Write the checkpoint of a step, on every rank of the world together; returns where it is."""
    final = Path(folder) / f"step_{step:08d}"
    partial = final.with_suffix(".partial")
    if dist.get_rank() == 0:
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
    dist.barrier()
    save_tensors(dict(_tensors(state)), checkpoint_id=partial)
    dist.barrier()
    if dist.get_rank() == 0:
        sums = {path.name: _checksum(path) for path in sorted(partial.iterdir())}
        description = {"step": step, "shape": asdict(state.shape), "optimizer": _kind(state), "checksums": sums}
        with open(partial / DESCRIPTION, "w") as file:
            json.dump(description, file, indent=1)
            file.flush()
            os.fsync(file.fileno())
        shutil.rmtree(final, ignore_errors=True)
        partial.rename(final)
    dist.barrier()
    return final


def newest(folder: str | Path) -> Path | None:
    """The newest complete checkpoint in a folder; None if there is none."""
    return max((path.parent for path in Path(folder).glob(f"step_????????/{DESCRIPTION}")), default=None)


def load_newest(folder: str | Path, state: State) -> int:
    """Restore the newest complete checkpoint of a folder on every rank, and return its step; 0 if there is none.

    Raises:
        ValueError: it is damaged, or of another model or optimizer; the message says what does not fit.
    """
    path = newest(folder)
    if path is None:
        return 0
    load(path, state)
    step = json.loads((path / DESCRIPTION).read_text())["step"]
    if dist.get_rank() == 0:
        print(f"Resuming behind step {step}, from {path}")
    return step


def load(path: Path, state: State) -> None:
    """Restore one checkpoint, in place; to be called on every rank of the world.

    Raises:
        ValueError: as `load_newest`.
    """
    check(path, state)
    _make_states(state.optimizer)
    tensors = dict(_tensors(state))
    missing = sorted(tensors.keys() - FileSystemReader(path).read_metadata().state_dict_metadata.keys())
    if missing:
        raise ValueError(f"{path} has no {missing[0]} ({len(missing)} tensors are missing): it is of another model")
    load_tensors(tensors, checkpoint_id=path)


def check(path: Path, state: State) -> None:
    """See that a checkpoint is whole, and of this model.

    Raises:
        ValueError: names the file, or the sizes, that do not fit.
    """
    try:
        description = json.loads((path / DESCRIPTION).read_text())
        theirs, optimizer, sums = (description[key] for key in ("shape", "optimizer", "checksums"))
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{path / DESCRIPTION} is not the description of a labkit checkpoint: {error!r}") from error
    differing = [
        f"{name} is {theirs.get(name)} there and {value} here"
        for name, value in asdict(state.shape).items()
        if theirs.get(name) != value
    ]
    if optimizer != _kind(state):
        differing.append(f"the optimizer is {optimizer} there and {_kind(state)} here")
    if differing:
        raise ValueError(f"{path} does not fit: {'; '.join(differing)}")
    for name, checksum in sums.items():
        file = path / name
        if not file.exists() or _checksum(file) != checksum:
            what = "is missing" if not file.exists() else "has changed since it was written"
            raise ValueError(f"{file} {what}: this checkpoint is damaged, resume from an older one")


def _tensors(state: State) -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors of this rank by name: in place, so that loading fills them."""
    for model in state.models:
        for name, parameter in model.named_parameters():
            yield from _whole_parts(f"model.{name}", parameter.detach(), parameter, state.groups)
            for key, value in state.optimizer.state.get(parameter, {}).items():
                full_name = f"optimizer.{name}.{key}"
                if value.shape == parameter.shape:
                    yield from _whole_parts(full_name, value, parameter, state.groups)
                else:
                    yield full_name, value


def _whole_parts(
    name: str, tensor: torch.Tensor, parameter: nn.Parameter, groups: ProcessGroups
) -> Iterator[tuple[str, torch.Tensor]]:
    """A tensor that is cut like its parameter, as part of the whole; of fused matrices (stride 3) each by itself."""
    shard = shard_of(parameter)
    if shard is None:
        yield name, tensor
        return
    size, rows = shard.whole_size // shard.stride, parameter.size(shard.dim) // shard.stride
    own = max(0, min(rows, size - groups.tp.rank() * rows))  # without the padding of a vocabulary
    for index, piece in enumerate(tensor.chunk(shard.stride, shard.dim)):
        whole = list(tensor.shape)
        whole[shard.dim] = size
        yield (
            f"{name}.{index}",
            DTensor.from_local(
                piece.narrow(shard.dim, 0, own),
                groups.device_mesh()["tp"],
                [DTensorShard(shard.dim)],
                run_check=False,
                shape=torch.Size(whole),
                stride=torch.empty(whole, device="meta").stride(),
            ),
        )


def _make_states(optimizer: torch.optim.Optimizer) -> None:
    """torch makes an optimizer's states in its first step: let it take one that changes nothing."""
    if optimizer.state and any("exp_avg" in state for state in optimizer.state.values()):
        return
    rates = [param_group["lr"] for param_group in optimizer.param_groups]
    for param_group in optimizer.param_groups:
        param_group["lr"] = 0.0
        for parameter in param_group["params"]:
            parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    optimizer.zero_grad()
    for param_group, rate in zip(optimizer.param_groups, rates):
        param_group["lr"] = rate


def _kind(state: State) -> str:
    """Which states there are; the sharded optimizer has the same as the plain one."""
    optimizer: Any = getattr(state.optimizer, "local", state.optimizer)
    inner = getattr(optimizer, "inner", None)
    return type(optimizer).__name__ if inner is None else f"{type(inner).__name__} with master weights"


def _checksum(path: Path) -> int:
    checksum = 0
    with open(path, "rb") as file:
        while block := file.read(1 << 24):
            checksum = zlib.crc32(block, checksum)
    return checksum
