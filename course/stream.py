"""Brings what a generator yields on the ranks into a cell, one value at a time."""

import inspect
import itertools
from collections.abc import Callable, Iterator

from labkit.launch import World

_stream_numbers = itertools.count()  # in the kernel
_streams_here: dict[int, Iterator] = {}  # on a rank: the stream that began last, kept from call to call


def stream(world: World, fn: Callable[..., Iterator], /, *args, **kwargs) -> Iterator[list]:
    """Iterate over what ``fn(*args, **kwargs)`` yields on the ranks: a list of their values at a time, in rank order.

    All ranks must yield equally often. Faults are reported as by `World.run`. Leaving the loop early ends the
    generators on the ranks too and frees what they held; so does the next stream in the same world.

    Raises:
        ValueError: ``fn`` is not a generator function.
        RuntimeError: some ranks have ended while others go on.
    """
    if not inspect.isgeneratorfunction(fn):
        name = getattr(fn, "__name__", repr(fn))
        raise ValueError(f"fn={name} has no yield: write one where a value is ready, or use World.run")
    number = next(_stream_numbers)
    world.run(_begin_stream, number, fn, args, kwargs)
    try:
        while any(values := world.run(_advance_stream, number)):
            if ended := [rank for rank, value in enumerate(values) if not value]:
                text = f"{fn.__name__} has ended on ranks {ended} but goes on elsewhere: yield equally often"
                raise RuntimeError(text)
            yield [value for (value,) in values]
    except BaseException:  # GeneratorExit above all: the caller wants no more
        # Python may collect a forgotten stream in the middle of a different call, which it cannot wait for.
        if not world.ended and not world.is_busy:
            world.run(_end_stream, number)
        raise


def _begin_stream(number: int, fn: Callable[..., Iterator], args: tuple, kwargs: dict) -> None:
    _streams_here.clear()
    _streams_here[number] = fn(*args, **kwargs)


def _advance_stream(number: int) -> list:
    """On a rank: return the next value, in a list; an empty one at the end, or if a newer stream has begun."""
    return list(itertools.islice(_streams_here.get(number, ()), 1))


def _end_stream(number: int) -> None:
    """On a rank: drop the generator, and with it the model that it holds."""
    _streams_here.pop(number, None)
