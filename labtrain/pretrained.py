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
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from labkit.groups import ProcessGroups, group_of_one, local_device
from labkit.shape import GPT
from labtrain import hugging_face as hf
from labtrain.checkpoint import raise_on_all_ranks
from labtrain.checkpoint_tensors import is_my_turn, named_parameters, slices_of
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
    if shape.tied and _has_own_output(folder, shape):
        return replace(shape, tied=False)
    return shape


def _read_config(folder: Path) -> Mapping[str, Any]:
    """Return what a folder's config.json has; a ValueError says how to get a folder
    that has one.
    """
    if not folder.exists():
        fault = f"{folder} is not a folder here, and labtrain downloads nothing"
        way_out = "name a folder that transformers' save_pretrained wrote"
        if re.fullmatch(r"[\w.-]+(/[\w.-]+)?", str(folder)):
            get = f"`hf download {folder} --local-dir {folder.name}`"
            way_out = f"if it is a model on huggingface.co, get it with {get}"
            way_out += ", then name that folder"
        raise ValueError(f"{fault}: {way_out}")
    if (folder / ADAPTER).exists():
        fault = f"{folder / ADAPTER} belongs to an adapter, which labtrain does not apply"
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
    locations = []
    for tensor in (embedding, output):
        written = tensor.path.stat().st_mtime_ns  # so that a file written anew is compared anew
        locations.append((tensor.path, tensor.name, written))
    return _differ(*locations)


def _ends(shape: GPT) -> list[str]:
    """Return the names of the embedding's weight and of the output layer's."""
    tensors = hf.family_of(shape).tensors
    return [f"{tensors[module][0]}.weight" for module in ("embedding", "output")]


@lru_cache  # they are large, and a rank asks several times
def _differ(*locations: tuple[Path, str, int]) -> bool:
    """Whether two matrices differ, each given by its file, its name there, and when the file was
    written.
    """
    with ExitStack() as open_files:
        matrices = []
        for path, name, _ in locations:
            file = open_files.enter_context(safe_open(path, "pt"))
            matrices.append(file.get_slice(name))
        a, b = matrices
        for first in range(0, a.get_shape()[0], ROWS_AT_ONCE):
            rows = slice(first, first + ROWS_AT_ONCE)
            if (a[rows] != b[rows]).any():
                return True
    return False


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
    shape = models[0].shape
    found = dict[str, Found]()
    raise_on_all_ranks(lambda: found.update(check(folder, shape)))
    sizes = unsharded_sizes(shape)
    for name, parameter, placement in named_parameters(models):
        for offsets, values in slices_of(parameter.detach(), placement):
            for tensor, part, index in _parts(name, sizes[name], shape, offsets, values):
                # Closed after each part: its pages leave memory
                with safe_open(found[tensor].path, "pt") as file:
                    part.copy_(file.get_slice(found[tensor].name)[index])
    for model in models:
        for bias in model.buffers():
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
    longest = shape
    if shape.positions == "learned":  # the file has all of the model's, a run may use fewer
        longest = replace(shape, seq_length=read_shape(folder).seq_length)
    expected = _tensor_sizes(longest)
    found = _find(folder, shape)
    left_out = hf.left_out(_read_config(folder))
    for name, (path, _, size, dtype) in found.items():
        if name not in expected:
            _check_leftover(name, path, shape)
        elif size != expected[name]:
            fault = f"{name} is {size} in {path}"
            raise ValueError(f"{fault}, but by {hf.CONFIG} it must be {expected[name]}{left_out}")
        elif dtype not in DTYPES:
            known = ", ".join(DTYPES)
            raise ValueError(f"{name} is {dtype} in {path}: use weights in one of {known}")
    if missing := sorted(expected.keys() - found.keys()):
        fault = f"{folder} has no {missing[0]} ({len(missing)} tensors are missing)"
        raise ValueError(f"{fault}: it is incomplete{left_out}")
    return found


def differences(folder: str | Path, shape: GPT) -> str:
    """Return in which options the model in a folder differs from a shape, or an empty text."""
    there = hf.config_of(read_shape(folder, shape.seq_length))
    here = hf.config_of(shape)
    found = []
    for name, value in here.items():
        if name != "architectures" and there.get(name) != value:
            found.append(f"{name} is {there.get(name)} there and {value} here")
    return "; ".join(found)


def _find(folder: Path, shape: GPT) -> dict[str, Found]:
    """Return where a folder has each of its tensors, by the name in a model with an
    output layer.
    """
    base = hf.family_of(shape).layers.split(".")[0]
    expected = _tensor_sizes(replace(shape, tied=False)).keys()
    found = dict[str, Found]()
    for path in hf.weight_files(folder):
        for name, header in _read_headers(path, folder).items():
            full_name = f"{base}.{name}"  # as a model without an output layer is saved
            if full_name not in expected:
                full_name = name
            found[full_name] = Found(path, name, header.get_shape(), header.get_dtype())
    embedding, output = _ends(shape)
    # A weight that is both was saved as the latter
    if shape.tied and embedding not in found and output in found:
        found[embedding] = found[output]
    return found


def _read_headers(path: Path, folder: Path) -> dict[str, Any]:
    """Return what a file says of each of its tensors; read no values."""
    try:
        with safe_open(path, "pt") as file:
            return {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118 - not a dict
    except FileNotFoundError:
        fault = f"{folder / hf.INDEX} names {path.name}, which is not there"
        raise ValueError(f"{fault}: download it") from None
    except OSError as error:
        fault = f"{path} cannot be read ({error.strerror or error})"
        raise ValueError(f"{fault}: name a folder of files") from None
    except SafetensorError as error:
        fault = f"{path} is damaged or incomplete ({error})"
        raise ValueError(f"{fault}: download it again") from None


def _check_leftover(name: str, path: Path, shape: GPT) -> None:
    """Raise a ValueError for a tensor that a model has no use for, unless its values say nothing
    more.
    """
    _, output = _ends(shape)
    if hf.NOT_WEIGHTS.search(name) or (shape.tied and name == output):
        return
    fault = f"{path} has {name}"
    if shape.num_experts and hf.AS_IN_MEMORY.search(name):
        why = "its experts are those of transformers' memory, not of its files"
        way_out = "write it anew with save_pretrained(..., save_original_format=True)"
        raise ValueError(f"{fault}: {why}: {way_out}")
    raise ValueError(f"{fault}, which such a model has no use for: {hf.CONFIG} is of another")


def unsharded_sizes(shape: GPT) -> dict[str, torch.Size]:
    """Return the size of each of a model's parameters, whole."""
    return {name: parameter.shape for name, parameter in on_meta(shape).named_parameters()}


def on_meta(shape: GPT) -> ParallelGPT:
    """Return a whole model without values."""
    return ParallelGPT(shape, group_of_one(), device="meta")


def _tensor_sizes(shape: GPT) -> dict[str, list[int]]:
    """Return the size of each tensor in the files, all of whose rows are a parameter's."""
    sizes: dict[str, list[int]] = {}
    for name, size in unsharded_sizes(shape).items():
        columns = list(size[-1:]) if len(size) > 1 else []
        for tensor, rows in hf.rows_of(name, size, shape):
            num_rows = max(rows.stop, *sizes.get(tensor, [0])[:1])
            sizes[tensor] = [num_rows, *columns]
    for tensor, size in sizes.items():
        if hf.is_transposed(tensor):
            size.reverse()
    return sizes


def _parts(
    name: str, size: Sequence[int], shape: GPT, offsets: Sequence[int], values: torch.Tensor
) -> Iterator[tuple[str, torch.Tensor, tuple[slice, ...]]]:
    """Yield the tensors in the files that have rows of a slice of a parameter: which rows, as a
    view, and where.

    The files have the keys of a layer apart from its queries. Here a slice has the rows 2 to 5 of
    the fused matrix, [12, 4]: two of queries, which end before row 4, and two of keys.

    >>> llama = GPT(2, 4, 8, 8, 2, norm="rmsnorm", mlp="swiglu", positions="rope", bias=False)
    >>> rows = torch.ones(4, 4)
    >>> for part in _parts("layers.0.attention.qkv.weight", [12, 4], llama, [2, 0], rows):
    ...     print(part[0].split(".")[-2], list(part[1].shape), part[2])
    q_proj [2, 4] (slice(2, 4, None), slice(0, 4, None))
    k_proj [2, 4] (slice(0, 2, None), slice(0, 4, None))
    """
    if values.dim() < 3:
        values = values[None]
        offsets = [0, *offsets]
    # [experts, rows, columns]: in the files, each expert's matrix is a tensor of its own
    expert, row, *columns = offsets
    rows_per_expert = size[-2] if len(size) == 3 else 0
    for number, matrix in enumerate(values, expert):
        first = number * rows_per_expert + row
        end = 0
        for tensor, rows in hf.rows_of(name, size, shape):
            # This tensor has the rows from begin to end of the parameter, and some of them are here
            begin = end
            end += len(rows)
            start = max(begin, first)
            stop = min(end, first + len(matrix))
            if start >= stop:
                continue
            part = matrix[start - first : stop - first]
            index = _box([rows.start + start - begin, *columns], part.shape)
            if hf.is_transposed(tensor):
                yield tensor, part.mT, index[::-1]
            else:
                yield tensor, part, index


def _box(starts: Sequence[int], lengths: Sequence[int]) -> tuple[slice, ...]:
    """Return the index of part of a tensor."""
    return tuple(slice(start, start + length) for start, length in zip(starts, lengths))


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
    buffers = [pair for model in models for pair in model.named_buffers()]
    raise_on_all_ranks(lambda: check_biases(buffers))
    # Of ranks with the same numbers, one gives them
    given = {}
    for name, parameter, placement in named_parameters(models):
        if is_my_turn(0, placement, groups):
            given[name] = (parameter.detach(), placement)
    sizes = unsharded_sizes(models[0].shape)
    dtype = next(models[0].parameters()).dtype

    def unsharded(name: str, writer: int) -> torch.Tensor:
        tensor = torch.zeros(sizes[name], dtype=dtype, device=local_device())
        if name in given:
            for offsets, values in slices_of(*given[name]):
                tensor[_box(offsets, values.shape)] = values
        # Each number comes from one rank; as bytes, so that also -0.0 stays
        if groups.layout.world_size > 1:
            dist.reduce(tensor.flatten().view(torch.uint8), writer)
        return tensor

    write(folder, models[0].shape, dtype, unsharded, **options)


def check_biases(buffers: Iterable[tuple[str, torch.Tensor]]) -> None:
    """Raise a ValueError if a router chooses by biases too, which no family has.

    The same bias for all experts of a layer changes no choice.
    """
    for name, bias in buffers:
        spread = float(bias.max() - bias.min())
        if spread > 0:
            fault = f"{name} has values that differ by up to {spread:.3g}"
            fault += ", and Mixtral has no place for them: transformers would choose other experts"
            way_out = "train with aux_loss_coefficient in place of expert_bias_update_rate"
            raise ValueError(f"{fault}. To export a model, {way_out}, or keep the checkpoint")


def write(
    folder: str | Path,
    shape: GPT,
    dtype: torch.dtype,
    unsharded: Callable[[str, int], torch.Tensor],
    like: str | Path | None = None,
    max_file_bytes: int = 5 << 30,
) -> None:
    """Write a folder as `save` does; ``unsharded(name, writer)`` gives that rank a parameter's
    values.

    ``like``: the folder that the model started from. Its tokenizer is copied, and what its
    config.json says beyond the shape: which family it is, its tokens, its longest sequence, its
    window. Without one, the longest sequence is that of the shape, and a Mistral becomes a Llama:
    up to that length they compute the same.
    """
    rank = dist.get_rank() if dist.is_initialized() else 0
    world_size = dist.get_world_size() if dist.is_initialized() else 1
    new = _NewFolder(Path(folder), shape, dtype, like, max_file_bytes)

    def on(writer: int, work: Callable[..., object], *args: Any) -> None:
        def do_if_mine() -> None:
            if rank == writer:
                work(*args)

        raise_on_all_ranks(do_if_mine, str(folder))

    on(0, new.start)
    try:
        for number, (file, names) in enumerate(new.files.items()):
            writer = number % world_size
            tensors: dict[str, torch.Tensor] = {}
            for name in names:
                values = unsharded(name, writer)  # every rank helps to gather it
                for tensor, part, index in new.parts(file, name, values):
                    if rank == writer:
                        if tensor not in tensors:
                            tensors[tensor] = torch.empty(new.tensor_sizes[tensor], dtype=dtype)
                        tensors[tensor][index] = part
            on(writer, _save_file, tensors, new.partial / file)
        on(0, new.finish)
    except ValueError:
        if rank == 0:
            shutil.rmtree(new.partial, ignore_errors=True)
        raise


class _NewFolder:
    """A folder in Hugging Face's format, which gets its name when it is complete."""

    def __init__(
        self,
        final: Path,
        shape: GPT,
        dtype: torch.dtype,
        like: str | Path | None,
        max_file_bytes: int,
    ):
        self.final = final
        self.partial = Path(f"{final}.partial")
        self.shape = shape
        self.dtype = dtype
        self.like = like
        self.sizes = unsharded_sizes(shape)
        self.tensor_sizes = _tensor_sizes(shape)
        self.num_bytes = {name: size.numel() * dtype.itemsize for name, size in self.sizes.items()}
        self.files = _plan(self.num_bytes, max_file_bytes)
        self.weight_map: dict[str, str] = {}  # from `parts`: the file of each tensor
        self.config: dict[str, Any] = {}

    def start(self) -> None:
        if self.final.exists():
            raise ValueError(f"{self.final} exists: name a new folder")
        self.config = config_like(self.shape, self.like)
        self.config["torch_dtype"] = str(self.dtype).removeprefix("torch.")
        shutil.rmtree(self.partial, ignore_errors=True)  # of a save that was killed
        self.partial.mkdir(parents=True)

    def parts(
        self, file: str, name: str, values: torch.Tensor
    ) -> Iterator[tuple[str, torch.Tensor, tuple[slice, ...]]]:
        """Yield what `_parts` does for a whole parameter, and note that its tensors are in a
        file.
        """
        offsets = [0] * values.dim()
        for tensor, part, index in _parts(name, self.sizes[name], self.shape, offsets, values):
            self.weight_map[tensor] = file
            yield tensor, part, index

    def finish(self) -> None:
        if lost := [file for file in self.files if not (self.partial / file).exists()]:
            way_out = f"{self.final} must be in a folder that all nodes share"
            raise ValueError(f"{self.partial} lacks {lost[0]}: {way_out}")
        if len(self.files) > 1:
            total = {"total_size": sum(self.num_bytes.values())}
            index = json.dumps({"metadata": total, "weight_map": self.weight_map})
            (self.partial / hf.INDEX).write_text(index)
        (self.partial / hf.CONFIG).write_text(json.dumps(self.config, indent=2))
        for path in copied_files(self.like) if self.like else []:
            shutil.copy(path, self.partial)
        self.partial.rename(self.final)


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
    config_there = _read_config(Path(like))
    config = hf.config_of(shape, config_there["model_type"])
    # What it leaves out is left out here too: it has the same default
    kept = hf.FAMILIES[config_there["model_type"]].kept
    config = {name: value for name, value in config.items() if name not in kept}
    return config | {name: config_there[name] for name in kept if name in config_there}


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

    >>> _plan({"a": 2, "b": 1, "c": 1}, most=3)  # doctest: +NORMALIZE_WHITESPACE
    {'model-00001-of-00002.safetensors': ['a', 'b'],
     'model-00002-of-00002.safetensors': ['c']}
    """
    files = [[]]
    left = most
    for name, size in num_bytes.items():
        if size > left and files[-1]:
            files.append([])
            left = most
        files[-1].append(name)
        left -= size
    if len(files) == 1:
        return {hf.WEIGHTS: files[0]}
    last = f"{len(files):05}"
    return {
        f"model-{number:05}-of-{last}.safetensors": names for number, names in enumerate(files, 1)
    }
