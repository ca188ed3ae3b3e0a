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
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from labkit.stored import State, make_states, tensors_of

DESCRIPTION, LOCK, METADATA = "labkit.json", "labkit.lock", ".metadata"  # the last is torch's
CHANGED, SHARED = "has changed since it was written", "checkpoint_dir must be a folder that all nodes share"


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


def save(folder: str | Path, state: State, step: int, num_samples: int, keep: int = 0) -> None:
    """Write the checkpoint of a step, on all ranks of the world together.

    Args:
        num_samples: how many samples of the data the run has seen.
        keep: how many complete checkpoints to leave there, the newest ones; 0 for all.

    Raises:
        ValueError: it cannot be written, or some files did not arrive in this folder. Nothing of it is left.
    """
    from torch.distributed.checkpoint import filesystem

    final = Path(folder) / f"step_{step:08d}"
    partial = final.with_suffix(".partial")

    def write() -> dict[str, int]:
        _write(dict(tensors_of(state)), partial)
        return {path.name: _checksum(path) for path in partial.glob(f"__{dist.get_rank()}_*")}  # this rank's files

    def finish() -> None:
        sums = {name: checksum for of_rank in sums_of_ranks for name, checksum in of_rank.items()}
        written = filesystem.FileSystemReader(partial).read_metadata().storage_data.values()
        here = sums.keys() & {path.name for path in partial.iterdir()}
        if lost := {info.relative_path for info in written} - here:
            raise ValueError(f"{partial} lacks {min(lost)}: {SHARED}")
        sums[METADATA] = _checksum(partial / METADATA)
        about = {"step": step, "num_samples": num_samples, **_about(state), "rates": state.rates, "checksums": sums}
        with open(partial / DESCRIPTION, "w") as file:
            json.dump(about | {"checksum": zlib.crc32(json.dumps(about).encode())}, file, indent=1)
            file.flush()
            os.fsync(file.fileno())
        shutil.rmtree(final, ignore_errors=True)
        partial.rename(final)
        for old in complete(folder)[:-keep] if keep else []:
            shutil.rmtree(old.rename(old.with_suffix(".partial")), ignore_errors=True)

    is_first = dist.get_rank() == 0
    try:
        sums_of_ranks = _together(write, str(final))
        _together(finish if is_first else None, str(final))
    except ValueError:
        if is_first:
            shutil.rmtree(partial, ignore_errors=True)  # others may need the space
        raise


def newest(folder: str | Path) -> Path | None:
    """Return the newest complete checkpoint in a folder, or None."""
    return next(reversed(complete(folder)), None)


def complete(folder: str | Path) -> list[Path]:
    """Return all complete checkpoints in a folder, the newest last."""
    return sorted(path.parent for path in Path(folder).glob(f"step_????????/{DESCRIPTION}"))


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
        text, done = f"Resuming after step {about['step']}, from {path.name}", (about["step"], about["num_samples"])
        rates = [(name, now, about["rates"][name]) for name, now in state.rates.items()]
        new = " and ".join(f"{name} is {now} instead of {old}" for name, now, old in rates if now != old)
        text += f". From here on the learning rate follows the new options: {new}" if new else ""
    if dist.get_rank() == 0:
        print(text, flush=True)
    return done


def _load(path: Path, state: State) -> None:
    from torch.distributed.checkpoint import filesystem, state_dict_loader

    _together(lambda: _check(path, state))
    make_states(state.optimizer)
    parts = list(tensors_of(state))
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
    if not (path / DESCRIPTION).exists():
        raise ValueError(f"rank {dist.get_rank()} does not see {path}: {SHARED}")
    try:
        about = json.loads((path / DESCRIPTION).read_text())
        checksum = about.pop("checksum")
        theirs = {name: about[name] for name in ("step", "num_samples", *ours)}
        sums = sorted(about["checksums"].items())
    except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
        raise ValueError(f"{path / DESCRIPTION} is not the description of a labkit checkpoint: {error!r}") from error
    if checksum != zlib.crc32(json.dumps(about).encode()):
        raise ValueError(f"{path / DESCRIPTION} {CHANGED}: remove {path.name} to resume from the checkpoint before it")
    differing = [f"{name} is {theirs[name]} there and {ours[name]} here" for name in ours if theirs[name] != ours[name]]
    if differing:
        way_out = "resume with what is there, or name a different checkpoint_dir"
        raise ValueError(f"{path} does not fit: {'; '.join(differing)}: {way_out}")
    for name, checksum in sums[dist.get_rank() :: dist.get_world_size()]:
        file = path / name
        if not file.exists() or _checksum(file) != checksum:
            what = CHANGED if file.exists() else "is missing"
            raise ValueError(f"{file} {what}: remove {path.name} to resume from the checkpoint before it")


def _together(work: Callable[[], Any] | None, written: str = "") -> list[Any]:
    """Do this rank's work, which may be to write, and return what all ranks' gave; raise on all if it failed on one."""
    error = result = None
    try:
        if work:
            result = work()
    except (ValueError, OSError) as raised:
        error = str(raised)
        if written and isinstance(raised, OSError):
            why = raised.strerror or raised
            error = f"{written} cannot be written ({why}): make space, or name a folder that you may write to"
    ranks: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(ranks, (error, result))
    errors, results = zip(*ranks)
    if first := next(filter(None, errors), None):
        raise ValueError(first)
    return list(results)


def _about(state: State) -> dict[str, Any]:
    """Return what must be the same to resume; the layout need not be."""
    optimizer: Any = getattr(state.optimizer, "local", state.optimizer)  # a sharded one has the same states
    inner = getattr(optimizer, "inner", None)
    kind = type(optimizer).__name__ if inner is None else f"{type(inner).__name__} with master weights"
    dtype = str(next(state.models[0].parameters()).dtype).removeprefix("torch.")
    return {**asdict(state.shape), "precision": dtype, "optimizer": kind, **state.data}


def _checksum(path: Path) -> int:
    checksum = 0
    with open(path, "rb") as file:
        while block := file.read(1 << 24):
            checksum = zlib.crc32(block, checksum)
    return checksum
