"""Traces of several ranks are one picture, and a rank that takes longer than its peers is named; noise names nobody."""

import io
import json
import os
import re
import time
from contextlib import redirect_stderr
from dataclasses import replace

import pytest
import torch.distributed as dist

from labkit.timeline.spans import Span
from labtrain import Trainer, training
from labtrain.profile import STEP, describe_slow_ranks, of_rank, own_seconds
from tests.labtrain.tiny import TINY


class Straggler(Trainer):
    """Rank 1 needs longer for every micro-batch, as it would on a core that something else uses too."""

    def loss(self, logits, targets):
        if dist.get_rank() == 1:
            time.sleep(0.2)
        return super().loss(logits, targets)


def run(config, kind=Trainer):
    """What a rank says on stderr about the steps that it profiles, and its losses."""
    with training(config) as trainer, redirect_stderr(io.StringIO()) as said:
        trainer.__class__ = kind
        losses = [step.loss for step in trainer.steps()]
    return said.getvalue(), losses


def test_only_the_rank_that_takes_longer_is_named(on_ranks, tmp_path):
    config = replace(TINY, steps=11, batch_size=4, profile_dir=str(tmp_path), profile_step_start=2)
    (slow, losses), (silent, _) = on_ranks(run, config, Straggler)
    assert slow.startswith(f"Traces are in {tmp_path}. Rank 1 computes ")
    assert slow.count("slow") == 1
    assert silent == ""
    (even, _), _ = on_ranks(run, config)
    assert even.startswith(f"Traces are in {tmp_path}. No rank is slow: none computes 1.3 times as long as its peers ")
    assert losses == on_ranks(run, replace(config, profile_dir=None))[0][1]


@pytest.mark.gloo  # the profiler has names for gloo's operations only
def test_the_files_of_all_ranks_are_one_picture(on_ranks, tmp_path):
    config = replace(TINY, pp_size=2, steps=4, profile_dir=str(tmp_path / "new"), profile_step_start=3)
    on_ranks(run, config)
    events = [json.loads((tmp_path / f"new/rank{rank}.json").read_text())["traceEvents"] for rank in range(2)]
    processes, ids = ([{event[key] for event in each if key in event} for each in events] for key in ("pid", "id"))
    assert len(processes[0]) == len(processes[1]) == 1
    assert not processes[0] & processes[1]
    assert all(ids)
    assert not ids[0] & ids[1]
    for rank, each in enumerate(events):
        names = [event["args"]["name"] for event in each if event["name"] == "process_name"]
        assert names == [f"rank {rank}"]
        assert {"step 3", "step 4", "F0", "F3", "B0", "gloo:all_reduce", "c10d::allreduce_"} <= {
            e["name"] for e in each
        }
        # Of two events in a row, one ends before the other starts, or lies inside it: Perfetto shows nothing else.
        rows = {}
        for event in (event for event in each if event["ph"] == "X"):
            rows.setdefault((event["pid"], event["tid"]), []).append((event["ts"], -event["dur"]))
        for row in rows.values():
            open_until = []
            for start, minus_seconds in sorted(row):
                while open_until and open_until[-1] <= start:
                    open_until.pop()
                assert not open_until or start - minus_seconds <= open_until[-1] + 0.01
                open_until.append(start - minus_seconds)

    # One clock: what rank 0 sends in its F is what rank 1 waits for.
    def times(rank, name, which):
        chosen = [event for event in events[rank] if event["name"] == name and event["ph"] == "X"]
        return sorted(event["ts"] + (event["dur"] if which == "end" else 0) for event in chosen)

    for number in range(4):
        assert times(0, f"F{number}", "start")[0] < times(1, f"for F{number}", "end")[0]
        assert times(1, f"B{number}", "start")[0] < times(0, f"for B{number}", "end")[0]


def test_own_time_is_the_step_without_its_waits():
    def step(start, *waits):
        inside = [Span(0, "wait", "all_reduce", start + first, start + last) for first, last in waits]
        work = [Span(0, "forward", "F0", start, start + 4), Span(0, "communication", "all_reduce", start, start + 9)]
        return [Span(0, STEP, "step 1", start, start + 10), *inside, *work]

    spans = [*step(0, (1, 3), (2, 4)), *step(100), Span(0, "wait", "in between", 110, 150), *step(200, (1, 2), (8, 10))]
    assert own_seconds(spans) == [7, 10, 7]  # what two waits cover counts once


EVEN, TWICE, THRICE = [1.0, 1.1, 0.9, 1.0, 1.0] * 2, [2.0] * 10, [3.0] * 10


@pytest.mark.parametrize(
    ("seconds", "stages", "said"),
    [
        ([EVEN, EVEN, EVEN, EVEN], [0] * 4, r"No rank is slow: .* \(at most 1.00 times\)\."),
        ([EVEN, EVEN, EVEN, [9.0, 1.0] * 5], [0] * 4, r"No rank is slow: .* \(at most 1.00 times\)\."),  # noise
        ([EVEN, TWICE, EVEN, EVEN], [0] * 4, r"Rank 1 computes 2.0 times as long as its peers: it is slow\."),
        (
            [EVEN, [9, 1.5, 2, 1.5, 0.5, *[1.5] * 5], EVEN],
            [0] * 3,
            r"Rank 1 computes 1.5 times as long as its peers: it is slow\.",
        ),
        ([EVEN, EVEN, TWICE, TWICE], [0, 0, 1, 1], r"No rank is slow: .* \(at most 1.00 times\)\."),
        ([EVEN, EVEN, TWICE, THRICE], [0, 0, 1, 1], r"Rank 3 computes 1.5 times as long as its peers: it is slow\."),
        (
            [EVEN, TWICE],
            [0, 1],
            r"Rank 1 computes 2.0 times .*: it is slow, or its stage, which no other rank has, is more work\.",
        ),
        ([TWICE, EVEN, EVEN, THRICE, EVEN], [0] * 5, r"Rank 0 computes .* slow\. Rank 3 computes .* slow\."),
        ([EVEN], [0], "To see which ranks are slow takes at least 2 ranks and 10 steps."),
        ([[1] * 9, [5] * 9], [0, 0], "To see which ranks are slow takes at least 2 ranks and 10 steps."),
    ],
)
def test_a_rank_is_named_if_nearly_every_step_is_slow(seconds, stages, said):
    assert re.fullmatch(said, describe_slow_ranks(seconds, stages))


def test_gpus_are_processes_of_their_rank():
    kernel = {"ph": "X", "name": "gemm", "tid": 7, "ts": 0.0, "dur": 1.0}
    name = {"ph": "M", "name": "process_name", "tid": 0}
    events = [{**name, "pid": pid, "args": {"name": "python"}} for pid in (os.getpid(), 0, 1)]
    events += [{**kernel, "pid": 1}, {"ph": "i", "name": "Iteration Start", "pid": "Traces"}]
    changed = of_rank(3, {"traceEvents": events})["traceEvents"]
    assert [event["pid"] for event in changed] == [301, 302, 303, 303]
    assert {event["args"]["name"] for event in changed if event["name"] == "process_name"} == {"rank 3"}


def test_a_folder_that_cannot_be_written_is_said(on_ranks, tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(Exception, match=r"profile_dir=\S+file/in cannot be written \(Not a directory\): name a folder"):
        on_ranks(run, replace(TINY, profile_dir=str(tmp_path / "file/in"), profile_step_start=1))
