"""Looks at worlds, made by hand: what a call would have learnt from its ranks."""

from dataclasses import replace

from labkit.launch.probe import Collective, PointToPoint, Snapshot
from labkit.launch.watchdog import Silence

RUNNING = Snapshot(
    stack=(("train.py", 3, "work"),),
    collectives=(),
    point_to_point=None,
    set_up=None,
    in_torch_distributed=False,
    groups={"0": ("default_pg", (0, 1)), "1": ("tp [0, 1]", (0, 1))},
    ran=(7, 3),
    busy=False,
    elsewhere=False,
)


def in_collective(operation: str = "all_reduce", number: int = 1, group: str = "0", shapes: str = "[4]") -> Snapshot:
    call = Collective(group, number, operation, shapes, "float")
    return replace(RUNNING, collectives=(call,), in_torch_distributed=True)


def in_point_to_point(operation: str, peer: int | None, tag: int = 0) -> Snapshot:
    return replace(RUNNING, point_to_point=PointToPoint(operation, peer, tag, (4,), "float32"))


def world(*snapshots: Snapshot | None, returned=()) -> Silence:
    answered = {rank: snapshot for rank, snapshot in enumerate(snapshots) if snapshot}
    return Silence(len(snapshots), answered, frozenset(returned))
