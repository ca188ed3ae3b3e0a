"""Says what a right answer that sends messages would do on GPUs: NCCL queues and pairs messages in its own way.

The answer runs once more, on CPU ranks that follow NCCL's rules. These ranks are new and end with the call, so nothing
of a standstill reaches the next check.
"""

import re
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

from course.communication import CommunicationLog
from course.exercises.calling import answer_to, quietly
from course.exercises.values import plain, same
from course.nccl_rules import ALL_OF_GROUP, FROM_ANY, Mismatch, NCCLRules, Under
from labkit.launch import Deadlock, RankFailed, launch
from labkit.launch.frames import Frame, describe, stack_of, user_frames

ONE_QUEUE = (
    "NCCL has one queue for each pair of ranks, for both directions, if messages are not batched. A send ends only "
    "when its receiver has the data, and what comes after it in the queue waits. Start the send and the receive "
    "together, with `dist.batch_isend_irecv([dist.P2POp(dist.isend, ...), dist.P2POp(dist.irecv, ...)])`; or let even "
    "ranks send first, and odd ranks receive first."
)
ALL_MUST_COME = (
    "A group makes its connections in its first batch or collective, and NCCL waits there until all ranks of the group "
    "have come. Let all of them call a collective first, such as `dist.barrier()`."
)
BY_ORDER = (
    "NCCL pairs the messages of two ranks by their order alone, and ignores tags. Receive in the order in which the "
    "other rank sends."
)
NAME_THE_SENDER = "NCCL cannot receive from any rank. Name the sender, by `src=`."
_WAIT = re.compile(
    r"^  rank ([\d, ]+): waits in (.*?)(?: for .*)?(?:,|\n   ) (at .*?)(?:, in \S*nccl_rules\.py, .*)?$", re.MULTILINE
)
"""In the report of a deadlock: ranks, call, perhaps what for, the learner's line, perhaps one of the rules'."""


class _Failed(Exception):
    """An error of the answer on a rank: the error, and the frames where it was raised."""


def sends_messages(log: CommunicationLog) -> bool:
    """Return whether a rank has sent or received point to point."""
    return any(record.operation in ("send", "recv") for record in log.records)


def heard_on_gpus(function: Callable, inputs: Callable, case: tuple, gradient_to: int | None, right: Sequence) -> str:
    """Say what goes wrong with a right answer in this case by NCCL's rules; return "" if nothing does.

    ``right`` are the ranks' answers. The argument at place ``gradient_to`` requires a gradient.
    """
    num_ranks, *rest = case
    on_rank = Under(_answer_here, raises_mismatches=True)
    try:
        ranks = launch(on_rank, function, inputs, rest, gradient_to, world_size=num_ranks, backend="gloo")
    except Deadlock as stuck:
        why = ALL_MUST_COME if ALL_OF_GROUP in str(stuck) else ONE_QUEUE
        return f"On GPUs it would stand still{_first_wait(str(stuck))}\n{why}"
    except RankFailed as failed:
        return _of_an_error(failed.cause)
    is_right = all(same(got, expected) for (got, _), expected in zip(ranks, right))
    tagged = [stack for _, stack in ranks if stack]
    if is_right or not tagged:
        return ""
    return f"On GPUs its messages would be mixed up{_line_of(tagged[0])}\n{BY_ORDER}"


def _of_an_error(cause: Any) -> str:
    """Say so if it is about messages. Of any other error it is not known that GPUs would raise it."""
    if not isinstance(cause, _Failed):
        return ""
    error, frames = cause.args
    if isinstance(error, Mismatch):
        return f"On GPUs its messages would be mixed up{_line_of(frames)}\nHere {error}. {BY_ORDER}"
    if FROM_ANY in str(error):
        return f"On GPUs it would raise an error{_line_of(frames)}\n{NAME_THE_SENDER}"
    return ""


def _first_wait(report: str) -> str:
    """Return what the report of a deadlock says of the first rank that waits in a message, and of its line."""
    found = _WAIT.search(report)
    if not found:
        return ""
    ranks, call, line = found.groups()
    who = f"ranks {ranks} wait" if "," in ranks else f"rank {ranks} waits"
    return f": {who} in {call}, {line}"


def _line_of(frames: Sequence[Frame]) -> str:
    learners, _ = user_frames(frames)
    return f": at {describe(learners[-1])}" if learners else ""


def _answer_here(function: Callable, inputs: Callable, rest: list, gradient_to: int | None) -> tuple[Any, tuple]:
    """On one rank: return the answer, and the frames of the first message with a tag."""
    arguments = inputs(*rest)
    if gradient_to is not None:
        arguments[gradient_to].requires_grad_()
    try:
        with quietly(), _tags_noted() as tagged:
            got = answer_to(function, arguments, ())
    except Exception as error:
        frames = [(each.filename, each.lineno or 0, each.name) for each in traceback.extract_tb(error.__traceback__)]
        raise _Failed(error, frames) from error
    return plain(got), tagged[0] if tagged else ()


@contextmanager
def _tags_noted() -> Iterator[list[tuple[Frame, ...]]]:
    """Note where messages with a tag are sent and received."""
    noted: list[tuple[Frame, ...]] = []

    def noting(method: Callable) -> Callable:
        def message(group, tensors, peer: int, tag: int):
            if tag:
                noted.append(stack_of(sys._getframe(1)))
            return method(group, tensors, peer, tag)

        return message

    with patch.multiple(NCCLRules, send=noting(NCCLRules.send), recv=noting(NCCLRules.recv)):
        yield noted
