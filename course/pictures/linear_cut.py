"""How the linear layer Y = XA + b is cut over a tensor group: which shards a rank has, and what the ranks send.

There are two cuts. By columns of A, each rank has some columns of Y. By rows of A (and columns of X to match), each
rank has a partial Y of full size, and the true Y is the sum over the ranks. Integers only, no torch.
"""

from dataclasses import dataclass
from typing import NamedTuple

from labkit.cuts import check_divides, chunks_of_rank
from labkit.sizes import check_size

CUTS = ("column", "row")


class Message(NamedTuple):
    """One collective: its ``operation``, and the full buffer that it works on."""

    operation: str
    tensor: str
    shape: tuple[int, ...]

    def size_bytes(self, bytes_per_element: int = 4) -> int:
        """Return the size of the full buffer, as `communication_log` counts it."""
        return self.shape[0] * self.shape[1] * bytes_per_element


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
        name = "output_size" if self.cut == "column" else "input_size"
        check_divides(self.tp_size, name, getattr(self, name))

    @property
    def partition_size(self) -> int:
        """How many columns (or rows) of A a rank has."""
        size = self.output_size if self.cut == "column" else self.input_size
        return sum(map(len, chunks_of_rank(size, self.tp_size, tp_rank=0)))

    @property
    def a_shard(self) -> tuple[int, int]:
        """The shape of a rank's part of A."""
        size = self.partition_size
        return (self.input_size, size) if self.cut == "column" else (size, self.output_size)

    @property
    def weight_shard(self) -> tuple[int, int]:
        """The same part as PyTorch stores it: transposed."""
        return self.a_shard[1], self.a_shard[0]

    @property
    def b_shard(self) -> tuple[int]:
        """The shape of a rank's part of b; if A is cut by rows, every rank has all of it."""
        return (self.a_shard[1],)

    @property
    def x_shard(self) -> tuple[int, int]:
        """The shape of what a rank multiplies: all of X, or the columns that meet its rows of A."""
        return self.batch_size, self.a_shard[0]

    @property
    def y_shard(self) -> tuple[int, int]:
        """The shape of what a rank computes: its columns of Y, or a partial Y of full size."""
        return self.batch_size, self.a_shard[1]

    def forward_messages(self, whole: bool = False) -> list[Message]:
        """Return what the group sends in the forward pass.

        With ``whole``, X and Y are whole on every rank, even on the side where the cut leaves them in shards
        (``gather_output=True`` of the column layer, ``input_is_parallel=False`` of the row layer).
        """
        y = (self.batch_size, self.output_size)
        if self.tp_size == 1:
            return []
        if self.cut == "row":
            return [Message("all_reduce", "Y", y)]
        return [Message("all_gather", "Y", y)] if whole else []

    def backward_messages(self, whole: bool = False) -> list[Message]:
        """Return what the group sends in the backward pass; ``dX`` is the gradient of the loss with respect to X."""
        x = (self.batch_size, self.input_size)
        if self.tp_size == 1:
            return []
        if self.cut == "column":
            return [Message("all_reduce", "dX", x)]
        return [Message("all_gather", "dX", x)] if whole else []

    def __str__(self) -> str:
        """Return a table of the shapes, whole and on each rank: the picture in text."""
        batch, rows, columns = self.batch_size, self.input_size, self.output_size
        x_on_rank = "the same" if self.cut == "column" else str(list(self.x_shard))
        b_on_rank = str(list(self.b_shard)) if self.cut == "column" else "the same"
        y_on_rank = str(list(self.y_shard)) + (" of partial sums" if self.cut == "row" else "")
        lines = [
            (f"{self.cut}, t = {self.tp_size}", "whole", "on each rank"),
            ("X", str([batch, rows]), x_on_rank),
            ("A", str([rows, columns]), str(list(self.a_shard))),
            ("stored weight", str([columns, rows]), str(list(self.weight_shard))),
            ("b", str([columns]), b_on_rank),
            ("Y", str([batch, columns]), y_on_rank),
        ]
        return "\n".join(f"{name:<16}{whole:<14}{shard}" for name, whole, shard in lines)
