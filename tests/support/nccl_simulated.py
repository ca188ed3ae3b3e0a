"""Runs a schedule's messages by NCCL's rules : `Messages` as it is, but with threads for ranks.

It takes milliseconds, so tests can look at hundreds of schedules. Nothing is computed: a message names who sent it.
"""

from contextlib import nullcontext
from threading import Semaphore, Thread
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist

from labkit.pipeline.messages import Messages


class Stuck(Exception):
    """No rank can go on."""


class Turns:
    """Threads that take turns: one runs until it has to wait, or ends."""

    def __init__(self):
        self.waiting = []  # for what, and how to be woken

    def run(self, programs):
        """Run all to their end, and return the errors that they raised."""
        errors, threads = [], []

        def run_one(program, woken):
            woken.acquire()
            try:
                program()
            except Exception as error:  # the caller raises it
                errors.append(error)
            self.pass_on()

        for program in programs:
            self.waiting.append((lambda: True, Semaphore(0)))
            threads.append(Thread(target=run_one, args=(program, self.waiting[-1][1])))
            threads[-1].start()
        self.pass_on()
        for thread in threads:
            thread.join()
        return errors

    def wait_until(self, is_true):
        if is_true():
            return
        self.waiting.append((is_true, Semaphore(0)))
        woken = self.waiting[-1][1]
        self.pass_on()
        woken.acquire()
        if not is_true():
            raise Stuck

    def pass_on(self):
        """Wake one that can go on; if nobody can, one that will see that."""
        if self.waiting:
            index = next((index for index, (is_true, _) in enumerate(self.waiting) if is_true()), 0)
            self.waiting.pop(index)[1].release()


class Channel:
    """What is sent first arrives where a receive is posted first, whatever it was meant for."""

    def __init__(self, turns):
        self.turns, self.sent, self.posted, self.num_here = turns, [], [], 0

    def send(self, tensor):
        self.wait_until_posted(len(self.sent))
        self.sent.append(tensor)
        place = len(self.sent)
        return SimpleNamespace(wait=lambda: self.wait_until_posted(place), is_completed=lambda: False)

    def receive(self, tensor):
        assert self.num_here == len(self.posted), "a receive would stand in a queue behind another"
        self.posted.append(tensor)
        place = len(self.posted)
        return SimpleNamespace(wait=lambda: self.wait_until_here(place))

    def wait_until_posted(self, count):
        self.turns.wait_until(lambda: len(self.posted) >= count)

    def wait_until_here(self, count):
        self.turns.wait_until(lambda: len(self.sent) >= count)
        if self.num_here < count:
            self.num_here = count
            self.posted[count - 1].copy_(self.sent[count - 1])  # fails if only one of the two is a shape


def run_simulated(schedule, is_known):
    """Run a schedule's messages, with shapes that are known or sent; return how many receives each rank had posted.

    That is at most, of messages whose op was still to come.

    Raises `Stuck` if ranks wait for each other for ever, an AssertionError if an op gets a message not meant for it.
    """
    turns, channels, most = Turns(), {}, [0] * schedule.pp_size
    places = [(rank, op) for rank, ops in enumerate(schedule.ranks) for op in ops]
    number = {place: float(index) for index, place in enumerate(places)}  # exact in float32 up to 2^24
    inputs = torch.zeros(schedule.num_micro_batches, 1).split(1)
    activation = (torch.float32, torch.Size([1])) if is_known else None

    def run_rank(rank):
        groups: Any = SimpleNamespace(coords=SimpleNamespace(pp=rank), has_channels=True, connect=lambda *_: None)
        groups.channel = lambda *key: channels.setdefault(key, Channel(turns))
        messages = Messages(schedule, groups, inputs, activation, lambda *_: nullcontext(), recv_prefetch=1)
        for op in schedule.ranks[rank]:
            arrived, sender = messages.take(op), schedule.neighbor(rank, op, -1)
            wanted = None if sender is None else torch.tensor([number[sender]])
            assert arrived == wanted, f"rank {rank} got a different op's message for {op}"
            most[rank] = max(most[rank], sum(len(posted) for _, posted in messages.recvs.values()))
            messages.send(op, torch.tensor([number[rank, op]]))
        messages.flush()

    isend, irecv = dist.isend, dist.irecv
    dist.isend = lambda tensor, group, **_: group.send(tensor)
    dist.irecv = lambda tensor, group, **_: group.receive(tensor)
    try:
        errors = turns.run([lambda rank=rank: run_rank(rank) for rank in range(schedule.pp_size)])
    finally:
        dist.isend, dist.irecv = isend, irecv
    for error in errors:
        raise error
    return most
