"""Messages by NCCL's rules, made of gloo's: what they demand of a pipeline, where there are no GPUs to ask.

There are no tags. Two ranks of a group share one queue for both directions, so a channel must have one direction only.
They connect at their first message, and who comes first stands still until the other comes. A message is done when the
other side receives, and until then the next one in its channel holds up its rank: as hardware queues do on a GPU, in
the worst case. Source: NCCL's documentation of point-to-point, and `pointToPoint` in PyTorch's ProcessGroupNCCL;
`ncclTransportP2pSetup` in NCCL.
"""

from contextlib import contextmanager

import torch
import torch.distributed as dist

HELLO, MESSAGE, RECEIPT = 1, 2, 3  # gloo's tags


class _Message:
    def __init__(self, work, receipt):
        self.works, self.is_done = (work, receipt), False

    def is_completed(self):
        return self.is_done  # gloo would not tell earlier

    def wait(self):
        if not self.is_done:  # gloo's sends can be waited for once
            self.is_done = True
            for work in self.works:
                work.wait()


@contextmanager
def as_on_nccl():
    """Inside the block, torch.distributed's send, recv, isend and irecv keep to these rules on this rank."""
    gloo = dist.send, dist.recv, dist.isend, dist.irecv
    isend, irecv = gloo[2:]
    connected, greeted, sent, received = {}, set(), {}, {}

    def connect(group, other, direction):
        assert connected.setdefault((group, other), direction) == direction, "two directions share a channel"
        if (group, other) not in greeted:
            greeted.add((group, other))
            greeting = isend(torch.zeros(1), group=group, group_dst=other, tag=HELLO)
            irecv(torch.zeros(1), group=group, group_src=other, tag=HELLO).wait()
            greeting.wait()

    def send(tensor, *, group, group_dst, tag=0):
        connect(group, group_dst, "there")
        if (group, group_dst) in sent:
            sent[group, group_dst].wait()
        receipt = irecv(torch.zeros(1), group=group, group_src=group_dst, tag=RECEIPT)
        work = isend(tensor, group=group, group_dst=group_dst, tag=MESSAGE)
        sent[group, group_dst] = _Message(work, receipt)
        return sent[group, group_dst]

    def receive(tensor, *, group, group_src, tag=0):
        connect(group, group_src, "here")
        before = received.get((group, group_src))
        assert before is None or before.is_done, "a receive would stand in a queue behind another"
        receipt = isend(torch.zeros(1), group=group, group_dst=group_src, tag=RECEIPT)
        work = irecv(tensor, group=group, group_src=group_src, tag=MESSAGE)
        received[group, group_src] = _Message(work, receipt)
        return received[group, group_src]

    dist.isend, dist.irecv = send, receive
    dist.send = lambda *args, **kwargs: send(*args, **kwargs).wait()
    dist.recv = lambda *args, **kwargs: receive(*args, **kwargs).wait()
    try:
        yield
    finally:
        dist.send, dist.recv, dist.isend, dist.irecv = gloo
