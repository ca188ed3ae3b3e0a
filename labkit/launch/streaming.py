"""Values from ranks while they work: what a generator function yields on each of them comes to the cell at once.

Between two values the ranks wait and the cell is free to draw, or to stop. The generators stay on the ranks, in this
module, because a function arrives there anew with each call.
"""

import inspect
import itertools
from collections.abc import Callable, Iterator
from typing import Any

from labkit.launch.world import World

_numbers = itertools.count()  # of streams, in the kernel
_running: dict[int, Iterator] = {}  # on a rank: the stream that began last


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
    number = next(_numbers)
    world.run(_begin, number, fn, args, kwargs)
    try:
        while True:
            goes_on, values = zip(*world.run(_advance, number), strict=True)
            if not any(goes_on):
                return
            if not all(goes_on):
                ended = [rank for rank, still in enumerate(goes_on) if not still]
                raise RuntimeError(
                    f"{fn.__name__} has ended on ranks {ended} but goes on elsewhere: yield equally often"
                )
            yield list(values)
    except BaseException:  # GeneratorExit above all: the caller wants no more
        # Python may collect a forgotten stream in the middle of another call, which it cannot wait for.
        if world.is_ready:
            world.run(_end, number)
        raise


def _begin(number: int, fn: Callable[..., Iterator], args: tuple, kwargs: dict) -> None:
    _running.clear()
    _running[number] = fn(*args, **kwargs)


def _advance(number: int) -> tuple[bool, Any]:
    """On a rank: return whether there was a next value, and the value."""
    if number not in _running:  # a newer stream has begun
        return False, None
    try:
        return True, next(_running[number])
    except StopIteration:
        _end(number)
        return False, None


def _end(number: int) -> None:
    """On a rank: drop the generator, and with it the model that it holds."""
    _running.pop(number, None)
