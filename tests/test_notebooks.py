"""What holds for every notebook before it is run: stored outputs, no leftovers of a session, working links."""

import ast
import copy
import importlib
import inspect
import json
import re
import subprocess
import symtable
import sys
from functools import cache
from pathlib import Path
from pkgutil import iter_modules

import nbformat
import pytest

from course import exercises, museum, working_copy
from course.exercises import standstill
from course.project import parts

ROOT = Path(__file__).parents[1]
NOTEBOOKS = [ROOT / path for path in working_copy.notebooks(ROOT)]
LAB = [path for path in NOTEBOOKS if path.parent.name != "further"]
FURTHER = [path for path in NOTEBOOKS if path not in LAB]
DOCUMENTS = [ROOT / name for name in ("README.md", "INSTRUCTOR.md", "CONTRIBUTING.md")]
DOCUMENTS += [ROOT / name for name in ("labtrain/README.md", "benchmarks/README.md", "course/servers.md")]
DEEPER = "(go deeper)"  # ends a heading that is not on the core path, with all below it
DEEPER_WORDS = {
    "V": r"\b(a|the|in) V\b|\bVs\b",
    "ZB-V": r"\bZB-V\b|\bzero-bubble-v\b",
    "V-Half": r"\b[Vv]-[Hh]alf\b",
    "V-Min": r"\b[Vv]-[Mm]in\b",
    "DualPipeV": r"\bDualPipeV\b|\bdualpipe-v\b",
    "capacity": r"\bcapacity\b",
    "stride": r"\bstride\b",
    "z-loss": r"\bz-loss\b",
}
"""Words that sections beside the core path explain, in bold, and how they are written where they are used."""
FURTHER_WORDS = {
    "label smoothing": ("09", r"\b[Ll]abel smoothing\b"),
    "logits": ("09", r"\b[Ll]ogits?\b"),
    "attention": ("10", r"\b[Aa]ttention\b"),
    "SwiGLU": ("10", r"\bSwiGLU\b"),
    "dropout mask": ("11", r"\bdropout masks?\b"),
    "recomputation": ("11", r"\b[Rr]ecomput"),
    "roofline": ("12", r"\b[Rr]oofline"),
    "MFU": ("12", r"\bMFU\b"),
    "context parallelism": ("13", r"\b[Cc]ontext parallel"),
    "FSDP": ("14", r"\bFSDP\b|\bZeRO-[23]\b|\b[Ff]ully sharded\b"),
    "expert parallelism": ("15", r"\b[Ee]xperts?\b"),
}
"""Words that only notebooks beyond the lab explain: which one, and how they are written where they are used."""
DEEPER_RESULTS = {
    "03": r"fused",
    "04": r"whole\s+world",
    "06": r"wrongly|width|bytes",
    "07": r"stuck|wrong|gradient norm",
    "08": r"resume|configuration|[Cc]heckpoint|gradient norm²",
}
"""Words of goals and recaps, by notebook, for what only its deeper sections do."""
LINK = re.compile(r"\]\(([^)#\s]+)(?:#[^)]*)?\)")
SECTION = re.compile(r"\*([^*]+)\*\s+(?:of|in)\s+(?:notebook\s+)?\[(\d\d)\b")
"""A section of a notebook, named with the notebook's number, as in: *One section* of [05](...)."""


@cache
def read(path):
    return nbformat.read(path, as_version=4)


def code_cells(notebook):
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


def unstored_cells(notebook):
    """Cells that nbval would run without comparing anything, because they were stored without having been run."""
    return [cell.id for number, cell in enumerate(code_cells(notebook), 1) if cell.execution_count != number]


@pytest.fixture(params=NOTEBOOKS, ids=lambda path: path.stem)
def path(request):
    return request.param


def test_outputs_are_stored_in_one_run_from_top_to_bottom(path):
    notebook = read(path)
    assert not unstored_cells(notebook), f"run `make notebooks`: {path.name} has cells stored without their outputs"
    assert any(cell.outputs for cell in code_cells(notebook)), f"{path.name} stores no output at all"


def test_a_stripped_notebook_is_caught():
    notebook = copy.deepcopy(read(NOTEBOOKS[0]))
    for cell in code_cells(notebook):
        cell.outputs, cell.execution_count = [], None
    assert len(unstored_cells(notebook)) == len(code_cells(notebook))


def test_errors_are_stored_only_where_they_are_meant(path):
    for cell in code_cells(read(path)):
        failed = any(output.output_type == "error" for output in cell.outputs)
        assert failed == ("raises-exception" in cell.metadata.get("tags", [])), f"cell {cell.id} of {path.name}"


def test_nothing_of_a_session_is_stored(path):
    notebook = read(path)
    assert set(notebook.metadata) == {"kernelspec", "language_info"}
    assert set(notebook.metadata.language_info) == {"name"}
    assert not [cell.id for cell in notebook.cells if set(cell.metadata) - {"tags", "jupyter"}]
    assert "widget-view" not in path.read_text()


def test_cells_are_small_enough_to_read(path):
    """A list of imports is not read line by line, so it does not count."""
    own = {cell.id: re.sub(r"(?m)^(import|from) .*\n?", "", cell.source) for cell in code_cells(read(path))}
    long = {name: source.count("\n") + 1 for name, source in own.items() if source.count("\n") > 12}
    assert not long, f"cells of {path.name} with their lines: {long}"


def test_every_section_runs_after_the_setup_alone(path, tmp_path):
    """The setup is what stands before the first section with code. Core parts need nothing of what goes deeper."""
    setup, *others = runnable(path, lambda is_core: True)
    core = runnable(path, lambda is_core: is_core)[1:]
    for number, section in enumerate(filter(None, [*others, *core])):
        begins = re.sub(r"\W+", "_", section[0])[:60]  # says in ruff's answer which section it is
        (tmp_path / f"{number}_{begins}.py").write_text("\n".join([*setup, *section]))
    command = [sys.executable, "-m", "ruff", "check", "--isolated", "--no-cache", "--select=F821", tmp_path]
    found = subprocess.run([*command, "--output-format=concise"], capture_output=True, text=True)
    assert found.returncode == 0, f"{path.name}, by section: {found.stdout}{found.stderr}"


def test_core_cells_use_no_word_that_only_a_deeper_section_explains():
    """A word is explained where it stands in bold. What a framework calls it, in *In practice*, is its own affair."""
    explained, deeper, found = set(), set(), []
    for path in NOTEBOOKS[1:]:
        for heading, _, is_core, cells in sections(read(path)):
            for cell in cells:
                bold = {word for word in DEEPER_WORDS if re.search(rf"\*\*([Aa]n? )?{word}\b", cell.source)}
                explained, deeper = (explained | bold, deeper) if is_core else (explained, deeper | bold)
                if is_core and heading != "In practice":
                    words = [word for word in DEEPER_WORDS.keys() - explained if uses(cell, DEEPER_WORDS[word])]
                    found += [f"{path.stem}, {cell.id}: {word}" for word in words]
    assert not found
    assert deeper == DEEPER_WORDS.keys(), "words of the list that no deeper section explains any more"


def test_the_lab_needs_nothing_from_beyond():
    """Where its core path uses a word of a further notebook, it says what that is, and links to the notebook."""
    found = []
    for path in LAB:
        linked = set()
        for heading, _, is_core, cells in sections(read(path)):
            for cell in cells if is_core and heading != "In practice" else []:
                linked |= set(re.findall(r"\]\((?:\w+/)*further/(\d\d)", cell.source))
                for word, (number, written) in FURTHER_WORDS.items():
                    if uses(cell, written) and number not in linked:
                        found.append(f"{path.stem}, {cell.id}: {word}")
    assert not found
    assert not [path.stem for path in LAB[1:] if "further/" in said_in(path)], "what one should know is of the lab"
    for number, written in FURTHER_WORDS.values():
        [path] = [path for path in FURTHER if path.stem.startswith(number)]
        assert any(uses(cell, written) for cell in read(path).cells), f"{written} is not in {path.stem} any more"


def test_goals_and_recaps_mark_what_goes_deeper():
    for number, written in DEEPER_RESULTS.items():
        [notebook] = [read(path) for path in LAB if path.stem.startswith(number)]
        ends = [notebook.cells[0].source.partition("You will be able to")[2], notebook.cells[-1].source]
        lines = [line for end in ends for line in re.split(r"\n(?=- |\n)", end)]
        marked = [line.partition(f"*{DEEPER}*") for line in lines]
        assert not [unmarked for unmarked, *_ in marked if re.search(written, unmarked)]
        assert any(re.search(written, deeper) for *_, deeper in marked), f"{number} promises nothing deeper any more"


def uses(cell, written):
    """Whether a reader of the cell meets what is ``written`` so: in its text, or in what it printed."""
    return any(re.search(written, text) for text in shown_by(cell))


def shown_by(cell):
    """What a cell shows in words: its text, or what it printed and drew."""
    if cell.cell_type == "markdown":
        return [cell.source]
    return [out.get("text") or out.get("data", {}).get("text/plain", "") for out in cell.outputs]


BY_CHANCE = {
    "05.ratio_undivided": "32 samples",
    "06.different_columns": "256 rows",
    "08.samples_of_405b": "128 nodes, and a vocabulary that is a multiple of 128",
}
"""Results that stand before their question, but as a different quantity."""


def test_no_number_is_said_before_it_is_asked_for(path):
    """Neither in the question, nor above it in the same section. Whole numbers below 20 may mean anything there."""
    results = json.loads((ROOT / "course/publish/results.json").read_text())
    before, number = [], "00" if path == NOTEBOOKS[0] else path.stem[:2]
    for cell in read(path).cells:
        before = [] if cell.cell_type == "markdown" and re.search(r"(?m)^## ", cell.source) else before
        before += shown_by(cell)
        asked = re.fullmatch(r"predict\.(\w+)", cell.source)
        key = f"{number}.{asked[1]}" if asked else ""
        result = results.get(key)
        result = round(result, 3) if isinstance(result, float) else result
        if key in BY_CHANCE or not isinstance(result, int | float) or (result % 1 == 0 and result < 20):
            continue
        forms = {f"{result:g}", f"{result:,g}", *(f"{result:.{digits}f}" for digits in (1, 2) if result % 1)}
        said = rf"(?<![\w.,])({'|'.join(map(re.escape, forms))})(?!\d|[.,]\d)"
        assert not [text for text in before if re.search(said, text)], key


def runnable(path, wanted):
    """The code of the setup and of each section, by headings of the second level; only the parts that are wanted."""
    found = [[]]
    for _, level, is_core, cells in sections(read(path)):
        if level == 2 and found[-1]:
            found.append([])
        if wanted(is_core):
            code = (cell.source for cell in cells if cell.cell_type == "code")
            found[-1] += [re.sub(r"^%%ranks.*", "rank = world_size = 0", source) for source in code]
    return found


def sections(notebook):
    """Each heading, its level, whether it is on the core path, and the cells up to the next heading of any level."""
    found, deeper = [("", 1, True, [])], None
    for cell in notebook.cells:
        parts = re.split(r"(?m)^(?=#+ )", cell.source) if cell.cell_type == "markdown" else [cell.source]
        for part in filter(None, parts):
            if cell.cell_type == "markdown" and (head := re.match(r"(#+) (.*)", part)):
                level = len(head[1])
                deeper = None if deeper and level <= deeper else deeper
                if head[2].endswith(DEEPER):
                    deeper = deeper or level
                found.append((head[2].removesuffix(DEEPER).strip(), level, not deeper, []))
            found[-1][3].append(nbformat.from_dict(cell | {"source": part}))
    return found


@cache
def lines_of_solutions():
    """How long our solution of each exercise is, by the name of the exercise."""
    modules = [importlib.import_module(f"course.exercises.{each.name}") for each in iter_modules(exercises.__path__)]
    found = {
        each.name: each.solution_function for module in modules for each in vars(module).values() if is_exercise(each)
    }
    return {name: len(inspect.getsource(solution).splitlines()) for name, solution in found.items()}


def is_exercise(each):
    return hasattr(each, "solution_function")


def lines_shown(code):
    """How many lines the scripts have that these cells show: they are read, too."""
    names = re.findall(r"^(?:\w+\.)?(case_\d+)\.show\(\)", code, re.MULTILINE)
    return sum(len(getattr(standstill, name).source.splitlines()) for name in names)


def lines_of_step(number):
    """How many lines our parts of a step of the project have, without blank ones."""
    names = [name for name, step in parts.steps().items() if step == number]
    text = "\n".join(parts.source_of(parts.ONE_FILE.read_text(), name) for name in names)
    return len([line for line in text.splitlines() if line])


def minutes_of_check(name):
    """Of what is checked by this name: a fault to name, a museum after its first case, or an exercise."""
    if name.startswith("case"):
        return 3
    if name.startswith("step_"):
        return 4 + 2 * lines_of_step(int(name.removeprefix("step_")))
    if name.startswith("repair"):
        return 4 + len(getattr(standstill, name).mended)
    return 3 * (len(vars(museum)[name].cases) - 1) if name.endswith("museum") else 4 + lines_of_solutions()[name]


def counted_minutes(cells, for_a_prediction=1):
    """To read and run, and for the exercises; INSTRUCTOR.md says by which rule."""
    text = "\n".join(cell.source for cell in cells if cell.cell_type == "markdown")
    code = "\n".join(cell.source for cell in cells if cell.cell_type == "code")
    words = len(re.findall(r"\w+", re.sub(r"\]\([^)]*\)|<[^>]*>", "]", text)))  # without addresses and tags
    lines = len([line for line in code.splitlines() if line and not re.match(r"(import|from) ", line)])
    lines += lines_shown(code)
    predictions = text.count("**Predict.") + len(re.findall(r"\.compare\(", code))
    explores = len(re.findall(r"^#+ Explore", text, re.MULTILINE))
    checks = re.findall(r"^(?:\w+\.)?(\w+)\.check\(", code, re.MULTILINE)
    return words / 150 + lines / 10 + for_a_prediction * predictions + 6 * explores, sum(map(minutes_of_check, checks))


def core_and_all(notebook):
    parts = sections(notebook)
    core = [cell for *_, is_core, cells in parts if is_core for cell in cells]
    return [*counted_minutes(core), *counted_minutes([cell for *_, cells in parts for cell in cells])]


@pytest.mark.parametrize("path", NOTEBOOKS[1:], ids=lambda path: path.stem)
def test_the_minutes_that_are_promised_were_counted(path):
    counted = core_and_all(read(path))
    said = re.search(r"core path takes (\d+) \+ (\d+) minutes.*?everything (\d+) \+ (\d+)", said_in(path), re.DOTALL)
    assert said, f"counted for {path.name}: {counted}"
    for number, minutes in zip(map(int, said.groups()), counted):
        assert number % 5 == 0
        assert abs(number - minutes) <= 4, f"{path.name}: {counted}"
    [row] = [line for line in read(NOTEBOOKS[0]).cells[1].source.splitlines() if path.name in line]
    assert f"| {said[1]} + {said[2]} | {said[3]} + {said[4]} |" in row


def minutes_said():
    """Of the lab, and of what lies further, as Start_Here says: how many rows, minutes of the core path, and of all."""
    _, *tables = re.split(r"(?m)^### ", read(NOTEBOOKS[0]).cells[1].source)
    for table in tables:
        rows = [row.split("|")[2:4] for row in re.findall(r"(?m)^\| (?:\*\*Start|\[\d\d ).*", table)]
        yield len(rows), *(sum(map(int, re.findall(r"\d+", " ".join(column)))) for column in zip(*rows))


def test_the_hours_that_are_told_are_the_sum():
    (num_lab, *lab), (num_further, *further) = minutes_said()
    assert (num_lab, num_further) == (len(LAB), len(FURTHER))
    told = (
        r"(\d+) hours with its exercises on the core path, (\d+) with everything\. "
        r"What lies further takes (\d+) hours, or (\d+) with everything"
    )
    said = re.search(told, " ".join((ROOT / "INSTRUCTOR.md").read_text().split()))
    assert [round(minutes / 60) for minutes in (*lab, *further)] == [int(hours) for hours in said.groups()]
    hours, minutes = re.search(r"takes (\d+) hours and (\d+) minutes", read(NOTEBOOKS[0]).cells[1].source).groups()
    assert lab[0] == 60 * int(hours) + int(minutes)


def test_the_totals_below_the_agenda_are_the_sum():
    totals = re.findall(r"\| \*\*in all\*\* \| (\d+) \| about (\d+) h \|", read(NOTEBOOKS[0]).cells[1].source)
    sums = [(core, round(everything / 60)) for _, core, everything in minutes_said()]
    assert [(int(core), int(hours)) for core, hours in totals] == sums


def test_the_core_path_of_the_lab_fits_into_a_day():
    (_, core, _), _ = minutes_said()
    assert core <= 8 * 60, "something of the lab's core path must go deeper"


def test_minutes_are_counted_by_the_rule():
    source = "import torch\nx = 1\npredict.x.compare(x)\nunit_forward.check(my)\ncase.check(0)\nsharding_museum.check()"
    cells = [nbformat.v4.new_markdown_cell("### Explore\n\n" + "word " * 299), nbformat.v4.new_code_cell(source)]
    assert counted_minutes(cells) == (300 / 150 + 5 / 10 + 1 + 6, 4 + 8 + 3 + 2 * 3)
    assert counted_minutes(cells, for_a_prediction=2)[0] - counted_minutes(cells)[0] == 1
    assert counted_minutes([nbformat.v4.new_code_cell("jobs.case_1.show()")]) == (2 + 1 / 10, 0)


def needed(path):
    """The notebooks beyond the lab that one should know before this one, as its first cell says."""
    sentence = re.split(r"\.(?=\s|$)", said_in(path).partition("You should know")[2])[0]
    return [number for number in re.findall(r"\[(\d\d)\]", sentence) if number > LAB[-1].stem[:2]]


@pytest.mark.parametrize("path", FURTHER, ids=lambda path: path.stem)
def test_what_a_notebook_needs_is_the_same_on_every_page(path):
    number, needs = path.stem[:2], sorted(needed(path))
    for page in ((ROOT / "README.md").read_text(), read(NOTEBOOKS[0]).cells[1].source):
        [row] = [line for line in page.splitlines() if f"({path.relative_to(ROOT)})" in line]
        assert re.findall(r"\d\d", row.split("|")[4]) == needs
    told = " ".join((ROOT / "INSTRUCTOR.md").read_text().partition("\n## ")[0].split())
    alone = re.search(r"Of those, ([\d, and]+) need only the lab", told)[1]
    others = re.search(rf"\b{number} needs ([^;.]+)[;.]", told)
    assert (number in alone) == (not needs)
    assert re.findall(r"\d\d", others[1] if others else "") == needs


def test_a_section_that_is_named_is_there():
    texts = [path.read_text() for path in DOCUMENTS]
    texts += [cell.source for path in NOTEBOOKS for cell in read(path).cells if cell.cell_type == "markdown"]
    named = {(" ".join(name.split()), number) for text in texts for name, number in SECTION.findall(text)}
    assert len(named) >= 2
    for name, number in named:
        [path] = [path for path in NOTEBOOKS if path.stem.startswith(number)]
        assert name in [heading for heading, *_ in sections(read(path))], f"{path.stem} has no section {name}"


def said_in(path):
    return read(path).cells[0].source


def agendas():
    """Each agenda of INSTRUCTOR.md as its rows: when, how long, and what."""
    text = (ROOT / "INSTRUCTOR.md").read_text()
    rows = re.compile(r"^\| (\d+):(\d\d) \| (\d+) \| (.*?) \|", re.MULTILINE)
    return [rows.findall(part) for part in re.split(r"(?m)^## ", text) if rows.search(part)]


@pytest.mark.parametrize("agenda", agendas(), ids=["half a day", "a day", "more"])
def test_an_agenda_leaves_the_minutes_that_were_counted(agenda):
    """A row names sections in italics, or `exercise 1`; what it names must fit into its minutes."""
    now = 0
    for hour, minute, minutes, what in agenda:
        assert 60 * int(hour) + int(minute) == now, f"{hour}:{minute} {what}"
        now += int(minutes)
        if not (notebook := re.match(r"(\d\d|Start_Here)[: ]", what)):
            continue
        [path] = [path for path in NOTEBOOKS if path.stem.startswith(notebook[1])]
        names = re.findall(r"\*(.+?)\*", what) + [
            f"Exercise {number}:" for number in re.findall(r"exercise (\d)", what)
        ]
        cells = []
        for name in names:
            [own] = [cells for heading, *_, cells in sections(read(path)) if heading.startswith(name)]
            cells += own
        counted = counted_minutes(cells, for_a_prediction=2)  # a room answers aloud
        assert names and sum(counted) <= int(minutes) + 1, f"{what}: {counted}"


def test_the_hours_of_the_day_are_those_of_its_agenda():
    text = (ROOT / "INSTRUCTOR.md").read_text()
    whole, hours, minutes, core = re.search(
        r"A day \((\d) hours with lunch and breaks, (\d) h (\d+) min of work\).*?somebody alone (\d h \d+ min)",
        text,
        re.DOTALL,
    ).groups()
    _, day, _ = agendas()
    work = sum(int(length) for *_, length, what in day if what not in ("lunch", "break"))
    assert sum(int(row[2]) for row in day) == 60 * int(whole)
    assert work == 60 * int(hours) + int(minutes)
    (_, of_core, _), _ = minutes_said()
    assert core == f"{of_core // 60} h {of_core % 60} min"


@pytest.mark.parametrize("document", [*NOTEBOOKS, *DOCUMENTS], ids=lambda path: path.stem)
def test_relative_links_lead_somewhere(document):
    if document.suffix == ".ipynb":
        text = "\n".join(cell.source for cell in read(document).cells if cell.cell_type == "markdown")
    else:
        text = document.read_text()
    links = [link for link in LINK.findall(text) if "://" not in link and not link.startswith("attachment:")]
    assert not [link for link in links if not (document.parent / link).exists()]


BRANCH = re.compile(
    r"github\.com/[\w.-]+/[\w.-]+/(?:blob|tree|raw)/(?![0-9a-f]{40}\b)[^\s)\"'>]+"
    r"|githubusercontent\.com/[\w.-]+/[\w.-]+/(?![0-9a-f]{40}\b)[^\s)\"'>]+"
    r"|https?://[\w.-]+/en/(?:main|master)/[^\s)\"'>]*"
)
"""A link to what changes under the reader: a file of a branch, or pages that are built from one."""


def test_no_link_names_a_branch():
    """Files move: a link with the commit's 40 digits still shows what its sentence says."""
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True)
    paths = [ROOT / name for name in filter(None, listed.stdout.split("\0"))]
    texts = {path: path.read_text(errors="ignore") for path in paths if path.is_file() and path.suffix != ".png"}
    assert len(texts) > 100
    found = [f"{path.relative_to(ROOT)}: {link[0]}" for path, text in texts.items() for link in BRANCH.finditer(text)]
    assert not found


def test_a_link_that_names_a_branch_is_caught():
    site, commit = "https://github" + ".com/some/project", "0123456789" * 4
    assert all(BRANCH.search(f"[x]({site}/{kind}/main/a.py)") for kind in ("blob", "tree", "raw"))
    assert BRANCH.search(f"{site}/tree/0.9-dev")
    assert BRANCH.search("https://docs.example" + ".io/en/master/a.html")
    assert not BRANCH.search(f"{site}/blob/{commit}/a.py {site}/tree/{commit} {site}/issues/1 {site}")


FACTORIES = {"arange", "empty", "eye", "full", "linspace", "ones", "rand", "randint", "randn", "tensor", "zeros"}
"""Functions of torch that make a tensor, on the CPU unless they are told a device."""


def test_cells_that_communicate_do_it_from_the_ranks_own_device(path):
    """Else a notebook on a machine with GPUs says NCCL and uses gloo. A cell that means the CPU says so."""
    wrong = []
    for cell in code_cells(read(path)):
        source = re.sub(r"^%%ranks.*\n", "", cell.source)
        on_ranks = [ast.parse(source)] if source != cell.source else rank_functions(source)
        if "# on the CPU" not in source:
            wrong += [f"{cell.id}: {ast.unparse(call)}" for tree in on_ranks for call in calls_without_device(tree)]
    assert not wrong, f"give these device=local_device(): {wrong}"


def test_no_function_takes_a_device_that_the_kernel_was_asked_for(path):
    """The kernel has no world, so it says the CPU, also where ranks have GPUs."""
    cells = [cell.source for cell in code_cells(read(path)) if not cell.source.startswith("%%ranks")]
    asked = set()
    for source in cells:
        for node in ast.parse(source).body:
            if isinstance(node, ast.Assign) and "local_device()" in ast.unparse(node.value):
                asked |= {ast.unparse(target) for target in node.targets}
    used = {name for source in cells for name in globals_in_functions(symtable.symtable(source, path.name, "exec"))}
    assert not asked & used, "call local_device() in the function, which runs on ranks"


def globals_in_functions(table):
    """The globals that functions use, but not those of a comprehension, which runs where it stands."""
    for inner in table.get_children():
        if not inner.get_name().endswith(("comp", "genexpr")):
            yield from (symbol.get_name() for symbol in inner.get_symbols() if symbol.is_global())
            yield from globals_in_functions(inner)


def rank_functions(source):
    """The functions of a cell that call torch.distributed themselves."""
    functions = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.FunctionDef)]
    return [each for each in functions if re.search(r"\bdist\.(?!get_|new_)\w+\(", ast.unparse(each))]


def calls_without_device(tree):
    """Those of torch's factories, but for draws: their generator is the CPU's, so that all machines draw the same."""
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call)]
    made = [call for call in calls if re.fullmatch(rf"torch\.({'|'.join(FACTORIES)})", ast.unparse(call.func))]
    return [call for call in made if not {keyword.arg for keyword in call.keywords} & {"device", "generator", None}]
