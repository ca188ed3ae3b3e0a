"""The project of notebook 18: seven steps that are written into my_megatron.py, and what can be done with the whole.

What is not written yet is ours while a step is checked (`course.project.parts`), so each can be done alone.
"""

import ast
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from course.exercises.base import Folded, Verdict, kept_in_handouts, report
from course.exercises.values import same
from course.project import check as checks
from course.project.mistakes import MISTAKES
from course.project.parts import ONE_FILE, parts_of, steps, to_begin_with, written_in
from course.project.probes import history

MINE = Path("my_megatron.py")
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
        "The stage before the last begins with one forward, the one before it with two, ...",
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

    def parts(self) -> None:
        """Print what is to be written, as it stands in the file at the beginning."""
        source = to_begin_with()
        stubs = parts_of(source)
        names = [name for name, step in steps().items() if step == self.number]
        print("\n\n\n".join(ast.get_source_segment(source, stubs[name]) or "" for name in names))

    def check(self, path: str | Path = MINE) -> None:
        """Try this step's parts of a file on real ranks."""
        report(self.name, self.verdict(path))

    def verdict(self, path: str | Path = MINE) -> Verdict:
        """Return what `check` prints, as data."""
        if not Path(path).exists():
            return Verdict("not attempted", f"{self.name}: there is no {path} yet. `begin()` writes one.")
        result = checks.check(path, self.number)
        return Verdict(result.status, str(result))

    def hint(self) -> Folded:
        """Return all hints of the step."""
        return Folded("Hints", "\n\n".join(HINTS[self.number]))

    @kept_in_handouts
    def solution(self) -> Folded:
        """Return our parts."""
        ours = ONE_FILE.read_text()
        parts = parts_of(ours)
        names = [name for name, step in steps().items() if step == self.number]
        source = "\n\n\n".join(ast.get_source_segment(ours, parts[name]) or "" for name in names)
        return Folded("Solution", f"```python\n{source}\n```", plain_text=source)


step_1, step_2, step_3, step_4, step_5, step_6, step_7 = map(Step, HINTS)


def begin(path: str | Path = MINE) -> None:
    """Write the file with the stubs, unless there is one."""
    path = Path(path)
    if not path.exists():
        path.write_text(to_begin_with())
    written = written_in(path.read_text())
    print(f"{path}: {len(written)} of {len(steps())} parts are written.")


def is_complete(path: str | Path) -> bool:
    """Return whether all parts are written, and say so if not."""
    path = Path(path)
    if path.exists() and len(written_in(path.read_text())) == len(steps()):
        return True
    print(f"{path}: not attempted yet. All seven steps come first.")
    return False


def train(path: str | Path = MINE, world_size: int = 8, **options) -> list[tuple[float, float]]:
    """Run a complete file under torchrun, show what it prints, and return each step's loss and tokens per second."""
    if not is_complete(path):
        return []
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={world_size}"]
    command += [str(path), *(f"--{name}={value}" for name, value in ({"text": path} | options).items())]
    done = subprocess.run(command, capture_output=True, text=True, env=os.environ | {"OMP_NUM_THREADS": "1"})
    print(done.stdout + done.stderr, end="")
    rows = [line.split() for line in done.stdout.splitlines() if line.startswith("step")]
    return [(float(row[3]), float(row[6].replace(",", ""))) for row in rows]


def plant_faults(path: str | Path = MINE) -> None:
    """Plant one mistake after the other into a complete file, and say which of them its own parity test catches.

    The test: two steps on 8 ranks (tp = 2, pp = 2) against one rank, both with the mistake.
    """
    if not is_complete(path):
        return
    source = Path(path).read_text()
    for mistake in {mistake.part: mistake for mistake in reversed(MISTAKES)}.values():
        right = ast.get_source_segment(source, parts_of(source)[mistake.part]) or ""
        wrong = source.replace(right, mistake.source())
        many = _history(wrong, path, 8, tp=2, pp=2)
        one = _history(wrong, path, 1)
        if many.ended:
            found = f"caught: {many.ended}"
        elif all(same(seen, one.seen[0]) for seen in many.seen):
            found = "NOT caught: the same losses and norms as one rank"
        else:
            found = "caught: losses or norms differ from those of one rank"
        print(f"{mistake.part:26} {found}")


def _history(source: str, path: str | Path, world_size: int, **options) -> checks.Outcome:
    return checks.on_ranks(world_size, history, source, str(path), list(steps()), {"steps": 2} | options)
