"""course/project/one_file.py: however the ranks are split, it trains as one rank does, and no message waits for ever."""

import ast
import os
import runpy
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from labkit.launch import launch
from labtrain import TrainConfig
from tests.support.nccl import under_nccls_rules

PATH = Path(__file__).resolve().parents[3] / "course" / "project" / "one_file.py"
SMALL = {
    "--layers": 8,
    "--hidden": 32,
    "--heads": 8,
    "--seq": 16,
    "--global_batch": 16,
    "--steps": 3,
    "--warmup": 1,
    "--dtype": "float64",
    "--bucket": 3000,
    "--text": PATH,
}
LAYOUTS = [(tp, pp) for tp in (1, 2, 4, 8) for pp in (1, 2, 4, 8) if tp * pp <= 8]


def one_file(options):
    """Run the file on this rank, as torchrun does, and return the losses and norms of its steps."""
    os.environ["LOCAL_RANK"] = str(torch.distributed.get_rank())
    os.environ["LOCAL_WORLD_SIZE"] = str(torch.distributed.get_world_size())
    sys.argv = [str(PATH)]
    for name, value in options.items():
        sys.argv += [name, str(value)]
    end = runpy.run_path(str(PATH), run_name="one_file")
    return end["losses"] + end["norms"]


def assert_same_training(**options):
    options = SMALL | {f"--{name}": value for name, value in options.items()}
    alone = options | {"--tp": 1, "--pp": 1}
    [expected] = launch(one_file, world_size=1, options=alone, quiet=True)
    assert expected[0] > expected[2], "it learns"
    for found in launch(one_file, world_size=8, options=options, quiet=True):
        torch.testing.assert_close(found, expected, rtol=1e-10, atol=0)


@pytest.mark.parametrize(
    ("tp", "pp", "untied", "micro_batch"),
    [
        (2, 2, 0, 1),  # 8 micro-batches for 2 stages, 2 replicas
        (1, 4, 1, 2),  # 4 for 4
        (1, 8, 0, 4),  # 4 for 8 stages
        (4, 1, 1, 2),
        (8, 1, 0, 8),
    ],
)
def test_a_split_changes_no_loss_and_no_norm(tp, pp, untied, micro_batch):
    assert_same_training(tp=tp, pp=pp, untied=untied, micro_batch=micro_batch)


@pytest.mark.skipif("SWEEP" not in os.environ, reason="make sweep-answers")
@pytest.mark.parametrize("untied", [0, 1])
@pytest.mark.parametrize(("tp", "pp"), LAYOUTS)
def test_every_layout_of_eight_ranks(tp, pp, untied):
    assert_same_training(tp=tp, pp=pp, untied=untied, micro_batch=1)
