"""The exercise on a checkpoint in two layouts: the solution goes on as the trained job would, and leaves no files."""

import copy
from pathlib import Path

import pytest

from course.exercises import new_layout
from course.exercises.values import same
from labkit.launch import launch

pytestmark = pytest.mark.usefixtures("launches_on_kept_ranks")


def both_go_on():
    """On one rank: the facts of the loaded job, those of the trained one, and the folder."""
    arguments = trained, fresh, folder = copy.deepcopy(new_layout.layout_inputs("tp", "fsdp"))
    loaded = new_layout.facts_of_job(new_layout.my_new_layout(*arguments), *arguments)
    return loaded, new_layout.facts_of_job(trained, trained, fresh, folder), str(folder)


def test_the_loaded_job_goes_on_as_the_trained_one():
    for loaded, trained, folder in launch(both_go_on, world_size=2, backend="gloo"):
        assert loaded["shape of its shards"]["0.weight"] == [3, 3] and trained["shape of its shards"]["2.weight"] == [
            3,
            3,
        ]
        for fact in loaded.keys() - {"shape of its shards"}:
            assert same(loaded[fact], trained[fact]), fact
        assert loaded["files in the folder"] == [".metadata", "__0_0.distcp", "__1_0.distcp"]
        assert not Path(folder).exists()


def test_names_that_were_not_saved_are_explained():
    def loads_too_much(trained, fresh, folder):
        model, optimizer = new_layout.get_state_dict(trained.model, trained.optimizer)
        new_layout.dcp.save({"model": model}, checkpoint_id=folder)
        new_layout.dcp.load({"model": model, "optimizer": optimizer}, checkpoint_id=folder)
        return fresh

    text = " ".join(new_layout.new_layout.verdict(loads_too_much).text.split())
    assert "What you load has names that were not saved." in text
