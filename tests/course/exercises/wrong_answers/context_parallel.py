"""Answers to the exercises on context parallel."""

import math
import warnings

import torch
import torch.distributed as dist
import torch.distributed.nn
import torch.nn.functional as F

from course.exercises.context_parallel import attend, merge
from labkit.context_parallel import positions
from labkit.partition import tokens_of_rank


def cut_in_order(seq_length, cp_size, cp_rank):
    return torch.arange(seq_length).chunk(cp_size)[cp_rank]


def dealt_like_cards(seq_length, cp_size, cp_rank):
    return [i for i in range(seq_length) if i % cp_size == cp_rank]


def chunk_pairs_from_half(seq_length, cp_size, cp_rank):
    chunks = torch.arange(seq_length).chunk(2 * cp_size)
    return torch.cat([chunks[cp_rank], chunks[cp_rank + cp_size]])


def counts_back_from_2c(seq_length, cp_size, cp_rank):
    chunks = torch.arange(seq_length).chunk(2 * cp_size)
    return torch.cat([chunks[cp_rank], chunks[2 * cp_size - cp_rank]])


def mirror_of_each_token(seq_length, cp_size, cp_rank):
    early = list(range(seq_length // (2 * cp_size) * cp_rank, seq_length // (2 * cp_size) * (cp_rank + 1)))
    return early + [seq_length - 1 - i for i in early]


def late_before_early(seq_length, cp_size, cp_rank):
    chunks = torch.arange(seq_length).view(2 * cp_size, -1)
    return chunks[[2 * cp_size - 1 - cp_rank, cp_rank]].flatten()


def one_row_per_chunk(seq_length, cp_size, cp_rank):
    return torch.arange(seq_length).view(2 * cp_size, -1)[[cp_rank, 2 * cp_size - 1 - cp_rank]]


def numbers_of_chunks(seq_length, cp_size, cp_rank):
    return cp_rank, 2 * cp_size - 1 - cp_rank


def only_the_early_half(seq_length, cp_size, cp_rank):
    size = seq_length // cp_size // 2
    return list(range(cp_rank * size, cp_rank * size + size))


def slices_of_one_list(seq_length, cp_size, cp_rank):
    everything, size = list(range(seq_length)), seq_length // (2 * cp_size)
    end = seq_length - cp_rank * size
    return everything[cp_rank * size :][:size] + everything[end - size : end]


def asks_labkit(seq_length, cp_size, cp_rank):
    return positions(seq_length, cp_size, cp_rank)


def asks_labkit_for_chunks(seq_length, cp_size, cp_rank):
    return [place for chunk in tokens_of_rank(seq_length, cp_size, cp_rank) for place in chunk]


def halves(out, lse, block_out, block_lse):
    return torch.stack([out, block_out]).mean(0), torch.logaddexp(lse, block_lse)


def halves_and_higher_lse(out, lse, block_out, block_lse):
    return 0.5 * (out + block_out), torch.max(lse, block_lse)


def exponentials(out, lse, block_out, block_lse):
    a, b = torch.exp(lse), torch.exp(block_lse)
    return (a * out + b * block_out) / (a + b), torch.log(a + b)


def exponentials_of_lse_only(out, lse, block_out, block_lse):
    return out + torch.sigmoid(block_lse - lse) * (block_out - out), torch.log(lse.exp() + block_lse.exp())


def sigmoid_backwards(out, lse, block_out, block_lse):
    return out.lerp(block_out, torch.sigmoid(lse - block_lse)), torch.logaddexp(lse, block_lse)


def keeps_the_lse(out, lse, block_out, block_lse):
    out = out - F.sigmoid(block_lse - lse) * (out - block_out)
    return out, lse


def adds_the_lse(out, lse, block_out, block_lse):
    total = lse + block_lse
    share = torch.softmax(torch.cat([lse, block_lse], 1), 1)
    return share[:, :1] * out + share[:, 1:] * block_out, total


def formula_of_ring_flash_attention(out, lse, block_out, block_lse):
    out = out - F.sigmoid(block_lse - lse) * (out - block_out)
    return out, lse - F.logsigmoid(lse - block_lse)


def not_normalised(out, lse, block_out, block_lse):
    highest = torch.maximum(lse, block_lse)
    a, b = (lse - highest).exp(), (block_lse - highest).exp()
    return a * out + b * block_out, highest + (a + b).log()


def the_stronger_wins(out, lse, block_out, block_lse):
    return torch.where(block_lse > lse, block_out, out), torch.logaddexp(lse, block_lse)


def shrinks_nothing(out, lse, block_out, block_lse):
    return out + block_out * torch.exp(block_lse - torch.logaddexp(lse, block_lse)), torch.logaddexp(lse, block_lse)


def relative_to_the_block(out, lse, block_out, block_lse):
    ratio = (lse - block_lse).exp()
    return (ratio * out + block_out) / (ratio + 1), block_lse + ratio.log1p()


def relative_to_what_was_seen(out, lse, block_out, block_lse):
    seen = torch.where(lse == -math.inf, -100.0, lse)
    ratio = (block_lse - seen).exp()
    return (out + ratio * block_out) / (1 + ratio), seen + ratio.log1p()


def squeezes_the_lse(out, lse, block_out, block_lse):
    new_out, new_lse = by_highest(out, lse, block_out, block_lse)
    return new_out, new_lse.squeeze(-1)


def flat_lse(out, lse, block_out, block_lse):
    lse, block_lse = lse.flatten(), block_lse.flatten()
    new_lse = torch.logaddexp(lse, block_lse)
    return torch.exp(lse - new_lse) * out + torch.exp(block_lse - new_lse) * block_out, new_lse


def starts_with_the_block(out, lse, block_out, block_lse):
    if torch.isinf(lse).any():
        return block_out, block_lse
    return merge(out, lse, block_out, block_lse)


def lse_first(out, lse, block_out, block_lse):
    return merge(out, lse, block_out, block_lse)[::-1]


def by_highest(out, lse, block_out, block_lse):
    highest = torch.maximum(lse, block_lse)
    a, b = (lse - highest).exp(), (block_lse - highest).exp()
    return (a * out + b * block_out) / (a + b), highest + (a + b).log()


def next_and_previous():
    return (dist.get_rank() + 1) % dist.get_world_size(), (dist.get_rank() - 1) % dist.get_world_size()


def swapped_with(tensor, to, come_from):
    """What arrives from one rank while the tensor goes to one."""
    arriving = torch.empty_like(tensor)
    ops = [dist.P2POp(dist.isend, tensor.contiguous(), to), dist.P2POp(dist.irecv, arriving, come_from)]
    for work in dist.batch_isend_irecv(ops):
        work.wait()
    return arriving


def start(q):
    return torch.zeros_like(q), torch.full((len(q), 1), -math.inf, dtype=q.dtype)


def ring(q, k, v, see, to_next=True):
    """A ring in which ``see(step, source, k, v)`` says what is attended to, and how; None: nothing."""
    ends = next_and_previous() if to_next else next_and_previous()[::-1]
    out, lse = start(q)
    for step in range(dist.get_world_size()):
        if seen := see(step, (dist.get_rank() - step) % dist.get_world_size(), k, v):
            out, lse = merge(out, lse, *attend(q, *seen))
        if step + 1 < dist.get_world_size():
            k, v = swapped_with(k, *ends), swapped_with(v, *ends)
    return out


def full_attention(q, k, v):
    return ring(q, k, v, lambda step, source, k, v: (k, v, False))


def forgets_the_triangle(q, k, v):
    return ring(q, k, v, lambda step, source, k, v: (k, v, False) if source <= dist.get_rank() else None)


def all_triangles(q, k, v):
    return ring(q, k, v, lambda step, source, k, v: (k, v, True))


def triangles_on_earlier(q, k, v):
    return ring(q, k, v, lambda step, source, k, v: (k, v, True) if source <= dist.get_rank() else None)


def masks_the_earlier(q, k, v):
    return ring(q, k, v, lambda step, source, k, v: (k, v, step == 0) if source >= dist.get_rank() else None)


def other_direction(q, k, v):
    see = lambda step, source, k, v: (k, v, step == 0) if source <= dist.get_rank() else None  # noqa: E731
    return ring(q, k, v, see, to_next=False)


def no_triangle_but_step_0(q, k, v):
    return ring(q, k, v, lambda step, source, k, v: (k, v, step == 0))


def own_values(q, k, v):
    mine = v
    see = lambda step, source, k, v: (k, mine, step == 0) if source <= dist.get_rank() else None  # noqa: E731
    return ring(q, k, v, see)


def sends_its_own_again(q, k, v):
    out, lse = start(q)
    here = torch.stack([k, v])
    for step in range(dist.get_world_size()):
        source = (dist.get_rank() - step) % dist.get_world_size()
        if source <= dist.get_rank():
            out, lse = merge(out, lse, *attend(q, *here, causal=source == dist.get_rank()))
        if step < dist.get_world_size() - 1:
            here = swapped_with(torch.stack([k, v]), *next_and_previous())
    return out


def stops_before_the_last(q, k, v):
    out, lse = start(q)
    kv = torch.stack([k, v])
    for step in range(dist.get_world_size() - 1):
        source = (dist.get_rank() - step) % dist.get_world_size()
        if source == dist.get_rank():
            out, lse = merge(out, lse, *attend(q, *kv, causal=True))
        elif source < dist.get_rank():
            out, lse = merge(out, lse, *attend(q, *kv, causal=False))
        kv = swapped_with(kv, *next_and_previous())
    return out


def sends_first(q, k, v):
    out, lse = start(q)
    for step in range(dist.get_world_size()):
        k, v = swapped_with(k, *next_and_previous()), swapped_with(v, *next_and_previous())
        source = (dist.get_rank() - step) % dist.get_world_size()
        if source <= dist.get_rank():
            out, lse = merge(out, lse, *attend(q, k, v, source == dist.get_rank()))
    return out


def receives_into_what_it_sends(q, k, v):
    (right, left), n, rank = next_and_previous(), dist.get_world_size(), dist.get_rank()
    out, lse = start(q)
    kv = torch.stack([k, v])
    for step in range(n):
        source = (rank - step) % n
        if source <= rank:
            out, lse = merge(out, lse, *attend(q, *kv, causal=source == rank))
        if step + 1 < n:
            for work in dist.batch_isend_irecv([dist.P2POp(dist.isend, kv, right), dist.P2POp(dist.irecv, kv, left)]):
                work.wait()
            kv = kv + (step + 1) / 8  # what a lost race leaves is not the same each time: here it is always wrong
    return out


def never_merges(q, k, v):
    out = None
    for step in range(dist.get_world_size()):
        source = (dist.get_rank() - step) % dist.get_world_size()
        if source <= dist.get_rank():
            out, _ = attend(q, k, v, source == dist.get_rank())
        if step < dist.get_world_size() - 1:
            k, v = swapped_with(k, *next_and_previous()), swapped_with(v, *next_and_previous())
    return out


def adds_outs(q, k, v):
    out = torch.zeros_like(q)
    for step in range(dist.get_world_size()):
        source = (dist.get_rank() - step) % dist.get_world_size()
        if source <= dist.get_rank():
            out += attend(q, k, v, source == dist.get_rank())[0]
        if step < dist.get_world_size() - 1:
            k, v = swapped_with(k, *next_and_previous()), swapped_with(v, *next_and_previous())
    return out


def one_message_too_many(q, k, v):
    (out, lse), kv = start(q), torch.stack([k, v])
    for step in range(dist.get_world_size()):
        source = (dist.get_rank() - step) % dist.get_world_size()
        if source <= dist.get_rank():
            out, lse = merge(out, lse, *attend(q, *kv, causal=source == dist.get_rank()))
        kv = swapped_with(kv, *next_and_previous())
    return out


def sends_before_it_receives(q, k, v):
    (to, come_from), arriving = next_and_previous(), torch.empty_like(k)
    dist.send(k, to)
    dist.recv(arriving, come_from)
    return arriving


def passes_on_only_what_it_uses(q, k, v):
    (out, lse), kv = start(q), torch.stack([k, v])
    for step in range(dist.get_world_size()):
        source = (dist.get_rank() - step) % dist.get_world_size()
        if source > dist.get_rank():
            continue
        out, lse = merge(out, lse, *attend(q, *kv, causal=source == dist.get_rank()))
        if step < dist.get_world_size() - 1:
            kv = swapped_with(kv, *next_and_previous())
    return out


def whole_attention(q, k, v):
    everything = [torch.empty_like(torch.stack([k, v])) for _ in range(dist.get_world_size())]
    dist.all_gather(everything, torch.stack([k, v]))
    keys, values = torch.cat(everything, 1)
    scores = q @ keys.T / math.sqrt(q.size(1))
    places = torch.arange(len(keys))
    scores[places > places[dist.get_rank() * len(q) :][: len(q), None]] = -math.inf
    return scores.softmax(1) @ values


def by_even_and_odd(q, k, v):
    """A ring of blocking messages: even ranks send first, odd ones receive first."""
    (to, come_from), (out, lse) = next_and_previous(), attend(q, k, v, True)
    kv = torch.stack([k, v])
    for step in range(1, dist.get_world_size()):
        arriving = torch.empty_like(kv)
        receiving = dist.irecv(arriving, come_from)
        dist.send(kv, to)
        assert receiving
        receiving.wait()
        kv = arriving
        if step <= dist.get_rank():
            out, lse = merge(out, lse, *attend(q, *kv, causal=False))
    return out


def while_it_computes(q, k, v):
    """A ring whose messages travel while the rank computes, keys and values apart."""
    (out, lse), (to, come_from), c = start(q), next_and_previous(), dist.get_world_size()
    for step in range(c):
        next_k, next_v, works = torch.empty_like(k), torch.empty_like(v), []
        if step < c - 1:
            works = [dist.isend(k, to), dist.isend(v, to, tag=1)]
            works += [dist.irecv(next_k, come_from), dist.irecv(next_v, come_from, tag=1)]
        if step <= dist.get_rank():
            out, lse = merge(out, lse, *attend(q, k, v, causal=step == 0))
        for work in works:
            work.wait()
        k, v = next_k, next_v
    return out


def all_to_all(pieces):
    arrived = torch.empty_like(pieces)
    dist.all_to_all_single(arrived, pieces)
    return arrived


def same_way_again(grad, split_dim, join_dim):
    parts = torch.tensor_split(grad, dist.get_world_size(), dim=split_dim)
    return torch.cat(list(all_to_all(torch.stack(parts))), dim=join_dim)


def straight_through(grad, split_dim, join_dim):
    return grad.clone()


def averaged(grad, split_dim, join_dim):
    parts = torch.stack(torch.tensor_split(grad, dist.get_world_size(), dim=join_dim))
    return torch.cat(list(all_to_all(parts / dist.get_world_size())), dim=split_dim)


def sequence_and_heads_written_in(grad, split_dim, join_dim):
    return torch.cat(list(all_to_all(torch.stack(grad.chunk(dist.get_world_size(), 1)))), 0)


def heads_and_sequence_written_in(grad, split_dim, join_dim):
    return torch.cat(list(all_to_all(torch.stack(grad.chunk(dist.get_world_size(), 0)))), 1)


def not_joined(grad, split_dim, join_dim):
    return all_to_all(torch.stack(grad.chunk(dist.get_world_size(), join_dim)))


def joined_where_it_was_cut(grad, split_dim, join_dim):
    return torch.cat(all_to_all(torch.stack(grad.chunk(dist.get_world_size(), join_dim))).unbind(), join_dim)


def reshapes_here(grad, split_dim, join_dim):
    return torch.cat(torch.tensor_split(grad, dist.get_world_size(), join_dim), split_dim)


def sends_a_view(grad, split_dim, join_dim):
    c = dist.get_world_size()
    leaving = grad.T if join_dim else grad
    arrived = torch.empty(leaving.shape)
    dist.all_to_all_single(arrived, leaving)
    return torch.cat(arrived.chunk(c), split_dim)


def gathers_everything(grad, split_dim, join_dim):
    everything = [torch.empty_like(grad) for _ in range(dist.get_world_size())]
    dist.all_gather(everything, grad)
    return torch.cat([each.chunk(dist.get_world_size(), join_dim)[dist.get_rank()] for each in everything], split_dim)


def added_over_ranks(grad, split_dim, join_dim):
    grad_x = torch.cat(list(all_to_all(torch.stack(grad.chunk(dist.get_world_size(), join_dim)))), split_dim)
    dist.all_reduce(grad_x)
    return grad_x


def transposed_and_back(grad, split_dim, join_dim):
    leaving = grad.movedim(join_dim, 0).contiguous()
    pieces = all_to_all(leaving).chunk(dist.get_world_size())
    return torch.cat([piece.movedim(0, join_dim) for piece in pieces], split_dim)


def reduced(number):
    number = torch.as_tensor(number).clone()
    dist.all_reduce(number)
    return number


def own_mean(losses, is_counted):
    return losses[is_counted].mean()


def own_mean_of_all_tokens(losses, is_counted):
    return losses.mean()


def share_of_the_mean(losses, is_counted):
    return losses[is_counted].sum() / reduced(is_counted.sum())


def own_mean_by_n(losses, is_counted):
    return torch.where(is_counted, losses, 0).sum() / is_counted.sum() / dist.get_world_size()


def own_mean_times_n(losses, is_counted):
    return losses[is_counted].mean() * dist.get_world_size()


def own_sum(losses, is_counted):
    return losses[is_counted].sum()


def mean_of_everybody(losses, is_counted):
    return reduced(losses[is_counted].sum()) / reduced(is_counted.sum())


def ignores_the_mask(losses, is_counted):
    return losses.sum() * dist.get_world_size() / reduced(is_counted.sum())


def share_by_n(losses, is_counted):
    return losses[is_counted].sum() / (reduced(is_counted.sum()) * dist.get_world_size())


def twice_the_share(losses, is_counted):
    return 2 * losses[is_counted].sum() / reduced(is_counted.sum())


def leaves_early(losses, is_counted):
    if not is_counted.any():
        return torch.tensor(0.0)
    return losses[is_counted].sum() / reduced(is_counted.sum()) * dist.get_world_size()


def by_the_average_count(losses, is_counted):
    average = reduced(is_counted.float().sum() / dist.get_world_size())
    return (losses * is_counted).sum() / average


def share_of_all(losses, is_counted):
    count = is_counted.sum()
    dist.all_reduce(count)
    return losses[is_counted].sum() / count * dist.get_world_size()


def loss_as_a_float(losses, is_counted):
    return share_of_all(losses, is_counted).item()


def loss_of_data(losses, is_counted):
    return share_of_all(losses.data, is_counted)


def lse_without_its_last_dim(out, lse, block_out, block_lse):
    total = torch.logaddexp(lse, block_lse)
    return (lse - total).exp() * out + (block_lse - total).exp() * block_out, total.squeeze(-1)


def four_times_the_share(losses, is_counted):
    return 4 * losses[is_counted].sum() / reduced(is_counted.sum())


def by_all_tokens_of_all_ranks(losses, is_counted):
    return losses[is_counted].sum() / reduced(len(losses))


def by_all_tokens_of_all_ranks_times_n(losses, is_counted):
    return losses[is_counted].sum() / reduced(len(losses)) * dist.get_world_size()


def without_a_graph(losses, is_counted):
    with torch.no_grad():
        return by_the_average_count(losses, is_counted)


def as_a_float(losses, is_counted):
    return by_the_average_count(losses, is_counted).item()


def as_a_new_tensor(losses, is_counted):
    return torch.tensor(as_a_float(losses, is_counted))


def by_autograds_all_reduce(losses, is_counted):
    """The sum of all ranks; its backward adds up the gradients of all, which is n times this rank's own."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch names a newer function
        total = torch.distributed.nn.functional.all_reduce(losses[is_counted].sum())
    count = is_counted.sum()
    dist.all_reduce(count)
    return total / count


def balanced_positions_anew_pairs(seq_length, cp_size, cp_rank):
    period = 2 * cp_size
    out = []
    for base in range(0, seq_length, period):
        out.append(base + cp_rank)
        out.append(base + period - 1 - cp_rank)
    return out


def one_maximum_for_all(out, lse, block_out, block_lse):
    # a single shift keeps all exponents non-positive
    shift = torch.max(lse.max(), block_lse.max())
    w_old = torch.exp(lse - shift)
    w_new = torch.exp(block_lse - shift)
    total = w_old + w_new
    merged = (out * w_old + block_out * w_new) / total.clamp_min(torch.finfo(out.dtype).tiny)
    return merged, shift + total.log()


def difference_clamped(out, lse, block_out, block_lse):
    # avoid inf - inf and saturation of the sigmoid
    delta = torch.clamp(block_lse - lse, min=-10.0, max=10.0)
    weight = torch.sigmoid(delta)
    merged = (1.0 - weight) * out + weight * block_out
    return merged, torch.logaddexp(lse, block_lse)


def starts_from_a_weight_of_one(q, k, v):
    c, rank = dist.get_world_size(), dist.get_rank()
    out, lse = torch.zeros_like(q), torch.zeros(len(q), 1, dtype=q.dtype)
    for step in range(c):
        origin = (rank - step) % c
        if origin <= rank:
            out, lse = merge(out, lse, *attend(q, k, v, origin == rank))
        if step < c - 1:
            kv, arrived = torch.stack([k, v]), torch.empty(2, *k.shape, dtype=k.dtype)
            ops = [
                dist.P2POp(dist.isend, kv, (rank + 1) % c),
                dist.P2POp(dist.irecv, arrived, (rank - 1) % c),
            ]
            for each in dist.batch_isend_irecv(ops):
                each.wait()
            k, v = arrived
    return out


def blocks_averaged(q, k, v):
    world_size, rank = dist.get_world_size(), dist.get_rank()
    send_to, recv_from = (rank + 1) % world_size, (rank - 1 + world_size) % world_size
    accumulated = torch.zeros_like(q)
    num_blocks = 0
    kv = torch.stack((k, v)).contiguous()
    for step in range(world_size):
        source_rank = (rank - step + world_size) % world_size
        requests = []
        if step < world_size - 1:
            next_kv = torch.empty_like(kv)
            requests = dist.batch_isend_irecv(
                [dist.P2POp(dist.isend, kv, send_to), dist.P2POp(dist.irecv, next_kv, recv_from)]
            )
        if source_rank <= rank:
            block_out, _ = attend(q, kv[0], kv[1], causal=source_rank == rank)
            accumulated += block_out
            num_blocks += 1
        for request in requests:
            request.wait()
        if step < world_size - 1:
            kv = next_kv
    return accumulated / num_blocks


def receives_into_what_it_sends_by_name(q, k, v):
    world_size, rank = dist.get_world_size(), dist.get_rank()
    kv = torch.stack((k, v))
    out, lse = attend(q, k, v, causal=True)
    for step in range(1, world_size):
        ops = [
            dist.P2POp(op=dist.irecv, tensor=kv, peer=(rank - 1) % world_size),
            dist.P2POp(op=dist.isend, tensor=kv, peer=(rank + 1) % world_size),
        ]
        for work in dist.batch_isend_irecv(ops):
            work.wait()
        if step <= rank:
            out, lse = merge(out, lse, *attend(q, kv[0], kv[1], causal=False))
    return out


def output_and_input_exchanged(grad, split_dim, join_dim):
    c = dist.get_world_size()
    leaving = torch.stack(grad.chunk(c, join_dim))
    arrived = torch.zeros_like(leaving)
    dist.all_to_all_single(leaving, arrived)
    return torch.cat(arrived.unbind(), split_dim)


def summed_before(grad, split_dim, join_dim):
    world_size = dist.get_world_size()
    # every rank contributed to the output, so its gradient must be summed first
    grad = grad.clone().contiguous()
    dist.all_reduce(grad, op=dist.ReduceOp.SUM)
    leaving = torch.stack(grad.chunk(world_size, dim=join_dim)).contiguous()
    arrived = torch.empty_like(leaving)
    dist.all_to_all_single(arrived, leaving)
    return torch.cat(list(arrived.unbind(0)), dim=split_dim)


def dim_not_moved_back(grad, split_dim, join_dim):
    # put the joined dim in front so that its chunks are contiguous
    moved = grad.movedim(join_dim, 0).contiguous()
    received = torch.empty_like(moved)
    dist.all_to_all_single(received, moved)
    # received: [world_size * chunk, ...] -> put the chunks back along the split dim
    return received.movedim(0, split_dim).contiguous()


def leaves_without_tokens(losses, is_counted):
    if not is_counted.any():
        return (losses * 0.0).sum()
    total = is_counted.sum()
    dist.all_reduce(total, op=dist.ReduceOp.SUM)
    return losses[is_counted].sum() * (dist.get_world_size() / total)


def halves_of_c_chunks(seq_length: int, cp_size: int, cp_rank: int) -> list[int]:
    chunks = torch.arange(seq_length).chunk(cp_size)
    head, tail = chunks[cp_rank], chunks[cp_size - 1 - cp_rank]
    half = head.numel() // 2
    return torch.cat((head[:half], tail[half:])).sort().values.tolist()


def attends_before_it_arrives(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Overlap communication with computation: post the next exchange before attending to the current block."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    out, lse = attend(q, k, v, causal=True)
    current = torch.stack((k, v)).contiguous()
    for step in range(1, world_size):
        incoming = torch.empty_like(current)
        reqs = dist.batch_isend_irecv(
            [
                dist.P2POp(dist.isend, current, (rank + 1) % world_size),
                dist.P2POp(dist.irecv, incoming, (rank - 1) % world_size),
            ]
        )
        source = (rank - step) % world_size
        if source < rank:
            block = attend(q, *current.unbind(), causal=False)
            out, lse = merge(out, lse, *block)
        for req in reqs:
            req.wait()
        current = incoming
    return out


def pieces_interleaved(grad, split_dim, join_dim):
    c = dist.get_world_size()
    leaving = torch.stack(grad.chunk(c, join_dim))
    arrived = torch.empty_like(leaving)
    dist.all_to_all_single(arrived, leaving)
    shape = list(grad.shape)
    shape[join_dim] //= c
    shape[split_dim] *= c
    return arrived.transpose(0, 1).reshape(shape)


WRONG = [
    ("loss_scale", loss_as_a_float, "a float, from which backward cannot start"),
    ("loss_scale", loss_of_data, "no graph"),
    ("merge_blocks", lse_without_its_last_dim, "lse is squeezed"),
    ("balanced_positions", cut_in_order, "consecutive tokens"),
    ("balanced_positions", dealt_like_cards, "every c-th token"),
    ("balanced_positions", chunk_pairs_from_half, "chunks r and r + c"),
    ("balanced_positions", counts_back_from_2c, "chunk 2c - r"),
    ("balanced_positions", mirror_of_each_token, "the late chunk backwards"),
    ("balanced_positions", late_before_early, "the late chunk first"),
    ("balanced_positions", one_row_per_chunk, "two rows"),
    ("balanced_positions", numbers_of_chunks, "the numbers of the chunks"),
    ("balanced_positions", only_the_early_half, "one chunk only"),
    ("balanced_positions", asks_labkit, "the lab's own function"),
    ("balanced_positions", asks_labkit_for_chunks, "the lab's own function"),
    ("merge_blocks", halves, "a plain mean"),
    ("merge_blocks", halves_and_higher_lse, "a plain mean, and the higher lse"),
    ("merge_blocks", exponentials, "overflows"),
    ("merge_blocks", exponentials_of_lse_only, "the lse overflows"),
    ("merge_blocks", sigmoid_backwards, "the wrong sign"),
    ("merge_blocks", keeps_the_lse, "the old lse"),
    ("merge_blocks", adds_the_lse, "lse + lse"),
    ("merge_blocks", formula_of_ring_flash_attention, "nan from -inf"),
    ("merge_blocks", not_normalised, "out is not divided"),
    ("merge_blocks", the_stronger_wins, "a hard choice"),
    ("merge_blocks", shrinks_nothing, "the old part keeps its weight"),
    ("merge_blocks", relative_to_the_block, "overflows where lse is far above block_lse"),
    ("merge_blocks", relative_to_what_was_seen, "overflows where block_lse is far above lse"),
    ("merge_blocks", squeezes_the_lse, "a squeezed lse"),
    ("merge_blocks", flat_lse, "a flat lse, which broadcasts along the wrong dim"),
    ("merge_blocks", starts_with_the_block, "one query that has seen nothing decides for all"),
    ("merge_blocks", lse_first, "in the wrong order"),
    ("ring_forward", full_attention, "no mask"),
    ("ring_forward", forgets_the_triangle, "no mask on the own block"),
    ("ring_forward", all_triangles, "a triangle on every block"),
    ("ring_forward", triangles_on_earlier, "a triangle on earlier blocks"),
    ("ring_forward", masks_the_earlier, "the comparison is reversed"),
    ("ring_forward", other_direction, "receives from the next rank"),
    ("ring_forward", no_triangle_but_step_0, "later ranks are seen"),
    ("ring_forward", own_values, "only the keys travel"),
    ("ring_forward", sends_its_own_again, "sends its own at every step"),
    ("ring_forward", stops_before_the_last, "one step too few"),
    ("ring_forward", receives_into_what_it_sends, "a race: one buffer for both"),
    ("ring_forward", sends_first, "passes on before it attends"),
    ("ring_forward", never_merges, "the last block only"),
    ("ring_forward", adds_outs, "adds up the outs"),
    ("ring_forward", one_message_too_many, "one message too many"),
    ("ring_forward", whole_attention, "an all-gather"),
    ("ring_forward", sends_before_it_receives, "every send waits for a receive"),
    ("ring_forward", passes_on_only_what_it_uses, "masked blocks are not passed on"),
    ("ulysses_backward", same_way_again, "the same dims"),
    ("ulysses_backward", straight_through, "grad as it is"),
    ("ulysses_backward", averaged, "divides by c"),
    ("ulysses_backward", sequence_and_heads_written_in, "dims written in"),
    ("ulysses_backward", heads_and_sequence_written_in, "dims written in, swapped"),
    ("ulysses_backward", not_joined, "stacked"),
    ("ulysses_backward", joined_where_it_was_cut, "joined along the wrong dim"),
    ("ulysses_backward", reshapes_here, "sends nothing"),
    ("ulysses_backward", sends_a_view, "not contiguous"),
    ("ulysses_backward", gathers_everything, "an all-gather"),
    ("ulysses_backward", added_over_ranks, "adds up"),
    ("loss_scale", own_mean, "the mean of means"),
    ("loss_scale", own_mean_of_all_tokens, "ignores the mask"),
    ("loss_scale", share_of_the_mean, "not multiplied by n"),
    ("loss_scale", own_mean_by_n, "divides by n as well"),
    ("loss_scale", own_mean_times_n, "multiplies the mean by n"),
    ("loss_scale", own_sum, "a sum"),
    ("loss_scale", mean_of_everybody, "the loss of all"),
    ("loss_scale", ignores_the_mask, "ignores the mask in the sum"),
    ("loss_scale", share_by_n, "divides by n, not multiplies"),
    ("loss_scale", twice_the_share, "two ranks written in"),
    ("loss_scale", four_times_the_share, "four ranks written in"),
    ("loss_scale", by_all_tokens_of_all_ranks, "divides by all tokens"),
    ("loss_scale", by_all_tokens_of_all_ranks_times_n, "divides by all tokens"),
    ("loss_scale", without_a_graph, "no graph"),
    ("loss_scale", as_a_float, "a float"),
    ("loss_scale", as_a_new_tensor, "no graph"),
    ("loss_scale", leaves_early, "ranks without counted tokens skip the all-reduce"),
    ("balanced_positions", balanced_positions_anew_pairs, "single tokens to and fro"),
    ("merge_blocks", one_maximum_for_all, "one maximum for all queries"),
    ("merge_blocks", difference_clamped, "clamps the difference"),
    ("ring_forward", starts_from_a_weight_of_one, "starts from lse = 0"),
    ("ring_forward", blocks_averaged, "averages the blocks"),
    ("ring_forward", receives_into_what_it_sends_by_name, "receives into what it sends"),
    ("ulysses_backward", output_and_input_exchanged, "arguments exchanged"),
    ("ulysses_backward", summed_before, "adds up first"),
    ("ulysses_backward", dim_not_moved_back, "dim not moved back"),
    ("loss_scale", leaves_without_tokens, "returns early"),
    ("balanced_positions", halves_of_c_chunks, "halves of c chunks"),
    ("ring_forward", attends_before_it_arrives, "attends to the block before"),
    ("ulysses_backward", pieces_interleaved, "interleaves the pieces"),
]

RIGHT = [
    ("balanced_positions", slices_of_one_list),
    ("merge_blocks", by_highest),
    ("ring_forward", by_even_and_odd),
    ("ring_forward", while_it_computes),
    ("ulysses_backward", transposed_and_back),
    ("loss_scale", by_the_average_count),
    ("loss_scale", by_autograds_all_reduce),
]
