"""Cells on ranks, in real kernels: what a cell shows, whose a name is, and that the next one works after a fault."""

import re

import nbformat
import pytest
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError

from course.ranks import Ranks
from tests.support.kernel import is_alive, wait_until
from tools.kernel import Kernel

IMPORT = "from course.ranks import ranks\nfrom labkit.launch import watchdog; watchdog._QUIET_SECONDS = 0.5"


@pytest.fixture(scope="module")
def one_kernel(tmp_path_factory):
    kernel = Kernel(tmp_path_factory.mktemp("kernel"))
    kernel.run(IMPORT)
    yield kernel
    kernel.close()


@pytest.fixture
def kernel(one_kernel):
    """A kernel in which four ranks live: those of the test before, where it left them in order."""
    ran = one_kernel.run("%%ranks 4\ndist.barrier(); world_size")
    assert ran.stdout.endswith("ranks 0-3: 4\n"), ran
    return one_kernel


def shows(kernel: Kernel, cell: str) -> str:
    ran = kernel.run(cell)
    assert not ran.error, ran
    return ran.stdout


def error(kernel: Kernel, cell: str) -> str:
    """Run a cell that must fail; the ranks then take the next one."""
    ran = kernel.run(cell)
    assert ran.error, ran
    assert "ranks 0-3: 6\n" in shows(kernel, "%%ranks\ns = torch.tensor(rank); dist.all_reduce(s); s.item()")
    return ran.error


def test_names_stay_and_values_are_folded(kernel):
    assert shows(kernel, "%%ranks\nx = torch.tensor(float(rank))\ndist.all_reduce(x)\nx.item()") == "ranks 0-3: 6.0\n"
    assert shows(kernel, "%%ranks\nx + max(rank, 1)") == (
        "ranks 0-1: tensor(7.)\nrank 2: tensor(8.)\nrank 3: tensor(9.)\n"
    )
    assert shows(kernel, "%%ranks\nx;") == shows(kernel, "%%ranks\ny = x") == ""
    assert shows(kernel, "%%ranks\ntorch.eye(2) if rank else None") == (
        "ranks 1-3:\ntensor([[1., 0.],\n        [0., 1.]])\n"
    )
    assert kernel.value("([x.item() for x in ranks['x']], ranks['rank'])") == ([6.0] * 4, [0, 1, 2, 3])
    assert "KeyError: 'nowhere has no value on ranks 0-3'" in kernel.run("ranks['nowhere']").error


def test_print_is_grouped_and_a_function_of_an_earlier_cell_is_quoted(kernel):
    assert shows(kernel, "%%ranks\ndef half(x):\n    print('half of', x)\n    return 1 / x") == ""
    assert shows(kernel, "%%ranks [0, 1]\nhalf(2)") == ("[rank 0] half of 2\n[rank 1] half of 2\nranks 0-1: 0.5\n")
    assert re.search(
        r"at this cell, line 3:  half\(0\)\n    at Cell In\[\d+\], line 4, in half:  return 1 / x",
        error(kernel, "%%ranks\n\nhalf(0)"),
    )


def test_whose_a_name_is(kernel):
    kernel.run("scale, mine = 2, [1]\ndef scaled(x): return scale * x")
    assert shows(kernel, "%%ranks\nscaled(scale), mine") == "ranks 0-3: (4, [1])\n"
    kernel.run("scale = 3")
    assert shows(kernel, "%%ranks\nmine.append(rank)\nscaled(scale)") == "ranks 0-3: 9\n"
    assert shows(kernel, "%%ranks\nmine") == "ranks 0-3: [1]\n"  # it was changed in place, but not assigned
    assert shows(kernel, "%%ranks\nmine += [rank]") == ""
    kernel.run("mine = 'the notebook still has its own'")
    assert shows(kernel, "%%ranks [3]\nmine") == "rank 3: [1, 3]\n"
    assert shows(kernel, "%%ranks\nif rank == 0: scale = 'of rank 0'") == ""
    assert shows(kernel, "%%ranks\nscale") == "rank 0: 'of rank 0'\nranks 1-3: 3\n"
    assert shows(kernel, "%%ranks\nif rank == 0: del scale") == ""
    assert shows(kernel, "%%ranks\nscale") == "ranks 0-3: 3\n"


def test_a_function_on_the_ranks_reads_the_notebooks_value_of_now(kernel):
    kernel.run("factor, rank = 2, 'not that of a rank'")
    assert (
        shows(kernel, "%%ranks\ndef times(x): return factor * x, rank\nclass Twice:\n    def of(self): return times(1)")
        == ""
    )
    kernel.run("factor = 5")
    assert shows(kernel, "%%ranks\ntwice = Twice()") == ""
    assert shows(kernel, "%%ranks [1]\ntwice.of()") == "rank 1: (5, 1)\n"
    kernel.run("factor, tally = 7, 1")
    assert shows(kernel, "%%ranks\nimport math as m\ndef count():\n    global tally\n    tally += 1") == ""
    assert shows(kernel, "%%ranks\ncount()\n[factor * x for x in range(2)]") == "ranks 0-3: [0, 7]\n"
    assert shows(kernel, "%%ranks\nm.floor(tally)") == "ranks 0-3: 2\n"


def test_what_cannot_be_sent_is_named(kernel):
    kernel.run("import threading; lock = threading.Lock()")
    assert "ValueError: lock (a lock) cannot be sent to the ranks" in error(kernel, "%%ranks\nlock")
    assert shows(kernel, "%%ranks\nlock = 3\nlock") == "ranks 0-3: 3\n"  # which nobody needs from the notebook


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("0", "%%ranks 0: the count must be from 1 to 128; for rank 0 alone write %%ranks [0]"),
        ("129", "%%ranks 129: the count must be from 1 to 128"),
        ("four", "%%ranks four is neither a count nor a list: write a count as in %%ranks 4"),
        ("2.5", "%%ranks 2.5 is neither a count nor a list"),
        ("[]", "%%ranks []: the list must name ranks that live, each once: ranks 0-3"),
        ("[4]", "%%ranks [4]: the list must name"),
        ("[1, 1]", "%%ranks [1, 1]: the list must name"),
        ("['x']", "%%ranks ['x']: the list must name"),
    ],
)
def test_bad_input(kernel, line, said):
    assert f"ValueError: {said}" in error(kernel, f"%%ranks {line}\nrank")


def test_bad_input_starts_no_process(launches):
    for line, cell, kind in (
        ("0", "1", ValueError),
        ("", "1", ValueError),
        ("[0]", "1", ValueError),
        ("2", "x = = 1", SyntaxError),
    ):
        with pytest.raises(kind, match=r"%%ranks \[0\]|%%ranks: no ranks live: start some|invalid syntax"):
            Ranks().magic(line, cell)
    assert not launches


def test_typo_on_all_ranks_keeps_the_names(kernel):
    shows(kernel, "%%ranks\nkept = rank")
    report = error(kernel, "%%ranks\nassigned = 1\nkept = kep + 1")
    assert report.startswith("RankFailed: rank") and "raised NameError: name 'kep' is not defined" in report
    assert "at this cell, line 3:  kept = kep + 1" in report and report.count("the same") == 3
    assert report.endswith("The ranks and their names are kept.")
    assert shows(kernel, "%%ranks\nkept - rank + assigned") == "ranks 0-3: 1\n"


def test_a_rank_that_raises_while_others_compute_keeps_the_names(kernel):
    shows(kernel, "%%ranks\nkept = rank")
    report = error(kernel, "%%ranks\nimport time\nif rank == 1: raise KeyError('k')\ntime.sleep(60)")
    assert "rank 1 of 4 raised KeyError: 'k'" in report and "rank 0: runs at this cell, line 4:  time.sleep" in report
    assert shows(kernel, "%%ranks\nkept") == "rank 0: 0\nrank 1: 1\nrank 2: 2\nrank 3: 3\n"


LEFT_ON_ITS_WAY = {
    "beside a collective": "if rank == 2: 1 / 0\ndist.barrier()",
    "an asynchronous collective": "if rank == 2: work = dist.barrier(async_op=True)\n1 / 0",
    "an unmatched send": "if rank == 2: work = dist.isend(x, 1)\n1 / 0",
    "an unmatched receive": "if rank == 2: work = dist.irecv(x, 1)\n1 / 0",
    "a collective that failed": "import datetime\n"
    "try: rank or dist.irecv(x, 1).wait(datetime.timedelta(seconds=0.1))\nexcept RuntimeError: pass\n1 / 0",
    "a circle of receives": "if rank == 2: 1 / 0\ndist.recv(x, (rank + 1) % 4)",
    "a collective of a group": "pair = dist.new_group([1, 2])\nif rank == 1: 1 / 0\nif rank == 2: dist.barrier(pair)",
}


@pytest.mark.parametrize("how", LEFT_ON_ITS_WAY)
def test_an_exception_that_leaves_something_on_its_way_keeps_the_names(kernel, how):
    shows(kernel, "%%ranks\nx = torch.ones(2); kept = rank; group = dist.new_group([0, 3])")
    pids = kernel.value("[pid for pid, _, _ in ranks._on_ranks(__import__('course.rank_cell').rank_cell.facts)]")
    report = error(kernel, f"%%ranks\nnew = 1\n{LEFT_ON_ITS_WAY[how]}")
    assert "raised ZeroDivisionError" in report
    assert report.endswith("groups connected anew. The ranks and their names are kept.")
    assert shows(kernel, "%%ranks\nkept - rank + new") == "ranks 0-3: 1\n"
    cell = "%%ranks [0, 3]\ny = torch.ones(1); dist.all_reduce(y, group=group); y.item()"
    assert shows(kernel, cell).endswith("ranks 0, 3: 2.0\n")
    assert (
        kernel.value("[pid for pid, _, _ in ranks._on_ranks(__import__('course.rank_cell').rank_cell.facts)]") == pids
    )


def test_a_thread_that_may_send_later_restarts(kernel):
    shows(kernel, "%%ranks\nx = torch.ones(2); lost = 1")
    cell = "%%ranks\nimport threading\nif rank == 2: threading.Timer(60, dist.send, (x, 1)).start()\n1 / 0"
    assert re.search(r"\nRanks restarted, names lost: .*\blost\b.*\bx\b", error(kernel, cell))


def test_a_rank_that_is_killed(kernel):
    shows(kernel, "%%ranks\nlost = 1")
    report = error(kernel, "%%ranks\nimport os; mine = 2\nif rank == 1: os.kill(os.getpid(), 9)\ndist.barrier()")
    assert "rank 1 of 4 was killed by SIGKILL" in report
    assert re.search(r"\nRanks restarted, names lost: .*\blost, .*\bmine\b.*\bos\b", report)


def test_c_code_that_cannot_be_interrupted(kernel):
    shows(kernel, "%%ranks\nlost = 1")
    report = error(kernel, "%%ranks\nmine = 2\nif rank == 1: sum(range(10**12))\n1 / 0")
    assert "rank 1: holds the GIL in C code, or waits for a core" in report
    assert re.search(r"\nRanks restarted, names lost: .*\blost, .*\bmine\b", report)
    assert "NameError: name 'lost'" in error(kernel, "%%ranks\nlost")


HALF_MADE = {
    "the others never came": "if rank == 1: 1 / 0\nhalf = dist.new_group([0, 3])",
    "one has left it": "half = dist.new_group([0, 3])\nif rank == 3: dist.destroy_process_group(half)\n"
    "if rank == 0: dist.barrier(half)\n1 / 0",
}


@pytest.mark.parametrize("how", HALF_MADE)
def test_a_group_that_only_some_of_its_ranks_have(kernel, how):
    shows(kernel, "%%ranks\nkept = 1")
    ran = kernel.run(f"%%ranks\n{HALF_MADE[how]}")
    assert ran.error.endswith("The ranks and their names are kept.") and "ZeroDivisionError" in ran.error, ran
    told = "Not all of the ranks [0, 3] have their group: make it again.\n"
    assert (told in ran.stdout) == (how == "one has left it")
    again = "%%ranks\nhalf = dist.new_group([0, 3]); x = torch.ones(1) + kept\n"
    again += "if rank in (0, 3): dist.all_reduce(x, group=half)\nx.item()"
    assert shows(kernel, again) == "ranks 0, 3: 4.0\nranks 1-2: 2.0\n"


OBJECTS = """%%ranks
from labkit import pipeline
from labkit.data_parallel import DataParallel
from labkit.groups import init_groups
from labkit.layout import ParallelLayout
from labkit.schedules import one_f_one_b
groups = init_groups(ParallelLayout(4, pp_size=2))
torch.manual_seed(0)
layer, model = torch.nn.Linear(3, 3), DataParallel(torch.nn.Linear(3, 1), groups.dp)
"""
STEP = """%%ranks
layer.zero_grad(); model.zero_grad()
model(torch.full((2, 3), 1.0 + groups.coords.dp)).sum().backward()
rows = [torch.ones(2, 3)] * 4
pipeline.run(one_f_one_b(2, 4), [layer], groups, rows, loss=lambda y, _: y.square().mean())
model.module.weight.grad[0, 0].item(), round(layer.weight.grad.norm().item(), 6)
"""


def test_objects_that_hold_groups_work_after_a_fault(kernel):
    shows(kernel, OBJECTS)
    before = shows(kernel, STEP)
    for fault in ("if rank == 2: 1 / 0\ndist.barrier(groups.pp)", "dist.recv(torch.ones(1), (rank + 1) % 4)"):
        assert error(kernel, f"%%ranks\n{fault}").endswith("The ranks and their names are kept.")
        assert shows(kernel, STEP) == before and "3.0" in before


def test_a_missing_collective(kernel):
    report = error(kernel, "%%ranks\nif rank != 3: dist.barrier()")
    assert report.startswith("Deadlock: no rank can go on.") and "at this cell, line 2" in report
    assert "ranks 0, 1, 2 wait; rank 3 has returned without it" in report
    assert report.endswith("The ranks and their names are kept.")


def test_the_second_deadlock_is_told_as_the_first(kernel):
    """Its collectives are counted from 1 again, and ranks that were not asked have made more of them before."""
    shows(kernel, "%%ranks\nfor _ in range(3): dist.barrier()")
    for _ in range(2):
        report = kernel.run("%%ranks [0, 2]\ndist.barrier()").error
        assert "ranks 0, 2 wait; ranks 1, 3 have returned without it" in report
        assert "have left it" not in report and "differ in size" not in report


@pytest.mark.parametrize(("line", "word"), [("!ls", "!ls"), ("%timeit 1", "%timeit"), ("files = !ls", "!ls")])
def test_what_only_ipython_understands_is_named(kernel, line, word):
    assert error(kernel, f"%%ranks\nx = 1\n{line}").startswith(f"ValueError: {word} cannot stand in a %%ranks cell")


def test_a_name_of_the_ranks_is_named_in_the_notebook(kernel):
    shows(kernel, "%%ranks\nonly_there = 1")
    assert error(kernel, "only_there + 1").endswith('ranks["only_there"] is a list with the value of each')
    assert error(kernel, "nowhere_at_all").endswith("name 'nowhere_at_all' is not defined")


def test_random_numbers_are_equal_as_the_notebook_says(kernel):
    assert shows(kernel, "%%ranks\ntorch.rand(2)").startswith("ranks 0-3: tensor(")


def test_a_collective_on_some_ranks_only(kernel):
    ran = kernel.run("%%ranks [1, 3]\ndist.barrier()")
    assert (
        "Ranks 0, 2 were not asked: this cell runs on ranks 1, 3 only.\nThey would have to call barrier" in ran.stdout
    )
    assert ran.error_name == "Deadlock" and "Ranks 0, 2 were not asked" in ran.error
    shows(kernel, "%%ranks 4\npair = dist.new_group([1, 3])")
    assert (
        shows(kernel, "%%ranks [1, 3]\nx = torch.ones(1)\ndist.all_reduce(x, group=pair)\nx")
        == "ranks 1, 3: tensor([2.])\n"
    )


def interrupted(kernel: Kernel, cell: str, seconds: float = 30) -> str:
    """Press stop when the cell has said that it is under way."""
    message = kernel.start(cell)
    wait_until(lambda: False, 1.0)
    kernel.manager.interrupt_kernel()
    ran = kernel.finish(message, seconds)
    assert ran.error_name == "KeyboardInterrupt", ran
    return ran.error


def test_the_stop_button_keeps_the_names(kernel):
    said = interrupted(kernel, "%%ranks\nimport time\nstep = 1\nwhile True: time.sleep(0.01)")
    assert "rank 0, 1, 2, 3: runs at this cell, line 4" in said and said.endswith("The ranks and their names are kept.")
    assert shows(kernel, "%%ranks\nstep") == "ranks 0-3: 1\n"


def test_the_stop_button_keeps_the_names_of_ranks_that_meet_now_and_then(kernel):
    loop = "%%ranks\nimport time\nx, steps = torch.ones(1), 0\nwhile True:\n    time.sleep(0.05 * rank)\n"
    said = interrupted(kernel, loop + "    dist.all_reduce(x); x /= 4; steps += 1")
    assert said.endswith("The ranks and their names are kept.")
    assert kernel.value("min(ranks['steps'])") > 0


def test_the_stop_button_in_a_barrier_keeps_the_names(kernel):
    shows(kernel, "%%ranks\nkept = 1")
    said = interrupted(kernel, "%%ranks\nimport time\nif rank == 0: time.sleep(60)\ndist.barrier()")
    assert "rank 1, 2, 3: waits in barrier" in said and said.endswith("The ranks and their names are kept.")
    assert shows(kernel, "%%ranks\nrank * kept") == "rank 0: 0\nrank 1: 1\nrank 2: 2\nrank 3: 3\n"


def test_figures_are_shown_with_their_rank(kernel):
    shown = kernel.run(
        "%%ranks [1]\nimport matplotlib.pyplot as plt\nplt.plot([1, 2]); plt.title('a line'); plt.show()"
    )
    assert not shown.error and not shown.stderr and shown.stdout == ""
    assert [data["text/plain"] for data in shown.shown] == ["Figure of rank 1: a line"]
    assert shows(kernel, "%%ranks [1]\nplt.get_fignums()") == "rank 1: []\n"
    [data] = kernel.run("%%ranks\nimport matplotlib.pyplot as plt\nplt.plot([rank])").shown
    assert re.findall(r"<b>(rank \d)</b></figcaption><div[^>]*><img alt=\"Figure of (rank \d)", data["text/html"]) == (
        [(f"rank {rank}", f"rank {rank}") for rank in range(4)]
    )


def test_what_a_rank_displays_is_shown_as_in_a_notebook(kernel):
    ran = kernel.run("%%ranks [1, 2]\nfrom IPython.display import HTML, display\ndisplay(HTML('<b>bold</b>'), 'plain')")
    assert ran.stdout == "[rank 1] plain\n[rank 2] plain\nranks 1-2:\n", ran
    assert [data["text/html"] for data in ran.shown] == ["<b>bold</b>"]
    ran = kernel.run("%%ranks\nfrom IPython.display import HTML\nHTML(f'<i>{rank // 2}</i>')")
    assert ran.stdout == "ranks 0-1:\nranks 2-3:\n", ran
    assert [data["text/html"] for data in ran.shown] == ["<i>0</i>", "<i>1</i>"]
    kernel.run("from IPython.display import HTML, display")
    assert kernel.run("%%ranks [0]\ndisplay(HTML('<u>sent</u>'));").shown[0]["text/html"] == "<u>sent</u>"
    assert error(kernel, "%%ranks\ndisplay(HTML('lost')); 1 / 0") and kernel.run("%%ranks\n3").shown == []


def test_bars_of_ranks_are_not_in_the_red_band_of_warnings(kernel):
    ran = kernel.run(
        "%%ranks [0, 1]\nfrom tqdm import tqdm\nimport sys\nfor _ in tqdm(range(3)): pass\n"
        "for _ in tqdm(iter([1]), desc='no total'): pass\nprint('a warning', file=sys.stderr)"
    )
    assert ran.stderr == "[rank 0] a warning\n[rank 1] a warning\n"
    assert (
        len(re.findall(r"^\[rank [01]\] 100%\|.*3/3", ran.stdout, re.MULTILINE)) == 2 and "no total: 1it" in ran.stdout
    )


def test_a_long_print_is_cut_in_a_notebook_and_says_by_how_much(kernel):
    lines = shows(kernel, "%%ranks [0]\nprint('x' * 200_000)\nfor i in range(20_000): print(i)").splitlines()
    assert len(lines) <= 101 and sum(map(len, lines)) < 10_000
    assert lines[0].endswith("x ... 198,000 more characters")
    assert "... 19,901 lines left out: the first 80 and the last 20 of a rank are shown ..." in lines[80]
    assert lines[-1] == "[rank 0] 19999"


def test_the_first_cells_functions_read_the_notebooks_value_of_now(kernel):
    shows(kernel, "factor = 2")
    assert shows(kernel, "%%ranks 2\ndef times(x): return factor * x").startswith("Ranks restarted, 2 instead of 4")
    shows(kernel, "factor = 5")
    assert shows(kernel, "%%ranks\ntimes(1)") == "ranks 0-1: 5\n"


def test_the_table_and_completion(kernel):
    shows(kernel, "%%ranks [2]\nloss_of_rank_2 = 1")
    rows = shows(kernel, "%ranks").splitlines()
    assert len(rows) == 5 and re.fullmatch(r"   2 +\d+ +\d+ MB  .*\bloss_of_rank_2\b.*", rows[3])
    assert "loss_of_rank_2" not in rows[1] + rows[2] + rows[4]
    found = (
        "from IPython.core.completer import provisionalcompleter\n"
        "completer = get_ipython().Completer; completer.use_jedi = False\n"  # which would take seconds to start
        "with provisionalcompleter(): print([each.text for each in completer.completions(text, len(text))])"
    )
    for text, expected in (
        ("%%ranks\nprint(loss_o", ["loss_of_rank_2"]),
        ("%%ranks\nworld_s", ["world_size"]),
        ("loss_o", []),
    ):
        assert shows(kernel, f"text = {text!r}\n{found}") == f"{expected}\n"


def test_a_line_that_cannot_be_is_refused_in_one_sentence(kernel):
    kernel.run("living, ranks.world = ranks.world, None")  # as after a restart of the kernel
    try:
        assert kernel.run("%%ranks\n1").error == (
            "ValueError: %%ranks: no ranks live: start some with a count, as in %%ranks 4"
        )
    finally:
        kernel.run("ranks.world = living")
    assert "\n" not in kernel.run("%%ranks many\n1").error


def test_a_different_count_restarts(kernel):
    shows(kernel, "%%ranks\nx = 1")
    assert shows(kernel, "%%ranks 2\nrank").endswith("x.\nrank 0: 0\nrank 1: 1\n")


def test_nbclient_sees_the_error_and_nothing_outlives_the_kernel(one_kernel):
    """Last, because it ends the kernel of all tests, as nbclient ends one of its own."""
    cells = ["%%ranks 2\nimport os; pids = os.getpid()", "print(ranks['pids'])", "%%ranks\n1 / 0"]
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell) for cell in cells])
    with pytest.raises(CellExecutionError, match="ZeroDivisionError: division by zero"):
        NotebookClient(notebook, km=one_kernel.manager).execute()
    assert notebook.cells[2].outputs[-1].ename == "RankFailed"
    pids = eval(notebook.cells[1].outputs[0].text)
    assert len(pids) == 2 and all(map(is_alive, pids))
    one_kernel.manager.shutdown_kernel()
    assert wait_until(lambda: not any(map(is_alive, pids)), 5)
