"""Pipeline parallelism on real ranks: each holds some stages of the model, and obeys a schedule."""

from labkit.pipeline.paced import PacedStage
from labkit.pipeline.run import run

__all__ = ["PacedStage", "run"]
