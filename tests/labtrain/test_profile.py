"""Each rank writes the trace of torch's profiler, with the steps and the pipeline's ops by their names."""

import io
import json
from contextlib import redirect_stderr
from dataclasses import replace

import pytest

from labtrain import training
from tests.labtrain.tiny import TINY


def run(config):
    """What a rank says on stderr about the steps that it profiles, and its losses."""
    with training(config) as trainer, redirect_stderr(io.StringIO()) as said:
        losses = [step.loss for step in trainer.steps()]
    return said.getvalue(), losses


@pytest.mark.gloo  # the profiler has names for gloo's operations only
def test_each_rank_writes_a_trace_of_its_steps(on_ranks, tmp_path):
    folder = tmp_path / "a" / "new"
    config = replace(TINY, pp_size=2, steps=4, profile_dir=str(folder), profile_step_start=3)
    (said, losses), (silent, _) = on_ranks(run, config)
    assert (said, silent) == (f"Traces are in {folder}\n", "")
    assert losses == on_ranks(run, replace(config, profile_dir=None))[0][1]
    assert sorted(path.name for path in folder.iterdir()) == ["rank0.json", "rank1.json"]
    for path in folder.iterdir():
        names = {event["name"] for event in json.loads(path.read_text())["traceEvents"]}
        assert {"step 3", "step 4", "F0", "F3", "B0", "gloo:all_reduce", "c10d::allreduce_"} <= names
        assert "step 2" not in names


def test_a_folder_that_cannot_be_written_is_said(on_ranks, tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(Exception, match=r"profile_dir=\S+file/in cannot be written \(Not a directory\): name a folder"):
        on_ranks(run, replace(TINY, profile_dir=str(tmp_path / "file/in"), profile_step_start=1))
