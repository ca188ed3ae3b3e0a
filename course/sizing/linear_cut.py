"""Cuts the linear layer Y = XA + b over a tensor group: which shards a rank has, and what the ranks send.

There are two cuts. By columns of A, each rank has some columns of Y. By rows of A (and columns of X to match), each
rank has a partial Y of full size, and the true Y is the sum over the ranks.
"""

from dataclasses import dataclass
from functools import cached_property
from math import prod
from typing import NamedTuple

from labkit.partition import check_divides, chunks_of_rank
from labkit.sizes import check_size

CUTS = ("column", "row")
FLOAT32_BYTES = 4


class Message(NamedTuple):
    """One collective: its ``operation``, and the full buffer that it works on."""

    operation: str
    tensor: str
    shape: tuple[int, ...]

    def size_bytes(self) -> int:
        """Return the size of the full buffer in float32, as `communication_log` counts it."""
        return prod(self.shape) * FLOAT32_BYTES


class Tensor(NamedTuple):
    """Y, X, A or b: its shape, a rank's part, and how it is cut: by "columns", "rows", as a "sum", or "" (whole)."""

    shape: tuple[int, ...]
    shard: tuple[int, ...]
    by: str

    @property
    def shard_bytes(self) -> int:
        return prod(self.shard) * FLOAT32_BYTES


@dataclass(frozen=True)
class LinearCut:
    """Y = XA + b with X: [batch, in], A: [in, out], b: [out] and Y: [batch, out], cut ``tp_size`` ways.

    >>> LinearCut("column", 1024, 512, tp_size=2).weight_shard
    (256, 1024)
    """

    cut: str
    input_size: int
    output_size: int
    tp_size: int
    batch_size: int = 256

    def __post_init__(self):
        if self.cut not in CUTS:
            raise ValueError(f"cut={self.cut!r} is unknown: use 'column' or 'row'")
        for name in ("input_size", "output_size", "tp_size", "batch_size"):
            object.__setattr__(self, name, check_size(name, getattr(self, name)))
        check_divides(self.tp_size, *self._cut_size)

    @property
    def _cut_size(self) -> tuple[str, int]:
        return ("output_size", self.output_size) if self.cut == "column" else ("input_size", self.input_size)

    def part_of(self, rank: int) -> range:
        """Return the columns (or rows) of A that a rank has."""
        return chunks_of_rank(self._cut_size[1], self.tp_size, rank)[0]

    @cached_property
    def tensors(self) -> dict[str, Tensor]:
        """The four tensors of the equation by name, in its order."""
        batch, rows, columns, part = self.batch_size, self.input_size, self.output_size, len(self.part_of(0))
        y, x, a, b = (batch, columns), (batch, rows), (rows, columns), (columns,)
        shards, by = ((batch, part), x, (rows, part), (part,)), ("columns", "", "columns", "columns")
        if self.cut == "row":
            shards, by = (y, (batch, part), (part, columns), b), ("sum", "columns", "rows", "")
        return dict(zip("YXAb", map(Tensor, (y, x, a, b), shards, by)))

    @property
    def weight_shard(self) -> tuple[int, ...]:
        """The shape of a rank's part of A as PyTorch stores it: transposed."""
        return self.tensors["A"].shard[::-1]

    def messages(self, whole: bool = False) -> tuple[list[Message], ...]:
        """Return what the group sends forward and backward; ``dX`` is the gradient of the loss with respect to X.

        With ``whole``, X and Y are whole on every rank, even on the side where the cut leaves them in shards
        (``gather_output=True`` of the column layer, ``input_is_parallel=False`` of the row layer).
        """
        gather = "all_gather" * whole
        y, x = ("all_reduce", gather) if self.cut == "row" else (gather, "all_reduce")
        sent = Message(y, "Y", self.tensors["Y"].shape), Message(x, "dX", self.tensors["X"].shape)
        return tuple([each] * (self.tp_size > 1 and each.operation != "") for each in sent)
