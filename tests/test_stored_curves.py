"""The stored loss curves are those of the code above them.

nbval does not compare them, because the cells that draw them also depend on the moment. So one process trains again by
the notebook's own code: the curves must have its losses, up to its last step.
"""

import re

import pytest

from tests.test_notebooks import NOTEBOOKS, code_cells, read
from tools.kernel import Kernel

ONE_PROCESS = "with World(1) as world: losses = [each for [each] in stream(world, {})]"
OF_TRAINER = "losses = [step.loss for step in launch(train, {}, world_size=1)[0]]"
AGAIN = {  # the cell of a figure: the cells before it that are needed, and the code that computes the losses
    "train-run": (["setup", "shared-text", "shared-batch", "train-define"], ONE_PROCESS.format("train, {steps}")),
    "gpt-run": (["setup", "gpt-data", "gpt-alone"], ONE_PROCESS.format("train_alone")),
    "train-two": (["setup", "config-make"], OF_TRAINER.format("one_process")),
    "layouts-run": (["setup", "config-make"], OF_TRAINER.format("one_process")),
    "dies-curves": (["setup"], "{same}; " + OF_TRAINER.format("TrainConfig(**same, precision='float64')")),
}
CURVE = re.compile(r"([\d.]+) to ([\d.]+) at step (\d+)")


def figures():
    """The cells that store loss curves, each with its notebook and what the figure says in words.

    In 18, what trains is the reader's own file.
    """
    for path in NOTEBOOKS:
        for cell in code_cells(read(path)):
            for output in cell.outputs if "nbval-skip" not in cell.metadata.get("tags", []) else []:
                words = output.get("data", {}).get("text/plain", "")
                if words.startswith("Loss curves"):
                    yield pytest.param(path, cell, words, id=f"{path.stem}-{cell.id}")


@pytest.fixture(scope="module")
def kernel(tmp_path_factory):
    kernel = Kernel(tmp_path_factory.mktemp("kernel"))
    yield kernel
    kernel.close()


def test_no_figure_is_left_out():
    assert {param.values[1].id for param in figures()} == set(AGAIN)


@pytest.mark.parametrize(("path", "cell", "words"), list(figures()))
def test_a_stored_curve_has_the_losses_and_the_steps_of_the_code(path, cell, words, kernel):
    names, code = AGAIN[cell.id]
    sources = {each.id: each.source for each in code_cells(read(path))}
    said = re.search(r"num_steps=\d+", cell.source)
    same = re.search(r"(?m)^same = .*$", "\n".join(sources.values()))
    code = code.format(steps=said and said[0], same=same and same[0])
    for source in [*(sources[name] for name in names), code]:
        assert not (ran := kernel.run(source)).error, ran.error
    losses = [f"{loss:.2f}" for loss in kernel.value("losses")]
    curves = CURVE.findall(words)
    assert max(int(step) for *_, step in curves) == len(losses), "run `make notebooks`"
    for first, last, step in curves:  # one that resumed begins later
        assert first in losses and last == losses[int(step) - 1], f"{words}: run `make notebooks`"


def test_a_figure_of_other_code_is_caught(kernel):
    [(path, cell, words)] = [param.values for param in figures() if param.values[1].id == "gpt-run"]
    longer = words.replace("at step 20", "at step 25")
    with pytest.raises(AssertionError, match="make notebooks"):
        test_a_stored_curve_has_the_losses_and_the_steps_of_the_code(path, cell, longer, kernel)
