"""Looks at worlds, made by hand: what a call would have learnt from its ranks."""

from dataclasses import replace

from labkit.launch.probe import Collective, PointToPoint, Snapshot
from labkit.launch.watchdog import Silence

RUNNING = Snapshot(
    stack=(("train.py", 3, "work"),),
    instruction=10,
    collectives=(),
    point_to_point=None,
    set_up=None,
    in_torch_distributed=False,
    posted={},
    groups={"0": ("default_pg", (0, 1)), "1": ("tp [0, 1]", (0, 1))},
    recorded=(4, 4),
    context_switches=7,
    cpu_seconds=1.0,
    elsewhere=False,
)


def in_collective(operation: str = "all_reduce", number: int = 1, group: str = "0", shapes: str = "[4]") -> Snapshot:
    call = Collective(group, number, operation, shapes, "float")
    return replace(RUNNING, collectives=(call,), in_torch_distributed=True)


def in_point_to_point(operation: str, peer: int | None, posted: dict | None = None, tag: int = 0) -> Snapshot:
    call = PointToPoint(operation, peer, tag, "0", (4,), "float32")
    return replace(RUNNING, point_to_point=call, posted={call.channel: 1, **(posted or {})})


def world(*snapshots: Snapshot | None, returned=()) -> Silence:
    answered = {rank: snapshot for rank, snapshot in enumerate(snapshots) if snapshot and rank not in returned}
    return Silence(len(snapshots), answered, frozenset(returned))
