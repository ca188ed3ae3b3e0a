"""tools/gpu_check.py: its CPU part passes with four packages, faults are found, and none ends the check."""

import json
import os
import subprocess
import sys
from argparse import Namespace
from dataclasses import replace
from pathlib import Path

import pytest
import torch.distributed as dist

from course.working_copy import find
from labkit.launch import launch
from labkit.parallel_config import SCHEDULES
from labkit.tensor_parallel import operators
from tests.support import gpu_rows_with_faults
from tools import gpu_check
from tools.gpu_rows import on_ranks, one_process, speed
from tools.gpu_rows.row import LeftOut, Where
from tools.gpu_rows.table import all_rows

ROOT = Path(__file__).parents[1]
ALLOWED = {"torch", "numpy", "cloudpickle", "tqdm"}
OF_TORCH = {  # which it brings along
    "torchgen", "functorch", "filelock", "typing_extensions", "sympy", "mpmath", "isympy", "networkx", "jinja2",
    "markupsafe", "fsspec", "setuptools", "pkg_resources", "_distutils_hack", "triton", "nvidia", "cuda",
}  # fmt: skip
REFUSE = f"""
import sys
from importlib.machinery import PathFinder


class Without:
    'As PathFinder, where no package is installed but a few.'

    @staticmethod
    def find_spec(name, path=None, target=None):
        spec = PathFinder.find_spec(name, path, target)
        is_installed = "." not in name and spec is not None and "site-packages" in str(spec.origin)
        return None if is_installed and name not in {ALLOWED | OF_TORCH!r} else spec


sys.meta_path[sys.meta_path.index(PathFinder)] = Without
"""


def run(folder, *options, **environment):
    command = [sys.executable, "tools/gpu_check.py", "--device", "cpu", "--folder", str(folder), *options]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, env=os.environ | environment)
    report = json.loads((folder / "report.json").read_text())
    return done, {row["name"]: row for row in report["rows"]}, (folder / "report.md").read_text()


def test_on_cpu_ranks_everything_passes_with_four_packages(tmp_path):
    (tmp_path / "sitecustomize.py").write_text(REFUSE)
    done, rows, page = run(tmp_path / "report", "--ranks", "2", PYTHONPATH=str(tmp_path))
    assert done.returncode == 0, done.stdout + done.stderr
    needs_gpus = {row.name for row in all_rows(0, (2,)) if row.needs}
    assert {name for name, row in rows.items() if row["verdict"] == "left out"} == needs_gpus
    assert {name for name, row in rows.items() if row["verdict"] == "passed"} == rows.keys() - needs_gpus
    assert sum(name.startswith("2 ranks: schedule, ") for name in rows) == len(SCHEDULES)
    assert "the CPU only: this says nothing about GPUs" in page
    assert "memory against the estimate (11_dropout_and_memory, `memory-run`): it needs a GPU" in page
    assert "Deadlock: no rank can go on" in rows["2 ranks: a rank stays away"]["measured"]


def test_a_refused_package_is_refused(tmp_path):
    """Else the test above would say nothing. That torch is let through it shows itself."""
    (tmp_path / "sitecustomize.py").write_text(REFUSE)
    command = [sys.executable, "-c", "import numpy, cloudpickle, tqdm; import tyro"]
    environment = os.environ | {"PYTHONPATH": str(tmp_path)}
    said = subprocess.run(command, capture_output=True, text=True, env=environment).stderr
    assert "No module named 'tyro'" in said


def run_faults(folder, budget_seconds):
    table = "tests.support.gpu_rows_with_faults"
    asked = Namespace(table=table, device="cpu", num_gpus=0, ranks=[2], folder=folder, budget_seconds=budget_seconds)
    report = gpu_check.Report(folder, {"ran on": "the CPU"})
    gpu_check.run_rows(gpu_rows_with_faults.all_rows(0, (2,)), asked, report)
    return report


def test_a_row_that_fails_ends_itself_only(tmp_path):
    report = run_faults(tmp_path, budget_seconds=300)
    assert {line.name: (line.verdict, line.error.partition("\n")[0]) for line in report.lines} == {
        "is_wrong": ("FAILED", ""),
        "raises": ("FAILED", "RuntimeError: the row raised | this"),
        "dies": ("FAILED", "its process ended with exit status -6"),
        "hangs": ("FAILED", "no answer after 3 seconds: its process was ended"),
        "is_left_out": ("left out", "this GPU cannot"),
        "passes": ("passed", ""),
    }
    page = (tmp_path / "report.md").read_text()
    assert "1 passed, 4 FAILED, 1 left out." in page
    assert "| raises | 02_collectives, `measure` | FAILED | RuntimeError: the row raised \\| this |" in page


def test_what_is_beyond_its_time_is_left_out(tmp_path):
    report = run_faults(tmp_path, budget_seconds=0)
    assert {line.verdict for line in report.lines} == {"left out"}
    assert all("--budget-seconds" in line.error for line in report.lines)


@pytest.mark.parametrize("num_gpus", [0, 1, 2, 3, 8])
def test_each_row_names_a_cell_that_exists(num_gpus):
    rows = all_rows(num_gpus)
    assert len({row.name for row in rows}) == len(rows)
    for row in rows:
        cells = json.loads((ROOT / find(row.notebook)).read_text())["cells"]
        assert row.cell in {cell["id"] for cell in cells if cell["cell_type"] == "code"}, row


@pytest.mark.parametrize("n", [2, 3, 4, 6, 8, 16])
def test_its_layouts_fit_every_number_of_ranks(n):
    for config in on_ranks.layouts(n).values():
        config.make_schedule(n)


@pytest.fixture(scope="module")
def where():
    where = Where("cpu", 0)
    yield where
    where.close()


def test_rows_that_need_gpus_have_no_other_fault(where):
    """Their lines run here, but for those that ask a GPU."""
    rows = {row.name: row for row in all_rows(0, (2,)) if row.needs and not row.name.startswith("notebook")}
    found = {name: row.check(where) for name, row in rows.items()}
    assert len(found) == 5
    assert all(each.is_right for each in found.values()), found
    assert all("tokens/s" in each.expected for name, each in found.items() if "tokens per second" in name)


def test_a_notebook_is_run_up_to_the_cell_that_fails(where, tmp_path):
    cells = [
        {"cell_type": "markdown", "id": "text", "metadata": {}, "source": ["text"]},
        {"cell_type": "code", "id": "meant", "metadata": {"tags": ["raises-exception"]}, "source": ["1 / 0"]},
        {"cell_type": "code", "id": "magic", "metadata": {}, "source": ["%pwd\n", "x = 2"]},
    ]
    path = tmp_path / "small.ipynb"
    path.write_text(json.dumps({"cells": cells}))
    assert speed.notebook(where, path).measured == "2 cells ran"
    cells.append({"cell_type": "code", "id": "not-meant", "metadata": {}, "source": ["x.missing"]})
    path.write_text(json.dumps({"cells": cells}))
    found = speed.notebook(where, path)
    assert not found.is_right
    assert found.measured.startswith("cell not-meant: AttributeError")


def test_a_notebook_needs_the_lab(where, monkeypatch):
    monkeypatch.setitem(sys.modules, "ipywidgets", None)
    with pytest.raises(LeftOut, match="make gpu-check"):
        speed.notebook(where, "any.ipynb")


def visible_gpus():
    return os.environ["CUDA_VISIBLE_DEVICES"]


def test_only_ranks_that_share_a_gpu_see_one(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    assert launch(visible_gpus, world_size=1, backend="gloo") == [""]
    monkeypatch.setenv("LABKIT_SHARE_GPU", "1")
    assert launch(visible_gpus, world_size=1, backend="gloo") == ["0"]


def faulty(fn, *args):
    """On a rank, for this call: sums are not sums, and what arrives is one's own."""

    def own_piece(mine, pieces, **_):
        mine.copy_(pieces[: len(mine)])
        return dist.barrier(async_op=True)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dist, "all_reduce", lambda tensor, *args, **options: None)
        patch.setattr(dist, "batch_isend_irecv", lambda operations: [])
        patch.setattr(operators, "reduce_scatter_single", own_piece)
        return getattr(on_ranks, fn)(*args)


@pytest.mark.parametrize(
    ("fn", "args"),
    [("layer", (name,)) for name in on_ranks.LAYERS]
    + [("collective", ("all-reduce",)), ("collective", ("send and receive",))],
)
def test_a_wrong_sum_is_found(where, fn, args):
    assert not on_ranks.compared(where, 2, faulty, fn, *args).is_right


def test_a_run_that_differs_is_found(where):
    config = on_ranks.layouts(2)["tp, sequence parallel"]
    alone = replace(config, tp_size=1, sequence_parallel=False)
    here = Where("cpu", 0, where.worlds)
    assert on_ranks.trained(here, 2, config).is_right
    here.in_one_process[alone]["losses"][1] += 1e-6
    found = on_ranks.trained(here, 2, config)
    assert not found.is_right and "losses" in found.measured


@pytest.mark.parametrize("name", one_process.LARGEST_ERRORS)
def test_a_product_of_too_few_bits_is_wrong(where, name, monkeypatch):
    error = one_process.product(where, name).measured
    monkeypatch.setitem(one_process.LARGEST_ERRORS, name, 0.0)
    assert not one_process.product(where, name).is_right, error


def test_a_fault_that_nobody_notices_is_wrong(where, monkeypatch):
    from tools.gpu_rows import faults

    monkeypatch.setitem(faults.FAULTS, "a rank stays away", faults.meet)
    found = faults.fault(where, 2, "a rank stays away")
    assert not found.is_right and "nobody noticed" in found.measured
