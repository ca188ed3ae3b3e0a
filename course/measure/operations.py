"""The nine operations of torch.distributed, each as a function from a rank's tensor to the tensor it then has.

torch writes results into tensors that the caller provides; these functions make them, and make a strided tensor
contiguous. Run them on ranks, as `course.measure.flow.trace_flow` does. ``root`` is the rank that gives or takes.
"""

import torch
import torch.distributed as dist

from labkit.partition import check_divides
from labkit.tensor_parallel import operators


def broadcast(x: torch.Tensor, root: int = 0) -> torch.Tensor:
    """Give every rank the root's tensor."""
    x = x.contiguous()
    dist.broadcast(x, src=root)
    return x


def scatter(x: torch.Tensor, root: int = 0) -> torch.Tensor:
    """Cut the root's tensor, and give each rank one piece."""
    pieces = _pieces(x)
    mine = torch.empty_like(pieces[0])
    dist.scatter(mine, pieces if dist.get_rank() == root else None, src=root)
    return mine


def gather(x: torch.Tensor, root: int = 0) -> torch.Tensor | None:
    """Give the root every rank's tensor, in rank order; the others end with nothing."""
    pieces = [x.new_empty(x.shape) for _ in range(dist.get_world_size())] if dist.get_rank() == root else None
    dist.gather(x.contiguous(), pieces, dst=root)
    return torch.cat(pieces) if pieces else None


def reduce(x: torch.Tensor, root: int = 0) -> torch.Tensor | None:
    """Give the root the sum; what the other ranks' tensors then hold is undefined."""
    x = x.contiguous()
    dist.reduce(x, dst=root)
    return x if dist.get_rank() == root else None


def all_gather(x: torch.Tensor) -> torch.Tensor:
    """Give every rank all tensors, in rank order."""
    return operators.all_gather(x, dist.group.WORLD, dim=0)  # pyright: ignore[reportArgumentType]


def reduce_scatter(x: torch.Tensor) -> torch.Tensor:
    """Give each rank one piece of the sum."""
    return operators.reduce_scatter(x, dist.group.WORLD, dim=0)  # pyright: ignore[reportArgumentType]


def all_reduce(x: torch.Tensor) -> torch.Tensor:
    """Give every rank the whole sum."""
    return operators.all_reduce(x, dist.group.WORLD)  # pyright: ignore[reportArgumentType]


def all_to_all(x: torch.Tensor) -> torch.Tensor:
    """Send a different piece from each rank to each rank."""
    arrived = x.new_empty(x.shape)
    dist.all_to_all_single(arrived, torch.cat(_pieces(x)))
    return arrived


def send_receive(x: torch.Tensor) -> torch.Tensor:
    """Send to the next rank and receive from the one before, as on a ring."""
    rank, world_size, x = dist.get_rank(), dist.get_world_size(), x.contiguous()
    arrived = torch.empty_like(x)
    send = dist.P2POp(dist.isend, x, (rank + 1) % world_size)
    receive = dist.P2POp(dist.irecv, arrived, (rank - 1) % world_size)
    for request in dist.batch_isend_irecv([send, receive]):
        request.wait()
    return arrived


def ring_all_reduce(x: torch.Tensor, num_steps: int) -> torch.Tensor:
    """Run the first steps of an all-reduce on a ring: n-1 steps add, and n-1 more pass the sums around."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    pieces = _pieces(x)
    for step in range(num_steps):
        mine, theirs = (rank - step) % world_size, (rank - step - 1) % world_size
        arrived = send_receive(pieces[mine])
        pieces[theirs] = pieces[theirs] + arrived if step < world_size - 1 else arrived
    return torch.cat(pieces)


def _pieces(x: torch.Tensor) -> list[torch.Tensor]:
    check_divides(dist.get_world_size(), "len(x)", len(x), parts_name="world_size")
    return list(x.contiguous().chunk(dist.get_world_size()))


WITH_ROOT = {"broadcast": broadcast, "scatter": scatter, "gather": gather, "reduce": reduce}
WITHOUT_ROOT = {
    "all-gather": all_gather,
    "reduce-scatter": reduce_scatter,
    "all-reduce": all_reduce,
    "all-to-all": all_to_all,
    "send and receive": send_receive,
}
