"""Watches a learner's function on a rank while it runs: what it sends, and what it uses before it has come.

It sees the operations that torch carries out, below autograd. What it says has happened: nothing here is a guess.
"""

import linecache
import sys
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from labkit.c10d import Call

NEW_MEMORY = {"empty", "empty_like", "new_empty", "empty_strided", "new_empty_strided", "resize_", "empty_permuted"}
WRITES_ITS_BUFFER = {"all_reduce", "broadcast", "reduce", "all_gather", "recv"}
"""Operations whose `Call.tensors` are those that they write to."""


class Watch(TorchDispatchMode):
    """Notes what the learner's ``function`` makes torch do, while this mode is on."""

    def __init__(self, function: Callable):
        super().__init__()
        code = getattr(function, "__code__", None)
        self.file = getattr(code, "co_filename", None)
        self.first_line = getattr(code, "co_firstlineno", 1)
        self.under_way: list[_UnderWay] = []  # calls for which nobody has waited yet
        self.too_early = ""  # which line used what a call had not written yet
        self.sent: dict[torch.dtype, str] = {}  # the first operation that sent numbers of this dtype

    def hear(self, call: Call) -> "_UnderWay":
        """Note a call, as `labkit.c10d.listening` asks."""
        for tensor in call.tensors:
            self.sent.setdefault(tensor.dtype, call.operation)
        writes = call.has_handle and call.operation in WRITES_ITS_BUFFER
        return _UnderWay(self.under_way, call.operation, list(map(_span, call.tensors)) if writes else [])

    def __torch_dispatch__(self, func, types, args: tuple[Any, ...] = (), kwargs=None):
        if any(kind not in (torch.Tensor, torch.nn.Parameter) for kind in types):
            return NotImplemented  # such as a DTensor: what it is made of comes here in its turn
        name = func._schema.name.partition("::")[2]
        uses_numbers = "c10d" not in func._schema.name and name not in NEW_MEMORY and not _is_view(func)
        if uses_numbers and self.under_way and not self.too_early:
            self._note_too_early([leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)])
        return func(*args, **(kwargs or {}))

    def _note_too_early(self, inputs: list[torch.Tensor]) -> None:
        """Note the first line that uses a tensor while a call for which nobody has waited may still write to it."""
        spans = [_span(tensor) for tensor in inputs if tensor.layout == torch.strided and tensor.is_contiguous()]
        for call in self.under_way:
            if any(start < end_of and start_of < end for start, end in spans for start_of, end_of in call.writes):
                self.too_early = (
                    f"The result of {call.operation} is used{self._line()} before anybody has waited for it: with a "
                    "handle, it is only started. Call `wait()` on the handle first."
                )
                return

    def _line(self) -> str:
        """Return the line of the learner's that is running, with its text."""
        frame = sys._getframe(2)
        while frame is not None and (frame.f_code.co_filename != self.file or self.file is None):
            frame = frame.f_back
        if frame is None:
            return ""
        text = linecache.getline(frame.f_code.co_filename, frame.f_lineno).strip()
        return f" in line {frame.f_lineno - self.first_line + 1}, `{text}`" if text else ""


class _UnderWay:
    """A call from its start to the end of its first wait, and the memory that it ``writes``."""

    def __init__(self, all_calls: list["_UnderWay"], operation: str, writes: list[tuple[int, int]]):
        self.all_calls = all_calls
        self.operation = operation
        self.writes = writes

    def note_start(self, work: dist.Work | None) -> None:
        if work is not None and self.writes:
            self.all_calls.append(self)

    def note_wait(self) -> Callable[[], None]:
        return self._end

    def _end(self) -> None:
        if self in self.all_calls:
            self.all_calls.remove(self)


def _span(tensor: torch.Tensor) -> tuple[int, int]:
    """Return where the numbers of a contiguous tensor begin and end in memory."""
    return tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes


def _is_view(func) -> bool:
    """Whether an operation returns its input's own memory, and changes nothing."""
    returned = func._schema.returns
    return any(each.alias_info is not None and not each.alias_info.is_write for each in returned)
