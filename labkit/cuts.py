"""Who has what: the rows of a batch, the layers of a model, the chunks of a weight. Integers only, no torch.

The trainer, the layers and the pictures all ask here, so what is drawn is what trains.
"""

from dataclasses import dataclass

from labkit.sizes import check_size, divisors, either


@dataclass(frozen=True)
class BatchCut:
    """A batch of ``batch_size`` rows on ``dp_size`` replicas, each adding up gradients over some micro-batches.

    A replica has neighbouring rows, and takes them in order.

    >>> cut = BatchCut(batch_size=8, dp_size=2, num_micro_batches=2)
    >>> [list(cut.rows(1, micro_batch)) for micro_batch in (0, 1)]
    [[4, 5], [6, 7]]

    Raises:
        ValueError: names the value, the rule and the way out.
    """

    batch_size: int
    dp_size: int = 1
    num_micro_batches: int = 1

    def __post_init__(self):
        for name in ("batch_size", "dp_size", "num_micro_batches"):
            object.__setattr__(self, name, check_size(name, getattr(self, name)))
        pieces = self.dp_size * self.num_micro_batches
        if self.batch_size % pieces:
            raise ValueError(
                f"dp_size={self.dp_size} * num_micro_batches={self.num_micro_batches} = {pieces} does not divide "
                f"batch_size={self.batch_size}: use batch_size {either(multiples_near(self.batch_size, pieces))}"
            )

    @property
    def micro_batch_size(self) -> int:
        """How many rows a replica sees at once: B / (d m)."""
        return self.batch_size // (self.dp_size * self.num_micro_batches)

    def rows(self, dp_rank: int, micro_batch: int) -> range:
        """The rows of the batch that a replica sees in one of its micro-batches."""
        start = (dp_rank * self.num_micro_batches + micro_batch) * self.micro_batch_size
        return range(start, start + self.micro_batch_size)

    def rows_of_replica(self, dp_rank: int) -> range:
        """All rows of the batch that a replica sees in a step."""
        rows = self.micro_batch_size * self.num_micro_batches
        return range(dp_rank * rows, (dp_rank + 1) * rows)

    def __str__(self) -> str:
        """A table of the first and last rows: one line per rank, one column per micro-batch."""
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


def layers_of_stage(num_layers: int, stage: int, num_stages: int) -> range:
    """The layers of one of the model's consecutive stages; some stages have one layer more than others.

    >>> [len(layers_of_stage(10, stage, 4)) for stage in range(4)]
    [2, 3, 2, 3]
    """
    return range(num_layers * stage // num_stages, num_layers * (stage + 1) // num_stages)


def chunks_of_rank(size: int, tp_size: int, tp_rank: int, stride: int = 1) -> list[range]:
    """What a tensor-parallel rank keeps of a dim of this size, by Megatron-LM's stride rule.

    The dim is cut into t * stride chunks, and rank r keeps chunks r, r + t, r + 2t, ... With stride=3, a fused
    [Q; K; V] gives each rank its own heads of Q, of K and of V.

    >>> chunks_of_rank(12, tp_size=2, tp_rank=1, stride=3)
    [range(2, 4), range(6, 8), range(10, 12)]
    """
    chunk = size // (tp_size * stride)
    starts = range(tp_rank * chunk, size, tp_size * chunk)
    return [range(start, start + chunk) for start in starts]


def check_divides(tp_size: int, name: str, size: int, stride: int = 1) -> None:
    """Raise a ValueError if a dim of this size cannot be cut into tp_size * stride equal chunks."""
    size, stride = check_size(name, size), check_size("stride", stride)
    pieces = tp_size * stride
    if size % pieces:
        cut = f"tp_size={tp_size}" + (f" * stride={stride} = {pieces}" if stride > 1 else "")
        ways = [] if size % stride else list(divisors(size // stride))
        fits = f"tp_size {either(ways)}, or " if ways else ""
        raise ValueError(
            f"{cut} does not divide {name}={size}: use {fits}{name} {either(multiples_near(size, pieces))}"
        )


def multiples_near(number: int, of: int) -> list[int]:
    """The multiples just below and just above a number; 0 is left out.

    >>> multiples_near(10, of=4), multiples_near(3, of=4)
    ([8, 12], [4])
    """
    below = number // of * of
    return [multiple for multiple in (below, below + of) if multiple]
