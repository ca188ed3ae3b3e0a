"""Saves and loads checkpoints that do not depend on the layout: saved on some ranks, resumed on any
others.

Each tensor is stored as the whole model has it, under its name; every rank writes and reads its
shards of it. A checkpoint gets its final name only when it is complete, so a run that is killed
while it saves has the one before.
"""

import errno
import fcntl
import json
import os
import shutil
import sys
import zlib
from collections.abc import Callable, Iterable, Iterator, KeysView, Mapping, Set
from concurrent import futures
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint import filesystem, staging, state_dict_loader, state_dict_saver
from torch.distributed.checkpoint.api import CheckpointException

from labkit.groups import local_device, local_rank
from labkit.shape import GPT
from labtrain.checkpoint_tensors import State, make_states, tensors_of, without_states
from labtrain.command_line import run_command

DESCRIPTION = "labkit.json"
LOCK = "labkit.lock"
METADATA = ".metadata"  # torch's
CHANGED = "has changed since it was written"
SHARED = "checkpoint_dir must be a folder that all nodes share"
NOT_A_DESCRIPTION = "is not the description of a labtrain checkpoint"
FACTS = {"step", "num_samples", "precision", "optimizer", "options", "checksums", "checksum"}
"""What a description says, beside the shape of the model."""

RENAMED_OPTIONS = {"balanced": "zigzag", "bias_update_rate": "expert_bias_update_rate"}
"""Options of checkpoints that were written before these had the names of today."""


@contextmanager
def lock_folder(
    folder: str | Path, resume: bool, in_background: bool = False
) -> Iterator[Callable[..., None]]:
    """Keep the folder for this run inside the block, on all ranks together; yield `save`, or
    `InBackground.save`.

    What a killed save left there goes. After the block, the last checkpoint is complete. Raises a
    ValueError if another run uses the folder, if it has checkpoints that are not resumed, or if it
    cannot be written.
    """
    folder = Path(folder)
    with ExitStack() as while_it_runs:

        def prepare() -> None:
            if dist.get_rank() == 0:
                _check_folder(folder)
                while_it_runs.enter_context(_locked(folder / LOCK))
                _clean(folder, resume)

        raise_on_all_ranks(prepare, f"checkpoint_dir={folder}")
        if in_background:
            yield while_it_runs.enter_context(InBackground()).save
        else:
            yield save


def _check_folder(folder: Path) -> None:
    """Make a folder for checkpoints, or raise a ValueError if something else has its name."""
    if (folder / DESCRIPTION).exists():
        fault = f"checkpoint_dir={folder} is a checkpoint"
        raise ValueError(f"{fault}: name the folder that it is in, {folder.parent}")
    if folder.is_file():
        raise ValueError(f"checkpoint_dir={folder} is a file: name a folder")
    folder.mkdir(parents=True, exist_ok=True)


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Hold a file's lock inside the block. A process that is killed frees it too."""
    with open(path, "w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            fault = f"checkpoint_dir={path.parent} is in use by another run"
            raise ValueError(f"{fault}: name a different folder") from None
        except OSError:
            pass  # a file system without locks
        yield


def _clean(folder: Path, resume: bool) -> None:
    """Remove what killed saves left; raise a ValueError if there are checkpoints and the run does
    not resume.
    """
    found = newest(folder)
    if found and not resume:
        fault = f"checkpoint_dir={folder} already has {found.name}"
        raise ValueError(f"{fault}: resume it, or name a different folder")
    for partial in folder.glob("step_*.partial"):
        shutil.rmtree(partial, ignore_errors=True)


def save(folder: str | Path, state: State, step: int, num_samples: int, keep: int = 0) -> None:
    """Write a step's checkpoint, on all ranks together, and leave the ``keep`` newest complete ones
    there; 0 for all.

    If it cannot be written, or some files do not arrive in this folder, nothing is left and a
    ValueError says why.
    """
    writer = _Writer(folder, state, step, num_samples, keep)
    with _complete_or_nothing(writer.partial):
        state_dict_saver.save(dict(tensors_of(state, to_save=True)), storage_writer=writer)


class InBackground(AbstractContextManager["InBackground"]):
    """Saves as `save` does, but returns when the values are copied; torch's thread writes them.

    One checkpoint at a time is on its way. The ranks' threads meet in a gloo group of their own, so
    that no message of theirs gets among those of training.
    """

    def __init__(self):
        self._group: Any = dist.new_group(
            backend="gloo", group_desc="checkpoints in the background"
        )
        # A rank that closed early would hang up on a peer that is still connecting
        dist.barrier(self._group)
        self._copies = _Copies()
        self._in_flight: list[tuple[Path, futures.Future]] = []

    def save(
        self, folder: str | Path, state: State, step: int, num_samples: int, keep: int = 0
    ) -> None:
        """Copy the values once the checkpoint before is complete; raise what `save` raises if that
        one has failed.
        """
        self.wait()
        writer = _Writer(folder, state, step, num_samples, keep)
        # Or the thread would look for tensors on GPU 0, and open a context there
        writer.per_thread_copy_ahead = 0
        saving: Any = state_dict_saver.async_save(
            dict(tensors_of(state, to_save=True)),
            storage_writer=writer,
            process_group=self._group,
            async_stager=self._copies,
        )
        self._in_flight.append((writer.partial, saving))

    def wait(self) -> None:
        """Wait until the checkpoint on its way is complete, and raise what `save` raises if it is
        not.
        """
        # If interrupted here, it is still on its way
        futures.wait([future for _, future in self._in_flight])
        while self._in_flight:
            partial, future = self._in_flight.pop()
            with _complete_or_nothing(partial):
                future.result()

    def __exit__(self, error_type, *_) -> None:
        try:
            # The first error is the one to tell
            with suppress(Exception) if error_type else ExitStack():
                self.wait()
        finally:
            # Now, though a traceback may hold this object
            dist.destroy_process_group(vars(self).pop("_group"))


class _Copies(staging.AsyncStager):
    """Copies what a rank saves to the CPU's memory, slice by slice.

    torch's own stager copies all the memory that a slice lies in, and takes longer.
    """

    _synchronize_after_execute = False  # `stage` returns when the values are there

    def __init__(self):
        # Kept, because to get memory, pinned for a GPU, takes longer than to copy.
        self._copies: dict[str, torch.Tensor] = {}

    def stage(self, state_dict: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Return copies of these tensors."""
        for name, tensor in state_dict.items():
            if name in self._copies:
                self._copies[name].copy_(tensor, non_blocking=True)
            else:
                self._copies[name] = tensor.to("cpu", non_blocking=True, copy=True)
        if local_device().type == "cuda":
            torch.cuda.current_stream().synchronize()  # before the next step changes the weights
        return {name: self._copies[name] for name in state_dict}


class _Writer(filesystem.FileSystemWriter):
    """Writes files as torch does, notes their checksums, and renames the folder when
    all are there.
    """

    def __init__(self, folder: str | Path, state: State, step: int, num_samples: int, keep: int):
        self.keep = keep
        self.final = Path(folder) / f"step_{step:08d}"
        self.partial = self.final.with_suffix(".partial")
        self.about: dict[str, Any] = {"step": step, "num_samples": num_samples}
        self.about |= _must_be_same(state)
        self.about["options"] = state.options
        self.about["layout"] = str(state.groups.layout).splitlines()[0]
        super().__init__(self.partial)

    def write_data(self, plan, planner) -> Any:
        """Write this rank's files, and compute their checksums."""
        try:
            results = super().write_data(plan, planner).value()
        except (OSError, RuntimeError) as error:
            self._raise_if_refused(plan, error)
            raise  # not the file system's fault, or nobody says so
        files = self.partial.glob(f"__{dist.get_rank()}_*")
        checksums = {path.name: _checksum(path) for path in files}
        written = torch.futures.Future()
        written.set_result((results, checksums))
        return written

    def _raise_if_refused(self, plan, error: OSError | RuntimeError) -> None:
        """Raise an OSError that says what there was to write, if the file system refused it."""
        tensors = [item.tensor_data for item in plan.items if item.tensor_data]
        needed = 0
        for tensor in tensors:
            needed += tensor.chunk.sizes.numel() * tensor.properties.dtype.itemsize
        left = shutil.disk_usage(self.partial.parent).free
        number = errno.ENOSPC if left < needed else _errno_of(error)
        if number is not None:
            why = f"{os.strerror(number)}: the files of rank {dist.get_rank()}"
            raise OSError(number, f"{why} need {needed:,} bytes, {left:,} are free") from error

    def finish(self, metadata, results: list[Any]) -> None:
        """Give the checkpoint its name; the first rank calls this when all have written."""
        super().finish(metadata, [of_rank for of_rank, _ in results])
        checksums = {}
        written = set()
        for of_rank, checksums_of_rank in results:
            checksums |= checksums_of_rank
            written |= {result.storage_data.relative_path for result in of_rank}
        # A node that writes to a disk of its own has checksums of files that are not here
        arrived = checksums.keys() & {path.name for path in self.partial.iterdir()}
        if lost := written - arrived:
            raise ValueError(f"{self.partial} lacks {min(lost)}: {SHARED}")
        checksums[METADATA] = _checksum(self.partial / METADATA)
        described = self.about | {"checksums": checksums}
        described["checksum"] = _checksum_of(described)
        with open(self.partial / DESCRIPTION, "w") as file:
            json.dump(described, file, indent=1)
            file.flush()
            os.fsync(file.fileno())
        shutil.rmtree(self.final, ignore_errors=True)
        self.partial.rename(self.final)
        if self.keep:
            for old in complete(self.final.parent)[: -self.keep]:
                # Renamed first, so that nobody takes what is left of it for a checkpoint
                shutil.rmtree(old.rename(old.with_suffix(".partial")), ignore_errors=True)


def _errno_of(error: BaseException | None) -> int | None:
    """Return the number of the OSError that led to this one: torch's writer says only "unexpected
    pos" after it.
    """
    while error is not None:
        if isinstance(error, OSError):
            return error.errno
        error = error.__context__
    return None


@contextmanager
def _complete_or_nothing(partial: Path) -> Iterator[None]:
    """Turn torch's error, the same on all ranks, into the one to raise; remove what has been
    written.

    What the file system refuses is a ValueError with a way out. Anything else is raised as it is:
    its cause is unknown.
    """
    try:
        yield
    except CheckpointException as error:
        if dist.get_rank() == 0:
            shutil.rmtree(partial, ignore_errors=True)  # others may need the space
        causes = [cause for cause, _ in error.failures.values()]
        interrupts = [cause for cause in causes if not isinstance(cause, Exception)]
        cause = [*interrupts, *causes][0]
        if isinstance(cause, OSError):
            raise ValueError(unwritable(partial.with_suffix(""), cause)) from error
        raise cause from error


def newest(folder: str | Path) -> Path | None:
    """Return the newest complete checkpoint in a folder, or None."""
    return next(reversed(complete(folder)), None)


def complete(folder: str | Path) -> list[Path]:
    """Return all complete checkpoints in a folder, the newest last."""
    return sorted(path.parent for path in Path(folder).glob(f"step_????????/{DESCRIPTION}"))


def step_of(path: Path) -> int:
    """Return after which step a checkpoint was saved.

    >>> step_of(Path("run1/step_00000040"))
    40
    """
    return int(path.name.removeprefix("step_"))


def load_newest(folder: str | Path, state: State) -> tuple[int, int]:
    """Restore a folder's newest complete checkpoint on every rank, and return its step and samples
    (0, 0 without one).

    Raises a ValueError if it is damaged, or has a different model, optimizer, text or seed.
    """
    found = [newest(folder)]
    dist.broadcast_object_list(found)  # one rank looks for all
    path = found[0]
    if path is None:
        _say_on_each_node(f"No checkpoint in {folder}: starting with step 1")
        return 0, 0
    untrained = _load(path, state)
    about = json.loads((path / DESCRIPTION).read_text())
    said = [f"Resuming after step {about['step']}, from {path.name}"]
    changes = _changes(state.options, options_of(about))
    if changes:
        said.append(f"From here on {', '.join(changes)}")
    if names := _on_any_rank(untrained):
        more = f" and {len(names) - 1} more" if len(names) > 1 else ""
        said.append(f"It has no optimizer states of {names[0]}{more}, so these start anew")
    _say_on_each_node(". ".join(said))
    return about["step"], about["num_samples"]


def _load(path: Path, state: State) -> list[str]:
    """Fill this rank's tensors; return the names of the parameters that had no optimizer states."""
    make_states(state.optimizer)
    tensors = dict(tensors_of(state))
    of_model = {name for name in tensors if name.startswith("model.")}
    raise_on_all_ranks(lambda: _check(path, state, of_model))
    untrained = dict(without_states(state, _saved_names(path)))  # frozen until now, say
    for name, parameter in untrained.items():
        for key in state.optimizer.state[parameter]:
            tensors.pop(f"optimizer.{name}.{key}", None)
    state_dict_loader.load(tensors, checkpoint_id=path)
    _forget_states(state.optimizer, list(untrained.values()))
    return list(untrained)


def options_of(about: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options of the run that wrote a checkpoint, by the names of today.

    >>> options_of({"options": {"context_parallel": "gathered", "balanced": True}})
    {'context_parallel': 'all_gather', 'zigzag': True}
    >>> options_of({"options": {"recompute": True}})
    {'recompute': 'full'}
    """
    options = dict(about["options"])
    for old, new in RENAMED_OPTIONS.items():
        if old in options:
            options[new] = options.pop(old)
    if options.get("context_parallel") == "gathered":
        options["context_parallel"] = "all_gather"
    if isinstance(recompute := options.get("recompute"), bool):
        options["recompute"] = "full" if recompute else "none"
    return options


def _changes(now: Mapping[str, Any], before: Mapping[str, Any]) -> list[str]:
    """Return what to say of each option that differs from that of the run that is resumed."""
    names = sorted(now.keys() & before.keys() - {"resume"})
    changed = [name for name in names if now[name] != before[name]]
    return [f"{name} is {now[name]} instead of {before[name]}" for name in changed]


def _say_on_each_node(text: str) -> None:
    if local_rank() == 0:  # each node may have a log of its own
        print(text, flush=True)


def _saved_names(path: Path) -> KeysView[str]:
    return filesystem.FileSystemReader(path).read_metadata().state_dict_metadata.keys()


def _on_any_rank(names: Iterable[str]) -> list[str]:
    of_ranks: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(of_ranks, list(names))
    return sorted(set().union(*of_ranks))


@torch.no_grad()
def _forget_states(optimizer: torch.optim.Optimizer, parameters: list[nn.Parameter]) -> None:
    """Let an optimizer start anew with these parameters, from their values."""
    masters = getattr(optimizer, "masters", {})
    inner = getattr(optimizer, "inner", optimizer)
    for parameter in parameters:
        optimizer.state.pop(parameter)
        if parameter in masters:
            inner.state.pop(masters[parameter])
            masters[parameter].copy_(parameter)


def _check(path: Path, state: State, names: Set[str]) -> None:
    """Check that a checkpoint is whole, of this model, and has tensors of these names.

    Ranks share its data files.
    """
    if not (path / DESCRIPTION).exists():
        raise ValueError(f"rank {dist.get_rank()} does not see {path}: {SHARED}")
    about, damage = _read(path)
    go_back = f"remove {path.name} to resume from the checkpoint before it"
    if damage:
        raise ValueError(f"{damage}: {go_back}")
    differing = []
    for name, expected in _must_be_same(state).items():
        if about.get(name) != expected:
            differing.append(f"{name} is {about.get(name)} there and {expected} here")
    if differing:
        way_out = "resume with what is there, or name a different checkpoint_dir"
        raise ValueError(f"{path} does not fit: {'; '.join(differing)}: {way_out}")
    checksums = about["checksums"]
    data_files = sorted(checksums.keys() - {METADATA})
    share = data_files[dist.get_rank() :: dist.get_world_size()]
    if damage := _damage(path, {name: checksums[name] for name in [METADATA, *share]}):
        raise ValueError(f"{damage}: {go_back}")
    if missing := sorted(names - _saved_names(path)):
        fault = f"{path} has no {missing[0]} ({len(missing)} tensors are missing)"
        raise ValueError(f"{fault}: it is of a different model")


def _read(path: Path) -> tuple[dict[str, Any], str]:
    """Return what a checkpoint says of itself, and whether that has changed since, or an empty
    text.
    """
    file = path / DESCRIPTION
    try:
        about = dict(json.loads(file.read_text()))
    except (OSError, ValueError, TypeError) as error:
        raise ValueError(f"{file} {NOT_A_DESCRIPTION}: {error!r}") from error
    shape = {field.name for field in fields(GPT)}
    if missing := sorted((FACTS | shape) - about.keys()):
        if not {"step", "checksums"} < about.keys():
            raise ValueError(f"{file} {NOT_A_DESCRIPTION}: it has no {missing[0]}")
        fault = f"{path} was written by an older version of labtrain, without {missing[0]}"
        way_out = "use the version that wrote it, or start a new run in a different folder"
        raise ValueError(f"{fault}: {way_out}")
    checksum = about.pop("checksum")
    is_as_written = checksum == _checksum_of(about)
    return about, "" if is_as_written else f"{file} {CHANGED}"


def _checksum_of(described: Mapping[str, Any]) -> int:
    return zlib.crc32(json.dumps(described).encode())


def _damage(path: Path, checksums: Mapping[str, int]) -> str:
    """Return what is wrong with the first file that is not as it was written, or an empty text."""
    for name, checksum in checksums.items():
        file = path / name
        if not file.is_file() or _checksum(file) != checksum:
            return f"{file} {_what_is_wrong(file)}"
    return ""


def _what_is_wrong(file: Path) -> str:
    if file.is_file():
        return CHANGED
    return "is a folder" if file.exists() else "is missing"


def raise_on_all_ranks(work: Callable[[], Any], written: str = "") -> None:
    """Do this rank's work; raise on all ranks if it failed on one.

    ``written`` names what it writes, if anything.
    """
    error = ""
    try:
        work()
    except OSError as raised:
        error = unwritable(written, raised) if written else str(raised)
    except ValueError as raised:
        error = str(raised)
    errors = [error]
    if dist.is_initialized():
        errors *= dist.get_world_size()
        dist.all_gather_object(errors, error)
    if first := next(filter(None, errors), None):
        raise ValueError(first)


def unwritable(what: str | Path, error: OSError) -> str:
    """Return what to say of a file or folder that could not be written.

    >>> unwritable("run1", OSError(errno.EACCES, "Permission denied"))
    'run1 cannot be written (Permission denied): name a folder that you may write to'
    """
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        way_out = "make space, or name a folder on a different disk"
    elif error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
        way_out = "name a folder that you may write to"
    else:
        way_out = "name a different folder"
    return f"{what} cannot be written ({error.strerror or error}): {way_out}"


def _must_be_same(state: State) -> dict[str, Any]:
    """Return what must be the same to resume; the layout need not be."""
    inner = getattr(state.optimizer, "inner", None)
    optimizer = type(state.optimizer).__name__
    if inner is not None:
        optimizer = f"{type(inner).__name__} with master weights"
    dtype = str(next(state.models[0].parameters()).dtype).removeprefix("torch.")
    facts = {"precision": dtype, "optimizer": optimizer}
    return asdict(state.shape) | facts | state.data


def describe(folder: str | Path) -> tuple[Path, dict[str, Any], str]:
    """Return a checkpoint, or the newest of a folder, what it says of itself, and what is damaged,
    or an empty text.

    Raises a ValueError if there is none, or it does not say.
    """
    is_checkpoint = (Path(folder) / DESCRIPTION).exists()
    path = Path(folder) if is_checkpoint else newest(folder)
    if path is None:
        fault = f"no complete checkpoint is in {folder}"
        raise ValueError(f"{fault}: name a folder of checkpoints, or one of them")
    about, damage = _read(path)
    return path, about, damage or _damage(path, about["checksums"])


def main(folder: str) -> int:
    """Print what is in a checkpoint, or in the newest of a folder; return 0 if it is whole,
    otherwise 1.
    """
    try:
        path, about, damage = describe(folder)
    except ValueError as error:
        print(error)
        return 1
    num_files = len(about.pop("checksums"))
    print(json.dumps(about, indent=1))
    if damage:
        print(f"{path.name} is damaged: {damage}")
        return 1
    print(f"{path.name} is whole: {num_files} files")
    return 0


def _checksum(path: Path) -> int:
    checksum = 0
    with open(path, "rb") as file:
        while block := file.read(1 << 24):
            checksum = zlib.crc32(block, checksum)
    return checksum


if __name__ == "__main__":
    run_command(main, *sys.argv[1:2] or ["."])
