"""Spells in a message what is of `TrainConfig` as it is typed: ``tp_size=2`` becomes ``--tp 2``.

All of labkit's errors speak Python, since most of it is called from Python. The command line passes
them through here, so nobody words an error twice.
"""

import re
import shlex
from dataclasses import fields
from functools import cache
from typing import get_args, get_type_hints

from labtrain.config import ShortOption, TrainConfig
from labtrain.hugging_face import CONFIG


def short_options() -> dict[str, str]:
    """Return the second, shorter option of each field that has one."""
    kinds = get_type_hints(TrainConfig, include_extras=True)
    return {
        name: each.name
        for name, kind in kinds.items()
        for each in get_args(kind)
        if isinstance(each, ShortOption)
    }


@cache
def options() -> dict[str, str]:
    """Return the option of each field, without the ``no-`` of a switch: the short one, if it has
    two.
    """
    return {
        each.name: f"--{each.name.replace('_', '-')}" for each in fields(TrainConfig)
    } | short_options()


def switch(name: str, value: bool) -> str:
    """Return how a bool is given: by a switch where it is not the default.

    >>> switch("resume", True), switch("zigzag", False), switch("resume", False)
    ('--resume', '--no-zigzag', 'no --resume')
    """
    default = next(field.default for field in fields(TrainConfig) if field.name == name)
    option = options()[name].replace("--", "--no-") if default else options()[name]
    return option if value != default else f"no {option}"


def as_typed(message: str) -> str:
    """Return a message with options in place of fields and their values.

    A field of one word, such as ``text``, counts only with an equals sign: ``text=``. What a
    config.json says is left as it stands there.

    >>> as_typed("tp_size=2 * pp_size=1 = 2 does not divide world_size=1: use tp_size 1")
    '--tp 2 * --pp 1 = 2 does not divide world_size=1: use --tp 1'
    >>> as_typed("stage_layers=(1, 3) and order='tp-pp' need a text=, resume=True and zigzag=False")
    '--stage-layers 1 3 and --order tp-pp need a --text, --resume and --no-zigzag'
    >>> as_typed("tp_size * cp_size=16 does not divide num_query_groups=2")
    '--tp * --cp = 16 does not divide --num-query-groups 2'
    """
    if CONFIG in message:
        return message
    expression = r"(?<![\w=])([a-z]\w*(?: [*/] [a-z]\w*)+)=(?=\d)"  # whose value this is
    message = re.sub(expression, r"\1 = ", message)
    names = "|".join(sorted(options(), key=len, reverse=True))
    not_in_a_path = r"(?<![\w./'\"-])"
    value = r"(?P<value>True\b|False\b|'[^']*'|\([^()]*\))"
    message = re.sub(rf"{not_in_a_path}(?P<name>{names})={value}", _with_value, message)
    message = re.sub(
        rf"{not_in_a_path}({names})=(?=[\s,;:)]|$)", lambda found: options()[found[1]], message
    )
    message = re.sub(
        rf"{not_in_a_path}({names})=", lambda found: f"{options()[found[1]]} ", message
    )
    bare = rf"{not_in_a_path}({names})\b(?![/=(\"'-]|\.\w)"
    return re.sub(bare, lambda found: options()[found[1]] if "_" in found[1] else found[1], message)


def _with_value(found: re.Match[str]) -> str:
    name, value = found["name"], found["value"]
    if value in ("True", "False"):
        return switch(name, value == "True")
    if value.startswith("("):
        return f"{options()[name]} {value[1:-1].replace(',', '')}".rstrip()
    return f"{options()[name]} {shlex.quote(value[1:-1])}"
