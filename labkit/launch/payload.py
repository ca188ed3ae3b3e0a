"""Carries objects between the notebook and the ranks: pickled, and large ones through a file in
memory.

The bytes of tensors and arrays stand beside the pickle (out-of-band buffers). Whoever reads the
file maps it: all ranks share one copy of an argument, and a rank copies a page only when it writes
to it.
"""

import ctypes
import functools
import importlib
import inspect
import io
import mmap
import os
import pickle
import sys
import tempfile
import types
from pathlib import Path
from typing import Any

import cloudpickle

# A pickle and its buffers; or the name of a file, and where in it each of these starts and ends.
Payload = list | tuple[str, list[tuple[int, int]]]
_INLINE_BYTES = 1 << 16  # fits the buffer of a socket
_ALIGNMENT = 64  # of each buffer in the file, as torch has it in memory


class _Pickler(cloudpickle.Pickler):
    def reducer_override(self, obj):
        if isinstance(obj, types.CodeType):
            # cloudpickle 3.1.3 leaves out the file of code, so no report could show its line.
            reduced: Any = self.dispatch_table[types.CodeType](obj)
            make, parts = reduced
            parts = [obj.co_filename if part == "<dynamic-code>" else part for part in parts]
            return make, tuple(parts)
        if isinstance(obj, types.ModuleType) and type(obj) is not types.ModuleType:
            # torch.ops: cloudpickle sends it with a function that uses torch and a name "ops"
            return importlib.import_module, (obj.__name__,)
        if isinstance(obj, type) and _has_two_names(obj):
            return getattr, (sys.modules[obj.__module__], obj.__name__)
        torch = sys.modules.get("torch")
        if torch is None:
            return super().reducer_override(obj)
        if isinstance(obj, torch.Tensor) and obj.is_cuda:
            return obj.cpu().__reduce_ex__(5)  # otherwise the notebook would start CUDA
        if isinstance(obj, torch.Tensor) and hasattr(obj, "trigger_wait"):
            # A functional collective's result is complete only when an operation has used it.
            return obj.clone().__reduce_ex__(5)
        if type(obj) is torch.storage.TypedStorage:
            options = {"wrap_storage": obj._untyped_storage, "dtype": obj.dtype, "_internal": True}
            return functools.partial(torch.storage.TypedStorage, **options), ()
        if type(obj) is torch.UntypedStorage:
            return _untyped, (pickle.PickleBuffer(_memory(obj.cpu())),)
        return super().reducer_override(obj)


def _has_two_names(kind: type) -> bool:
    """Return whether a class is in its module, but not by its full name.

    torch's SDPBackend is such a class: its full name is _SDPBackend, as in C++.
    """
    is_in_module = getattr(sys.modules.get(kind.__module__), kind.__name__, None) is kind
    return is_in_module and kind.__qualname__ != kind.__name__ and "." not in kind.__qualname__


def _memory(storage):
    """Return a storage's own memory as a buffer. torch itself offers one by numpy only."""
    memory = (ctypes.c_char * storage.nbytes()).from_address(storage.data_ptr())
    memory.storage = storage  # alive as long as the buffer is
    return memory


def _untyped(data):
    import torch

    if not len(data):  # frombuffer takes no empty buffer
        return torch.UntypedStorage(0)
    return torch.frombuffer(data, dtype=torch.uint8).untyped_storage()


def pickled(obj) -> list[memoryview]:
    """Return the pickle of an object and its buffers, which are still the object's own memory."""
    file = io.BytesIO()
    buffers: list[pickle.PickleBuffer] = []
    _Pickler(file, protocol=5, buffer_callback=buffers.append).dump(obj)
    return [file.getbuffer(), *(buffer.raw() for buffer in buffers)]


def dump(path: str, parts: list[memoryview]) -> Payload:
    """Copy what was pickled.

    If it is large, to a new file at ``path`` or, where that has no room, in TMPDIR.
    """
    if sum(map(len, parts)) <= _INLINE_BYTES:
        return [bytearray(part) for part in parts]
    try:
        return _write(open(path, "xb"), parts)
    except OSError:  # /dev/shm is small in many containers
        return _write(tempfile.NamedTemporaryFile(prefix="labkit-", delete=False), parts)


def load(payload: Payload):
    """Return the object. Its file may be removed at once."""
    if isinstance(payload, tuple):
        path, ranges = payload
        with open(path, "rb") as file:
            content = memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY))
        payload = [content[start:end] for start, end in ranges]
    return pickle.loads(payload[0], buffers=payload[1:])


def discard(payload: Payload) -> None:
    if isinstance(payload, tuple):
        Path(payload[0]).unlink(missing_ok=True)


def why_not(error: Exception, fn, args: tuple, kwargs: dict) -> str:
    """Name the part of a call that cannot be pickled: an argument, or something that the function
    uses.
    """
    parts = {f"argument {name}": argument for name, argument in (*enumerate(args), *kwargs.items())}
    if inspect.isfunction(fn):
        used = inspect.getclosurevars(fn)
        for name, value in {**used.globals, **used.nonlocals}.items():
            parts[f"{name}, which the function uses,"] = value
    culprits = []
    for name, part in parts.items():
        try:
            pickled(part)
        except Exception:
            culprits.append(f"{name} (a {type(part).__name__})")
    culprit = " and ".join(culprits) or f"the function (a {type(fn).__name__})"
    return f"{culprit} cannot be sent to the ranks: {error}. Make it inside the function instead"


def _write(file, parts: list[memoryview]) -> Payload:
    ranges = []
    try:
        with file:
            for part in parts:
                start = file.seek(-file.tell() % _ALIGNMENT, os.SEEK_CUR)
                ranges.append((start, start + file.write(part)))
    except OSError as error:
        os.unlink(file.name)
        raise OSError(error.errno, error.strerror, file.name) from None  # which names the folder
    return file.name, ranges
