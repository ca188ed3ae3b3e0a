"""The project of notebook 18: seven steps, written into my_megatron.py, and what can be done with the whole.

What is not written yet is ours, so each step can be done alone, and the file always runs.
"""

import math
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from course.exercises.base import Folded, Verdict, kept_in_handouts, report
from course.exercises.values import same
from course.project.check import TITLES, check, on_ranks
from course.project.faults import FAULTS
from course.project.parts import ONE_FILE, filled_in, replaced, source_of, steps, to_begin_with, written_in
from course.project.probes import history
from course.project.torchrun import Failed, torchrun
from course.table import Table

MINE = Path("my_megatron.py")
History = list[tuple[float, float]]
"""Loss and norm of each step, on one rank."""
HINTS = {
    1: [
        "`torch.arange(world_size).view(pp, dp, tp)` is the grid, and it is there already: `grid`. A group is a line "
        "of it along one axis. Bring that axis to the end with `permute` or `transpose`, then `reshape(-1, size)`.",
        "Call `dist.new_group(ranks)` in a loop over all lists, and keep the group if `rank in ranks`.",
    ],
    2: [
        "One of the two is the identity forward and a sum backward. The other is the sum forward and the identity "
        "backward. `x.view_as(x)` is an identity that autograd can follow.",
        "`dist.all_reduce` writes into its argument: give it a contiguous copy.",
    ],
    3: [
        "`parameter(name, *shape, dim=...)` takes the shape of the whole model and cuts it along `dim`.",
        "`weight.flatten(0, 1)` makes [parts, outputs / tp, inputs] one matrix for `F.linear`.",
        "qkv: [batch, seq, 3, heads / tp, hidden / heads]. Attention wants q, k and v, each [batch, heads / tp, seq, "
        "hidden / heads].",
    ],
    4: [
        "Subtract the number of this rank's first row. What is then below 0, or beyond the last row, is elsewhere.",
        "loss = log(sum of exp(logits)) - logit of the target. Each of the two is a sum over ranks: `reduce_from_tp`.",
    ],
    5: [
        "`grads.split(sizes)` gives a view for each parameter; `view_as(param)` gives it the shape.",
        "Count down from len(params) * num_micro_batches; at 0, `dist.all_reduce(..., async_op=True)`.",
    ],
    6: [
        "The stage before the last begins with one forward, the one before it with two, and so on.",
        "An action F needs the activation of the previous stage, an action B the gradient of the next. Keep x and y of "
        "each micro-batch: `y.backward(received)`, then send `x.grad`.",
        "Divide the loss of a micro-batch by num_micro_batches * dp: all gradients are added up.",
    ],
    7: [
        "Sum the squares of this rank's gradients, without those that a different rank counts; all-reduce over "
        "`tp_group`, then over `pp_group`; then the root.",
        "clip = args.clip / (norm + 1e-6), at most 1; multiply each bucket's `grads` by it.",
    ],
}


@dataclass
class Step:
    """One step of the project."""

    number: int
    notebook: str = "18"

    @property
    def name(self) -> str:
        return f"step_{self.number}"

    def check(self, path: str | Path = MINE) -> None:
        """Try this step's parts of a file on real ranks."""
        report(self.name, self.verdict(path))

    def verdict(self, path: str | Path = MINE) -> Verdict:
        """Return what `check` prints, as data."""
        if not Path(path).exists():
            return Verdict("not attempted", f"{self.name}: there is no {path} yet. `begin()` writes one.")
        result = check(path, self.number)
        return Verdict(result.status, str(result))

    def hint(self) -> Folded:
        """Return all hints of the step."""
        return Folded("Hints", "\n\n".join(HINTS[self.number]))

    @kept_in_handouts
    def solution(self) -> Folded:
        """Return our parts."""
        ours = ONE_FILE.read_text()
        names = [name for name, step in steps().items() if step == self.number]
        source = "\n\n\n".join(source_of(ours, name) for name in names)
        return Folded("Solution", f"```python\n{source}\n```", plain_text=source)


step_1, step_2, step_3, step_4, step_5, step_6, step_7 = STEPS = [Step(number) for number in TITLES]


def begin(path: str | Path = MINE) -> None:
    """Write the file with the stubs, unless there is one."""
    path = Path(path)
    if not path.exists():
        path.write_text(to_begin_with())
    print(whose(path))


def whose(path: str | Path) -> str:
    """Say how many parts of a file its learner has written."""
    return f"{Path(path).name}: {len(written_in(Path(path).read_text()))} of {len(steps())} parts are yours."


@dataclass(frozen=True)
class Training:
    """What a run under torchrun printed: loss and norm of each step, and its tokens per second."""

    losses: list[float]
    norms: list[float]
    speeds: list[float]

    @property
    def tokens_per_second(self) -> float:
        """Return the median over the steps: the first ones also pay for imports."""
        return sorted(self.speeds)[len(self.speeds) // 2] if self.speeds else math.nan


def train(path: str | Path = MINE, world_size: int = 8, show: bool = True, **options) -> Training:
    """Run a file under torchrun on its own text, with our parts in the place of stubs; return what it printed."""
    return _train(filled_in(Path(path).read_text()), world_size, show, options)


def train_ours(world_size: int = 8, **options) -> Training:
    """Run our file in the same way, and show nothing."""
    return _train(ONE_FILE.read_text(), world_size, False, options)


def _train(source: str, world_size: int, show: bool, options: dict[str, object]) -> Training:
    printed = ""
    with tempfile.TemporaryDirectory(prefix="my_megatron_") as folder:
        script = Path(folder) / "my_megatron.py"
        script.write_text(source)
        try:
            for text in torchrun(script, world_size, {"text": script, **options}):
                printed += text
                if show:
                    print(text, end="")
        except Failed as failed:
            print(failed)
    rows = [line.split() for line in printed.splitlines() if line.startswith("step")]
    return Training(
        losses=[float(row[3]) for row in rows],
        norms=[float(row[5]) for row in rows],
        speeds=[float(row[6].replace(",", "")) for row in rows],
    )


def plant_faults(path: str | Path = MINE) -> "Planted":
    """Plant one fault after the other into a file, and find those that its own parity test does not see.

    The test: three steps in float64 on 8 ranks (tp = 2, pp = 2) have the losses and norms of one rank.
    """
    source = filled_in(Path(path).read_text())
    if (found := parity(source)) != EQUAL:
        print(f"Your file does not pass the test itself: {found}. Until it does, the faults are planted into ours.")
        source = ONE_FILE.read_text()
    return Planted({name: parity(replaced(source, {fault.part: fault.source()})) for name, fault in FAULTS.items()})


@dataclass(frozen=True)
class Planted:
    """What a parity test found of each fault."""

    found: dict[str, str]

    @property
    def missed(self) -> list[str]:
        """Return the faults with which 8 ranks train as one does."""
        return [name for name, found in self.found.items() if found == EQUAL]

    def __str__(self) -> str:
        return str(Table(["planted", "8 ranks, against one"], [*self.found.items()]))


EQUAL = "equal: the fault is not seen"


def parity(source: str) -> str:
    """Train with a file on 8 ranks and on one, and return what differs first."""
    many = on_ranks(8, history, source, "planted.py", {"steps": 3, "tp": 2, "pp": 2})
    one = on_ranks(1, history, source, "planted.py", {"steps": 3})
    if ended := many.ended or one.ended:
        return ended.splitlines()[0]
    for apart in differences(many.seen, one.seen[0]):
        return f"differ: {apart.what} of step {apart.step}, rank {apart.rank}"
    return EQUAL


class Difference(NamedTuple):
    """A loss or a norm of a rank that is not the one of one process."""

    what: str
    step: int
    rank: int
    got: float
    expected: float


def differences(many: list[History], one: History) -> Iterator[Difference]:
    """Yield where the ranks' losses and norms are not those of one process, the first step first."""
    for step, right in enumerate(one):
        for rank, seen in enumerate(many):
            for what, got, expected in zip(("loss", "norm"), seen[step], right):
                if not same(got, expected):
                    yield Difference(what, step, rank, got, expected)
