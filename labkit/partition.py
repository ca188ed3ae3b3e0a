"""Divides work among ranks: the rows of a batch, a sequence, a model's layers, a weight's dims. Integers, no torch.

The trainer, the layers and the pictures all ask here, so what is drawn is what trains.
"""

from dataclasses import dataclass

from labkit.sizes import Misfit, check_size, divisors, either


@dataclass(frozen=True)
class BatchCut:
    """A batch of ``batch_size`` rows on ``dp_size`` replicas: each has consecutive rows, in ``num_micro_batches``.

    >>> cut = BatchCut(batch_size=8, dp_size=2, num_micro_batches=2)
    >>> [list(cut.rows(1, micro_batch)) for micro_batch in (0, 1)]
    [[4, 5], [6, 7]]

    Raises:
        ValueError: the replicas and their micro-batches cannot share the rows equally.
    """

    batch_size: int
    dp_size: int = 1
    num_micro_batches: int = 1

    def __post_init__(self):
        for name in ("batch_size", "dp_size", "num_micro_batches"):
            object.__setattr__(self, name, check_size(name, getattr(self, name)))
        d, m = self.dp_size, self.num_micro_batches
        if self.batch_size % (d * m):
            advice = f"use batch_size {either(multiples_near(self.batch_size, d * m))}"
            raise Misfit.of_division("batch_size", self.batch_size, advice, dp_size=d, num_micro_batches=m)

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
        return BatchCut(self.batch_size, self.dp_size).rows(dp_rank, 0)


def layers_of_stage(num_layers: int, stage: int, num_stages: int) -> range:
    """Return the layers of one of the model's consecutive stages; some stages may have one layer more than others.

    >>> [len(layers_of_stage(10, stage, 4)) for stage in range(4)]
    [2, 3, 2, 3]
    """
    return range(num_layers * stage // num_stages, num_layers * (stage + 1) // num_stages)


def tokens_of_rank(seq_length: int, cp_size: int, cp_rank: int, balanced: bool = True) -> list[range]:
    """Return which tokens of a sequence a context-parallel rank holds: consecutive ones, or two balanced chunks.

    Balanced means an early and a late one of 2c chunks, r and 2c - 1 - r: equal work under a causal mask.

    >>> tokens_of_rank(8, cp_size=2, cp_rank=0), tokens_of_rank(8, cp_size=2, cp_rank=0, balanced=False)
    ([range(0, 2), range(6, 8)], [range(0, 4)])

    Raises:
        ValueError: the sequence cannot be cut so, or there is no such rank.
    """
    check_sequence_cut(seq_length, cp_size, balanced)
    if check_size("cp_rank", cp_rank, least=0) >= cp_size:
        raise ValueError(f"cp_rank={cp_rank} is not one of cp_size={cp_size}: use 0 to {cp_size - 1}")
    if not balanced or cp_size == 1:
        return [range(seq_length)[seq_length // cp_size * cp_rank :][: seq_length // cp_size]]
    chunk = seq_length // (2 * cp_size)
    return [range(number * chunk, (number + 1) * chunk) for number in (cp_rank, 2 * cp_size - 1 - cp_rank)]


def check_sequence_cut(seq_length: int, cp_size: int, balanced: bool, tp_size: int = 1) -> None:
    """Raise a ValueError if a sequence cannot be cut among context-parallel ranks, and each part among ``tp_size``."""
    seq_length, chunks = check_size("seq_length", seq_length), 2 * check_size("cp_size", cp_size)
    if not balanced or cp_size == 1:  # consecutive tokens, or one rank with all of them
        check_divides(cp_size, "seq_length", seq_length, parts_name="cp_size")
    elif seq_length % chunks:
        cut = f"balanced chunks: 2 * cp_size={cp_size} = {chunks} does not divide seq_length={seq_length}"
        fits = either(multiples_near(seq_length, chunks)) + (", or balanced=False" if seq_length % cp_size == 0 else "")
        raise ValueError(f"{cut}: use seq_length {fits}")
    check_divides(tp_size, "seq_length" if cp_size == 1 else "seq_length / cp_size", seq_length // cp_size)


def chunks_of_rank(size: int, tp_size: int, tp_rank: int, stride: int = 1) -> list[range]:
    """Return what a tensor-parallel rank keeps of a dim of this size, by Megatron-LM's stride rule.

    The dim is cut into t * stride chunks, and rank r keeps chunks r, r + t, r + 2t, ... With stride=3, each rank
    gets the Q, the K and the V of its own heads from a fused [Q; K; V].

    >>> chunks_of_rank(12, tp_size=2, tp_rank=1, stride=3)
    [range(2, 4), range(6, 8), range(10, 12)]
    """
    chunk = size // (tp_size * stride)
    starts = range(tp_rank * chunk, size, tp_size * chunk)
    return [range(start, start + chunk) for start in starts]


def check_divides(parts: int, name: str, size: int, stride: int = 1, *, parts_name: str = "tp_size") -> None:
    """Raise a Misfit if a dim of this size cannot be cut into parts * stride equal chunks.

    >>> check_divides(4, "output_size", 10)
    Traceback (most recent call last):
    labkit.sizes.Misfit: tp_size=4 does not divide output_size=10: use tp_size 1, 2, 5 or 10, or output_size 8 or 12
    """
    size, stride = check_size(name, size), check_size("stride", stride)
    chunks = parts * stride
    if size % chunks:
        fits = "" if size % stride else f"{parts_name} {either(divisors(size // stride))}, or "
        advice = f"use {fits}{name} {either(multiples_near(size, chunks))}"
        raise Misfit.of_division(name, size, advice, **{parts_name: parts} | ({"stride": stride} if stride > 1 else {}))


def multiples_near(number: int, of: int) -> list[int]:
    """Return the multiples just below and just above a number, without 0: of 4, 8 and 12 are near 10."""
    below = number // of * of
    return [multiple for multiple in (below, below + of) if multiple]
