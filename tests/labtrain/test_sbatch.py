"""The template for Slurm: torchrun and labtrain take its options, its layout is good, it is queued again."""

import os
import re
import shlex
import socket
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest
import tyro
from torch.distributed.run import config_from_args, parse_args

import labtrain
from course.sizing import DGX_H100, Plan, search, step_time
from labtrain import TrainConfig
from labtrain.__main__ import options_class
from tests.labtrain.processes import ROOT, environment

TEMPLATE = Path(labtrain.__file__).with_name("train.sbatch")
TEXT = TEMPLATE.read_text()


def run(folder, **commands):
    """Run the template as a job of two nodes, with these commands in place of Slurm's."""
    for name, lines in commands.items():
        (folder / name).write_text(f"#!/bin/bash\n{lines}\n")
        (folder / name).chmod(0o755)
    variables = {"SLURM_SUBMIT_DIR": folder, "SLURM_JOB_ID": 4242, "SLURM_CPUS_PER_TASK": 64}
    variables |= {"SLURM_JOB_NUM_NODES": 2, "SLURM_GPUS_ON_NODE": 8, "PATH": f"{folder}:{os.environ['PATH']}"}
    given = {name: str(value) for name, value in variables.items()}
    return subprocess.run(["bash", TEMPLATE], env=environment(**given), timeout=60)


@pytest.fixture(scope="module")
def command(tmp_path_factory):
    """What srun is given to run on each node: its words, beginning with the program."""
    folder = tmp_path_factory.mktemp("job")
    assert run(folder, srun="printf '%q ' \"$@\" > given").returncode == 0
    words = shlex.split((folder / "given").read_text())
    return words[words.index(".venv/bin/torchrun") :]


@pytest.fixture(scope="module")
def config(command):
    options = command[command.index("labtrain") + 1 :]
    given = tyro.cli(options_class(), args=options, config=(tyro.conf.FlagCreatePairsOff,))
    return TrainConfig(**vars(given))


@pytest.fixture(scope="module")
def num_ranks():
    assert "#SBATCH --ntasks-per-node=1\n" in TEXT
    return int(re.search(r"--nodes=(\d+)", TEXT)[1]) * int(re.search(r"--gpus-per-node=(\d+)", TEXT)[1])


def test_torchrun_understands_its_options(command, num_ranks):
    about, program, options = config_from_args(parse_args(command[1:]))
    assert (about.min_nodes, about.max_nodes, about.nproc_per_node, about.max_restarts) == (2, 2, 8, 0)
    assert about.max_nodes * about.nproc_per_node == num_ranks
    meet = (about.rdzv_backend, about.rdzv_endpoint, about.run_id)
    assert meet == ("c10d", f"{socket.gethostname()}:29500", "4242")
    assert Path(program).name.startswith("python")
    assert options[:3] == ["-u", "-m", "labtrain"] and "--resume" in options


def test_it_is_part_of_the_package_and_its_options_fit(config, num_ranks):
    assert config.layout(num_ranks).world_size == 16
    assert (
        'packages = ["labkit", "labtrain", "course"]' in (ROOT / "pyproject.toml").read_text()
    )  # hatch takes all files in them


def test_no_layout_that_fits_is_faster(config, num_ranks):
    shared = config.shape, num_ranks, config.batch_size
    plan = Plan(
        *shared, config.tp_size, config.pp_size, config.micro_batch_size, cp_size=config.cp_size, fused_attention=True,
        recompute=config.recompute, sequence_parallel=config.sequence_parallel,
        zero_stage=config.zero_stage,
    )  # fmt: skip
    ways = [dict(zero_stage=stage, sequence_parallel=divided) for stage in (0, 1) for divided in (False, True)]
    choices = dict(recompute=("none", "full"), cp_size=(1, 2, 4), fused_attention=True, schedule=None)
    best = min(search(*shared, DGX_H100, **choices, **way).best.seconds for way in ways)
    seconds = step_time(plan, DGX_H100).total
    assert seconds <= 1.05 * best
    named = replace(plan, tp_size=8, pp_size=2, micro_batch_size=2, sequence_parallel=True)
    assert f"{step_time(named, DGX_H100).total / seconds:.1f} times as fast as --tp 8 --pp 2" in TEXT


@pytest.mark.parametrize("code", [0, 1])
def test_it_goes_back_into_the_queue_before_its_time_is_up(tmp_path, code):
    """If Slurm refuses, the run goes on. Here srun itself sends Slurm's signal, and ends when scontrol was called."""
    os.mkfifo(tmp_path / "end")
    srun, scontrol = "kill -USR1 $PPID; read < end; exit 7", f"echo $@ > asked; echo > end; exit {code}"
    assert run(tmp_path, srun=srun, scontrol=scontrol).returncode == 7
    assert (tmp_path / "asked").read_text() == "requeue 4242\n"
