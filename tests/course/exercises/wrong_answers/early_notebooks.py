"""Answers to exercises of the first notebooks that passed, or were taken for something else than what is wrong in them.

The third part of each of SAYS is what the check must say of it.
"""

import torch
import torch.distributed as dist
import torch.nn.functional as F

from course.exercises.parallel_gpt import gumbel


def stride_of_tp_and_pp(world_size, tp_size, pp_size):
    dp_size = world_size // (tp_size * pp_size)
    tensor = [list(range(i, i + tp_size)) for i in range(0, world_size, tp_size)]
    data = []
    for s in range(pp_size):
        for t in range(tp_size):
            start = s * tp_size * dp_size + t
            data.append([start + k * tp_size for k in range(dp_size)])
    stride = tp_size * pp_size
    pipe = [[i + k * stride for k in range(pp_size)] for i in range(stride)]
    return tensor, data, pipe


def data_first_and_wrapped_stages(rank, tp_size, dp_size):
    dp = rank % dp_size
    tp = rank // dp_size % tp_size
    pp = rank // (tp_size * dp_size) % dp_size
    return tp, dp, pp


def adds_before_it_waits(x):
    n, r = dist.get_world_size(), dist.get_rank()
    chunks = [c.clone() for c in x.chunk(n)]
    for phase in range(2):
        for step in range(n - 1):
            s = (r - step + phase) % n
            d = (r - step - 1 + phase) % n
            buf = torch.zeros_like(chunks[d])
            a = dist.isend(chunks[s], (r + 1) % n)
            b = dist.irecv(buf, (r - 1) % n)
            chunks[d] = chunks[d] + buf if phase == 0 else buf
            a.wait()
            b.wait()
    return torch.cat(chunks)


def list_turned_by_rank(x):
    n, r = dist.get_world_size(), dist.get_rank()
    chunks = list(x.chunk(n))
    rotated = chunks[r:] + chunks[:r]
    mine = torch.empty_like(chunks[0])
    dist.reduce_scatter(mine, rotated)
    got = [torch.empty_like(mine) for _ in range(n)]
    dist.all_gather(got, mine)
    return torch.cat(got)


def invents_dim_of_all_gather(x, master_weight, master_bias):
    n, r = dist.get_world_size(), dist.get_rank()
    w, b = master_weight.chunk(n)[r], master_bias.chunk(n)[r]
    y = F.linear(x, w, b)
    parts = [torch.empty_like(y) for _ in range(n)]
    dist.all_gather(parts, y, dim=-1)
    return torch.cat(parts, dim=-1)


def bias_on_rank_0_alone(x, master_weight, master_bias):
    n, r = dist.get_world_size(), dist.get_rank()
    w = master_weight.chunk(n)[r]
    b = master_bias.chunk(n)[r]
    y = F.linear(x, w, b if r == 0 else None)
    parts = [torch.empty_like(y) for _ in range(n)]
    dist.all_gather(parts, y)
    return torch.cat(parts, dim=-1)


def counts_from_the_end(master, rank, tp_size, stride):
    return torch.cat([s.chunk(tp_size)[-rank] for s in master.chunk(stride)])


def chunks_a_stride_apart(master, rank, tp_size, stride):
    chunks = master.chunk(tp_size * stride, dim=0)
    return torch.cat([chunks[rank + k * stride] for k in range(tp_size)], dim=0)


def blocks_of_stride_rows(master, rank, tp_size, stride):
    rows = []
    for start in range(rank * stride, master.shape[0], tp_size * stride):
        rows.append(master[start : start + stride])
    return torch.cat(rows)


def a_matrix_only(master, rank, tp_size, stride):
    out_features, in_features = master.shape
    section = out_features // stride
    per_rank = section // tp_size
    view = master.view(stride, tp_size, per_rank, in_features)
    return view[:, rank].reshape(-1, in_features)


def sums_in_bfloat16(x, weight, bias):
    y = F.linear(x, weight).to(torch.bfloat16)
    dist.all_reduce(y)
    return y.to(x.dtype) + bias


def divides_before_it_waits(gradients):
    n = dist.get_world_size()
    works, out = [], []
    for g in gradients:
        works.append(dist.all_reduce(g, async_op=True))
        out.append(g / n)
    for w in works:
        w.wait()
    return out


def last_bucket_stays_a_sum(gradients, bucket_size):
    n = dist.get_world_size()
    out, bucket = [], []

    def send(divide):
        flat = torch.cat([g.flatten() for g in bucket])
        dist.all_reduce(flat)
        if divide:
            flat /= n
        for g in bucket:
            out.append(flat[: g.numel()].view_as(g))
            flat = flat[g.numel() :]
        bucket.clear()

    for g in gradients:
        bucket.append(g)
        if sum(b.numel() for b in bucket) >= bucket_size:
            send(True)
    if bucket:
        send(False)
    return out


def by_avg(gradients):
    for g in gradients:
        dist.all_reduce(g, op=dist.ReduceOp.AVG)
    return gradients


def waits_through_futures(gradients):
    n = dist.get_world_size()
    futures = [dist.all_reduce(g, async_op=True).get_future() for g in gradients]
    for f in futures:
        f.wait()
    return [g / n for g in gradients]


def mean_of_ranks_with_rows(gradient, num_rows):
    active = torch.tensor(1.0 if num_rows > 0 else 0.0, device=gradient.device)
    summed = gradient.clone() * active
    dist.all_reduce(summed)
    dist.all_reduce(active)
    return summed / active.clamp(min=1.0)


def one_rank_for_all_rows(logits, temperature, seed):
    rows, size = logits.shape
    n, r = dist.get_world_size(), dist.get_rank()
    scores = logits / temperature + gumbel(seed, rows, size * n)[:, r * size : (r + 1) * size]
    v, i = scores.max(1)
    i = i + r * size
    vs, is_ = [torch.empty_like(v) for _ in range(n)], [torch.empty_like(i) for _ in range(n)]
    dist.all_gather(vs, v)
    dist.all_gather(is_, i)
    best = int(torch.stack(vs).max(1).values.argmax())
    return is_[best]


def receives_from_the_right(x):
    world_size = dist.get_world_size()
    rank = dist.get_rank()
    neighbour = (rank + 1) % world_size
    chunks = list(x.clone().chunk(world_size))
    for step in range(world_size - 1):
        send_idx = (rank - step) % world_size
        recv_idx = (rank - step - 1) % world_size
        incoming = torch.empty_like(chunks[recv_idx])
        works = [dist.isend(chunks[send_idx], dst=neighbour), dist.irecv(incoming, src=neighbour)]
        for w in works:
            w.wait()
        chunks[recv_idx] = chunks[recv_idx] + incoming
    for step in range(world_size - 1):
        send_idx = (rank - step + 1) % world_size
        recv_idx = (rank - step) % world_size
        incoming = torch.empty_like(chunks[recv_idx])
        works = [dist.isend(chunks[send_idx], dst=neighbour), dist.irecv(incoming, src=neighbour)]
        for w in works:
            w.wait()
        chunks[recv_idx] = incoming
    return torch.cat(chunks)


def leaves_out_an_argument(x, master_weight):
    return x @ master_weight.T


def different_but_for_recomputation(place, across, sequence_parallel):
    return "same" if across == "recomputation" else "different"


SAYS = [
    ("mask", different_but_for_recomputation, "without it all tensor ranks hold copies"),
    ("rank_to_coordinates", data_first_and_wrapped_stages, "The last axis needs no `%`"),
    ("group_lists", stride_of_tp_and_pp, "tp_size * pp_size apart"),
    ("ring_all_reduce", adds_before_it_waits, "The result of recv is used in line 11"),
    ("ring_all_reduce", receives_from_the_right, "only if that one receives from *its* left"),
    ("column_forward", leaves_out_an_argument, "with the arguments of the stub"),
    ("all_reduce_from_halves", list_turned_by_rank, "Each rank's list began with its own piece"),
    ("column_forward", invents_dim_of_all_gather, "What your line calls has no such arguments"),
    ("column_forward", bias_on_rank_0_alone, "Only rank 0's columns have their bias"),
    ("stride_shard", counts_from_the_end, "`[-rank]` counts from the end"),
    ("stride_shard", chunks_a_stride_apart, "t apart, not stride. And in a later case: IndexError"),
    ("stride_shard", blocks_of_stride_rows, "blocks of `stride` rows"),
    ("stride_shard", a_matrix_only, "Given were master [12]"),
    ("row_forward", sums_in_bfloat16, "Its all_reduce sends torch.bfloat16"),
    ("average", divides_before_it_waits, "The result of all_reduce is used in line 6"),
    ("bucketed_average", last_bucket_stays_a_sum, "was added up and not divided"),
    ("unequal_average", mean_of_ranks_with_rows, "the mean of the ranks that have rows"),
    ("next_word", one_rank_for_all_rows, "the words of one rank for all rows"),
]
WRONG = []
RIGHT = [("average", by_avg), ("average", waits_through_futures)]
