"""Checkpoints that do not depend on the layout: saved on some ranks, resumed on any others.

Each tensor is stored as the whole model has it, under its name. Every rank writes and reads its part with
torch.distributed.checkpoint. A checkpoint gets its final name only when it is complete, so a run that is killed
while it saves still has the one before.

torch.distributed.checkpoint is imported inside functions: it takes long to import, and most runs save nothing.
"""

import fcntl
import json
import os
import shutil
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from labkit.groups import ProcessGroups
from labkit.shape import GPT
from labkit.tensor_parallel import shard_of

DESCRIPTION, LOCK = "labkit.json", "labkit.lock"


@dataclass(frozen=True)
class State:
    """What a rank saves and restores: its parts of the model, with their states in the optimizer."""

    models: Sequence[nn.Module]
    optimizer: torch.optim.Optimizer
    groups: ProcessGroups
    shape: GPT


@contextmanager
def claim(folder: str | Path, resume: bool) -> Iterator[None]:
    """Keep the folder for this run inside the block, and remove what a killed save left there; call it on every rank.

    Raises:
        ValueError: another run writes there, or has written there and this one does not resume it; or nobody can write.
    """
    folder = Path(folder)

    def take() -> None:
        if (folder / DESCRIPTION).exists():
            raise ValueError(f"checkpoint_dir={folder} is a checkpoint: name the folder that it is in, {folder.parent}")
        folder.mkdir(parents=True, exist_ok=True)
        locked = while_it_runs.enter_context(open(folder / LOCK, "w"))  # noqa: SIM115 - freed if killed, too
        try:
            fcntl.flock(locked, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ValueError(f"checkpoint_dir={folder} is in use by another run: name a different folder") from None
        except OSError:
            pass  # a file system without locks
        if not resume and (path := newest(folder)):
            raise ValueError(f"checkpoint_dir={folder} already has {path.name}: resume it, or name a different folder")
        for partial in folder.glob("step_*.partial"):
            shutil.rmtree(partial, ignore_errors=True)

    with ExitStack() as while_it_runs:
        _together(take if dist.get_rank() == 0 else None, f"checkpoint_dir={folder}")
        yield


def save(folder: str | Path, state: State, step: int, num_samples: int) -> None:
    """Write the checkpoint of a step, on all ranks of the world together.

    Args:
        num_samples: how many samples of the data the run has seen.

    Raises:
        ValueError: it cannot be written, or some files did not arrive in this folder. Nothing of it is left.
    """
    from torch.distributed.checkpoint import filesystem

    final = Path(folder) / f"step_{step:08d}"
    partial = final.with_suffix(".partial")

    def finish() -> None:
        written = filesystem.FileSystemReader(partial).read_metadata().storage_data.values()
        if lost := {info.relative_path for info in written} - {path.name for path in partial.iterdir()}:
            raise ValueError(f"{partial} lacks {min(lost)}: checkpoint_dir must be a folder that all nodes share")
        sums = {path.name: _checksum(path) for path in sorted(partial.iterdir())}
        about = {"step": step, "num_samples": num_samples, **_about(state), "checksums": sums}
        with open(partial / DESCRIPTION, "w") as file:
            json.dump(about, file, indent=1)
            file.flush()
            os.fsync(file.fileno())
        shutil.rmtree(final, ignore_errors=True)
        partial.rename(final)

    is_first = dist.get_rank() == 0
    try:
        _together(lambda: _write(dict(_tensors(state)), partial), str(final))
        _together(finish if is_first else None, str(final))
    except ValueError:
        if is_first:
            shutil.rmtree(partial, ignore_errors=True)  # others may need the space
        raise


def newest(folder: str | Path) -> Path | None:
    """Return the newest complete checkpoint in a folder, or None."""
    return max((path.parent for path in Path(folder).glob(f"step_????????/{DESCRIPTION}")), default=None)


def load_newest(folder: str | Path, state: State) -> tuple[int, int]:
    """Restore a folder's newest complete checkpoint on every rank, and return its step and samples (0, 0 without one).

    Raises:
        ValueError: it is damaged, or of a different model or optimizer; the message says what does not fit.
    """
    found = [newest(folder)]
    dist.broadcast_object_list(found)  # one rank looks for all
    text, done = f"No checkpoint in {folder}: starting with step 1", (0, 0)
    if path := found[0]:
        _load(path, state)
        about = json.loads((path / DESCRIPTION).read_text())
        text, done = f"Resuming after step {about['step']}, from {path}", (about["step"], about["num_samples"])
    if dist.get_rank() == 0:
        print(text, flush=True)
    return done


def _load(path: Path, state: State) -> None:
    from torch.distributed.checkpoint import filesystem, state_dict_loader

    _together(lambda: _check(path, state))
    _make_states(state.optimizer)
    parts = list(_tensors(state))
    tensors = dict(parts)

    def check_names() -> None:
        known = filesystem.FileSystemReader(path).read_metadata().state_dict_metadata
        if missing := sorted(tensors.keys() - known.keys()):
            count = f"{len(missing)} tensors are missing"
            raise ValueError(f"{path} has no {missing[0]} ({count}): it is of a different model")

    _together(check_names)
    state_dict_loader.load(tensors, checkpoint_id=path)
    for name, tensor in parts:
        if tensor is not tensors[name]:  # a rank with the first and the last stage has the tied embedding twice
            tensor.copy_(tensors[name])


def _write(tensors: dict[str, torch.Tensor], folder: Path) -> None:
    """Let torch save. It raises a BaseException on all ranks: raise what it comes from, an OSError or an interrupt."""
    from torch.distributed.checkpoint import state_dict_saver
    from torch.distributed.checkpoint.api import CheckpointException

    try:
        state_dict_saver.save(tensors, checkpoint_id=folder)
    except CheckpointException as error:
        causes = [cause for cause, _ in error.failures.values()]
        cause = next((each for each in causes if not isinstance(each, Exception)), causes[0])
        if isinstance(cause, OSError) or not isinstance(cause, Exception):
            raise cause from error
        raise OSError(str(cause)) from error  # torch's writer in C++ only says that bytes are missing


def _check(path: Path, state: State) -> None:
    """Check that a checkpoint is whole, and of this model. The ranks divide the files among them."""
    ours = _about(state)
    try:
        about = json.loads((path / DESCRIPTION).read_text())
        theirs = {name: about[name] for name in ("step", "num_samples", *ours)}
        sums = sorted(about["checksums"].items())
    except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
        raise ValueError(f"{path / DESCRIPTION} is not the description of a labkit checkpoint: {error!r}") from error
    differing = [f"{name} is {theirs[name]} there and {ours[name]} here" for name in ours if theirs[name] != ours[name]]
    if differing:
        raise ValueError(f"{path} does not fit: {'; '.join(differing)}")
    for name, checksum in sums[dist.get_rank() :: dist.get_world_size()]:
        file = path / name
        if not file.exists() or _checksum(file) != checksum:
            what = "is missing" if not file.exists() else "has changed since it was written"
            raise ValueError(f"{file} {what}: remove {path.name} to resume from the checkpoint before it")


def _together(work: Callable[[], None] | None, written: str = "") -> None:
    """Do the work of this rank, which may be to write, wait for the others, and raise on all if it failed on one."""
    error = None
    try:
        if work:
            work()
    except (ValueError, OSError) as raised:
        error = str(raised)
        if written and isinstance(raised, OSError):
            why = raised.strerror or raised
            error = f"{written} cannot be written ({why}): make space, or name a folder that you may write to"
    errors: list[str | None] = [None] * dist.get_world_size()
    dist.all_gather_object(errors, error)
    first = next((each for each in errors if each), None)
    if first:
        raise ValueError(first)


def _tensors(state: State) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield this rank's tensors by name: those in use, so that loading fills them."""
    for model in state.models:
        for name, parameter in model.named_parameters():
            yield from _whole_parts(f"model.{name}", parameter.detach(), parameter, state.groups)
            for key, value in state.optimizer.state.get(parameter, {}).items():
                yield from _whole_parts(f"optimizer.{name}.{key}", value, parameter, state.groups)


def _whole_parts(
    name: str, tensor: torch.Tensor, parameter: nn.Parameter, groups: ProcessGroups
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield a tensor as part of the whole if it is cut like its parameter; fused matrices (stride 3) one by one."""
    from torch.distributed.tensor import DTensor
    from torch.distributed.tensor import Shard as DTensorShard

    shard = shard_of(parameter)
    if shard is None or tensor.shape != parameter.shape:
        yield name, tensor
        return
    size, rows = shard.whole_size // shard.stride, parameter.size(shard.dim) // shard.stride
    own = max(0, min(rows, size - groups.tp.rank() * rows))  # without the padding of a vocabulary
    whole = tensor.new_empty([size if dim == shard.dim else n for dim, n in enumerate(tensor.shape)], device="meta")
    how: dict[str, Any] = {"run_check": False, "shape": whole.shape, "stride": whole.stride()}
    for index, piece in enumerate(tensor.chunk(shard.stride, shard.dim)):
        own_piece, mesh = piece.narrow(shard.dim, 0, own), groups.device_mesh()["tp"]
        yield f"{name}.{index}", DTensor.from_local(own_piece, mesh, [DTensorShard(shard.dim)], **how)


def _make_states(optimizer: torch.optim.Optimizer) -> None:
    """Let an optimizer make its states. torch does so in the first step, so take one that changes nothing."""
    rates = [param_group["lr"] for param_group in optimizer.param_groups]
    for param_group in optimizer.param_groups:
        param_group["lr"] = 0.0
        for parameter in param_group["params"]:
            parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    optimizer.zero_grad()
    for param_group, rate in zip(optimizer.param_groups, rates):
        param_group["lr"] = rate


def _about(state: State) -> dict[str, Any]:
    """Return what must be the same to resume; the layout need not be."""
    optimizer: Any = getattr(state.optimizer, "local", state.optimizer)  # a sharded one has the same states
    inner = getattr(optimizer, "inner", None)
    kind = type(optimizer).__name__ if inner is None else f"{type(inner).__name__} with master weights"
    dtype = str(next(state.models[0].parameters()).dtype).removeprefix("torch.")
    return {**asdict(state.shape), "precision": dtype, "optimizer": kind}


def _checksum(path: Path) -> int:
    checksum = 0
    with open(path, "rb") as file:
        while block := file.read(1 << 24):
            checksum = zlib.crc32(block, checksum)
    return checksum
