"""Puts what is launched from here under NCCL's rules."""

from contextlib import contextmanager

from course.nccl_rules import Under
from labkit.launch import world

_pickled_call = world._pickled_call


def _pickled_call_under(function, args, kwargs):
    return _pickled_call(Under(function) if callable(function) else function, args, kwargs)


def put_under_nccls_rules() -> None:
    """From now on, `launch`, `World.run` and what calls them. Not for worlds that have run something before."""
    world._pickled_call = _pickled_call_under


def is_under_nccls_rules() -> bool:
    return world._pickled_call is _pickled_call_under


@contextmanager
def under_nccls_rules():
    before = world._pickled_call
    put_under_nccls_rules()
    try:
        yield
    finally:  # a call in here may end in an error that its test expects
        world._pickled_call = before
