"""The explorer that trains: what fits, what it says, curves that agree, and a stop that stops."""

import pytest

from course.explorers.training import differences_text, training_explorer
from labkit.train import TrainConfig

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
    assert explorer.button.description == "Stop"
    explorer.button.click()
    explorer.wait()
    assert explorer.progress.value.endswith("Stopped.")
    assert [len(losses) for losses in explorer.losses.values()] == [1]  # the step that was under way
    train_again = explorer.button.description
    assert train_again == "Train"


def test_a_run_that_fails_says_why(explorer):
    explorer.shown = TrainConfig(**{**vars(CONFIG), "learning_rate": 1e300, "warmup_steps": 0, "steps": 5})
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
