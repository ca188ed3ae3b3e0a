"""Finds the memory of all tensors of this process."""

import gc

import torch
from torch._subclasses.fake_tensor import FakeTensor


def storages() -> dict[int, int]:
    """Return the bytes of each storage in the CPU's memory, by its address; fake and meta tensors have none."""
    gc.collect()
    tensors = [each for each in gc.get_objects() if issubclass(type(each), torch.Tensor)]
    tensors = [each for each in tensors if not isinstance(each, FakeTensor) and each.device.type == "cpu"]
    tensors += [each.grad for each in tensors if each.is_leaf and each.grad is not None]
    return {each.untyped_storage().data_ptr(): each.untyped_storage().nbytes() for each in tensors}
