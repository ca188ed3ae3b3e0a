"""The exercises of notebook 02: an all-reduce from its two halves, and one from send and receive alone."""

import torch
import torch.distributed as dist

from course.communication import CommunicationLog
from course.exercises.on_ranks import RankExercise, gathered, only, own, whole_numbers
from course.measure import operations
from course.sizing.ring import bus_factor
from labkit.groups import local_device


def example_tensor(num_elements: int, seed: int | None = None) -> tuple[torch.Tensor]:
    """Return what each rank starts from: 0, 1, 2, ... plus its rank; with a seed, numbers that follow no formula."""
    if seed is not None:
        return (whole_numbers((num_elements,), seed + dist.get_rank()).double(),)
    return (torch.arange(num_elements, dtype=torch.float32, device=local_device()) + dist.get_rank(),)


def moves_x_once_in_each_half(log: CommunicationLog, x: torch.Tensor) -> str | None:
    scattered, gathered, needed = log.total_bytes("reduce_scatter"), log.total_bytes("all_gather"), x.nbytes
    if scattered == gathered == needed:
        return None
    return (
        f"The tensor has {needed} bytes, and each half moves it once: a reduce_scatter of its pieces, then an "
        f"all_gather of their sums. Here it was {scattered} bytes and {gathered}."
    )


# -- from its two halves ------------------------------------------------------------------------------------------


def my_all_reduce(x):
    world_size = dist.get_world_size()
    pieces = list(x.chunk(world_size))

    my_sum = torch.empty_like(pieces[0])
    dist.reduce_scatter(my_sum, pieces)  # piece number `rank` of every rank, added up

    sums = [torch.empty_like(my_sum) for _ in range(world_size)]
    dist.all_gather(sums, my_sum)
    return torch.cat(sums)


all_reduce_from_halves = RankExercise(
    "all_reduce_from_halves",
    my_all_reduce,
    notebook="02",
    cases=[(4, 4), (2, 6), (3, 6, 20)],
    inputs=example_tensor,
    rule=only("reduce_scatter", "all_gather", also=moves_x_once_in_each_half),
    may_change=("x",),
    hints=[
        "Cut the tensor into one piece per rank: `list(x.chunk(world_size))`.",
        "`dist.reduce_scatter(out, pieces)` writes into `out`, which is as large as one piece. "
        "Make it with `torch.empty_like(pieces[0])`.",
        "`dist.all_gather(outs, out)` fills a list with one tensor per rank. `torch.cat(outs)` joins them into one.",
    ],
)


def pieces_of(x):
    return x.chunk(dist.get_world_size())


all_reduce_from_halves.mistakes_in(
    (
        None,
        lambda x: list(pieces_of(x)),
        "The pieces are right, but not yet joined: `torch.cat` makes one flat tensor of them.",
    ),
    (None, lambda x: sum(pieces_of(x)), "The sums were added up. They are different pieces of the result: join them."),
    (
        None,
        lambda x: pieces_of(x)[-1].repeat(dist.get_world_size()),
        "`[tensor] * n` is n times the same tensor: each piece overwrites the last. Make n.",
    ),
)


def own_piece_first(x):
    pieces = list(pieces_of(x))
    return pieces[dist.get_rank() :] + pieces[: dist.get_rank()]


def unchanged(x):
    return x


all_reduce_from_halves.mistakes_of(
    lambda x, of: of(x),
    (dict(of=operations.reduce_scatter), "Only the first half is done: a rank has the sum of one piece. Gather them."),
    (
        dict(of=lambda x: gathered(own(x), dim=0)),
        "The pieces are gathered, but nothing was added: this rank's own piece went into all_gather. The sum that came "
        "out of reduce_scatter should go in.",
    ),
    (
        dict(of=lambda x: my_all_reduce(torch.cat(own_piece_first(x)))),
        "Each rank's list began with its own piece. Piece number i of every list goes to rank i: the lists must have "
        "the same order on all ranks.",
    ),
    (dict(of=lambda x: gathered(x, dim=0)), "Every rank's whole tensor was gathered, and nothing was added."),
    (dict(of=unchanged), "This is the rank's own tensor. Return what the collectives wrote, not what they read."),
)


# -- a ring -------------------------------------------------------------------------------------------------------


def my_ring_all_reduce(x):
    rank, world_size = dist.get_rank(), dist.get_world_size()
    right, left = (rank + 1) % world_size, (rank - 1) % world_size
    pieces = list(x.clone().chunk(world_size))
    arriving = torch.empty_like(pieces[0])

    for step in range(2 * (world_size - 1)):
        outgoing = (rank - step) % world_size  # the piece that arrived in the previous step
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


def sends_as_much_as_a_ring(log: CommunicationLog, x: torch.Tensor) -> str | None:
    sent, needed = log.total_bytes("send"), round(bus_factor("all_reduce", dist.get_world_size()) * x.nbytes)
    if sent == needed:
        return None
    why = "Whole tensors probably went around: cut them, and send one piece per step."
    if (num_sent := len(log) // 2) > (enough := 2 * (dist.get_world_size() - 1)):
        why = f"It went {num_sent} steps, and {enough} are enough: n-1 that add, n-1 that copy."
    if sent < needed:
        why = "With fewer, some sums cannot be known everywhere: these numbers came from somewhere else."
    return f"This rank sent {sent} bytes, and a ring needs {needed}: 2(n-1)/n times the tensor. {why}"


ring_all_reduce = RankExercise(
    "ring_all_reduce",
    my_ring_all_reduce,
    notebook="02",
    cases=[(4, 4), (2, 6), (3, 6, 20)],
    inputs=example_tensor,
    rule=only("send", "recv", also=sends_as_much_as_a_ring),
    may_change=("x",),
    hints=[
        "First time around, n-1 steps: in step s, send piece (rank - s) % n to the right, receive piece "
        "(rank - s - 1) % n from the left, and add it to your own.",
        "Second time around, n-1 more steps: keep counting s, and the piece numbers follow the same rule. Now what "
        "arrives replaces your piece: `pieces[i].copy_(arriving)`, because `pieces[i] = arriving` would keep the "
        "buffer that the next receive overwrites.",
        "`dist.send` waits for its receiver. If all ranks send first, nobody receives. Post both together: "
        "`dist.batch_isend_irecv([dist.P2POp(dist.isend, piece, right), dist.P2POp(dist.irecv, arriving, left)])`, "
        "then `wait()` for each request it returns.",
    ],
    if_stuck="a `send` or `recv` that nobody answers. A rank that sends to its right neighbour is answered only if "
    "that one receives from *its* left. If so, look at the order: if every rank waits in `send` first, or every rank "
    "in `recv`, nobody is left to answer. Start both, with `dist.batch_isend_irecv`, before you wait for one. If only "
    "some ranks send, the others never do.",
)


def ring(
    x,
    num_steps=lambda n: 2 * (n - 1),
    piece_of_step=lambda rank, step: rank - step,
    adds=lambda step, n: step < n - 1,
    target=lambda step, n: -1,
    ahead=1,
):
    """Run a ring that can be wrong: in its length, the piece it sends, when and where it adds, and its direction."""
    rank, n = dist.get_rank(), dist.get_world_size()
    pieces = list(x.clone().chunk(n))
    arriving = torch.empty_like(pieces[0])
    for step in range(num_steps(n)):
        send = dist.P2POp(dist.isend, pieces[piece_of_step(rank, step) % n].clone(), (rank + ahead) % n)
        receive = dist.P2POp(dist.irecv, arriving, (rank - ahead) % n)
        for request in dist.batch_isend_irecv([send, receive]):
            request.wait()
        incoming = pieces[piece_of_step((rank + target(step, n)) % n, step) % n]
        incoming.copy_(incoming + arriving if adds(step, n) else arriving)
    return torch.cat(pieces)


NOT_THE_SENT = "What arrives is for the piece (rank - step - 1) % n, the one before the piece just sent."
ring_all_reduce.mistakes_of(
    ring,
    (
        dict(num_steps=lambda n: n - 1),
        "Once around is the reduce-scatter: each rank has one complete sum. n-1 more steps carry them to all ranks.",
    ),
    (dict(num_steps=lambda n: 2 * n - 3), "A step is missing: n-1 add and n-1 more copy. `range(a, b)` ends before b."),
    (
        dict(
            num_steps=lambda n: 2 * n - 3,
            adds=lambda step, n: step < n - 2,
            piece_of_step=lambda rank, step: rank - step - (step >= dist.get_world_size() - 2),
        ),
        "The first time around is a step short: n - 1 steps add, and then each rank has one complete sum.",
    ),
    (dict(target=lambda step, n: 0), NOT_THE_SENT),
    (dict(target=lambda step, n: 0 if step < n - 1 else -1), NOT_THE_SENT),
    (dict(ahead=-1), "The neighbours are swapped: send to (rank + 1) % n, and receive from (rank - 1) % n."),
    (dict(adds=lambda step, n: True), "The second round adds again. What arrives is the sum, and replaces the piece."),
    (
        dict(piece_of_step=lambda rank, step: rank),
        "Every step sends the same piece. It must pass on the piece that arrived in the step before.",
    ),
    (
        dict(adds=lambda step, n: False),
        "The first time around must add what arrives to the rank's own piece. If yours does: the second must start "
        "from the piece that is finished, (rank + 1) % n.",
    ),
)


ring_all_reduce.mistake("This is the rank's own tensor: nothing that arrived was put into it.")(unchanged)
