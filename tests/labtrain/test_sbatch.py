"""The template for Slurm: labtrain takes its options, its layout is a good one, and it goes back into the queue."""

import os
import re
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest
import tyro

import labtrain
from course.sizing import DGX_H100, Plan, search, step_time
from labtrain import TrainConfig
from labtrain.__main__ import options_class
from tests.labtrain.processes import ROOT, environment

TEMPLATE = Path(labtrain.__file__).with_name("train.sbatch")
TEXT = TEMPLATE.read_text()


@pytest.fixture(scope="module")
def config():
    options = re.search(r"-m labtrain (.*) &", TEXT.replace("\\\n", " "))[1]
    options = options.replace('"$CHECKPOINTS"', "folder").split()
    given = tyro.cli(options_class(), args=options, config=(tyro.conf.FlagCreatePairsOff,))
    return TrainConfig(**vars(given))


@pytest.fixture(scope="module")
def num_ranks():
    return int(re.search(r"--nodes=(\d+)", TEXT)[1]) * int(re.search(r"--ntasks-per-node=(\d+)", TEXT)[1])


def test_it_is_part_of_the_package_and_its_options_fit(config, num_ranks):
    assert config.layout(num_ranks).world_size == 16
    assert (
        'packages = ["labkit", "labtrain", "course"]' in (ROOT / "pyproject.toml").read_text()
    )  # hatch takes all files in them


def test_no_layout_that_fits_is_faster(config, num_ranks):
    shared = config.shape, num_ranks, config.batch_size
    plan = Plan(
        *shared, config.tp_size, config.pp_size, config.micro_batch_size, cp_size=config.cp_size, fused_attention=True,
        recompute="full" if config.recompute else "none", sequence_parallel=config.sequence_parallel,
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
    for name, lines in {
        "srun": "kill -USR1 $PPID; read < end; exit 7",
        "scontrol": f"echo $@ > asked; echo > end; exit {code}",
    }.items():
        (tmp_path / name).write_text(f"#!/bin/bash\n{lines}\n")
        (tmp_path / name).chmod(0o755)
    variables = {"SLURM_SUBMIT_DIR": str(tmp_path), "SLURM_JOB_ID": "4242", "SLURM_CPUS_PER_TASK": "8"}
    variables["PATH"] = f"{tmp_path}:{os.environ['PATH']}"
    job = subprocess.run(["bash", TEMPLATE], env=environment(**variables), timeout=60)
    assert job.returncode == 7
    assert (tmp_path / "asked").read_text() == "requeue 4242\n"
