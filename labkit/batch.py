"""Who sees which rows of a batch: replicas side by side, and micro-batches one after the other. Integers, no torch."""

from dataclasses import dataclass


@dataclass(frozen=True)
class BatchCut:
    """A batch of ``batch_size`` rows on ``dp_size`` replicas, each adding up gradients over some micro-batches.

    A replica has neighbouring rows, and takes them in order.

    >>> cut = BatchCut(batch_size=8, dp_size=2, num_micro_batches=2)
    >>> [list(cut.rows(1, micro_batch)) for micro_batch in (0, 1)]
    [[4, 5], [6, 7]]
    """

    batch_size: int
    dp_size: int = 1
    num_micro_batches: int = 1

    def __post_init__(self):
        for name in ("batch_size", "dp_size", "num_micro_batches"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)} is no number of {name.split('_')[0]}: use 1 or more")
        pieces = self.dp_size * self.num_micro_batches
        if self.batch_size % pieces:
            below, above = self.batch_size // pieces * pieces, (self.batch_size // pieces + 1) * pieces
            raise ValueError(
                f"dp_size={self.dp_size} times num_micro_batches={self.num_micro_batches} is {pieces} pieces, which do "
                f"not divide batch_size={self.batch_size}: use batch_size {f'{below} or ' if below else ''}{above}"
            )

    @property
    def micro_batch_size(self) -> int:
        """How many rows a rank sees at once: B / (d m)."""
        return self.batch_size // (self.dp_size * self.num_micro_batches)

    def rows(self, dp_rank: int, micro_batch: int) -> range:
        """The rows of the batch that a replica sees in one of its micro-batches."""
        start = (dp_rank * self.num_micro_batches + micro_batch) * self.micro_batch_size
        return range(start, start + self.micro_batch_size)

    def __str__(self) -> str:
        """A table of the rows, first to last: a line a rank, a column a micro-batch."""
        names = [f"micro-batch {number}" for number in range(self.num_micro_batches)]
        lines = ["rank  " + "".join(f"{name:>16}" for name in names)]
        for dp_rank in range(self.dp_size):
            ranges = [rows_text(self.rows(dp_rank, number)) for number in range(self.num_micro_batches)]
            lines.append(f"{dp_rank:>4}  " + "".join(f"{text:>16}" for text in ranges))
        return "\n".join(lines)


def rows_text(rows: range) -> str:
    """First and last row.

    >>> rows_text(range(32, 64)), rows_text(range(5, 6))
    ('32-63', '5')
    """
    return f"{rows[0]}-{rows[-1]}" if len(rows) > 1 else str(rows[0])
