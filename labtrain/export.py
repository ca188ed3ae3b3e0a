"""Writes a checkpoint in Hugging Face's format: ``python -m labtrain.export CHECKPOINT FOLDER``, in
one process.

It reads one parameter after the other, so it needs memory for one file of the result, not for the
model.
"""

import sys
import warnings
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint import state_dict_loader

from labkit.shape import GPT
from labtrain import checkpoint, pretrained
from labtrain.command_line import run_command


def export(source: str | Path, folder: str | Path, **options: Any) -> str:
    """Write a checkpoint, or the newest of a folder, into a new folder; return one line that says
    what is there.

    Where the run started from a folder in that format, `labtrain.pretrained.write` copies its
    tokenizer and more, if it is still there and of the same model; the line says what was not
    found. ValueErrors are those of `labtrain.pretrained.save`, or say that the checkpoint is
    damaged.
    """
    path, about, damage = checkpoint.describe(source)
    if damage:
        raise ValueError(f"{path.name} is damaged: {damage}")
    shape = GPT(**{field.name: about[field.name] for field in fields(GPT)})
    dtype = getattr(torch, about["precision"])
    sizes = pretrained.unsharded_sizes(shape)

    def read(name: str, size: torch.Size, dtype: torch.dtype) -> torch.Tensor:
        tensors = {f"model.{name}": torch.empty(size, dtype=dtype)}
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch takes a process alone for a mistake
            state_dict_loader.load(tensors, checkpoint_id=path, no_dist=True)
        return tensors[f"model.{name}"]

    def read_weight(name: str, _: int) -> torch.Tensor:
        return read(name, sizes[name], dtype)

    buffers = pretrained.on_meta(shape).named_buffers()
    biases = ((name, read(name, buffer.shape, buffer.dtype)) for name, buffer in buffers)
    pretrained.check_biases(biases)
    like, notes = _start(checkpoint.options_of(about), shape)
    pretrained.write(folder, shape, dtype, read_weight, like, **options)
    line = f"{folder}: {shape.num_parameters:,} parameters in {about['precision']}, of {path.name}"
    return ". ".join([line, *notes])


def _start(run: Mapping[str, Any], shape: GPT) -> tuple[str | None, list[str]]:
    """Return the folder that a run started from, if the model is still of its form, and what to say
    of the rest.
    """
    start = run.get("init_from")
    notes = []
    if factor := run.get("capacity_factor"):
        fault = f"With capacity_factor={factor} tokens were dropped"
        notes.append(f"{fault}; transformers drops none")
    if start is None:
        return None, notes
    try:
        pretrained.config_like(shape, start)
    except ValueError as error:
        fault = f"Nothing is copied from init_from={start}"
        fault += ", so there is no tokenizer and no end-of-text token"
        longest = f"and the longest sequence is the run's {shape.seq_length} tokens"
        notes.append(f"{fault}, {longest}: {error}")
        return None, notes
    copied = [path.name for path in pretrained.copied_files(start)]
    if not any(name.startswith(("tokenizer.", "vocab.")) for name in copied):
        notes.append(f"{start} has no tokenizer to copy")
    if shape.positions == "learned":
        longest = pretrained.read_shape(start).seq_length
        if shape.seq_length < longest:
            has = f"It has the {shape.seq_length} positions of the run"
            notes.append(f"{has}, {start} has {longest}")
    return start, notes


def main(*arguments: str) -> int:
    """Return 0 if the folder is written, 2 if the arguments or the checkpoint do not fit."""
    if len(arguments) != 2:
        print("usage: python -m labtrain.export CHECKPOINT FOLDER", file=sys.stderr)
        return 2
    try:
        print(export(*arguments))
    except ValueError as error:
        print(f"labtrain.export: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    run_command(main, *sys.argv[1:])
