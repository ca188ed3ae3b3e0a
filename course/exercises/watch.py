"""Watches a learner's function while it runs: where the first nan arises, and which tensors are one and the same.

It sees the operations that torch carries out, below autograd. What it says has happened: nothing here is a guess.
"""

import itertools
import linecache
import sys
from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from course.exercises.values import is_freed
from labkit.c10d import Call

NEW_MEMORY = {"empty", "empty_like", "new_empty", "empty_strided", "new_empty_strided", "resize_", "empty_permuted"}
ONLY_WRITES = {"copy_", "fill_", "zero_", "index_put_", "scatter_", "index_copy_", "masked_fill_", "set_", "normal_"}
"""Operations that put new numbers where there were others, and use none of those."""
BY_NUMBERS = {"add": "+", "sub": "-", "rsub": "-", "mul": "*", "div": "/"}
OF_A_NEGATIVE = {"log", "log2", "log10", "log1p", "sqrt", "rsqrt", "pow"}
OVER_A_ROW = {"_softmax", "_log_softmax", "logsumexp"}
_MOST_ELEMENTS = 1 << 16  # larger tensors are not looked through
WRITES_ITS_BUFFER = {"all_reduce", "broadcast", "reduce", "all_gather", "recv"}
"""Operations whose `Call.tensors` are those that they write to."""
UNWRITTEN = (
    "What it holds is chance; during a check it is full of nan, or of the largest whole number. Begin with "
    "`torch.zeros`, or fill it."
)


class Watch(TorchDispatchMode):
    """Notes what the learner's ``function`` makes torch do, while this mode is on."""

    def __init__(self, function: Callable, given: dict[str, torch.Tensor]):
        super().__init__()
        code = getattr(function, "__code__", None)
        self.file = getattr(code, "co_filename", None)
        self.first_line = getattr(code, "co_firstlineno", 1)
        self.why_nan = ""  # where the first nan of the learner's came from
        self.notes: list[str] = []  # what else is worth saying of a wrong answer
        self.given = {_memory(tensor): name for name, tensor in given.items()}
        self.new: set[int] = set()  # memory that nobody had written to when it was made
        self.messages: set[int] = set()  # memory that collectives may have written to
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
        inputs = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        is_message = "c10d" in func._schema.name
        if not (is_message or name in NEW_MEMORY or _is_view(func)):
            self._note_too_early(inputs)
        computes = not (is_message or self.why_nan or name in NEW_MEMORY | ONLY_WRITES or _is_view(func))
        had_nan = [tensor for tensor in inputs if computes and _has_nan(tensor)]
        before = [_copy(tensor) for tensor in inputs] if computes and _is_binary(name) else inputs  # `x /= y` changes x
        self._note_repeats(name, args, is_message)
        result = func(*args, **(kwargs or {}))
        if is_message:
            self.messages |= {_memory(tensor) for tensor in inputs}
        elif name in NEW_MEMORY:
            self.new |= {_memory(tensor) for tensor in tree_leaves(result) if isinstance(tensor, torch.Tensor)}
        elif computes:
            made = [leaf for leaf in tree_leaves(result) if isinstance(leaf, torch.Tensor) and _has_nan(leaf)]
            if made and had_nan:
                self.why_nan = self._origin(had_nan)
            elif made:
                self.why_nan = f"The first nan arises{self._line()}: {_cause(name, before, args, made[0])}."
        return result

    def _origin(self, tensors: list[torch.Tensor]) -> str:
        """Say where numbers came from that were nan before anything was computed from them."""
        memories = [_memory(tensor) for tensor in tensors]
        if self.messages.intersection(memories):
            return ""  # the rank that sent them knows more
        names = [self.given[memory] for memory in memories if memory in self.given]
        if names:
            return f"`{names[0]}` has nan in it, as it was given, and that is used{self._line()}."
        if self.new.intersection(memories):
            return f"New memory is used{self._line()} before anybody has written to it. {UNWRITTEN}"
        return ""

    def _note_repeats(self, name: str, args: tuple[Any, ...], is_message: bool) -> None:
        """Note a list in which one tensor stands several times, and an index in which a number does."""
        lists = [value for value in args if isinstance(value, (list, tuple))]
        if name == "allgather_":
            lists = [inner for value in lists for inner in value if isinstance(inner, (list, tuple))]
        if name in ("cat", "stack", "allgather_"):
            for tensors in lists:
                places = [_place(each) for each in tensors if isinstance(each, torch.Tensor) and each.numel()]
                if len(set(places)) < len(places):
                    what = "is given a list" if is_message else "joins a list"
                    same = len(places) - len(set(places)) + 1
                    self._add(
                        f"`{name.strip('_').replace('allgather', 'all_gather')}`{self._line()} {what} in which one "
                        f"tensor stands {same} times: what is written to one entry is in the others, too."
                    )
        if name == "index_put_" and not any(args[3:]):
            _, places, *_ = args
            index = [each for each in places if isinstance(each, torch.Tensor) and each.dtype == torch.long]
            if len(index) == len(places) == 1 and len(index[0].unique()) < index[0].numel():
                self._add(
                    f"An index{self._line()} has a number twice, and what is written there first is lost. "
                    "`index_add_` adds all, and `torch.bincount` counts."
                )

    def _note_too_early(self, inputs: list[torch.Tensor]) -> None:
        """Note the first line that uses a tensor while a call for which nobody has waited may still write to it."""
        if self.too_early or not self.under_way:
            return
        spans = [_span(tensor) for tensor in inputs if tensor.layout == torch.strided and tensor.is_contiguous()]
        for call in self.under_way:
            if any(start < end_of and start_of < end for start, end in spans for start_of, end_of in call.writes):
                self.too_early = (
                    f"The result of {call.operation} is used{self._line()} before anybody has waited for it: with a "
                    "handle, it is only started. Call `wait()` on the handle first."
                )
                return

    def _add(self, note: str) -> None:
        if note not in self.notes:
            self.notes.append(note)

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


def _is_small(tensor: torch.Tensor) -> bool:
    return tensor.layout == torch.strided and not is_freed(tensor) and 0 < tensor.numel() <= _MOST_ELEMENTS


def _has_nan(tensor: torch.Tensor) -> bool:
    if not _is_small(tensor) or not (tensor.is_floating_point() or tensor.is_complex()):
        return False
    return bool(torch.isnan(tensor).any())


def _is_binary(name: str) -> bool:
    return name.rstrip("_") in BY_NUMBERS


def _is_view(func) -> bool:
    """Whether an operation returns its input's own memory, and changes nothing."""
    returned = func._schema.returns
    return any(each.alias_info is not None and not each.alias_info.is_write for each in returned)


def _copy(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.clone() if _is_small(tensor) else tensor


def _memory(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _place(tensor: torch.Tensor) -> tuple:
    return tensor.data_ptr(), tuple(tensor.shape), tensor.stride()


def _cause(name: str, inputs: list, args: Iterable, found: torch.Tensor) -> str:
    """Say from which numbers an operation made the first nan."""
    plain_name = name.rstrip("_")
    numbers = iter(inputs)
    operands = [next(numbers, None) if isinstance(each, torch.Tensor) else each for each in args]
    if plain_name in BY_NUMBERS and len(operands) > 1 and all(_is_number(each) for each in operands[:2]):
        place = int(torch.isnan(found).flatten().nonzero()[0])
        one, other = (float(torch.as_tensor(each).broadcast_to(found.shape).flatten()[place]) for each in operands[:2])
        if plain_name == "rsub":
            one, other = other, one
        return f"{one:g} {BY_NUMBERS[plain_name]} {f'({other:g})' if other < 0 else f'{other:g}'} is nan"
    tensors = [each for each in inputs if isinstance(each, torch.Tensor)]
    if plain_name in OVER_A_ROW:
        return f"{plain_name.strip('_')} over a row whose numbers are all -inf, or one of which is inf, is nan"
    if any(each.numel() == 0 for each in tensors):
        return f"{plain_name} of an empty tensor is nan"
    if plain_name in OF_A_NEGATIVE:
        return f"{plain_name} of a number below 0 is nan"
    infinite = any(each.is_floating_point() and bool(torch.isinf(each).any()) for each in tensors)
    return f"{plain_name} of numbers, {'some of them infinite' if infinite else 'all of them finite'}, gives nan"


def _is_number(value) -> bool:
    return isinstance(value, (int, float)) or (isinstance(value, torch.Tensor) and value.numel() > 0)


def shared(got) -> str:
    """Say which parts of an answer are one and the same tensor.

    >>> shared([torch.ones(2)] * 2)
    'Parts 1 and 2 of your answer are one and the same tensor: what is written to one is in the other, too.'
    """
    parts = list(enumerate(got, 1)) if isinstance(got, (list, tuple)) else []
    tensors = [(number, each) for number, each in parts if isinstance(each, torch.Tensor) and each.numel()]
    for (one, first), (other, second) in itertools.combinations(tensors, 2):
        if _place(first) == _place(second):
            same = "are one and the same tensor: what is written to one is in the other, too."
            return f"Parts {one} and {other} of your answer {same}"
    return ""
