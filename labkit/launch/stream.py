"""Values from ranks while they work: what a generator function yields on each of them comes to the cell at once.

Between two values the ranks wait and the cell is free: to draw, or to stop. The generators stay on the ranks, in this
module, because a function arrives there anew with each call.
"""

import inspect
from collections.abc import Callable, Iterator
from typing import Any

from labkit.launch.world import World

_running: Iterator | None = None  # on a rank only


def stream(world: World, fn: Callable[..., Iterator], /, *args, **kwargs) -> Iterator[list]:
    """Iterate over what ``fn(*args, **kwargs)`` yields on the ranks: each time a list of their values, in rank order.

    All ranks must yield equally often. Faults are reported as by `World.run`.

    Raises:
        ValueError: ``fn`` is no generator function.
        RuntimeError: some ranks have ended while others go on.
    """
    if not inspect.isgeneratorfunction(fn):
        name = getattr(fn, "__name__", repr(fn))
        raise ValueError(f"fn={name} has no yield: write one where a value is ready, or use World.run")
    world.run(_begin, fn, args, kwargs)
    while True:
        goes_on, values = zip(*world.run(_advance), strict=True)
        if not any(goes_on):
            return
        if not all(goes_on):
            ended = [rank for rank, still in enumerate(goes_on) if not still]
            raise RuntimeError(f"{fn.__name__} has ended on ranks {ended} but goes on elsewhere: yield equally often")
        yield list(values)


def _begin(fn: Callable[..., Iterator], args: tuple, kwargs: dict) -> None:
    global _running
    _running = fn(*args, **kwargs)


def _advance() -> tuple[bool, Any]:
    """On a rank: whether there was a next value, and the value."""
    global _running
    assert _running is not None
    try:
        return True, next(_running)
    except StopIteration:
        _running = None  # and with it the model that it held
        return False, None
