"""Says of a right answer that sends messages what it would do on GPUs, where NCCL has other rules than gloo.

The answer runs again on CPU ranks that follow NCCL's rules (`course.nccl_rules`). That it stands still there is the
launcher's finding, and which messages meet is read from their order. So nothing here depends on the time.
"""

import re
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence

from course import nccl_rules
from course.nccl_rules import Message, Under
from labkit.launch import Deadlock, RankFailed, launch
from labkit.launch.frames import describe, own_frames

BUT = "But on GPUs, NCCL carries the messages, and its rules are different."
STANDS_STILL = "There, {num_ranks} ranks would stand still:"
ONE_QUEUE = (
    "NCCL has one queue for each pair of ranks, for both directions. The queue runs in the order of the calls, "
    "whatever their tags, and the first message of a pair waits until both ranks have come. So if every rank starts "
    "with a send, or every rank with a receive, all wait for ever. Start both together: "
    "`dist.batch_isend_irecv([dist.P2POp(dist.isend, ...), dist.P2POp(dist.irecv, ...)])`. Or let even ranks send "
    "first, and odd ranks receive first."
)
FIRST_USE = (
    "NCCL connects a group when the group is first used, and waits for all its members. A batch of messages uses the "
    "world if it names no group, and here not all ranks use it. Make a group of those that do, with "
    "`dist.new_group([...])` on every rank, and name it in each message: `dist.P2POp(..., group=...)`."
)
IN_ORDER = "NCCL runs the calls of a group one after the other: all ranks must make them in the same order."
BY_ORDER = (
    "NCCL pairs messages by their order, and ignores tags. With {num_ranks} ranks, rank {receiver} would receive tag "
    "{tag} and get what rank {sender} sends with tag {sent_tag}. Receive in the order in which the other rank sends, "
    "or put both into one tensor."
)
RAISES = "There, it would raise an error:"
_REFUSED = r'nccl_rules\.py", line \d+, in (_check|_reduction|recv_anysource)\n'


def on_gpus(on_rank: Callable, arguments: Mapping[int, tuple]) -> tuple[list[str], str] | None:
    """Return what NCCL's rules make of an answer, as lines and the reason; None if they change nothing.

    ``on_rank`` calls the answer on a rank. It is tried on the largest and the smallest number of ranks for which there
    are ``arguments``. (Each of two ranks has one neighbour on both sides; a middle rank exists among more.)
    """
    for num_ranks in sorted({min(arguments), max(arguments)}, reverse=True):
        try:
            ranks = launch(Under(_messages_of), on_rank, arguments[num_ranks], world_size=num_ranks, backend="gloo")
        except Deadlock as deadlock:
            return _standstill(str(deadlock), num_ranks)
        except RankFailed as failed:
            return _refusal(failed)
        if found := _wrong_pair(ranks):
            return found
    return None


def _messages_of(on_rank: Callable, arguments: tuple) -> list[tuple[Message, str]]:
    """On a rank: call the answer; return its messages, and the line of each."""
    nccl_rules.messages = []
    on_rank(*arguments)
    return [(message._replace(stack=()), _line_of(message)) for message in nccl_rules.messages]


def _line_of(message: Message) -> str:
    learners, _ = own_frames(message.stack)
    return f"at {describe(learners[-1])}" if learners else "outside your code"


def _standstill(report: str, num_ranks: int) -> tuple[list[str], str]:
    """Return who waits, each place once, and why."""
    waits_at: dict[str, list[str]] = defaultdict(list)
    for line in re.findall(r"^  rank \d.*", report, re.M):
        line = re.sub(r",+ in course/nccl_rules\.py, line .*", "", line)
        who, _, where = line.partition(", at ")
        waits_at[where].append(who)
    lines = [f"  {STANDS_STILL.format(num_ranks=num_ranks)}"]
    for where, ranks in waits_at.items():
        lines += ranks
        lines += [f"    at {where}"] * bool(where)
    return lines, _why(report)


def _why(report: str) -> str:
    """Return which rule a standstill comes from: batches and collectives are not named in it, as single messages are."""
    if re.search(r": waits in (send to|recv from) rank", report):
        return ONE_QUEUE
    return FIRST_USE if re.search(r": has returned$", report, re.M) else IN_ORDER


def _refusal(failed: RankFailed) -> tuple[list[str], str] | None:
    """Return what NCCL refuses; None if the rank failed for a reason of its own."""
    if not re.search(_REFUSED, failed.tracebacks.get(failed.rank, "")):
        return None
    lines = [line for line in str(failed).splitlines() if "nccl_rules.py" not in line]
    return [f"  {RAISES}", *(f"  {line}" for line in lines[:2])], ""


def _wrong_pair(ranks: Sequence[list[tuple[Message, str]]]) -> tuple[list[str], str] | None:
    """Return the first two messages of different tags that meet, because they are paired by order."""
    in_order: dict[tuple, list[tuple[Message, str]]] = defaultdict(list)
    for rank, messages in enumerate(ranks):
        for message, line in messages:
            ends = (rank, message.peer) if message.kind == "send" else (message.peer, rank)
            in_order[message.queue, ends, message.kind].append((message, line))
    for (queue, (sender, receiver), kind), sends in in_order.items():
        if kind == "recv":
            continue
        receives = in_order.get((queue, (sender, receiver), "recv"), [])
        for (sent, sent_at), (received, received_at) in zip(sends, receives):
            if sent.tag != received.tag:
                lines = [f"  rank {sender}: sends {sent_at}", f"  rank {receiver}: receives {received_at}"]
                tags = dict(tag=received.tag, sent_tag=sent.tag)
                return lines, BY_ORDER.format(num_ranks=len(ranks), sender=sender, receiver=receiver, **tags)
    return None
