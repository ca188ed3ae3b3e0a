"""A job made of parts of one's own: steps of one process in every layout, and the example of labtrain's README."""

import re
import subprocess
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch

from labkit.data_parallel import DataParallel
from labtrain import train
from labtrain.build import build, make_models
from tests.labtrain.layouts import compare
from tests.labtrain.tiny import SHORT, numbers

README = Path(__file__).resolve().parents[2] / "labtrain" / "README.md"


def momentum(config, parameters):
    return torch.optim.SGD(parameters, lr=config.learning_rate, momentum=0.9)


def skipping_layer_1(config, schedule, groups):
    """Build the usual models, in which layer 1 computes nothing but its residual."""
    models = make_models(config, schedule, groups)
    for model in models:
        for name, layer in model.layers.items():
            if name == "1":
                layer.forward = lambda x, *args, **options: x
    return models


def wrap_whole_replicas(config, model, groups):
    return DataParallel(model, groups.dp_cp)


OF_ONES_OWN = partial(build, make_optimizer=momentum, make_models=skipping_layer_1)


def test_one_process_and_every_layout_agree(on_ranks):
    for part in (dict(make_optimizer=momentum), dict(make_models=skipping_layer_1)):  # which are in use
        (usual,), (unlike,) = (on_ranks(train, SHORT, partial(build, **each), world_size=1) for each in ({}, part))
        assert numbers(unlike) != pytest.approx(numbers(usual), rel=1e-3)
    layouts = (dict(tp_size=2, pp_size=2), dict(zero_stage=1), dict(zero_stage=3, pp_size=2))
    compare(on_ranks, [(4, replace(SHORT, **options)) for options in layouts], OF_ONES_OWN)


def test_a_wrapper_without_shards_sends_once_a_step(on_ranks):
    """The pipeline lets chunks reduce after each micro-batch, which only shards can: whole replicas would add twice."""
    runs = [(4, replace(SHORT, pp_size=pp_size, micro_batch_size=1, zero_stage=2)) for pp_size in (1, 2)]
    compare(on_ranks, runs, partial(build, wrap=wrap_whole_replicas))


def test_the_example_of_the_readme_runs():
    (example,) = re.findall(r"```python\n(.*?)```", README.read_text(), re.DOTALL)
    done = subprocess.run([sys.executable, "-c", example], capture_output=True, text=True, timeout=120)
    losses = re.findall(r"^([1-4]) (\d\.\d+)$", done.stdout, re.MULTILINE)
    assert [step for step, _ in losses] == ["1", "2", "3", "4"], done.stderr
    assert float(losses[-1][1]) < float(losses[0][1])
