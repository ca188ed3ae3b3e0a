"""Loads a model from a folder in Hugging Face's format, and saves it there, on any ranks in any layout.

A rank copies only its own slices out of the files, which are mapped into memory. The mapping from shards to slices of
whole tensors is that of checkpoints, `labkit.checkpoint_tensors`.
"""

import json
import shutil
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from labkit import hugging_face as hf
from labkit.checkpoint import together
from labkit.checkpoint_tensors import is_my_turn, slices_of
from labkit.groups import ProcessGroups, group_of_one, local_device
from labkit.model import ParallelGPT
from labkit.shape import GPT

COPIED = ("tokenizer*", "vocab.*", "merges.txt", "*_tokens*.json", "chat_template.*", "generation_config.json")
KEPT = ("bos_token_id", "eos_token_id", "pad_token_id", "max_position_embeddings")  # of a config.json
DTYPES = ("F64", "F32", "BF16", "F16")
Found = dict[str, tuple[Path, str]]  # tensor -> its file, and its name there


def read_shape(folder: str | Path, seq_length: int | None = None) -> GPT:
    """Return the shape of the model in a folder, for sequences of this length, by default the longest."""
    path = Path(folder) / hf.CONFIG
    config = hf.read_json(path)  # its errors name the path
    try:
        return hf.shape_of(config, seq_length)
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
        for offsets, own in slices_of(parameter.detach(), parameter):
            for tensor, part, index in _parts(name, sizes[name], shape, offsets, own):
                path, name_there = found[tensor]
                with safe_open(path, "pt") as file:  # closed after each part, so that no others stay in memory
                    part.copy_(file.get_slice(name_there)[index])


def check(folder: str | Path, shape: GPT) -> Found:
    """Return where a folder has each tensor of a shape; read no values.

    Raises:
        ValueError: it is of a different shape, a file is damaged, or a tensor is missing, left over or differs.
    """
    there, here = hf.config_of(read_shape(folder, shape.seq_length)), hf.config_of(shape)
    if differing := [name for name in here if there.get(name) != here[name]]:
        both = (f"{name} is {there.get(name)} there and {here[name]} here" for name in differing)
        raise ValueError(f"{folder} is of a different model: {'; '.join(both)}")
    expected, base, found = _tensor_sizes(shape), hf.family_of(shape).layers.split(".")[0], {}
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
        for name_there, header in headers.items():
            name = f"{base}.{name_there}"  # as a model without an output layer is saved
            name = name if name in expected else name_there
            found[name], size, most = (path, name_there), header.get_shape(), expected.get(name)
            if most is None:
                if not hf.NOT_WEIGHTS.search(name) and not (shape.tied and name == "lm_head.weight"):
                    raise ValueError(f"{path} has {name}, which such a model has no use for: {hf.CONFIG} is of another")
            elif size != most and not (name.endswith("wpe.weight") and size[1:] == most[1:] and size[0] > most[0]):
                raise ValueError(f"{name} is {size} in {path}, but by {hf.CONFIG} it must be {most}")
            elif header.get_dtype() not in DTYPES:
                use = ", ".join(DTYPES)
                raise ValueError(f"{name} is {header.get_dtype()} in {path}: use weights in one of {use}")
    if missing := sorted(expected.keys() - found.keys()):
        raise ValueError(f"{folder} has no {missing[0]} ({len(missing)} tensors are missing): it is incomplete")
    return found


def whole_sizes(shape: GPT) -> dict[str, torch.Size]:
    """Return the size of each of a model's parameters, whole."""
    return {name: each.shape for name, each in ParallelGPT(shape, group_of_one(), device="meta").named_parameters()}


def _tensor_sizes(shape: GPT) -> dict[str, list[int]]:
    """Return the size of each tensor in the files, all of whose rows are a parameter's."""
    sizes: dict[str, list[int]] = {}
    for name, size in whole_sizes(shape).items():
        for tensor, rows in hf.rows_of(name, size, shape):
            sizes[tensor] = max(sizes.get(tensor, []), [rows.stop, *size[max(1, len(size) - 1) :]])
    return {tensor: size[::-1] if hf.is_transposed(tensor) else size for tensor, size in sizes.items()}


def _parts(
    name: str, size: Sequence[int], shape: GPT, offsets: Sequence[int], own: torch.Tensor
) -> Iterator[tuple[str, torch.Tensor, tuple[slice, ...]]]:
    """Yield the tensors in the files that have rows of a slice of a parameter: which rows, as a view, and where."""
    expert, row, *columns = offsets if own.dim() == 3 else (0, *offsets)
    for number, matrix in enumerate(own if own.dim() == 3 else [own]):
        first = (expert + number) * size[-2] + row if own.dim() == 3 else row  # of all experts' rows
        end = 0
        for tensor, rows in hf.rows_of(name, size, shape):
            begin, end = end, end + len(rows)
            start, stop = max(begin, first), min(end, first + len(matrix))
            if start < stop:
                part, starts = matrix[start - first : stop - first], [rows.start + start - begin, *columns]
                index = tuple(slice(at, at + length) for at, length in zip(starts, part.shape))
                yield (tensor, part.mT, index[::-1]) if hf.is_transposed(tensor) else (tensor, part, index)


def save(
    folder: str | Path, models: ParallelGPT | Sequence[ParallelGPT], groups: ProcessGroups, **options: Any
) -> None:
    """Write the model of all ranks into a new folder that transformers can load; every rank calls this.

    The ranks take turns to write a file, for which they gather one parameter after the other. So a rank holds at most
    one file's tensors and one parameter more. Options are those of `write`.

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

    write(folder, models[0].shape, dtype, whole, **options)


def write(
    folder: str | Path,
    shape: GPT,
    dtype: torch.dtype,
    whole: Callable[[str, int], torch.Tensor],
    like: str | Path | None = None,
    max_file_bytes: int = 5 << 30,
) -> None:
    """Write a folder as `save` does; ``whole(name, writer)`` gives that rank a parameter's values.

    ``like``: a folder whose tokenizer, and what its config.json says of it, are copied.
    """
    final, partial = Path(folder), Path(f"{folder}.partial")
    rank, world_size = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    sizes, tensor_sizes = whole_sizes(shape), _tensor_sizes(shape)
    files, weight_map = _plan({name: size.numel() * dtype.itemsize for name, size in sizes.items()}, max_file_bytes), {}
    config = hf.config_of(shape) | {"torch_dtype": str(dtype).removeprefix("torch.")}
    config |= {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}  # else transformers takes 1 and 2
    theirs = hf.read_json(Path(like) / hf.CONFIG) if like else {}
    config |= {name: theirs[name] for name in KEPT if name in theirs and name in config}

    def on(writer: int, work: Callable[[], object]) -> None:
        together(work if rank == writer else lambda: None, str(folder))

    def start() -> None:
        if final.exists():
            raise ValueError(f"{final} exists: name a new folder")
        shutil.rmtree(partial, ignore_errors=True)  # of a save that was killed
        partial.mkdir(parents=True)

    def finish() -> None:
        if lost := [file for file in files if not (partial / file).exists()]:
            raise ValueError(f"{partial} lacks {lost[0]}: {folder} must be in a folder that all nodes share")
        if len(files) > 1:
            total = sum(size.numel() for size in sizes.values()) * dtype.itemsize
            (partial / hf.INDEX).write_text(json.dumps({"metadata": {"total_size": total}, "weight_map": weight_map}))
        (partial / hf.CONFIG).write_text(json.dumps(config, indent=2))
        for path in (path for pattern in COPIED for path in Path(like).glob(pattern)) if like else ():
            shutil.copy(path, partial)
        partial.rename(final)

    on(0, start)
    try:
        for number, (file, names) in enumerate(files.items()):
            writer, tensors = number % world_size, {}
            for name in names:
                values = whole(name, writer)
                for tensor, part, index in _parts(name, sizes[name], shape, [0] * values.dim(), values):
                    weight_map[tensor] = file
                    if rank == writer:
                        if tensor not in tensors:
                            tensors[tensor] = torch.empty(tensor_sizes[tensor], dtype=dtype)
                        tensors[tensor][index] = part
            on(writer, lambda path=partial / file, tensors=tensors: _save_file(tensors, path))
        on(0, finish)
    except ValueError:
        if rank == 0:
            shutil.rmtree(partial, ignore_errors=True)
        raise


def _save_file(tensors: dict[str, torch.Tensor], path: Path) -> None:
    try:
        save_file(tensors, path, {"format": "pt"})
    except SafetensorError as error:  # such as a full disk
        raise OSError(error) from None


def _plan(num_bytes: dict[str, int], most: int) -> dict[str, list[str]]:
    """Return which parameters go into which file, none larger than ``most`` unless one parameter is."""
    files, left = [[]], most
    for name, size in num_bytes.items():
        if size > left and files[-1]:
            files.append([])
            left = most
        files[-1].append(name)
        left -= size
    if len(files) == 1:
        return {hf.WEIGHTS: files[0]}
    return {f"model-{i:05}-of-{len(files):05}.safetensors": names for i, names in enumerate(files, 1)}
