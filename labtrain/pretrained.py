"""Loads a model from a folder in Hugging Face's format, and saves it there, on any ranks in any
layout.

A rank copies only its own slices out of the files, which are mapped into memory. The mapping from
shards to slices of whole tensors is that of checkpoints, `labtrain.checkpoint_tensors`.
"""

import json
import re
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from labkit.groups import ProcessGroups, group_of_one, local_device
from labkit.shape import GPT
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from labtrain import hugging_face as hf
from labtrain.checkpoint import together
from labtrain.checkpoint_tensors import is_my_turn, slices_of
from labtrain.model import ParallelGPT

COPIED = (
    "tokenizer*",
    "vocab.*",
    "merges.txt",
    "*_tokens*.json",
    "chat_template.*",
    "generation_config.json",
)
ADAPTER = "adapter_config.json"
DTYPES = ("F64", "F32", "BF16", "F16")
ROWS_AT_ONCE = 1 << 12  # that are compared


class Found(NamedTuple):
    """Where a tensor is, and what the file says of it."""

    path: Path
    name: str  # in the file
    size: list[int]
    dtype: str


def read_shape(folder: str | Path, seq_length: int | None = None) -> GPT:
    """Return the shape of the model in a folder, for sequences of this length, by default the
    longest.

    A config.json may say that the output layer's weight is the embedding's while the files have
    both, with different values, as after a merge of two models. Then the output layer has a weight
    of its own, as in transformers.
    """
    folder = Path(folder)
    config = _read_config(folder)
    try:
        shape = hf.shape_of(config, seq_length)
    except ValueError as error:
        raise ValueError(f"{folder / hf.CONFIG}: {error}") from None
    return replace(shape, tied=False) if shape.tied and _has_own_output(folder, shape) else shape


def _read_config(folder: Path) -> Mapping[str, Any]:
    """Return what a folder's config.json has; a ValueError says how to get a folder
    that has one.
    """
    if not folder.exists():
        fault, name = f"{folder} is not a folder here, and labkit downloads nothing", str(folder)
        if re.fullmatch(r"[\w.-]+(/[\w.-]+)?", name):
            get = f"hf download {name} --local-dir {folder.name}"
            raise ValueError(
                f"{fault}: if it is a model on huggingface.co, get it with "
                f"`{get}`, then name that folder"
            )
        raise ValueError(f"{fault}: name a folder that transformers' save_pretrained wrote")
    if (folder / ADAPTER).exists():
        fault = f"{folder / ADAPTER} belongs to an adapter, which labkit does not apply"
        raise ValueError(f"{fault}: merge it into the weights, and name the folder of the result")
    return hf.read_json(folder / hf.CONFIG)


def _has_own_output(folder: Path, shape: GPT) -> bool:
    """Whether the files have an output layer's weight that differs from the embedding's."""
    try:
        found = _find(folder, shape)
    except ValueError:  # which `check` is there to say
        return False
    embedding, output = (found.get(name) for name in _ends(shape))
    if embedding is None or output is None:
        return False
    if embedding.size != output.size or not {embedding.dtype, output.dtype} <= set(DTYPES):
        return True
    places = (
        (tensor.path, tensor.name, tensor.path.stat().st_mtime_ns) for tensor in (embedding, output)
    )
    return _differ(*places)


def _ends(shape: GPT) -> list[str]:
    """Return the names of the embedding's weight and of the output layer's."""
    return [
        f"{hf.family_of(shape).tensors[module][0]}.weight" for module in ("embedding", "output")
    ]


@lru_cache  # they are large, and a rank asks several times
def _differ(*places: tuple[Path, str, int]) -> bool:
    """Whether two matrices differ, each given by its file, its name there, and when the file was
    written.
    """
    with ExitStack() as open_files:
        a, b = (
            open_files.enter_context(safe_open(path, "pt")).get_slice(name)
            for path, name, _ in places
        )
        blocks = (
            slice(first, first + ROWS_AT_ONCE) for first in range(0, a.get_shape()[0], ROWS_AT_ONCE)
        )
        return any(bool((a[rows] != b[rows]).any()) for rows in blocks)


def load(
    folder: str | Path, models: ParallelGPT | Sequence[ParallelGPT], groups: ProcessGroups
) -> None:
    """Fill a rank's model, or its chunks of it, from a folder; every rank calls this.

    It reads only its own slices.

    Learned positions after the model's seq_length are left out. Values are rounded to the
    parameters' dtype.

    Raises:
        ValueError: on every rank, before anything is changed: the folder is not whole, or is of a
            different model.
    """
    models = [models] if isinstance(models, ParallelGPT) else models
    shape, found = models[0].shape, dict[str, Found]()
    together(lambda: found.update(check(folder, shape)))
    sizes = whole_sizes(shape)
    for name, parameter in (pair for model in models for pair in model.named_parameters()):
        for offsets, own in slices_of(parameter.detach(), parameter):
            for tensor, part, index in _parts(name, sizes[name], shape, offsets, own):
                # Closed after each part: its pages leave memory
                with safe_open(found[tensor].path, "pt") as file:
                    part.copy_(file.get_slice(found[tensor].name)[index])
    for bias in (buffer for model in models for buffer in model.buffers()):
        bias.zero_()  # of routers: a folder has none


def check(folder: str | Path, shape: GPT) -> dict[str, Found]:
    """Return where a folder has each tensor of a shape; read no values.

    Raises:
        ValueError: it is of a different shape, a file is damaged, or a tensor is missing, left over
            or differs.
    """
    folder = Path(folder)
    if differing := differences(folder, shape):
        raise ValueError(f"{folder} is of a different model: {differing}")
    learned = {"seq_length": read_shape(folder).seq_length} if shape.positions == "learned" else {}
    expected, found = _tensor_sizes(replace(shape, **learned)), _find(folder, shape)
    left_out = hf.left_out(_read_config(folder))
    for name, (path, _, size, dtype) in found.items():
        if (most := expected.get(name)) is None:
            _check_leftover(name, path, shape)
        elif size != most:
            raise ValueError(
                f"{name} is {size} in {path}, but by {hf.CONFIG} it must be {most}{left_out}"
            )
        elif dtype not in DTYPES:
            raise ValueError(
                f"{name} is {dtype} in {path}: use weights in one of {', '.join(DTYPES)}"
            )
    if missing := sorted(expected.keys() - found.keys()):
        fault = f"{folder} has no {missing[0]} ({len(missing)} tensors are missing)"
        raise ValueError(f"{fault}: it is incomplete{left_out}")
    return found


def differences(folder: str | Path, shape: GPT) -> str:
    """Return in which options the model in a folder differs from a shape, or an empty text."""
    there, here = hf.config_of(read_shape(folder, shape.seq_length)), hf.config_of(shape)
    both = [(name, there.get(name), here[name]) for name in here if name != "architectures"]
    return "; ".join(
        f"{name} is {theirs} there and {ours} here" for name, theirs, ours in both if theirs != ours
    )


def _find(folder: Path, shape: GPT) -> dict[str, Found]:
    """Return where a folder has each of its tensors, by the name in a model with an
    output layer.
    """
    base, found = hf.family_of(shape).layers.split(".")[0], dict[str, Found]()
    expected = _tensor_sizes(replace(shape, tied=False)).keys()
    for path in hf.weight_files(folder):
        try:
            with safe_open(path, "pt") as file:
                headers = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118 - it is no dict
        except FileNotFoundError:
            raise ValueError(
                f"{folder / hf.INDEX} names {path.name}, which is not there: download it"
            ) from None
        except OSError as error:
            raise ValueError(
                f"{path} cannot be read ({error.strerror or error}): name a folder of files"
            ) from None
        except SafetensorError as error:
            raise ValueError(
                f"{path} is damaged or incomplete ({error}): download it again"
            ) from None
        for name_there, header in headers.items():
            name = f"{base}.{name_there}"  # as a model without an output layer is saved
            name = name if name in expected else name_there
            found[name] = Found(path, name_there, header.get_shape(), header.get_dtype())
    embedding, output = _ends(shape)
    # A weight that is both was saved as the latter
    if shape.tied and embedding not in found and output in found:
        found[embedding] = found[output]
    return found


def _check_leftover(name: str, path: Path, shape: GPT) -> None:
    """Raise a ValueError for a tensor that a model has no use for, unless its values say nothing
    more.
    """
    if hf.NOT_WEIGHTS.search(name) or (shape.tied and name == _ends(shape)[1]):
        return
    if shape.num_experts and hf.AS_IN_MEMORY.search(name):
        fault = (
            f"{path} has {name}: its experts are those of transformers' memory, not of its files"
        )
        raise ValueError(
            f"{fault}: write it anew with save_pretrained(..., save_original_format=True)"
        )
    raise ValueError(
        f"{path} has {name}, which such a model has no use for: {hf.CONFIG} is of another"
    )


def whole_sizes(shape: GPT) -> dict[str, torch.Size]:
    """Return the size of each of a model's parameters, whole."""
    return {name: parameter.shape for name, parameter in on_meta(shape).named_parameters()}


def on_meta(shape: GPT) -> ParallelGPT:
    """Return a whole model without values."""
    return ParallelGPT(shape, group_of_one(), device="meta")


def _tensor_sizes(shape: GPT) -> dict[str, list[int]]:
    """Return the size of each tensor in the files, all of whose rows are a parameter's."""
    sizes: dict[str, list[int]] = {}
    for name, size in whole_sizes(shape).items():
        for tensor, rows in hf.rows_of(name, size, shape):
            sizes[tensor] = max(sizes.get(tensor, []), [rows.stop, *size[max(1, len(size) - 1) :]])
    return {
        tensor: size[::-1] if hf.is_transposed(tensor) else size for tensor, size in sizes.items()
    }


def _parts(
    name: str, size: Sequence[int], shape: GPT, offsets: Sequence[int], own: torch.Tensor
) -> Iterator[tuple[str, torch.Tensor, tuple[slice, ...]]]:
    """Yield the tensors in the files that have rows of a slice of a parameter: which rows, as a
    view, and where.
    """
    expert, row, *columns = offsets if own.dim() == 3 else (0, *offsets)
    for number, matrix in enumerate(own if own.dim() == 3 else [own]):
        # Of all experts' rows
        first = (expert + number) * size[-2] + row if own.dim() == 3 else row
        end = 0
        for tensor, rows in hf.rows_of(name, size, shape):
            begin, end = end, end + len(rows)
            start, stop = max(begin, first), min(end, first + len(matrix))
            if start < stop:
                part, starts = (
                    matrix[start - first : stop - first],
                    [rows.start + start - begin, *columns],
                )
                index = tuple(slice(at, at + length) for at, length in zip(starts, part.shape))
                yield (
                    (tensor, part.mT, index[::-1])
                    if hf.is_transposed(tensor)
                    else (tensor, part, index)
                )


def save(
    folder: str | Path,
    models: ParallelGPT | Sequence[ParallelGPT],
    groups: ProcessGroups,
    **options: Any,
) -> None:
    """Write the model of all ranks into a new folder that transformers can load; every rank calls
    this.

    The ranks take turns to write a file, for which they gather one parameter after the other. So a
    rank holds at most one file's tensors and one parameter more. Options are those of `write`.

    Raises:
        ValueError: on every rank: the folder exists or cannot be written, or transformers has no
            such model.
    """
    models = [models] if isinstance(models, ParallelGPT) else models
    together(lambda: check_biases(pair for model in models for pair in model.named_buffers()))
    mine = {
        name: each
        for model in models
        for name, each in model.named_parameters()
        if is_my_turn(0, each, groups)
    }
    sizes, dtype = whole_sizes(models[0].shape), next(models[0].parameters()).dtype

    def whole(name: str, writer: int) -> torch.Tensor:
        tensor = torch.zeros(sizes[name], dtype=dtype, device=local_device())
        for offsets, own in slices_of(mine[name].detach(), mine[name]) if name in mine else ():
            tensor[
                tuple(slice(start, start + length) for start, length in zip(offsets, own.shape))
            ] = own
        # Each number comes from one rank; as bytes, so that also -0.0 stays
        if groups.layout.world_size > 1:
            dist.reduce(tensor.flatten().view(torch.uint8), writer)
        return tensor

    write(folder, models[0].shape, dtype, whole, **options)


def check_biases(buffers: Iterable[tuple[str, torch.Tensor]]) -> None:
    """Raise a ValueError if a router chooses by biases too, for which no family has a place.

    The same bias for all experts of a layer changes no choice.
    """
    for name, bias in buffers:
        if (spread := float(bias.max() - bias.min())) > 0:
            fault = (
                f"{name} has values that differ by up to {spread:.3g}, and Mixtral has "
                "no place for them"
            )
            way_out = (
                "train with aux_loss_coefficient in place of expert_bias_update_rate, "
                "or keep the checkpoint"
            )
            raise ValueError(
                f"{fault}: transformers would choose other experts. To export a model, {way_out}"
            )


def write(
    folder: str | Path,
    shape: GPT,
    dtype: torch.dtype,
    whole: Callable[[str, int], torch.Tensor],
    like: str | Path | None = None,
    max_file_bytes: int = 5 << 30,
) -> None:
    """Write a folder as `save` does; ``whole(name, writer)`` gives that rank a parameter's values.

    ``like``: the folder that the model started from. Its tokenizer is copied, and what its
    config.json says beyond the shape: which family it is, its tokens, its longest sequence, its
    window. Without one, the longest sequence is that of the shape, and a Mistral becomes a Llama:
    up to that length they compute the same.
    """
    final, partial = Path(folder), Path(f"{folder}.partial")
    rank, world_size = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    sizes, tensor_sizes = whole_sizes(shape), _tensor_sizes(shape)
    files, weight_map = (
        _plan(
            {name: size.numel() * dtype.itemsize for name, size in sizes.items()}, max_file_bytes
        ),
        {},
    )
    config: dict[str, Any] = {}

    def on(writer: int, work: Callable[[], object]) -> None:
        together(work if rank == writer else lambda: None, str(folder))

    def start() -> None:
        if final.exists():
            raise ValueError(f"{final} exists: name a new folder")
        config.update(config_like(shape, like))
        config["torch_dtype"] = str(dtype).removeprefix("torch.")
        shutil.rmtree(partial, ignore_errors=True)  # of a save that was killed
        partial.mkdir(parents=True)

    def finish() -> None:
        if lost := [file for file in files if not (partial / file).exists()]:
            raise ValueError(
                f"{partial} lacks {lost[0]}: {folder} must be in a folder that all nodes share"
            )
        if len(files) > 1:
            total = sum(size.numel() for size in sizes.values()) * dtype.itemsize
            (partial / hf.INDEX).write_text(
                json.dumps({"metadata": {"total_size": total}, "weight_map": weight_map})
            )
        (partial / hf.CONFIG).write_text(json.dumps(config, indent=2))
        for path in copied_files(like) if like else []:
            shutil.copy(path, partial)
        partial.rename(final)

    on(0, start)
    try:
        for number, (file, names) in enumerate(files.items()):
            writer, tensors = number % world_size, {}
            for name in names:
                values = whole(name, writer)
                for tensor, part, index in _parts(
                    name, sizes[name], shape, [0] * values.dim(), values
                ):
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


def config_like(shape: GPT, like: str | Path | None) -> dict[str, Any]:
    """Return the config.json of a shape, with what that of the folder ``like`` says beyond the
    shape.

    Raises:
        ValueError: transformers has no such model, or that of the folder is of a different shape.
    """
    if like is None:
        # Null, or transformers would take 1 and 2
        return hf.config_of(shape) | dict.fromkeys(hf.TOKENS)
    if differing := differences(like, shape):
        raise ValueError(f"{like} is of a different model: {differing}")
    theirs = _read_config(Path(like))
    config = hf.config_of(shape, theirs["model_type"])
    # What they leave out is left out here too: it has the same default
    kept = hf.FAMILIES[theirs["model_type"]].kept
    config = {name: value for name, value in config.items() if name not in kept}
    return config | {name: theirs[name] for name in kept if name in theirs}


def copied_files(like: str | Path) -> list[Path]:
    """Return the files of a folder that say how texts become tokens, and how a model generates."""
    return [path for pattern in COPIED for path in Path(like).glob(pattern) if path.is_file()]


def _save_file(tensors: dict[str, torch.Tensor], path: Path) -> None:
    try:
        save_file(tensors, path, {"format": "pt"})
    except SafetensorError as error:  # such as a full disk
        raise OSError(error) from None


def _plan(num_bytes: dict[str, int], most: int) -> dict[str, list[str]]:
    """Return which parameters go into which file, none larger than ``most`` unless one parameter
    is.
    """
    files, left = [[]], most
    for name, size in num_bytes.items():
        if size > left and files[-1]:
            files.append([])
            left = most
        files[-1].append(name)
        left -= size
    if len(files) == 1:
        return {hf.WEIGHTS: files[0]}
    return {
        f"model-{i:05}-of-{len(files):05}.safetensors": names for i, names in enumerate(files, 1)
    }
