"""Answers to the exercises on collectives."""

import torch
import torch.distributed as dist


def halves(x, make_piece, num_ranks):
    """The lines that most answers to the first exercise share: a piece of the sum, and then all pieces."""
    piece = make_piece(x, num_ranks)
    dist.reduce_scatter(piece, list(x.chunk(num_ranks)))
    pieces = [torch.empty_like(piece) for _ in range(num_ranks)]
    dist.all_gather(pieces, piece)
    return pieces


def one_piece(x, num_ranks):
    return x.new_empty(x.numel() // num_ranks)


def copied_from_the_page(x):
    my_sum = x.new_empty(1)
    dist.reduce_scatter(my_sum, list(x.chunk(4)))
    everything = [torch.empty_like(my_sum) for _ in range(4)]
    dist.all_gather(everything, my_sum)
    return torch.cat(everything)


def four_ranks_only(x):
    return torch.cat(halves(x, one_piece, 4))


def first_half_only(x):
    piece = one_piece(x, dist.get_world_size())
    dist.reduce_scatter(piece, list(x.chunk(dist.get_world_size())))
    return piece


def gathers_the_inputs(x):
    pieces = list(x.chunk(dist.get_world_size()))
    arrived = [torch.empty_like(pieces[0]) for _ in pieces]
    piece = torch.empty_like(pieces[0])
    dist.reduce_scatter(piece, pieces)
    dist.all_gather(arrived, pieces[dist.get_rank()].contiguous())
    return torch.cat(arrived)


def gathers_everything_and_adds(x):
    everything = [torch.empty_like(x) for _ in range(dist.get_world_size())]
    dist.all_gather(everything, x)
    return sum(everything)


def calls_all_reduce(x):
    dist.all_reduce(x)
    return x


def average_not_sum(x):
    return torch.cat(halves(x, one_piece, dist.get_world_size())) / dist.get_world_size()


def one_buffer_for_all(x):
    piece = one_piece(x, dist.get_world_size())
    dist.reduce_scatter(piece, list(x.chunk(dist.get_world_size())))
    pieces = [torch.empty_like(piece)] * dist.get_world_size()
    dist.all_gather(pieces, piece)
    return torch.cat(pieces)


def stacked_pieces(x):
    return torch.stack(halves(x, one_piece, dist.get_world_size()))


def only_rank_0_gathers(x):
    piece = first_half_only(x)
    if dist.get_rank() == 0:
        pieces = [torch.empty_like(piece) for _ in range(dist.get_world_size())]
        dist.all_gather(pieces, piece)
        x = torch.cat(pieces)
    return x


def float32_pieces(x):
    def piece_of_float32(x, num_ranks):
        return torch.empty(x.numel() // num_ranks, dtype=torch.float32)

    return torch.cat(halves(x, piece_of_float32, dist.get_world_size()))


def halves_with_views(x):
    n, result = dist.get_world_size(), torch.empty_like(x)
    piece = torch.empty_like(x[: len(x) // n])
    dist.reduce_scatter(piece, [part.clone() for part in x.view(n, -1)])
    dist.all_gather(list(result.chunk(n)), piece)
    return result


def exchange(piece):
    """Send a piece to the right, and return what comes from the left."""
    rank, n, arrived = dist.get_rank(), dist.get_world_size(), torch.empty_like(piece)
    send = dist.P2POp(dist.isend, piece.contiguous(), (rank + 1) % n)
    receive = dist.P2POp(dist.irecv, arrived, (rank - 1) % n)
    for request in dist.batch_isend_irecv([send, receive]):
        request.wait()
    return arrived


def ring(x, exchange=exchange, num_adds=None, num_copies=None, start=1, adds_twice=False, off=1):
    """A ring with knobs, for the answers that differ from a right one in one place."""
    rank, n = dist.get_rank(), dist.get_world_size()
    pieces = [piece.clone() for piece in x.chunk(n)]
    for step in range(n - 1 if num_adds is None else num_adds):
        arrived = exchange(pieces[(rank - step) % n])
        pieces[(rank - step - off) % n] += arrived
    for step in range(n - 1 if num_copies is None else num_copies):
        arrived = exchange(pieces[(rank + start - step) % n])
        place = (rank + start - step - 1) % n
        pieces[place] = pieces[place] + arrived if adds_twice else arrived
    return torch.cat(pieces)


def steps_that_add_only(x):
    return ring(x, num_copies=0)


def one_step_too_many(x):
    n = dist.get_world_size()
    return ring(x, num_adds=n, num_copies=n)


def second_round_adds(x):
    return ring(x, adds_twice=True)


def second_round_starts_with_own_piece(x):
    return ring(x, start=0)


def adds_to_the_piece_it_sent(x):
    return ring(x, off=0)


def whole_tensor_around(x):
    total, moving = x.clone(), x.clone()
    for _ in range(dist.get_world_size() - 1):
        moving = exchange(moving)
        total += moving
    return total


def sends_before_it_receives(piece):
    rank, n, arrived = dist.get_rank(), dist.get_world_size(), torch.empty_like(piece)
    dist.send(piece, (rank + 1) % n)
    dist.recv(arrived, (rank - 1) % n)
    return arrived


def everybody_sends_first(x):
    return ring(x, sends_before_it_receives)


def send_without_wait(piece):
    rank, n, arrived = dist.get_rank(), dist.get_world_size(), torch.empty_like(piece)
    dist.isend(piece.clone(), (rank + 1) % n)
    dist.recv(arrived, (rank - 1) % n)
    return arrived


def never_waits_for_its_sends(x):
    return ring(x, send_without_wait)


def receive_without_wait(piece):
    rank, n, arrived = dist.get_rank(), dist.get_world_size(), torch.zeros_like(piece)
    send = dist.isend(piece, (rank + 1) % n)
    dist.irecv(arrived, (rank - 1) % n)
    send.wait()
    return arrived


def adds_before_it_arrived(x):
    return ring(x, receive_without_wait)


def receives_from_the_right(piece):
    rank, n, arrived = dist.get_rank(), dist.get_world_size(), torch.empty_like(piece)
    send = dist.isend(piece, (rank - 1) % n)
    dist.recv(arrived, (rank + 1) % n)
    send.wait()
    return arrived


def neighbours_swapped(x):
    return ring(x, receives_from_the_right)


def all_reduce_after_all(x):
    total = x.clone()
    dist.all_reduce(total)
    return total


def ring_that_waits_in_order(x):
    rank, n = dist.get_rank(), dist.get_world_size()
    x = x.clone()
    pieces = x.chunk(n)
    for step in range(2 * n - 2):
        buffer = torch.empty_like(pieces[0])
        sent = dist.isend(pieces[(rank - step) % n], (rank + 1) % n)
        dist.recv(buffer, (rank - 1) % n)
        sent.wait()
        target = pieces[(rank - step - 1) % n]
        target.copy_(target + buffer if step < n - 1 else buffer)
    return x


def all_reduce_from_halves_1(x: torch.Tensor) -> torch.Tensor:
    n = dist.get_world_size()
    mine = torch.empty_like(x[: len(x) // n])
    dist.reduce_scatter(mine, list(x.chunk(n)))
    parts = [torch.empty_like(mine)] * n
    dist.all_gather(parts, mine)
    return torch.cat(parts)


def all_reduce_from_halves_2(x: torch.Tensor) -> torch.Tensor:
    my_sum = x.new_empty(1)
    dist.reduce_scatter(my_sum, list(x.chunk(4)))
    everything = [torch.empty_like(my_sum) for _ in range(4)]
    dist.all_gather(everything, my_sum)
    return torch.cat(everything)


def all_reduce_from_halves_3(x: torch.Tensor) -> torch.Tensor:
    n = dist.get_world_size()
    piece = x.new_empty(x.numel() // n)
    dist.reduce_scatter(piece, list(x.chunk(n)))
    pieces = [torch.empty_like(piece) for _ in range(n)]
    dist.all_gather(pieces, piece)
    return torch.stack(pieces)


def ring_all_reduce_1(x: torch.Tensor) -> torch.Tensor:
    rank, n = dist.get_rank(), dist.get_world_size()
    total, passing = x.clone(), x.clone()
    for _ in range(n - 1):
        arrived = torch.empty_like(x)
        send = dist.P2POp(dist.isend, passing, (rank + 1) % n)
        receive = dist.P2POp(dist.irecv, arrived, (rank - 1) % n)
        for request in dist.batch_isend_irecv([send, receive]):
            request.wait()
        total += arrived
        passing = arrived
    return total


def ring_all_reduce_2(x: torch.Tensor) -> torch.Tensor:
    rank, n = dist.get_rank(), dist.get_world_size()
    pieces = [piece.clone() for piece in x.chunk(n)]
    for step in range(2 * (n - 1)):
        s = step % (n - 1)
        outgoing, incoming = (rank - s) % n, (rank - s - 1) % n
        arrived = torch.empty_like(pieces[incoming])
        send = dist.P2POp(dist.isend, pieces[outgoing], (rank + 1) % n)
        receive = dist.P2POp(dist.irecv, arrived, (rank - 1) % n)
        for request in dist.batch_isend_irecv([send, receive]):
            request.wait()
        if step < n - 1:
            pieces[incoming] += arrived
        else:
            pieces[incoming] = arrived
    return torch.cat(pieces)


def ring_all_reduce_3(x: torch.Tensor) -> torch.Tensor:
    rank, n = dist.get_rank(), dist.get_world_size()
    pieces = [piece.clone() for piece in x.chunk(n)]
    for step in range(n - 1):
        arrived = torch.empty_like(pieces[0])
        send = dist.P2POp(dist.isend, pieces[(rank - step) % n], (rank + 1) % n)
        receive = dist.P2POp(dist.irecv, arrived, (rank - 1) % n)
        for request in dist.batch_isend_irecv([send, receive]):
            request.wait()
        pieces[(rank - step - 1) % n] += arrived
    return torch.cat(pieces)


def ring_all_reduce_4(x: torch.Tensor) -> torch.Tensor:
    rank, n = dist.get_rank(), dist.get_world_size()
    pieces = [piece.clone() for piece in x.chunk(n)]
    for step in range(2 * (n - 1)):
        arrived = torch.empty_like(pieces[0])
        send = dist.P2POp(dist.isend, pieces[(rank - step) % n], (rank + 1) % n)
        receive = dist.P2POp(dist.irecv, arrived, (rank - 1) % n)
        for request in dist.batch_isend_irecv([send, receive]):
            request.wait()
        pieces[(rank - step - 1) % n] += arrived
    return torch.cat(pieces)


def ring_all_reduce_5(x: torch.Tensor) -> torch.Tensor:
    rank, n = dist.get_rank(), dist.get_world_size()
    pieces = [piece.clone() for piece in x.chunk(n)]
    for step in range(2 * (n - 1)):
        incoming = (rank - step - 1) % n
        arrived = torch.zeros_like(pieces[incoming])
        send = dist.P2POp(dist.isend, pieces[(rank - step) % n], (rank + 1) % n)
        receive = dist.P2POp(dist.irecv, arrived, (rank - 1) % n)
        dist.batch_isend_irecv([send, receive])
        if step < n - 1:
            pieces[incoming] += arrived
        else:
            pieces[incoming] = arrived
    return torch.cat(pieces)


WRONG = [
    ("all_reduce_from_halves", copied_from_the_page, "pieces of one number, four ranks"),
    ("all_reduce_from_halves", four_ranks_only, "the number of ranks is written in"),
    ("all_reduce_from_halves", first_half_only, "stops after the reduce-scatter"),
    ("all_reduce_from_halves", gathers_the_inputs, "gathers inputs, not the sums"),
    ("all_reduce_from_halves", gathers_everything_and_adds, "gathers whole tensors and adds locally"),
    ("all_reduce_from_halves", calls_all_reduce, "calls the all-reduce itself"),
    ("all_reduce_from_halves", average_not_sum, "the average instead of the sum"),
    ("all_reduce_from_halves", one_buffer_for_all, "one buffer receives all pieces"),
    ("all_reduce_from_halves", stacked_pieces, "stacks the pieces instead of joining"),
    ("all_reduce_from_halves", only_rank_0_gathers, "only rank 0 calls the all-gather"),
    ("all_reduce_from_halves", float32_pieces, "pieces have a different dtype"),
    ("ring_all_reduce", steps_that_add_only, "the second round is missing"),
    ("ring_all_reduce", one_step_too_many, "n steps instead of n - 1"),
    ("ring_all_reduce", second_round_adds, "the second round adds, not copies"),
    ("ring_all_reduce", second_round_starts_with_own_piece, "second round starts with an incomplete piece"),
    ("ring_all_reduce", adds_to_the_piece_it_sent, "adds to the piece it sent"),
    ("ring_all_reduce", whole_tensor_around, "sends whole tensors: too many bytes"),
    ("ring_all_reduce", everybody_sends_first, "all ranks send before they receive"),
    ("ring_all_reduce", never_waits_for_its_sends, "never waits for its sends"),
    ("ring_all_reduce", adds_before_it_arrived, "adds before the message has arrived"),
    ("ring_all_reduce", neighbours_swapped, "left and right neighbours are swapped"),
    ("ring_all_reduce", all_reduce_after_all, "calls the collective, no messages"),
    ("all_reduce_from_halves", all_reduce_from_halves_1, "one tensor n times in list"),
    ("all_reduce_from_halves", all_reduce_from_halves_2, "four ranks as in the example"),
    ("all_reduce_from_halves", all_reduce_from_halves_3, "stack instead of cat"),
    ("ring_all_reduce", ring_all_reduce_1, "passes whole tensors, too many bytes"),
    ("ring_all_reduce", ring_all_reduce_2, "copy round starts with own piece"),
    ("ring_all_reduce", ring_all_reduce_3, "forgot the copy round"),
    ("ring_all_reduce", ring_all_reduce_4, "second round adds again"),
    ("ring_all_reduce", ring_all_reduce_5, "forgot to wait for the requests"),
]

RIGHT = [("all_reduce_from_halves", halves_with_views), ("ring_all_reduce", ring_that_waits_in_order)]
