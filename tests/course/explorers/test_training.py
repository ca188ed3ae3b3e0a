"""The explorer that trains: what fits, what it says, curves that agree, and a stop that stops."""

import dataclasses
import threading

import pytest
from ipywidgets.widgets import widget

from course.explorers import jupyter, training
from course.explorers.training import differences_text, training_explorer
from course.pictures.style import bytes_text
from course.sizing import step_traffic
from labtrain import TrainConfig

CONFIG = TrainConfig(
    num_layers=2, hidden_size=16, num_attention_heads=4, seq_length=8, batch_size=8, micro_batch_size=1, steps=2,
    precision="float64", tp_size=2, pp_size=2,
)  # fmt: skip


@pytest.fixture
def explorer():
    return training_explorer(CONFIG)


@pytest.fixture
def four_ranks(monkeypatch):
    """Half as many, where it does not matter how many there are."""
    monkeypatch.setattr(training, "NUM_RANKS", 4)


def train(explorer):
    explorer.button.click()
    explorer._thread.join()


def test_it_shows_the_layout_before_anything_runs(explorer):
    assert repr(explorer) == "training_explorer(t=2, p=2, '1f1b')"
    assert "p · t · d = 2 · 2 · 2 = 8; each replica takes 4 of 8 rows, in 4 micro-batches" in explorer.says.value
    [picture] = explorer.picture.scenes
    assert picture.by_key["rank5"].fact.startswith("rank 5: layer 1, part 2 of 2; rows 0 to 3")
    sent = step_traffic(CONFIG.shape, CONFIG.layout(8), gpus_per_node=8, batch_size=8, bytes_per_element=8)["tp"]
    assert picture.by_key["tp.0.bytes"].text == f"tp {bytes_text(sent.total_bytes / 8)}"
    assert '<img alt="Loss curves' in explorer.curves.value


def test_what_does_not_fit_gives_way_and_says_so(explorer):
    before = explorer.picture.scenes
    explorer.controls["pp_size"].value = 4
    assert "pipeline p is 2 now, not 4." in explorer.says.value and "num layers = 2" in explorer.says.value
    assert explorer.shown.pp_size == 2 and explorer.picture.scenes == before
    explorer.controls["tp_size"].value = 8
    assert "tensor t is 2 now, not 8." in explorer.says.value and "num attention heads = 4" in explorer.says.value
    explorer.controls["tp_size"].value = 4
    assert explorer.shown.tp_size == 4 and "alert" not in explorer.says.value
    assert explorer.picture.scenes != before
    assert not explorer.button.disabled


def test_two_layouts_train_to_the_same_losses(explorer):
    train(explorer)
    assert explorer.progress.value == "t=2 p=2 d=2, 1f1b: 2 steps done. Now choose a different layout."
    explorer.controls["tp_size"].value, explorer.controls["schedule"].value = 1, "gpipe"
    train(explorer)
    assert list(explorer.losses) == ["t=2 p=2 d=2, 1f1b", "t=1 p=2 d=4, gpipe"]
    one, other = explorer.losses.values()
    assert one == pytest.approx(other, rel=1e-12) and len(one) == 2
    assert explorer.progress.value.startswith("t=1 p=2 d=4, gpipe: 2 runs: the losses of 2 steps differ by ")
    assert all(name in explorer.curves.value for name in explorer.losses)
    assert (explorer.button.description, explorer.bar.value) == ("Train", 2)


def test_a_second_click_stops_the_run_of_the_layout_that_is_named(four_ranks):
    explorer, said = training_explorer(dataclasses.replace(CONFIG, steps=1000)), []
    explorer.progress.observe(lambda change: said.append(change["new"]), "value")
    explorer.button.click()
    explorer.controls["pp_size"].value = 1
    assert explorer.shown.pp_size == 1
    assert explorer.button.description == "Stop" and not explorer.button.disabled
    explorer.controls["pp_size"].value = 4
    assert "pipeline p is 1 now, not 4." in explorer.says.value
    explorer.button.click()
    explorer._thread.join()
    assert explorer.progress.value.startswith("t=2 p=2 d=1, 1f1b: ")
    assert explorer.progress.value.endswith("Stopped.")
    assert said[0] == "t=2 p=2 d=1, 1f1b: starting ranks ..."
    assert said[1].startswith("t=2 p=2 d=1, 1f1b is training: step 1 of 1000: loss ")
    assert [len(losses) for losses in explorer.losses.values()] == [1]  # the step that was under way
    assert explorer.button.description == "Train"


class Cell:
    """Stands for IPython in a kernel, which knows the cell that runs and the id of that run."""

    kernel = None

    def __init__(self, monkeypatch):
        monkeypatch.setattr(jupyter, "get_ipython", lambda: self)
        monkeypatch.setattr(training, "get_ipython", lambda: self)
        self.num_runs = 0

    def run(self, cell):
        self.cell, self.num_runs = cell, self.num_runs + 1
        return training_explorer(dataclasses.replace(CONFIG, steps=1000))

    def get_parent(self):
        return {"header": {"msg_id": self.num_runs}, "metadata": {"cellId": self.cell}}


def test_running_the_cell_again_ends_its_run_and_no_other(four_ranks, monkeypatch):
    """That JupyterLab says which cell runs, and that its stop button ends a run, test_browser.py shows."""
    cells, under_way = Cell(monkeypatch), threading.Event()
    earlier = cells.run("explorer")
    earlier.bar.observe(lambda change: under_way.set(), "value")  # after a step
    earlier.button.click()
    assert under_way.wait(60), earlier.progress.value
    cells.run("other")
    assert earlier.button.description == "Stop", earlier.progress.value
    num_widgets = len(widget._instances)
    cells.run("explorer")
    earlier._thread.join(60)  # all steps would take minutes
    assert earlier.progress.value.endswith("Stopped.") and earlier.comm is None
    assert len(widget._instances) == num_widgets


def test_a_run_that_fails_says_why(four_ranks):
    far_too_high = {"learning_rate": 100, "weight_decay": 1000, "warmup_steps": 0, "precision": "float32"}
    explorer = training_explorer(dataclasses.replace(CONFIG, **far_too_high, steps=5))
    train(explorer)
    assert "FloatingPointError" in explorer.progress.value
    assert explorer.button.description == "Train"


def test_the_config_must_fit_at_the_start():
    with pytest.raises(ValueError, match="does not divide"):
        training_explorer(TrainConfig(tp_size=2, pp_size=3, num_layers=3))


def test_differences_in_words():
    assert differences_text({"one": [3.0, 2.0, 1.0]}) == "3 steps done. Now choose a different layout."
    assert differences_text({"a": [3.0, 2.0], "b": [3.0, 2.5]}).endswith("2 steps differ by 5e-01 at most.")
    assert differences_text({"a": [3.0], "b": []}) == "0 steps done. Now choose a different layout."
