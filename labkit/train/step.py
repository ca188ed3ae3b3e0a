"""The outcome of one training step."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Step:
    """The results of one step, the same on every rank; ``number`` counts from 1."""

    number: int
    loss: float
    grad_norm: float
    learning_rate: float
    seconds: float
    tokens_per_second: float
    evaluation_loss: float | None = None
