"""A feature has a reader: each option of the trainer is used in a notebook, or explained in one or in a README."""

import ast
import json
import re
from dataclasses import fields

from labtrain import TrainConfig
from labtrain.spelling import options, switch
from tests.labtrain.processes import ROOT

PAGES = ["README.md", "labtrain/README.md"]


def cells():
    """The kind and the source of each cell of all notebooks."""
    for path in [ROOT / "Start_Here.ipynb", *(ROOT / "notebooks").rglob("[0-9]*.ipynb")]:
        for cell in json.loads(path.read_text())["cells"]:
            yield cell["cell_type"], "".join(cell["source"])


def given_in(source):
    """The fields that a cell gives to a config. (A name alone, such as ``text``, may be of anything.)"""
    calls = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Call)]
    of_configs = [call for call in calls if ast.unparse(call.func) in ("TrainConfig", "replace")]
    return {keyword.arg for call in of_configs for keyword in call.keywords}


def test_each_option_has_a_reader():
    sources = [(ROOT / page).read_text() for page in PAGES]
    used = set()
    for kind, source in cells():
        sources.append(source)
        if kind == "code" and not source.startswith("%%"):
            used |= given_in(source)
    text = "\n".join(sources)

    def is_read(name):
        default = getattr(TrainConfig, name)
        spelled = [options()[name], f"--{name.replace('_', '-')}"]
        spelled += [switch(name, not default)] if isinstance(default, bool) else []
        is_typed = any(re.search(rf"{option}(?![\w-])", text) for option in spelled)
        return name in used or is_typed or re.search(rf"`{name}(=[^`]*)?`", text)

    unread = [field.name for field in fields(TrainConfig) if not is_read(field.name)]
    assert not unread, f"nobody is told of {', '.join(unread)}: explain them, or let them go"
