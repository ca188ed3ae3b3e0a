"""Words who waits in a communication call, and who has left it or never came: a deadlock's report.

It is apart from the launcher, so that a picture of a deadlock can say the same words.
"""

from collections.abc import Sequence

NO_RANK_CAN_GO_ON = "no rank can go on."
SOME_HAVE_LEFT = (
    "Some ranks have left a collective: do its tensors differ in size? "
    "strict=True names both sizes."
)


def who_is_where(
    call: str,
    waiting: Sequence[int],
    left: Sequence[int] = (),
    never: Sequence[int] = (),
    returned: Sequence[int] = (),
) -> str:
    """Say of a call which ranks wait in it, have left it, never came, and returned without it.

    >>> who_is_where("broadcast", [0], left=[1, 3], returned=[2])
    '  broadcast: rank 0 waits; ranks 1, 3 have left it; rank 2 has returned without it'
    """
    parts = [_ranks(waiting, "waits", "wait")]
    if left:
        parts.append(_ranks(left, "has left it", "have left it"))
    if never:
        parts.append(_ranks(never, "never came", "never came"))
    if returned:
        parts.append(f"{_ranks(returned, 'has returned', 'have returned')} without it")
    return f"  {call}: {'; '.join(parts)}"


def with_states(why: str, states: Sequence[str]) -> str:
    """Say why, and then the state of each rank, each state once.

    >>> print(with_states("no rank can go on.", ["waits", "has returned", "waits"]))
    no rank can go on.
      rank 0, 2: waits
      rank 1: has returned
    """
    ranks: dict[str, list[str]] = {}
    for rank, state in enumerate(states):
        ranks.setdefault(state, []).append(str(rank))
    lines = [f"  rank {', '.join(there)}: {state}" for state, there in ranks.items()]
    return "\n".join([why, *lines])


def _ranks(ranks: Sequence[int], one: str, many: str) -> str:
    if len(ranks) == 1:
        return f"rank {ranks[0]} {one}"
    shown = ", ".join(map(str, ranks[:16]))
    if len(ranks) > 16:
        shown += ", ..."
    return f"ranks {shown} {many}"
