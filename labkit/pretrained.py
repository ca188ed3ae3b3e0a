"""Loads a model from a folder in Hugging Face's format, and saves it there, on any ranks in any layout.

A rank copies only its own slices out of the files, which are mapped into memory. The mapping from shards to slices of
whole tensors is that of checkpoints, `labkit.checkpoint_tensors`.
"""

import json
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from labkit import hugging_face as hf
from labkit.checkpoint import together, unwritable
from labkit.checkpoint_tensors import is_my_turn, slices_of
from labkit.groups import ProcessGroups, group_of_one, local_device
from labkit.model import ParallelGPT
from labkit.shape import GPT

COPIED = ("tokenizer*", "vocab.*", "merges.txt", "*_tokens*.json", "chat_template.*", "generation_config.json")
DTYPES = ("F64", "F32", "BF16", "F16")
Found = dict[str, tuple[Path, str]]  # tensor -> its file, and its name there


def read_shape(folder: str | Path, seq_length: int | None = None) -> GPT:
    """Return the shape of the model in a folder, for sequences of this length, by default the longest."""
    path = Path(folder) / hf.CONFIG
    try:
        return hf.shape_of(hf.read_json(path), seq_length)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None


def load(folder: str | Path, models: ParallelGPT | Sequence[ParallelGPT], groups: ProcessGroups) -> None:
    """Fill a rank's model, or its chunks of it, from a folder; every rank calls this. It reads only its own slices.

    Learned positions after the model's seq_length are left out. Values are rounded to the parameters' dtype.

    Raises:
        ValueError: on every rank, before anything is changed: the folder is not whole, or is of a different model.
    """
    models = [models] if isinstance(models, ParallelGPT) else models
    shape, found = models[0].shape, {}
    together(lambda: found.update(check(folder, shape)))
    sizes = whole_sizes(shape)
    for name, parameter in (pair for model in models for pair in model.named_parameters()):
        with ExitStack() as stack:  # closed after each tensor, so that no others stay in memory
            files: dict[Path, Any] = {}
            for offsets, own in slices_of(parameter.detach(), parameter):
                for rows, part, index in _parts(name, sizes[name], shape, offsets, own):
                    path, name_there = found[rows.name]
                    if path not in files:
                        files[path] = stack.enter_context(safe_open(path, "pt"))
                    part.copy_(files[path].get_slice(name_there)[index])
            del files


def check(folder: str | Path, shape: GPT) -> Found:
    """Return where a folder has each tensor of a shape; read no values.

    Raises:
        ValueError: it is of a different shape, a file is damaged, or a tensor is missing, left over or differs.
    """
    there, here = (hf.config_of(each, "") for each in (read_shape(folder, shape.seq_length), shape))
    if differing := [name for name in here if there.get(name) != here[name]]:
        both = (f"{name} is {there.get(name)} there and {here[name]} here" for name in differing)
        raise ValueError(f"{folder} is of a different model: {'; '.join(both)}")
    found, sizes = {}, {}
    for path, names in hf.weight_files(Path(folder)).items():
        try:
            with safe_open(path, "pt") as file:
                headers = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118 - it is no dict
        except FileNotFoundError:
            raise ValueError(f"{Path(folder) / hf.INDEX} names {path.name}, which is not there: download it") from None
        except (SafetensorError, OSError) as error:
            raise ValueError(f"{path} is damaged or incomplete ({error}): download it again") from None
        if missing := sorted(names - headers.keys()):
            raise ValueError(f"{path} lacks {missing[0]}, which {hf.INDEX} says it has: download both again")
        for there, header in headers.items():
            name = hf.full_name(there, shape)
            found[name], sizes[name] = (path, there), (header.get_shape(), header.get_dtype())
    expected = _file_sizes(shape)
    if missing := sorted(expected.keys() - found.keys()):
        raise ValueError(f"{folder} has no {missing[0]} ({len(missing)} tensors are missing): it is incomplete")
    extra = [name for name in sorted(found.keys() - expected.keys()) if not hf.NOT_WEIGHTS.search(name)]
    if extra := [name for name in extra if not (shape.tied and name == "lm_head.weight")]:
        raise ValueError(f"{folder} has {extra[0]}, which such a model has no use for: its config.json is of another")
    for name, size in expected.items():
        (there, dtype), is_positions = sizes[name], name.endswith("wpe.weight")
        if there != size and not (is_positions and there[1:] == size[1:] and there[0] >= size[0]):
            raise ValueError(f"{name} is {there} in {found[name][0]}, but by {hf.CONFIG} it must be {size}")
        if dtype not in DTYPES:
            raise ValueError(f"{name} is {dtype} in {found[name][0]}: use weights in one of {', '.join(DTYPES)}")
    return found


def whole_sizes(shape: GPT) -> dict[str, torch.Size]:
    """Return the size of each of a model's parameters, whole."""
    return {name: each.shape for name, each in ParallelGPT(shape, group_of_one(), device="meta").named_parameters()}


def _file_sizes(shape: GPT) -> dict[str, list[int]]:
    """Return the size of each tensor in the files."""
    sizes: dict[str, list[int]] = {}
    for name, size in whole_sizes(shape).items():
        for rows in hf.rows_of(name, size, shape):
            rest, last = size[1 if rows.expert is None else 2 :], rows.file_start + rows.length
            highest = max(last, sizes.get(rows.name, [0])[-1 if rows.is_transposed else 0])
            sizes[rows.name] = [*rest, highest] if rows.is_transposed else [highest, *rest]
    return sizes


def _parts(
    name: str, size: Sequence[int], shape: GPT, offsets: Sequence[int], own: torch.Tensor
) -> Iterator[tuple[hf.Rows, torch.Tensor, tuple[slice, ...]]]:
    """Yield the parts of a slice that lie in different rows of the files, as views, and where they lie there."""
    for rows in hf.rows_of(name, size, shape):
        block, (start, *others) = own, offsets
        if rows.expert is not None:
            if not 0 <= rows.expert - start < len(own):
                continue
            block, (start, *others) = own[rows.expert - start], others
        begin, end = max(start, rows.start), min(start + len(block), rows.start + rows.length)
        if begin < end:
            part, starts = block[begin - start : end - start], [begin - rows.start + rows.file_start, *others]
            index = tuple(slice(start, start + length) for start, length in zip(starts, part.shape))
            yield (rows, part.mT, index[::-1]) if rows.is_transposed else (rows, part, index)


def save(
    folder: str | Path,
    models: ParallelGPT | Sequence[ParallelGPT],
    groups: ProcessGroups,
    *,
    like: str | Path | None = None,
    max_file_bytes: int = 5 << 30,
) -> None:
    """Write the model of all ranks into a new folder that transformers can load; every rank calls this.

    The ranks take turns to write a file, for which they gather one parameter after the other. So a rank holds at most
    one file's tensors and one parameter more. ``like``: a folder whose tokenizer is copied.

    Raises:
        ValueError: on every rank: the folder exists or cannot be written, or transformers has no such model.
    """
    models = [models] if isinstance(models, ParallelGPT) else models
    mine = {name: each for model in models for name, each in model.named_parameters() if is_my_turn(0, each, groups)}
    sizes, dtype = whole_sizes(models[0].shape), next(models[0].parameters()).dtype

    def whole(name: str, writer: int) -> torch.Tensor:
        tensor = torch.zeros(sizes[name], dtype=dtype, device=local_device())
        for offsets, own in slices_of(mine[name].detach(), mine[name]) if name in mine else ():
            tensor[tuple(slice(start, start + length) for start, length in zip(offsets, own.shape))] = own
        if groups.layout.world_size > 1:  # each number comes from one rank; as bytes, so that also -0.0 stays
            dist.reduce(tensor.flatten().view(torch.uint8), writer)
        return tensor

    write(folder, models[0].shape, dtype, whole, like, max_file_bytes)


def write(
    folder: str | Path,
    shape: GPT,
    dtype: torch.dtype,
    whole: Callable[[str, int], torch.Tensor],
    like: str | Path | None = None,
    max_file_bytes: int = 5 << 30,
) -> None:
    """Write a folder as `save` does; ``whole(name, writer)`` gives that rank a parameter's values."""
    final, partial = Path(folder), Path(f"{folder}.partial")
    rank, world_size = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    config = hf.config_of(shape, str(dtype).removeprefix("torch."))  # raises where there is no such model
    theirs = hf.read_json(Path(like) / hf.CONFIG) if like else {}
    kept = ("bos_token_id", "eos_token_id", "pad_token_id", "max_position_embeddings")
    config |= {name: theirs[name] for name in kept if name in theirs and name in {**config, "pad_token_id": None}}

    def on_first(work: Callable[[], object]) -> None:
        together(work if rank == 0 else lambda: None, str(folder))

    def start() -> None:
        if final.exists():
            raise ValueError(f"{final} exists: name a new folder")
        shutil.rmtree(partial, ignore_errors=True)  # of a save that was killed
        partial.mkdir(parents=True)

    on_first(start)
    sizes, file_sizes, failed, places = whole_sizes(shape), _file_sizes(shape), [], {}
    plan = _plan({name: size.numel() * dtype.itemsize for name, size in sizes.items()}, max_file_bytes)
    for number, (file, names) in enumerate(plan.items()):
        writer, tensors = number % world_size, {}
        for name in names:
            places |= {rows.name: file for rows in hf.rows_of(name, sizes[name], shape)}
            values = whole(name, writer)
            if rank == writer:
                for rows, part, index in _parts(name, sizes[name], shape, [0] * values.dim(), values):
                    if rows.name not in tensors:
                        tensors[rows.name] = torch.empty(file_sizes[rows.name], dtype=dtype)
                    tensors[rows.name][index] = part
        try:
            if rank == writer:
                save_file(tensors, partial / file, {"format": "pt"})
        except (OSError, SafetensorError) as error:
            failed.append(error)  # the others are still gathering

    def finish() -> None:
        if lost := [file for file in plan if not (partial / file).exists()]:
            raise ValueError(f"{partial} lacks {lost[0]}: {folder} must be in a folder that all nodes share")
        if len(plan) > 1:
            total = sum(size.numel() for size in sizes.values()) * dtype.itemsize
            index = {"metadata": {"total_size": total}, "weight_map": places}
            (partial / hf.INDEX).write_text(json.dumps(index, indent=2))
        (partial / hf.CONFIG).write_text(json.dumps(config, indent=2))
        for path in (path for pattern in COPIED for path in Path(like).glob(pattern)) if like else ():
            shutil.copy(path, partial)
        partial.rename(final)

    def written() -> None:
        if failed:
            raise ValueError(unwritable(folder, failed[0]))

    try:
        together(written)
        on_first(finish)
    except ValueError:
        if rank == 0:
            shutil.rmtree(partial, ignore_errors=True)
        raise


def _plan(num_bytes: dict[str, int], most: int) -> dict[str, list[str]]:
    """Return which parameters go into which file, none larger than ``most`` unless one parameter is."""
    files, left = [[]], most
    for name, size in num_bytes.items():
        if size > left and files[-1]:
            files.append([])
            left = most
        files[-1].append(name)
        left -= size
    number = len(files)
    named = [hf.WEIGHTS] if number == 1 else [f"model-{i + 1:05}-of-{number:05}.safetensors" for i in range(number)]
    return dict(zip(named, files))
