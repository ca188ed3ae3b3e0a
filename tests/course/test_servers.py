"""What servers.md says about GPUs is what launch does."""

import re
from pathlib import Path

import pytest

from labkit.device import choose_backend

TEXT = (Path(__file__).parents[2] / "course/servers.md").read_text()
SECTION = TEXT[TEXT.index("## A class on one DGX") : TEXT.index("## Slurm with enroot")]


def test_the_first_lines_are_those_of_launch(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2,3")
    assert re.findall("^Ranks run on .*", SECTION, re.MULTILINE) == [choose_backend("auto", n, 2)[1] for n in (2, 4)]


@pytest.mark.parametrize("row", re.findall(r'^\| (?:`["0-9]|all,).*', SECTION, re.MULTILINE))
def test_the_table_says_where_ranks_run(row):
    servers, *cells = [cell.strip() for cell in row.strip("|").split("|")]
    seen = [value.split(",") if value else [] for value in re.findall("`([0-9,]*)`", servers.replace('"', ""))]
    num_gpus = 8 if servers.startswith("all") else len(seen[0])
    for num_ranks, cell in zip((2, 4, 8), cells, strict=True):
        backend, _ = choose_backend("auto", num_ranks, num_gpus)
        assert cell == ("CPU" if backend == "gloo" else f"{num_ranks} GPUs")
    if num_gpus < 8:  # nobody shares a GPU
        taken = [gpu for server in seen for gpu in server]
        assert len(set(taken)) == len(taken)
