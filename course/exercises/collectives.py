"""The exercises of notebook 02: an all-reduce from its two halves, and one from send and receive alone.

The functions named my_... are the solutions; those with a leading underscore make the typical mistakes.
"""

import torch
import torch.distributed as dist

from course.exercises.base import Mistake
from course.exercises.on_ranks import RankExercise, only
from course.sizing.ring import bus_factor
from labkit.communication import CommunicationLog
from labkit.groups import local_device


def my_all_reduce(x):
    world_size = dist.get_world_size()
    pieces = list(x.chunk(world_size))

    my_sum = torch.empty_like(pieces[0])
    dist.reduce_scatter(my_sum, pieces)  # piece number `rank` of everybody, added up

    sums = [torch.empty_like(my_sum) for _ in range(world_size)]
    dist.all_gather(sums, my_sum)
    return torch.cat(sums)


def my_ring_all_reduce(x):
    rank, world_size = dist.get_rank(), dist.get_world_size()
    right, left = (rank + 1) % world_size, (rank - 1) % world_size
    pieces = list(x.clone().chunk(world_size))
    arriving = torch.empty_like(pieces[0])

    for step in range(2 * (world_size - 1)):
        outgoing = (rank - step) % world_size  # the piece that arrived in the step before
        incoming = (rank - step - 1) % world_size
        send = dist.P2POp(dist.isend, pieces[outgoing], right)
        receive = dist.P2POp(dist.irecv, arriving, left)
        for request in dist.batch_isend_irecv([send, receive]):
            request.wait()
        if step < world_size - 1:  # first time around: add
            pieces[incoming] += arriving
        else:  # second time around: the sums are complete, keep them
            pieces[incoming].copy_(arriving)
    return torch.cat(pieces)


def example_tensor(num_elements: int) -> tuple[torch.Tensor]:
    """What each rank starts from: 0, 1, 2, ... plus its rank."""
    return (torch.arange(num_elements, dtype=torch.float32, device=local_device()) + dist.get_rank(),)


def _reduce_scatter_alone(x):
    pieces = list(x.chunk(dist.get_world_size()))
    my_sum = torch.empty_like(pieces[0])
    dist.reduce_scatter(my_sum, pieces)
    return my_sum


def _all_gather_of_own_pieces(x):
    pieces = list(x.chunk(dist.get_world_size()))
    gathered = [torch.empty_like(piece) for piece in pieces]
    dist.all_gather(gathered, pieces[dist.get_rank()].contiguous())
    return torch.cat(gathered)


def _all_gather_of_everything(x):
    gathered = [torch.empty_like(x) for _ in range(dist.get_world_size())]
    dist.all_gather(gathered, x)
    return torch.cat(gathered)


def _ring(x, num_steps: int, piece_of_step, keeps_from: int):
    """A ring whose loop can be wrong: in its length, in the piece it sends, in when it stops adding."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    pieces = list(x.clone().chunk(world_size))
    arriving = torch.empty_like(pieces[0])
    for step in range(num_steps):
        send = dist.P2POp(dist.isend, pieces[piece_of_step(rank, step) % world_size].clone(), (rank + 1) % world_size)
        receive = dist.P2POp(dist.irecv, arriving, (rank - 1) % world_size)
        for request in dist.batch_isend_irecv([send, receive]):
            request.wait()
        incoming = pieces[piece_of_step((rank - 1) % world_size, step) % world_size]
        incoming.copy_(arriving if step >= keeps_from else incoming + arriving)
    return torch.cat(pieces)


def _ring_once_around(x):
    n = dist.get_world_size()
    return _ring(x, n - 1, lambda rank, step: rank - step, keeps_from=n)


def _ring_one_step_short(x):
    n = dist.get_world_size()
    return _ring(x, 2 * (n - 1) - 1, lambda rank, step: rank - step, keeps_from=n - 1)


def _ring_that_always_adds(x):
    n = dist.get_world_size()
    return _ring(x, 2 * (n - 1), lambda rank, step: rank - step, keeps_from=2 * n)


def _ring_that_sends_its_own_piece(x):
    n = dist.get_world_size()
    return _ring(x, 2 * (n - 1), lambda rank, step: rank, keeps_from=n - 1)


def _ring_that_never_adds(x):
    n = dist.get_world_size()
    return _ring(x, 2 * (n - 1), lambda rank, step: rank - step, keeps_from=0)


def _list_of_pieces(x):
    return list(my_all_reduce(x).chunk(dist.get_world_size()))


def _unchanged(x):
    return x


def _sends_no_more_than_a_ring(log: CommunicationLog, x: torch.Tensor) -> str | None:
    if complaint := only("send", "recv")(log):
        return complaint
    sent = log.total_bytes("send")
    enough = round(bus_factor("all_reduce", dist.get_world_size()) * x.numel() * x.element_size())
    if sent <= enough:
        return None
    return (
        f"This rank sent {sent} bytes, and a ring needs {enough}: 2(n-1)/n times the tensor. "
        "Probably whole tensors went around: cut them, and send one piece a step."
    )


all_reduce_from_halves = RankExercise(
    "all_reduce_from_halves",
    my_all_reduce,
    cases=[(4, 4), (2, 6), (3, 6)],
    inputs=example_tensor,
    rule=only("reduce_scatter", "all_gather"),
    mistakes=[
        Mistake(_reduce_scatter_alone, "Only the first half is done: each rank has the sum of one piece. Gather them."),
        Mistake(
            _all_gather_of_own_pieces,
            "The pieces are gathered, but nothing was added: what goes into all_gather is the rank's own piece "
            "and should be the sum that came out of reduce_scatter.",
        ),
        Mistake(_list_of_pieces, "The pieces are right, and still a list: `torch.cat` makes one tensor of them."),
        Mistake(_all_gather_of_everything, "Everybody's whole tensor was gathered, and nothing was added."),
        Mistake(_unchanged, "This is the rank's own tensor. Return what the collectives wrote, not what they read."),
    ],
    hints=[
        "Cut the tensor into one piece a rank: `list(x.chunk(world_size))`.",
        "`dist.reduce_scatter(out, pieces)` writes into `out`, which is as large as one piece. "
        "Make it with `torch.empty_like(pieces[0])`.",
        "`dist.all_gather(outs, out)` fills a list with one tensor a rank. `torch.cat(outs)` makes one tensor of it.",
    ],
    if_stuck="a collective that only some ranks call, as inside an `if rank == ...`. All ranks must call it.",
)

ring_all_reduce = RankExercise(
    "ring_all_reduce",
    my_ring_all_reduce,
    cases=[(4, 4), (2, 6), (3, 6)],
    inputs=example_tensor,
    rule=_sends_no_more_than_a_ring,
    mistakes=[
        Mistake(
            _ring_once_around,
            "Once around is the reduce-scatter: each rank has one complete sum. Another n-1 steps carry them to all.",
        ),
        Mistake(
            _ring_one_step_short,
            "One step is missing: n-1 steps add and n-1 more copy, 2(n-1) in all. `range(a, b)` ends before b.",
        ),
        Mistake(
            _ring_that_always_adds,
            "The second time around adds again. By then what arrives is already the sum: it replaces the piece.",
        ),
        Mistake(
            _ring_that_sends_its_own_piece,
            "Every step sends the same piece. Each step must pass on the piece that arrived in the step before.",
        ),
        Mistake(
            _ring_that_never_adds,
            "The first time around must add what arrives to the rank's own piece. If yours does: the second must start "
            "from the piece that is finished, (rank + 1) % n.",
        ),
        Mistake(_unchanged, "This is the rank's own tensor: nothing that arrived was put into it."),
    ],
    hints=[
        "First time around, n-1 steps: in step s, send piece (rank - s) % n to the right, receive piece "
        "(rank - s - 1) % n from the left, and add it to your own.",
        "Second time around, n-1 more steps; count s on, the piece numbers stay as they are. Now what arrives replaces "
        "your piece: `pieces[i].copy_(arriving)`, because `pieces[i] = arriving` keeps the buffer that the next "
        "receive overwrites.",
        "`dist.send` waits for its receiver. If all ranks send first, nobody receives. Post both together: "
        "`dist.batch_isend_irecv([dist.P2POp(dist.isend, piece, right), dist.P2POp(dist.irecv, arriving, left)])`, "
        "then `wait()` for each request it returns.",
    ],
    if_stuck="a send that nobody receives. Where every rank calls `send` first, nobody is left to receive; where only "
    "some ranks send, the others do not know of it. On every rank post the send and the receive together, with "
    "`dist.batch_isend_irecv`, then wait for both.",
)
