"""Calls a learner's function on copies of its arguments: its answer, its error, and the loop that never ends.

What a call did to the copies shows whether it changed what its caller still needs.
"""

import copy
import io
import linecache
import re
import signal
import traceback
import warnings
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager, redirect_stdout
from dataclasses import dataclass, field
from types import FrameType
from typing import Any

import torch

from course.exercises.source import is_written
from course.exercises.values import is_freed, leaves, with_lists

MOST_SECONDS = 10
"""How long a call may compute, in seconds of this process's own CPU time: waiting for others does not count."""

warnings.filterwarnings("ignore", ".*use_deterministic_algorithms")  # of the mode that fills new memory; once, because
# a filter that is set anew lets each warning of the learner's own code appear again
_OLD_NAMES = r".*torch\.distributed\.(all_gather_into_tensor|reduce_scatter_tensor). is deprecated"
warnings.filterwarnings("ignore", _OLD_NAMES, FutureWarning)  # since 2.13: nearly all programs have them


class EndlessLoop(BaseException):
    """A call has computed for too long. Not an Exception, so that no ``except Exception`` inside the loop keeps it."""


@dataclass(frozen=True)
class Raised:
    """Stands in for the answer of a function that raised an error: its ``message``, and where it was raised."""

    message: str
    where: str = field(default="", compare=False)


def answer(function: Callable, case: Iterable, catch: Any = Exception):
    """Return what ``function`` answers: None if it is still a stub, `Raised` if it fails with one of ``catch``."""
    return answer_to(function, copy.deepcopy(case), catch)  # one that changes its arguments spoils only this copy


def answer_to(function: Callable, arguments: Iterable, catch: Any = Exception):
    """Do so with these very arguments, not with a copy."""
    try:
        with limited(MOST_SECONDS, function), unwritten_memory_shows():
            return with_lists(function(*arguments))
    except Exception as error:
        if isinstance(error, NotImplementedError) and not is_written(function):
            return None
        if not isinstance(error, catch):
            raise
        return Raised(said(error), _where(function, traceback.extract_tb(error.__traceback__)))


def quietly() -> redirect_stdout:
    """Leave out what a call prints: a check may call a function again, and shows what the first call printed."""
    return redirect_stdout(io.StringIO())


@contextmanager
def unwritten_memory_shows() -> Iterator[None]:
    """Fill new memory with nan, or the largest whole number: by luck it may hold zeros, and a wrong answer be right."""
    before = torch.get_deterministic_debug_mode()
    torch.set_deterministic_debug_mode("warn")
    try:
        yield
    finally:
        torch.set_deterministic_debug_mode(before)


@contextmanager
def limited(seconds: float, function: Callable | None = None) -> Iterator[None]:
    """Raise EndlessLoop, which names the line of ``function``, after so many seconds of CPU time.

    Only the main thread can set this timer.
    """

    def end(number: int, frame: FrameType | None):
        stack = traceback.extract_stack(frame)
        own = [place for place, each in enumerate(stack) if each.filename == __file__]
        where = _where(function, stack[max(own, default=0) :])
        raise EndlessLoop(f"After {seconds:g} s of computing it had not come back. Does a loop never end?{where}")

    try:
        before = signal.signal(signal.SIGPROF, end)
    except ValueError:  # not the main thread
        yield
        return
    timer = signal.setitimer(signal.ITIMER_PROF, seconds, 1)  # again and again: a bare `except:` keeps the first
    try:
        yield
    finally:
        try:
            signal.setitimer(signal.ITIMER_PROF, *timer)
        finally:
            signal.signal(signal.SIGPROF, before or signal.SIG_DFL)


def tensors_of(arguments: dict[str, Any]) -> dict[str, torch.Tensor]:
    """Return all tensors in arguments, a module's parameters too, by what a learner calls them.

    >>> list(tensors_of({"gradients": [torch.ones(2), torch.ones(3)], "size": 4}))
    ['gradients[0]', 'gradients[1]']
    """
    found = {}
    for name, value in arguments.items():
        if isinstance(value, torch.nn.Module):
            found |= {f"{name}.{part}": each for part, each in value.named_parameters()}
        elif isinstance(value, (list, tuple)):
            found |= tensors_of({f"{name}[{place}]": each for place, each in enumerate(value)})
        elif isinstance(value, torch.Tensor):
            found[name] = value
    return found


class Kept:
    """The tensors among arguments as they were before a call, except in those that it ``may_change``."""

    def __init__(self, arguments: dict[str, Any], may_change: Collection[str]):
        self.may_change = may_change
        self.before = [(name, tensor, tensor.detach().clone()) for name, tensor in tensors_of(arguments).items()]

    def complaint(self) -> str | None:
        """Say which argument is no longer as it was, if there is one."""
        for name, tensor, before in self.before:
            if re.split(r"\W", name)[0] in self.may_change:
                continue
            if is_freed(tensor):
                return f"It frees the memory of `{name}`, which it was given and others still need: keep its storage."
            if not _is_as_before(tensor, before):
                return (
                    f"It changes `{name}`, which it was given and others still need: write the result into a tensor of "
                    f"its own, as from `torch.empty_like({name})` or `{name}.clone()`."
                )
        return None


def _is_as_before(tensor: torch.Tensor, before: torch.Tensor) -> bool:
    if is_freed(tensor) or tensor.shape != before.shape:
        return False
    return torch.allclose(tensor, before, rtol=0, atol=0, equal_nan=True)


def no_gradient_to(name: str, argument: torch.Tensor, got) -> str | None:
    """Complain if backward from an answer would not reach this argument; no backward runs, as memory may be freed."""
    results = [each for each in leaves(got) if isinstance(each, torch.Tensor)]
    if not results:
        kind = type(got).__name__
        return f"It returns a {kind}, and backward needs a tensor that leads to `{name}`: leave out `.item()` or float."
    found, seen = [each.grad_fn for each in results], set()
    while found:
        if (node := found.pop()) is not None and node not in seen:
            seen.add(node)
            found += [child for child, _ in node.next_functions]
    if any(getattr(node, "variable", None) is argument for node in seen):
        return None
    return (
        f"No gradient reaches `{name}`, because autograd has no graph from it to the result. Did you compute under "
        "`torch.no_grad()`, or from `.data`, `.detach()`, `.item()` or `torch.tensor(...)`?"
    )


def said(error: Any) -> str:
    """Return an error's type and text, without what changes from run to run: torch's C++ puts it in brackets."""
    return f"{type(error).__name__}: " + re.sub(r"^(\[.*?\]:?)+\s*", "", str(error))


def _where(function: Callable | None, stack: Iterable[traceback.FrameSummary]) -> str:
    """Return the line of the learner's function on a stack, if there is one."""
    code = getattr(function, "__code__", None)
    for frame in stack:
        if code and frame.filename == code.co_filename and frame.lineno:
            line = linecache.getline(frame.filename, frame.lineno).strip()
            return f"\nin line {frame.lineno - code.co_firstlineno + 1} of {code.co_name}: {line}"
    return ""
