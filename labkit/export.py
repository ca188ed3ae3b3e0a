"""Writes a checkpoint in Hugging Face's format: ``python -m labkit.export CHECKPOINT FOLDER``, in one process.

It reads one parameter after the other, so it needs memory for one file of the result, not for the model.
"""

import sys
import warnings
from dataclasses import fields
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint import state_dict_loader

from labkit import checkpoint, pretrained
from labkit.command_line import run_command
from labkit.hugging_face import CONFIG
from labkit.shape import GPT


def export(source: str | Path, folder: str | Path, **options: Any) -> str:
    """Write a checkpoint, or the newest of a folder, into a new folder; return one line that says what is there.

    Where the run started from a folder in that format, its tokenizer is copied, if it is still there. ValueErrors are
    those of `labkit.pretrained.save`, or say that the checkpoint is damaged.
    """
    path, about, damage = checkpoint.describe(source)
    if damage:
        raise ValueError(f"{path.name} is damaged: {damage}")
    shape = GPT(**{each.name: about.get(each.name, each.default) for each in fields(GPT)})
    dtype, sizes = getattr(torch, about["precision"]), pretrained.whole_sizes(shape)
    start = about.get("options", {}).get("init_from")

    def whole(name: str, _: int) -> torch.Tensor:
        tensors = {f"model.{name}": torch.empty(sizes[name], dtype=dtype)}
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch takes a process alone for a mistake
            state_dict_loader.load(tensors, checkpoint_id=path, no_dist=True)
        return tensors[f"model.{name}"]

    like = start if start and (Path(start) / CONFIG).exists() else None
    pretrained.write(folder, shape, dtype, whole, like, **options)
    return f"{folder}: {shape.num_parameters:,} parameters in {about['precision']}, of {path.name}"


def main(*arguments: str) -> int:
    """Return 0 if the folder is written, 2 if the arguments or the checkpoint do not fit."""
    if len(arguments) != 2:
        print("usage: python -m labkit.export CHECKPOINT FOLDER", file=sys.stderr)
        return 2
    try:
        print(export(*arguments))
    except ValueError as error:
        print(f"labkit.export: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    run_command(main, *sys.argv[1:])
