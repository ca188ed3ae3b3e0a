"""The explorer that trains: what fits, what it says, curves that agree, and a stop that stops."""

import dataclasses

import pytest

from course.explorers.training import differences_text, training_explorer
from labkit.train import TrainConfig
from tests.support.kernel import Kernel

CONFIG = TrainConfig(
    num_layers=2, hidden_size=16, num_attention_heads=4, seq_length=8, batch_size=8, micro_batch_size=1, steps=2,
    precision="float64", tp_size=2, pp_size=2,
)  # fmt: skip


@pytest.fixture
def explorer():
    return training_explorer(CONFIG)


def train(explorer):
    explorer.button.click()
    explorer.wait()


def test_it_shows_the_layout_before_anything_runs(explorer):
    assert repr(explorer) == "training_explorer(t=2, p=2, '1f1b')"
    assert "p · t · d = 2 · 2 · 2 = 8; each replica takes 4 of 8 rows, in 4 micro-batches" in explorer.says.value
    assert all(bytes(picture.value[1:4]) == b"PNG" for picture in (explorer.picture, explorer.curves))
    assert "rank 5: layer 1, part 2 of 2; rows 0 to 3" in explorer.facts.value


def test_what_does_not_fit_is_refused_in_words_and_cannot_be_trained(explorer):
    before = explorer.picture.value
    explorer.pp_size.value = 4
    assert "does not fit" in explorer.says.value and "4 layers" in explorer.says.value
    assert explorer.button.disabled and explorer.picture.value == before
    explorer.pp_size.value, explorer.tp_size.value = 1, 8
    assert "num_attention_heads=4" in explorer.says.value
    explorer.tp_size.value = 4
    assert not explorer.button.disabled and explorer.shown.tp_size == 4
    assert explorer.picture.value != before


def test_two_layouts_train_to_the_same_losses(explorer):
    train(explorer)
    assert explorer.progress.value == "2 steps done. Now choose a different layout."
    explorer.tp_size.value, explorer.schedule.value = 1, "gpipe"
    train(explorer)
    assert list(explorer.losses) == ["t=2 p=2 d=2, 1f1b", "t=1 p=2 d=4, gpipe"]
    one, other = explorer.losses.values()
    assert one == pytest.approx(other, rel=1e-12) and len(one) == 2
    assert explorer.progress.value.startswith("2 runs: the losses of 2 steps differ by ")
    assert (explorer.button.description, explorer.bar.value) == ("Train", 2)


def test_a_second_click_stops_the_run(explorer):
    explorer.shown = TrainConfig(**{**vars(CONFIG), "steps": 1000})
    explorer.button.click()
    explorer.pp_size.value = 4
    assert "does not fit" in explorer.says.value
    assert explorer.button.description == "Stop" and not explorer.button.disabled
    explorer.button.click()
    explorer.wait()
    assert explorer.progress.value.endswith("Stopped.")
    assert [len(losses) for losses in explorer.losses.values()] == [1]  # the step that was under way
    assert explorer.button.description == "Train" and explorer.button.disabled
    explorer.pp_size.value = 2
    assert not explorer.button.disabled


CELL = f"""
from course.explorers.training import training_explorer, TrainConfig
from ipywidgets.widgets.widget import _instances as widgets
earlier = globals().get("explorer")
explorer = training_explorer({dataclasses.replace(CONFIG, steps=1000)!r})
"""


@pytest.fixture(scope="module")
def kernel(tmp_path_factory):
    kernel = Kernel(tmp_path_factory.mktemp("kernel"))
    yield kernel
    kernel.close()


def train_a_step(kernel):
    kernel.run(f"{CELL}explorer.button.click()", cell="explorer")
    kernel.run("while not any(explorer.losses.values()): time.sleep(0.05)", timeout=180)
    assert kernel.value("explorer.button.description") == "Stop", kernel.value("explorer.progress.value")


def test_the_stop_button_of_the_toolbar_ends_a_run_while_no_cell_runs(kernel):
    train_a_step(kernel)
    kernel.manager.interrupt_kernel()
    kernel.run("explorer.wait()")
    assert kernel.value("explorer.progress.value").endswith("Stopped.")


def test_running_the_cell_again_ends_its_run_and_no_other(kernel):
    train_a_step(kernel)
    kernel.run("other = training_explorer(explorer.shown)", cell="other")
    assert kernel.value("explorer.button.description") == "Stop", kernel.value("explorer.progress.value")
    num_widgets = kernel.value("len(widgets)")
    kernel.run(CELL, cell="explorer")
    kernel.run("earlier.wait()")
    assert kernel.value("(earlier.progress.value[-8:], earlier.comm)") == ("Stopped.", None)
    assert kernel.value("len(widgets)") == num_widgets


def test_a_run_that_fails_says_why(explorer):
    far_too_high = {"learning_rate": 100, "weight_decay": 1000, "warmup_steps": 0, "precision": "float32"}
    explorer.shown = TrainConfig(**{**vars(CONFIG), **far_too_high, "steps": 5})
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
