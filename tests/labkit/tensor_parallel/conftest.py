"""What the tests of the sharded layers share: inputs that are the same on every rank, and what "the same" means."""

import torch
import torch.distributed as dist

SIZES = [1, 3]  # alone, and a number that is no power of two; operators run on four, the model on two and on four
DTYPES = [torch.float32, torch.float64]
BATCH, SEQUENCE = 2, 12  # t divides the sequence


def assert_same(got, expected, what=""):
    exact = got.dtype == torch.float64
    rtol, atol = (1e-10, 1e-10) if exact else (2e-5, 2e-5)
    torch.testing.assert_close(got, expected, rtol=rtol, atol=atol, msg=lambda text: f"{what}: {text}")


def randoms(*shapes, dtype, seed=1):
    """Random tensors, the same on every rank."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, dtype=dtype, generator=generator) for shape in shapes]


def sequence_slice(x, divided):
    """This rank's slice of the sequence, or all of it."""
    group = dist.group.WORLD
    return x.chunk(group.size(), -2)[group.rank()] if divided else x
