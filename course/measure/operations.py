"""The nine operations of torch.distributed, each as a function from a rank's tensor to the tensor it then has.

torch writes results into tensors that the caller provides; these functions make them. Run them on ranks, as
`course.measure.flow.trace_flow` does. ``root`` is the one rank that gives or takes. A ring all-reduce, built from the
last of the nine, can be stopped after any step.
"""

import torch
import torch.distributed as dist


def broadcast(x: torch.Tensor, root: int = 0) -> torch.Tensor:
    """Give every rank the root's tensor."""
    dist.broadcast(x, src=root)
    return x


def scatter(x: torch.Tensor, root: int = 0) -> torch.Tensor:
    """Cut the root's tensor, and give each rank one piece."""
    pieces = list(x.chunk(dist.get_world_size()))
    mine = torch.empty_like(pieces[0])
    dist.scatter(mine, pieces if dist.get_rank() == root else None, src=root)
    return mine


def gather(x: torch.Tensor, root: int = 0) -> torch.Tensor | None:
    """Give the root every rank's tensor, in rank order; the others end with nothing."""
    is_root = dist.get_rank() == root
    pieces = [torch.empty_like(x) for _ in range(dist.get_world_size())] if is_root else None
    dist.gather(x, pieces, dst=root)
    return torch.cat(pieces) if pieces else None


def reduce(x: torch.Tensor, root: int = 0) -> torch.Tensor | None:
    """Give the root the sum; what the other ranks' tensors then hold is undefined."""
    dist.reduce(x, dst=root)
    return x if dist.get_rank() == root else None


def all_gather(x: torch.Tensor) -> torch.Tensor:
    """Give every rank all tensors, in rank order."""
    pieces = [torch.empty_like(x) for _ in range(dist.get_world_size())]
    dist.all_gather(pieces, x)
    return torch.cat(pieces)


def reduce_scatter(x: torch.Tensor) -> torch.Tensor:
    """Give each rank one piece of the sum."""
    pieces = list(x.chunk(dist.get_world_size()))
    my_sum = torch.empty_like(pieces[0])
    dist.reduce_scatter(my_sum, pieces)
    return my_sum


def all_reduce(x: torch.Tensor) -> torch.Tensor:
    """Give every rank the whole sum."""
    dist.all_reduce(x)
    return x


def all_to_all(x: torch.Tensor) -> torch.Tensor:
    """Send a different piece from each rank to each rank."""
    arrived = torch.empty_like(x)
    dist.all_to_all_single(arrived, x)
    return arrived


def send_receive(x: torch.Tensor) -> torch.Tensor:
    """Send to the next rank and receive from the one before, as on a ring."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    arrived = torch.empty_like(x)
    send = dist.P2POp(dist.isend, x, (rank + 1) % world_size)
    receive = dist.P2POp(dist.irecv, arrived, (rank - 1) % world_size)
    for request in dist.batch_isend_irecv([send, receive]):
        request.wait()
    return arrived


def ring_all_reduce(x: torch.Tensor, num_steps: int) -> torch.Tensor:
    """Run the first steps of an all-reduce on a ring: n-1 steps add, and n-1 more pass the sums around."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    pieces = list(x.chunk(world_size))
    for step in range(num_steps):
        mine, theirs = (rank - step) % world_size, (rank - step - 1) % world_size
        arrived = send_receive(pieces[mine])
        pieces[theirs] = pieces[theirs] + arrived if step < world_size - 1 else arrived
    return torch.cat(pieces)


WITH_ROOT = {"broadcast": broadcast, "scatter": scatter, "gather": gather, "reduce": reduce}
WITHOUT_ROOT = {
    "all-gather": all_gather,
    "reduce-scatter": reduce_scatter,
    "all-reduce": all_reduce,
    "all-to-all": all_to_all,
    "send and receive": send_receive,
}
