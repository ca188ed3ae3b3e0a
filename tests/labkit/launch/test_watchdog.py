"""The judge of silent worlds, on snapshots made by hand: each test is a world, no process is started."""

import random
from dataclasses import replace

import pytest

from labkit.launch.probe import Snapshot, Standing
from labkit.launch.watchdog import Look, Watchdog
from tests.labkit.launch.looks import LOCKED, RUNNING, at, in_call, in_collective, with_thread, world
from tests.support.sweep import IS_SWEEP

RETURNED = LOCKED  # its main thread waits for the next call


def verdicts(*looks: Look) -> list[str]:
    """What the watchdog says of a series of looks, half a second apart."""
    watchdog = Watchdog(now=0.0)
    return [watchdog.judge(2.0 + 0.5 * i, look) for i, look in enumerate(looks)]


STUCK = {
    "a rank has returned": world(in_collective(), RETURNED, returned=[1]),
    "returned, where Linux does not tell what a thread waits in": world(in_collective(), RUNNING, returned=[1]),
    "different numbers": world(in_collective(number=1), in_collective(number=2)),
    "different operations": world(in_collective("all_reduce"), in_collective("broadcast")),
    "different groups": world(in_collective(group="0"), in_collective(group="1")),
    "a receive and a collective": world(in_collective(), in_call("recv from rank 0")),
    "two receives": world(in_call("recv from rank 1"), in_call("recv from rank 0")),
    "two sends": world(in_call("send to rank 1"), in_call("send to rank 0")),
    "a different tag": world(in_call("send to rank 1 tag 1"), in_call("recv from rank 0 tag 2")),
    "a receive from one who has returned": world(in_call("recv from rank 1"), RETURNED, returned=[1]),
    "a receive from anyone": world(in_call("recv from any rank"), in_collective()),
    "all in the same collective, and nothing moves": world(in_collective(), in_collective()),
    "set-up in different orders": world(in_call("new_group of ranks [0, 1]"), in_call("new_group of ranks [1, 2]")),
    "set-up alone": world(in_call("init_process_group"), RETURNED, returned=[1]),
    "its thread waits in communication, and the main thread for that": world(
        with_thread(LOCKED, "waits"), in_collective()
    ),
    "returned, and its thread waits": world(in_collective(), with_thread(RETURNED, "waits"), returned=[1]),
}

ABLE_TO_GO_ON = {
    "computing": world(RUNNING, in_collective()),
    "no answer": world(None, in_collective()),
    "returned, and no answer": world(in_collective(), None, returned=[1]),
    "one is past the call that the other is in, and its thread waits for a core": world(
        replace(in_collective(number=5), busy=True), in_collective(number=6)
    ),
    "one has returned, and gloo's thread still sends for it": world(
        in_collective(), replace(RETURNED, busy=True), returned=[1]
    ),
    "sleeps beside an asynchronous collective": world(
        replace(in_collective(), threads=RUNNING.threads), in_call("recv from rank 0")
    ),
    "a helper thread sleeps, and will send": world(
        with_thread(in_call("recv from rank 1"), "runs"), in_call("recv from rank 0")
    ),
    "a helper thread of one that has returned sleeps, and will send": world(
        with_thread(RETURNED, "runs"), in_call("recv from rank 0"), returned=[0]
    ),
    "a queue that a helper thread will fill": world(with_thread(LOCKED, "runs"), in_collective()),
    "a wait with a time-out of its own": world(RUNNING, in_call("recv from rank 0")),
}


PAST_THIRD = replace(LOCKED, started={"0": 3})
NOT_AT_REST = {
    "no answer": world(PAST_THIRD, None),
    "in a collective": world(PAST_THIRD, in_collective(number=3)),
    "a thread of its own": world(PAST_THIRD, with_thread(PAST_THIRD, "runs")),
    "a request that nobody has waited for": world(PAST_THIRD, replace(PAST_THIRD, unsettled=True)),
    "one collective fewer": world(PAST_THIRD, replace(LOCKED, started={"0": 2, "1": 1})),
}


@pytest.mark.parametrize("look", NOT_AT_REST.values(), ids=NOT_AT_REST.keys())
def test_ranks_are_at_rest_when_each_group_is_equally_far_and_nothing_is_on_its_way(look):
    assert not look.is_at_rest()
    assert world(PAST_THIRD, replace(LOCKED, started={"0": 3, "1": 1}), RUNNING).is_at_rest()


@pytest.mark.parametrize("look", STUCK.values(), ids=STUCK.keys())
def test_deadlock_needs_three_looks_between_which_nothing_ran(look):
    assert verdicts(look, look, look) == ["", "", "deadlock"]


@pytest.mark.parametrize(
    "moved", [lambda rank: replace(rank, ran=(8, 3)), lambda rank: at(rank, (("train.py", 4, "work"),))]
)
def test_no_deadlock_while_anything_runs(moved):
    stuck = STUCK["different operations"]
    later = replace(stuck, snapshots={**stuck.snapshots, 1: moved(stuck.snapshots[1])})
    assert verdicts(stuck, stuck, later, later, later) == ["", "", "", "", "deadlock"]


@pytest.mark.parametrize("look", ABLE_TO_GO_ON.values(), ids=ABLE_TO_GO_ON.keys())
def test_no_deadlock_while_somebody_can_go_on(look):
    assert "deadlock" not in verdicts(*[look] * 60)


@pytest.fixture(autouse=True)
def notes(monkeypatch):
    monkeypatch.delenv("LABKIT_NO_NOTES", raising=False)  # `make test` sets it


def times_of_notes(look: Look) -> list[float]:
    return [2.0 + 0.5 * i for i, verdict in enumerate(verdicts(*[look] * 100)) if verdict == "note"]


def test_a_slow_rank_is_noted_after_five_seconds_and_again_after_thirty():
    assert times_of_notes(world(RUNNING, in_collective())) == [5.5, 35.5]


def test_nothing_is_noted_where_outputs_are_compared(monkeypatch):
    monkeypatch.setenv("LABKIT_NO_NOTES", "1")
    assert times_of_notes(world(RUNNING, in_collective())) == []


def test_a_rank_that_computes_while_nobody_waits_is_noted_before_ten_seconds():
    assert times_of_notes(world(RUNNING, RETURNED, returned=[1])) == [9.5, 39.5]


def test_a_sign_of_life_starts_the_clock_again(monkeypatch):
    monkeypatch.setattr("labkit.launch.watchdog._QUIET_SECONDS", 2.0)
    watchdog = Watchdog(now=0.0)
    assert not watchdog.is_due(1.9) and watchdog.is_due(2.0)
    watchdog.sign_of_life(3.0)
    assert not watchdog.is_due(4.9) and watchdog.is_due(5.0)


class Program:
    """A random legal program on ranks without processes: it tells what a probe would see, and whether it is stuck."""

    def __init__(self, seed: int, num_ranks: int):
        self.draw = random.Random(seed)
        self.todo: list[list[tuple]] = [[] for _ in range(num_ranks)]  # of each rank, in order
        self.state, self.until = ["next"] * num_ranks, [0.0] * num_ranks
        self.ran, self.now = [0] * num_ranks, 0.0
        for number in range(self.draw.randint(3, 12)):
            members = self.draw.sample(range(num_ranks), self.draw.randint(2, num_ranks))
            for rank in members:
                if self.draw.random() < 0.5:
                    busy = self.draw.random() < 0.5
                    self.todo[rank].append(("compute" if busy else "sleep", self.draw.choice([0.1, 0.6, 3.0])))
                self.todo[rank].append(("meet", number, frozenset(members), self.draw.choice([0.0, 0.1, 0.7])))

    def plant(self) -> None:
        """Take one meeting away from one of its members."""
        rank = self.draw.choice([rank for rank, todo in enumerate(self.todo) if any(op[0] == "meet" for op in todo)])
        self.todo[rank].remove(self.draw.choice([op for op in self.todo[rank] if op[0] == "meet"]))

    def step(self) -> None:
        """Let a tenth of a second go by."""
        self.now += 0.1
        for rank, todo in enumerate(self.todo):
            if self.state[rank] in ("compute", "sleep", "travels") and self.now >= self.until[rank]:
                todo.pop(0)
                self.state[rank], self.ran[rank] = "next", self.ran[rank] + 1
            if self.state[rank] == "next":
                self.state[rank] = todo[0][0] if todo else "returned"
                self.ran[rank] += 1
                if self.state[rank] in ("compute", "sleep"):
                    self.until[rank] = self.now + todo[0][1]
        for rank, todo in enumerate(self.todo):
            if self.state[rank] == "meet":
                _, number, members, seconds = todo[0]
                meeting = [peer for peer in members if self.state[peer] == "meet"]
                there = [peer for peer in meeting if self.todo[peer][0][1] == number]
                if len(there) == len(members):
                    for peer in there:  # gloo's threads, or bytes in a socket, are seen until the last has its own
                        self.state[peer] = "travels"
                        self.until[peer] = self.now + seconds + 0.1 * self.draw.random()

    def look(self) -> Look:
        seen = {
            "compute": replace(RUNNING, busy=True),
            "sleep": RUNNING,
            "meet": in_collective(),
            "travels": replace(in_collective(), busy=True),
            "next": replace(RUNNING, busy=True),
            "returned": RETURNED,
        }
        snapshots = [replace(seen[state], ran=(ran,)) for state, ran in zip(self.state, self.ran)]
        return world(*snapshots, returned=[rank for rank, state in enumerate(self.state) if state == "returned"])

    def verdict(self, seconds: float = 120.0) -> str:
        """Run to the end, with a look each half second. Return "deadlock" or "returned"."""
        watchdog = Watchdog(now=0.0)
        while set(self.state) != {"returned"} and self.now < seconds:
            self.step()
            if watchdog.is_due(self.now) and watchdog.judge(self.now, self.look()) == "deadlock":
                return "deadlock"
        return "returned"

    def is_stuck(self) -> bool:
        return set(self.state) <= {"meet", "returned"} and "meet" in self.state


@pytest.mark.parametrize("seed", range(0, 300, 1 if IS_SWEEP else 3))
def test_random_programs_are_called_stuck_only_where_a_meeting_was_taken_from_them(seed):
    legal, planted = (Program(seed, num_ranks=2 + seed % 4) for _ in range(2))
    assert legal.verdict() == "returned"
    planted.plant()
    assert planted.verdict() == "deadlock" and planted.is_stuck()


def standing(number: int = 1, limit_seconds: float = 10.0) -> Snapshot:
    """Stand in a call of NCCL's, which spins: at every moment the rank could run."""
    call = Standing((number,), limit_seconds, "all_reduce of tp [0, 1]", (0, 1))
    return replace(RUNNING, threads=(replace(RUNNING.threads[0], standing=call),), busy=True)


def first_overdue(*snapshots: Snapshot) -> float | None:
    """Return when a rank is called overdue that shows these snapshots in turn, while the other runs."""
    looks = (world(snapshots[number % len(snapshots)], RUNNING) for number in range(60))
    return next((0.5 * i for i, verdict in enumerate(verdicts(*looks)) if verdict == "overdue"), None)


def test_a_rank_is_overdue_only_when_it_stands_in_one_call_for_longer_than_its_group_allows():
    assert first_overdue(standing()) == 15.5  # five seconds later: where NCCL gives up by itself, it does so first
    assert first_overdue(standing(1), standing(2)) is None  # a loop: looks meet it at the same line
    assert first_overdue(standing(limit_seconds=3600)) is None
    assert first_overdue(RUNNING) is None
    watchdog = Watchdog(now=0.0)
    for now in range(2, 17, 7):
        watchdog.judge(now, world(standing(), RUNNING))
        watchdog.sign_of_life(now)  # of the other rank
    assert watchdog.judge(17.5, world(standing(), RUNNING)) == "overdue"
