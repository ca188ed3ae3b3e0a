"""What the tests of data parallelism share."""

import torch
import torch.distributed as dist
from torch import nn

ROWS, WIDTH = 12, 6  # 2, 3 and 4 ranks divide the rows


def world():
    return dist.group.WORLD


def linear(inputs=WIDTH, outputs=WIDTH, bias=True, dtype=torch.float64):
    return nn.Linear(inputs, outputs, bias, dtype=dtype)


def loss_of(output):
    return output.square().mean()


def backward_alone(model, parts):
    """What all ranks together should do: backward of the mean of the losses of all parts."""
    for part in parts:
        (loss_of(model(part)) / len(parts)).backward()


def local_part(whole, placement, like):
    """Which numbers of an unsharded gradient this rank has, in a row as long as its parameter."""
    flat = placement.flat
    return whole if flat is None else whole.flatten()[flat.start :][: len(like)]
