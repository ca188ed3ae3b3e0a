"""The judge of silent worlds, on snapshots made by hand: each test is a world, no process is started."""

from dataclasses import replace

import pytest

from labkit import communication
from labkit.launch.probe import Collective, PointToPoint, SetUp, Snapshot
from labkit.launch.report import deadlock_report, slow_note
from labkit.launch.watchdog import Silence, Watchdog

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


def verdicts(*looks: Silence) -> list[str]:
    """What the watchdog says of a series of looks, half a second apart."""
    watchdog = Watchdog(now=0.0)
    return [watchdog.judge(2.0 + 0.5 * i, look) for i, look in enumerate(looks)]


def world(*snapshots: Snapshot | None, returned=()) -> Silence:
    answered = {rank: snapshot for rank, snapshot in enumerate(snapshots) if snapshot and rank not in returned}
    return Silence(len(snapshots), answered, frozenset(returned))


STUCK = {
    "a rank has returned": world(in_collective(), None, returned=[1]),
    "different numbers": world(in_collective(number=1), in_collective(number=2)),
    "different operations": world(in_collective("all_reduce"), in_collective("broadcast")),
    "different groups": world(in_collective(group="0"), in_collective(group="1")),
    "a receive and a collective": world(in_collective(), in_point_to_point("recv", 0)),
    "two receives": world(in_point_to_point("recv", 1), in_point_to_point("recv", 0)),
    "two sends": world(in_point_to_point("send", 1), in_point_to_point("send", 0)),
    "another tag": world(in_point_to_point("send", 1, tag=1), in_point_to_point("recv", 0, tag=2)),
    "a receive from one who has returned": world(in_point_to_point("recv", 1), None, returned=[1]),
    "a receive from anyone": world(in_point_to_point("recv", None), in_collective()),
    "asynchronous": world(replace(in_collective(), in_torch_distributed=False), None, returned=[1]),
}

ABLE_TO_GO_ON = {
    "computing": world(RUNNING, in_collective()),
    "no answer": world(None, in_collective()),
    "all in the same collective": world(in_collective(), in_collective()),
    "all in it, their shapes differ (scatter)": world(in_collective(shapes="[4]"), in_collective(shapes="")),
    "a send meets its receive": world(in_point_to_point("send", 1), in_point_to_point("recv", 0)),
    "its isend was posted before": world(
        in_point_to_point("recv", 1, posted={("send", 1, 0, "0"): 1}), in_point_to_point("recv", 0)
    ),
    "anyone's send": world(in_point_to_point("recv", None), in_point_to_point("send", 0)),
    "sleeps beside an asynchronous collective": world(
        replace(in_collective(), in_torch_distributed=False, elsewhere=True), in_point_to_point("recv", 0)
    ),
    "writes a file inside torch.distributed": world(
        replace(RUNNING, in_torch_distributed=True, elsewhere=True), in_collective()
    ),
    "everybody joins": world(*[replace(RUNNING, set_up=SetUp("init_process_group", None))] * 2),
    "everybody makes the same group": world(*[replace(RUNNING, set_up=SetUp("new_group", (0, 1)))] * 2),
}


@pytest.mark.parametrize("look", STUCK.values(), ids=STUCK.keys())
def test_deadlock_needs_two_looks_between_which_nothing_ran(look):
    assert verdicts(look, look) == ["", "deadlock"]


@pytest.mark.parametrize(
    "change",
    [
        {"context_switches": 8},
        {"cpu_seconds": 1.3},
        {"instruction": 12},
        {"recorded": (5, 4)},
        {"stack": (("train.py", 4, "work"),)},
    ],
    ids=lambda change: next(iter(change)),
)
def test_no_deadlock_while_anything_moves(change):
    stuck = STUCK["different operations"]
    moved = replace(stuck, snapshots={**stuck.snapshots, 1: replace(stuck.snapshots[1], **change)})
    assert verdicts(stuck, moved, moved) == ["", "", "deadlock"]


@pytest.mark.parametrize("look", ABLE_TO_GO_ON.values(), ids=ABLE_TO_GO_ON.keys())
def test_no_deadlock_while_somebody_can_go_on(look):
    assert "deadlock" not in verdicts(*[look] * 60)


def test_set_up_is_watched_longer():
    orders = [replace(RUNNING, set_up=SetUp("new_group", ranks)) for ranks in ((0, 1), (1, 2))]
    assert verdicts(*[world(*orders)] * 4) == ["", "", "", "deadlock"]


def test_joining_alone_is_a_deadlock():
    look = world(replace(RUNNING, set_up=SetUp("init_process_group", None)), None, returned=[1])
    assert verdicts(*[look] * 4)[-1] == "deadlock"


def test_a_slow_rank_is_noted_after_five_seconds_and_again_after_thirty():
    said = [2.0 + 0.5 * i for i, verdict in enumerate(verdicts(*[world(RUNNING, in_collective())] * 100)) if verdict]
    assert said == [5.5, 35.5]


def test_a_rank_that_computes_alone_is_nothing_to_note():
    assert verdicts(*[world(RUNNING, None, returned=[1])] * 30) == [""] * 30


def test_a_sign_of_life_starts_the_clock_again():
    watchdog = Watchdog(now=0.0)
    assert not watchdog.is_due(1.9) and watchdog.is_due(2.0)
    watchdog.sign_of_life(3.0)
    assert not watchdog.is_due(4.9) and watchdog.is_due(5.0)


def test_report_says_who_waits_and_who_never_came():
    report = deadlock_report(STUCK["different groups"]).splitlines()
    assert report[1:3] == [
        "  all_reduce number 1 (float [4]) of the world [0, 1]: rank 0 waits; rank 1 never came",
        "  all_reduce number 1 (float [4]) of tp [0, 1]: rank 1 waits; rank 0 never came",
    ]
    assert report[3].startswith(
        "  rank 0: waits in all_reduce number 1 (float [4]) of the world [0, 1], at train.py, line 3"
    )


def test_report_names_the_learners_line_and_where_in_labkit():
    deeper = (("train.py", 3, "work"), (communication.__file__, 5, "wait"), ("/lib/python3.11/threading.py", 1, "wait"))
    report = deadlock_report(world(replace(in_collective(), stack=deeper), None, returned=[1]))
    assert "at train.py, line 3, in work, in labkit/communication.py, line 5, in wait" in report


def test_report_tells_a_group_of_all_ranks_from_the_world():
    look = world(in_collective(), in_collective(group="2"))
    groups = {**RUNNING.groups, "2": ("undefined", (0, 1))}
    report = deadlock_report(replace(look, snapshots={r: replace(s, groups=groups) for r, s in look.snapshots.items()}))
    assert "all_reduce number 1 (float [4]) of the world [0, 1]: rank 0 waits" in report
    assert "all_reduce number 1 (float [4]) of a group [0, 1]: rank 1 waits" in report


def test_report_of_point_to_point():
    report = deadlock_report(STUCK["another tag"])
    assert "rank 0: waits in send to rank 1 (float32 [4], tag 1)" in report
    assert "rank 1: waits in recv from rank 0 (float32 [4], tag 2)" in report


def test_note_says_where_the_slow_rank_is():
    note = slow_note(world(RUNNING, in_collective()), 5.2)
    assert "No news for 5 s" in note
    assert "rank 0: runs at train.py, line 3, in work" in note
