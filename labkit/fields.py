"""Checks the values of a dataclass by the types of its fields."""

from functools import lru_cache
from types import NoneType
from typing import Any, Literal, NamedTuple, get_args, get_origin, get_type_hints

from labkit.sizes import check_size, either


class _Field(NamedTuple):
    name: str
    choices: tuple[Any, ...]  # none if it is not a matter of choice
    is_int: bool
    may_be_none: bool


@lru_cache
def _fields_of(kind: type) -> list[_Field]:
    found = []
    for name, annotation in get_type_hints(kind).items():
        kinds = get_args(annotation) or (annotation,)
        choices = ()
        if annotation is bool:
            choices = (True, False)
        elif get_origin(annotation) is Literal:
            choices = kinds
        may_be_none = NoneType in kinds or None in kinds
        found.append(_Field(name, choices, int in kinds and not choices, may_be_none))
    return found


def check_fields(
    config: Any, kind: type, may_be_0: tuple[str, ...] = (), but: tuple[str, ...] = ()
) -> None:
    """Raise a ValueError if a field that ``kind`` declares, ``but`` some, is not one of its
    choices, or not a size; numbers of numpy become Python's own.

    A size is at least 1, or 0 if it is one of ``may_be_0``.
    """
    for name, choices, is_int, may_be_none in _fields_of(kind):
        if name in but:
            continue
        value = getattr(config, name)
        if choices and value not in choices:
            raise ValueError(f"{name}={value!r} is unknown: use {either(choices)}")
        if is_int and not (value is None and may_be_none):
            size = check_size(name, value, least=0 if name in may_be_0 else 1)
            object.__setattr__(config, name, size)
