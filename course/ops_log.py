"""Logs what PyTorch's pipeline stages do, as ops of `labkit.schedules`, so that the two can be compared."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from unittest import mock

from torch.distributed.pipelining import PipelineStage

from labkit.schedules import BACKWARD, FORWARD, WEIGHT_GRADIENT, Op

METHODS = {
    FORWARD: "forward_one_chunk",
    BACKWARD: "backward_one_chunk",
    WEIGHT_GRADIENT: "backward_weight_one_chunk",
}
"""The method of a stage that runs each kind of op. There, a chunk is a micro-batch."""


@contextmanager
def ops_log() -> Iterator[list[Op]]:
    """Note each op that a `PipelineStage` of this rank runs until the block ends, in order.

    Where the backward is split, PyTorch writes I for what is B here, as in `labkit.schedules`.

    >>> with ops_log() as ops:
    ...     pass  # a schedule's `step` would run ops here
    >>> ops
    []
    """
    ops: list[Op] = []
    with ExitStack() as patches:
        for kind, name in METHODS.items():
            method = _noting(ops, kind, getattr(PipelineStage, name))
            patches.enter_context(mock.patch.object(PipelineStage, name, method))
        yield ops


def _noting(ops: list[Op], kind: str, method: Callable) -> Callable:
    def note_and_run(stage: PipelineStage, micro_batch: int, *args, **options):
        # Each rank has one of the first p stages and one of the next p, in turn or along a V.
        ops.append(Op(kind, micro_batch, chunk=stage.stage_index // stage.group_size))
        return method(stage, micro_batch, *args, **options)

    return note_and_run
