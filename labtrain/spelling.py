"""Spells in a message what is of `TrainConfig` as it is typed: ``tp_size=2`` becomes ``--tp 2``.

All errors speak Python, since labkit and most of labtrain are called from Python. The command line
passes them through here, so nobody words an error twice.
"""

import re
import shlex
from dataclasses import fields
from functools import cache

from labtrain.config import TrainConfig
from labtrain.hugging_face import CONFIG

SHORT_OPTIONS = {
    "tp_size": "--tp",
    "cp_size": "--cp",
    "pp_size": "--pp",
    "ep_size": "--ep",
    "expert_tp_size": "--expert-tp",
}
"""The second, shorter option of each field that has one."""


@cache
def options() -> dict[str, str]:
    """Return the option of each field, without the ``no-`` of a switch: the short one, if it has
    two.
    """
    names = [field.name for field in fields(TrainConfig)]
    return {name: f"--{name.replace('_', '-')}" for name in names} | SHORT_OPTIONS


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
    without_value = rf"{not_in_a_path}({names})=(?=[\s,;:)]|$)"
    message = re.sub(without_value, lambda found: options()[found[1]], message)
    with_number = rf"{not_in_a_path}({names})="
    message = re.sub(with_number, lambda found: f"{options()[found[1]]} ", message)
    of_several_words = "|".join(name for name in names.split("|") if "_" in name)
    bare = rf"{not_in_a_path}({of_several_words})\b(?![/=(\"'-]|\.\w)"
    return re.sub(bare, lambda found: options()[found[1]], message)


def _with_value(found: re.Match[str]) -> str:
    name = found["name"]
    value = found["value"]
    if value in ("True", "False"):
        return switch(name, value == "True")
    if value.startswith("("):
        return f"{options()[name]} {value[1:-1].replace(',', '')}".rstrip()
    return f"{options()[name]} {shlex.quote(value[1:-1])}"
