"""Checks a schedule: every rank has its ops, and neither ops nor messages can stand still."""

from functools import lru_cache

from labkit.schedules.lowered import check_messages, lowered
from labkit.schedules.schedule import Op, Schedule
from labkit.sizes import counted


@lru_cache(maxsize=64)  # a pipeline asks before every step
def check(schedule: Schedule, allow_deadlock: bool = False) -> None:
    """Raise a ValueError unless each rank has each op once, after those on this rank that it needs,
    and all can finish.

    Messages are looked at too, by NCCL's rules: as `lowered` places them with ``recv_ahead``, with
    a queue for each channel, and without, with one queue for each pair of ranks. With
    ``allow_deadlock``, ranks may wait for each other.
    """
    if not isinstance(schedule, Schedule):
        raise ValueError(
            f"{schedule!r} is not a Schedule: make one, such as labkit.schedules.one_f_one_b(4, 8)"
        )
    if len(schedule.ranks) != schedule.pp_size:
        has = (
            f"has lists for {counted(len(schedule.ranks), 'rank')}, but pp_size={schedule.pp_size}"
        )
        raise ValueError(f"{schedule.name!r} {has}: give each rank one list")
    _check_lists(schedule)
    if not allow_deadlock:
        for _ in schedule.in_order():
            pass
        check_messages(schedule.name, lowered(schedule))
        check_messages(schedule.name, lowered(schedule, recv_ahead=False), one_queue_per_pair=True)


def _check_lists(schedule: Schedule) -> None:
    """Raise a ValueError unless each rank has each op once, after those on this rank that it
    needs.
    """
    m = schedule.num_micro_batches
    v = schedule.num_chunks
    wanted = dict.fromkeys(
        Op(kind, i, chunk) for i in range(m) for chunk in range(v) for kind in schedule.kinds
    )
    passes = counted(m, "micro-batch") + (f" and {counted(v, 'chunk')}" if v > 1 else "")
    rule = f"each rank runs {', '.join(schedule.kinds)} once for each of {passes}"
    for rank, ops in enumerate(schedule.ranks):
        position: dict[Op, int] = {}
        for index, op in enumerate(ops):
            if not isinstance(op, Op) or op not in wanted:
                raise ValueError(
                    f"rank {rank} has {op}, which this schedule has no use for: {rule}"
                )
            if op in position:
                raise ValueError(f"rank {rank} has {op} {ops.count(op)} times: {rule}")
            position[op] = index
        if missing := [op for op in wanted if op not in position]:
            more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
            raise ValueError(f"rank {rank} lacks {missing[0]}{more}: {rule}")
        for op in ops:
            for other, need in schedule.needs(rank, op):
                if other == rank and position[op] < position[need]:
                    raise ValueError(
                        f"rank {rank} has {op} before {need}, whose result it needs: swap them"
                    )
