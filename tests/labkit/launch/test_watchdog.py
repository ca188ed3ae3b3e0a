"""The judge of silent worlds, on snapshots made by hand: each test is a world, no process is started."""

from dataclasses import replace

import pytest

from labkit.launch.probe import SetUp
from labkit.launch.watchdog import Silence, Watchdog
from tests.labkit.launch.looks import RUNNING, in_collective, in_point_to_point, world


def verdicts(*looks: Silence) -> list[str]:
    """What the watchdog says of a series of looks, half a second apart."""
    watchdog = Watchdog(now=0.0)
    return [watchdog.judge(2.0 + 0.5 * i, look) for i, look in enumerate(looks)]


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
    "all in the same collective, and nothing moves": world(in_collective(), in_collective()),
    "asynchronous": world(replace(in_collective(), in_torch_distributed=False), None, returned=[1]),
}

ABLE_TO_GO_ON = {
    "computing": world(RUNNING, in_collective()),
    "no answer": world(None, in_collective()),
    "one is past the call that the other is in, and its thread waits for a core": world(
        replace(in_collective(number=5), busy=True), in_collective(number=6)
    ),
    "bytes are on their way to a receive": world(
        replace(in_point_to_point("recv", 1), busy=True), in_point_to_point("recv", 0)
    ),
    "one has returned, and its bytes are still on their way": world(
        in_collective(), replace(RUNNING, busy=True), returned=[1]
    ),
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
        {"ran": (8, 3)},
        {"ran": (7, 4)},
        {"stack": (("train.py", 4, "work"),)},
    ],
    ids=str,
)
def test_no_deadlock_while_anything_runs(change):
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
