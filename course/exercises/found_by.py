"""Tells a faulty sharded layer from the right one, by quantities that are computed on real ranks.

Nothing here knows which quantity gives a fault away: the check computes all of them on real ranks, for both layers.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist

from course.exercises.base import Folded, Verdict, indent, kept_in_handouts, report
from course.exercises.source import source_of
from labkit.groups import init_groups
from labkit.launch import launch
from labkit.layout import ParallelLayout
from labkit.tensor_parallel.operators import all_gather

INPUT_SIZE, OUTPUT_SIZE, NUM_TOKENS = 1024, 512, 4
DOES_NOT_RUN = "does not run"


@dataclass(frozen=True)
class ShardedLinear:
    """Y = XA + b on the ranks of a group, step by step; master and weight are [out, in], as PyTorch stores them."""

    dim: int  # along which the master weight is cut: 0 for column parallel, 1 for row parallel
    cut: Callable[[torch.Tensor, int, int], torch.Tensor]  # (master, rank in the group, tp_size) -> this rank's weight
    forward: Callable[..., torch.Tensor]  # (x, weight, bias, group) -> y, whole on every rank


@dataclass(frozen=True)
class Built:
    """A layer as one rank has it."""

    layer: ShardedLinear
    master: torch.Tensor
    weight: torch.Tensor
    group: dist.ProcessGroup

    def output(self, x: torch.Tensor) -> torch.Tensor:
        """Return the layer's output for x, with a bias of ones."""
        return self.layer.forward(x, self.weight, torch.ones(self.weight.size(0)), self.group)


def _weight_shape(built: Built) -> str:
    return str(list(built.weight.shape))


def _weight_spread(built: Built) -> str:
    return f"{built.weight.std():.3f}"


def _shards_joined(built: Built) -> str:
    num_weights = built.weight.numel() * built.group.size()
    if num_weights != built.master.numel():
        return f"{num_weights:,} weights, not {built.master.numel():,}"
    joined = all_gather(built.weight, built.group, built.layer.dim)
    return "the master" if torch.equal(joined, built.master) else "not the master"


def _output_shape(built: Built) -> str:
    return str(list(built.output(_example_input()).shape))


def _output_error(built: Built) -> str:
    x = _example_input()
    output, right = built.output(x), torch.nn.functional.linear(x, built.master, torch.ones(OUTPUT_SIZE))
    return "wrong shape" if output.shape != right.shape else f"{(output - right).abs().max():.1f}"


def _output_of_zeros(built: Built) -> str:
    output = built.output(torch.zeros_like(_example_input()))
    return f"{output.min():.1f} to {output.max():.1f}"


QUANTITIES: dict[str, Callable[[Built], str]] = {
    "weight shape": _weight_shape,
    "weight spread": _weight_spread,
    "shards joined": _shards_joined,
    "output shape": _output_shape,
    "output error": _output_error,
    "output for x = 0": _output_of_zeros,
}
"""What can be computed for any sharded layer. Each function runs on every rank, and rank 0's value counts.

- weight shape: of one rank's weight;
- weight spread: the standard deviation of one rank's weights;
- shards joined: whether the weights of the group, side by side, are the master weight;
- output shape: of what one rank has after the forward pass;
- output error: the largest difference from torch.nn.functional.linear with the master weight;
- output for x = 0: only the bias is left, which is 1 everywhere here.
"""


@dataclass(frozen=True)
class FlawedLayer:
    """A sharded layer with a fault: its ``code`` to read, and a `check` of what gives the fault away.

    ``tp_size`` is what was asked for. Both layers run on that many ranks, or on ``num_ranks``; the right one may
    need ``num_ranks_right``.
    """

    name: str
    task: str
    flawed: ShardedLinear
    right: ShardedLinear
    tp_size: int
    what: str
    why: str
    hint_text: str
    num_ranks: int | None = None
    num_ranks_right: int | None = None
    notebook: str = "04"

    def code(self) -> Folded:
        """Return what was asked for, and the lines that do something else."""
        return _source(self.task, self._part(self.flawed))

    def check(self, found_by: str | None = None) -> None:
        """Say whether ``found_by`` gives the fault away: it is computed for the faulty and for the right layer."""
        report(self.name, self.verdict(found_by))

    def verdict(self, found_by: str | None = None) -> Verdict:
        """Return what `check` prints, as data."""
        if found_by is None or found_by is ...:
            return Verdict("not attempted", f"{self.name}: not attempted yet (found_by is still {found_by}).")
        if found_by not in QUANTITIES:
            choice = indent(f"Choose from: {', '.join(QUANTITIES)}.")
            return Verdict("wrong", f"{self.name}: {found_by!r} is not computed here.\n{choice}")
        here, right = self.measure()
        if here[found_by] == right[found_by]:
            same = f"{found_by!r} is the same with and without the fault ({right[found_by]}). Look again."
            return Verdict("wrong", f"{self.name}: {same}")
        lines = [f"{self.name}: yes, {found_by!r} gives it away.", f"    {'':<19}{'right':<15}here"]
        for name in QUANTITIES:
            mark = "*" if here[name] != right[name] else " "
            lines.append(f"  {mark} {name:<19}{right[name]:<15}{here[name].partition(': ')[0]}")
        lines += sorted({indent(value) for value in here.values() if value.startswith(DOES_NOT_RUN)})
        return Verdict("passed", "\n".join([*lines, indent(f"{self.what} {self.why}")]))

    def measure(self) -> tuple[dict[str, str], dict[str, str]]:
        """Return every quantity on rank 0: for the faulty layer, and for the right one."""
        num_ranks = self.num_ranks or self.tp_size
        here = _measure(self.flawed, self.tp_size, num_ranks)
        return here, _measure(self.right, self.tp_size, self.num_ranks_right or num_ranks)

    def hint(self) -> Folded:
        """Return a hint where to look."""
        return Folded("Hint", self.hint_text)

    @kept_in_handouts
    def solution(self) -> Folded:
        """Return the same lines without the fault."""
        return _source("Without the fault", self._part(self.right))

    def _part(self, layer: ShardedLinear) -> Callable:
        """Return the function in which the two layers differ."""
        return layer.cut if self.flawed.cut is not self.right.cut else layer.forward


def _measure(layer: ShardedLinear, tp_size: int, num_ranks: int) -> dict[str, str]:
    # On the CPU, with or without GPUs: the values are the same everywhere.
    return launch(_measure_here, layer, tp_size, world_size=num_ranks, backend="gloo")[0]


def _measure_here(layer: ShardedLinear, tp_size: int) -> dict[str, str]:
    """On one rank: build the layer and compute every quantity for it."""
    torch.set_deterministic_debug_mode("error")  # torch now fills new memory with nan, so what nobody wrote shows
    world_size = dist.get_world_size()
    groups = init_groups(ParallelLayout(world_size, tp_size=min(tp_size, world_size)))  # asking for more is a fault
    torch.manual_seed(0)  # the same master weight on every rank
    master = torch.nn.init.xavier_normal_(torch.empty(OUTPUT_SIZE, INPUT_SIZE))
    weight = layer.cut(master, groups.coords.tp, tp_size).contiguous()
    built = Built(layer, master, weight, groups.tp)
    return {name: _value(quantity, built) for name, quantity in QUANTITIES.items()}


def _value(quantity: Callable[[Built], str], built: Built) -> str:
    try:
        return quantity(built)
    except RuntimeError as error:  # shapes that do not fit: every rank finds that, so no rank waits for another
        return f"{DOES_NOT_RUN}: {error}"


def _example_input() -> torch.Tensor:
    return torch.randn(NUM_TOKENS, INPUT_SIZE, generator=torch.Generator().manual_seed(1))


def _source(title: str, function: Callable) -> Folded:
    source = source_of(function)
    return Folded(title, f"```python\n{source}\n```", plain_text=f"# {title}\n{source}")
