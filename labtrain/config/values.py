"""Sets and checks single values of options."""

from typing import Any

from labkit.sizes import check_number


def set_value(options: Any, name: str, value: Any) -> None:
    """Set a field, although the class is frozen: only while it is being made."""
    object.__setattr__(options, name, value)


def check_numbers(options: Any, names: tuple[str, ...], most: int) -> None:
    """Raise a ValueError if one of these fields is not a number from 0 to ``most``; they become
    floats. What is None by default may be None.
    """
    for name in names:
        value = getattr(options, name)
        if value is not None or getattr(type(options), name) is not None:
            set_value(options, name, check_number(name, value, most))
