"""Every command line of the documents runs as it stands: its options are read, and its sizes fit its ranks."""

import argparse
import importlib
import inspect
import re
import shlex
import shutil
import sys
from pathlib import Path

import pytest
from torch.distributed.run import get_args_parser

from labtrain import TrainConfig
from labtrain.__main__ import read_options

ROOT = Path(__file__).parents[1]
RUNS = ROOT / "labtrain/README.md"
DOCUMENTS = [ROOT / name for name in ("README.md", "CONTRIBUTING.md", "INSTRUCTOR.md")]
DOCUMENTS += [RUNS, *sorted((ROOT / "course").glob("*.md"))]
FENCED = re.compile(r"^```\w*\n(.*?)^```$", re.MULTILINE | re.DOTALL)
HEREDOC = re.compile(r"^[^\n]*<<'END'\n(.*?)^END\n", re.MULTILINE | re.DOTALL)
SPAN = re.compile(r"`([^`]+)`")


def command_lines(text):
    """Each line of the code blocks, and each span of code in the prose."""
    for block in FENCED.findall(text):
        lines = HEREDOC.sub("", block).replace("\\\n", " ").splitlines()
        yield from (line.partition(" #")[0] for line in lines if not line.startswith("#"))
    yield from (" ".join(span.split()) for span in SPAN.findall(FENCED.sub("", text)))


def of_module(line):
    """Return what starts a module of ours in this line, the module, and its arguments; or nothing."""
    found = re.search(r"(.*?)-m ((?:labkit|labtrain|course|benchmarks)[\w.]*)(.*)", re.split(r" && | \| ", line)[-1])
    return found and (found[1], found[2], shlex.split(found[3].rstrip("\"'")))


LINES = [
    (str(path.relative_to(ROOT)), line)
    for path in DOCUMENTS
    for line in command_lines(path.read_text())
    if of_module(line)
]


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """A folder with the files that the lines of labtrain's page read; its own script makes the one with weights."""
    folder = tmp_path_factory.mktemp("readme")
    shutil.copy(ROOT / "README.md", folder)
    (folder / "ids.bin").write_bytes(bytes(4096))
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        exec(HEREDOC.search(RUNS.read_text())[1], {})
    return folder


def trained(options, world_size, monkeypatch):
    """Return what is wrong with options of the trainer on so many ranks, if that is known, or an empty text."""
    monkeypatch.setattr(sys, "argv", ["labtrain", *options])
    config = read_options()
    if not isinstance(config, TrainConfig):
        return config or ""  # a text, or nothing after --help
    try:
        if world_size := config.check or world_size:
            config.resize_to(world_size).make_schedule(world_size)
    except ValueError as error:
        return str(error)
    return ""


class Parsed(Exception):
    """Ends a command whose arguments are right."""


def parsed(module, arguments, monkeypatch):
    """Let a command of ours read its arguments, and no more."""
    main = importlib.import_module(module).main
    if inspect.signature(main).parameters or "argparse" not in vars(sys.modules[module]):
        inspect.signature(main).bind(*arguments)
        return
    read = argparse.ArgumentParser.parse_known_args

    def read_and_end(*args, **options):
        read(*args, **options)
        raise Parsed

    monkeypatch.setattr(argparse.ArgumentParser, "parse_known_args", read_and_end)
    monkeypatch.setattr(sys, "argv", [module, *arguments])
    with pytest.raises(Parsed):
        main()


@pytest.mark.parametrize(("document", "line"), LINES, ids=str)
def test_a_command_line_runs_as_it_stands(document, line, files, monkeypatch):
    monkeypatch.chdir(files)
    starter, module, arguments = of_module(line)
    if module != "labtrain":
        parsed(module if module != "benchmarks" else "benchmarks.__main__", arguments, monkeypatch)
        return
    world_size = 1
    if "torchrun" in starter:
        given = get_args_parser().parse_args([*shlex.split(starter.partition("torchrun")[2]), "-m", module])
        world_size = int(given.nnodes.rpartition(":")[2]) * int(given.nproc_per_node)
    assert trained(arguments, world_size, monkeypatch) == ""


def options_in_prose():
    """The page's spans of options, each with those before it in its paragraph that it may add to."""
    for paragraph in FENCED.sub("", RUNS.read_text()).split("\n\n"):
        spans = [" ".join(span.split()) for span in SPAN.findall(paragraph) if span.startswith("--")]
        yield from ((span, spans[:number]) for number, span in enumerate(spans) if " " in span)


@pytest.mark.parametrize(
    ("span", "before"), [*options_in_prose()], ids=lambda value: value if isinstance(value, str) else ""
)
def test_options_can_be_typed_as_they_stand(span, before, files, monkeypatch):
    """Alone, or added to options of which the same paragraph speaks first."""
    monkeypatch.chdir(files)
    bases = ["", *(f"{each} " for each in before if " " in each)]
    faults = [trained(shlex.split(base + span), None, monkeypatch) for base in bases]
    assert "" in faults, faults[0]


def test_what_make_is_asked_for_is_there():
    makefile = (ROOT / "Makefile").read_text()
    asked = {
        target for path in DOCUMENTS for line in command_lines(path.read_text())
        for target in re.findall(r"(?:^|&& )make ([a-z][\w-]*)", line)
    }  # fmt: skip
    assert len(asked) > 10
    assert not [target for target in asked if not re.search(rf"^{target}:", makefile, re.MULTILINE)]
