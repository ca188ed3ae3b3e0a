"""Answers to several exercises of the first notebooks: what a learner writes, and what a chatbot does."""

import math

import torch
import torch.distributed as dist
import torch.nn.functional as F

from course.exercises.parallel_gpt import gumbel


def sorted_by_size(gradients: list[torch.Tensor]) -> list[torch.Tensor]:
    """Average gradients with a single fused all-reduce."""
    ordered = sorted(gradients, key=lambda g: g.numel())
    flat = torch.cat([g.reshape(-1) for g in ordered])
    dist.all_reduce(flat, op=dist.ReduceOp.SUM)
    flat.div_(dist.get_world_size())
    averaged, offset = [], 0
    for g in ordered:
        averaged.append(flat[offset : offset + g.numel()].view_as(g))
        offset += g.numel()
    return averaged


def in_half_precision(gradients: list[torch.Tensor]) -> list[torch.Tensor]:
    world_size = dist.get_world_size()
    averaged = []
    for gradient in gradients:
        compressed = gradient.to(torch.float16)
        dist.all_reduce(compressed)
        averaged.append((compressed / world_size).to(gradient.dtype))
    return averaged


def loses_the_division(gradients: list[torch.Tensor]) -> list[torch.Tensor]:
    world_size = dist.get_world_size()
    results = []
    for grad in gradients:
        buffer = grad.detach().clone()
        dist.all_reduce(buffer, op=dist.ReduceOp.SUM)
        results.append(buffer)
    for result in results:
        result.div(world_size)
    return results


def offset_stays_0(gradients: list, bucket_size: int) -> list:
    world_size = dist.get_world_size()
    averaged, bucket, filled = [], [], 0
    last = len(gradients) - 1
    for index, gradient in enumerate(gradients):
        bucket.append(gradient)
        filled += gradient.numel()
        if filled >= bucket_size or index == last:
            buffer = torch.cat([g.flatten() for g in bucket])
            work = dist.all_reduce(buffer, async_op=True)
            work.wait()
            buffer /= world_size
            offset = 0
            for g in bucket:
                averaged.append(buffer[offset : offset + g.numel()].reshape(g.shape))
            bucket, filled = [], 0
    return averaged


def averages_the_weights(weight: torch.Tensor, steps: list, lr: float):
    """Local SGD: step locally, then average the weights over the ranks."""
    world_size = dist.get_world_size()
    for micro_batches in steps:
        for x in micro_batches:
            weight.grad = None
            loss = (x @ weight).square().mean()
            loss.backward()
            with torch.no_grad():
                weight.sub_(lr * weight.grad / len(micro_batches))
        with torch.no_grad():
            dist.all_reduce(weight)
            weight.div_(world_size)
    return weight


def gradient_at_the_first_weight(weight: torch.Tensor, steps: list, lr: float):
    world_size = dist.get_world_size()
    current = weight.detach().clone()
    for micro_batches in steps:
        gradient = torch.zeros_like(current)
        for x in micro_batches:
            loss = (x @ weight).square().mean()
            gradient += torch.autograd.grad(loss, weight)[0] / len(micro_batches)
        dist.all_reduce(gradient)
        current -= lr * gradient / world_size
    return current


def divides_by_own_rows_and_ranks(gradient, num_rows):
    g = gradient * num_rows
    dist.all_reduce(g)
    return g / (num_rows * dist.get_world_size())


def weights_upside_down(gradient: torch.Tensor, num_rows: int):
    total_rows = torch.tensor(num_rows, dtype=torch.float64, device=gradient.device)
    dist.all_reduce(total_rows, op=dist.ReduceOp.SUM)
    scaled = gradient / max(num_rows, 1)
    dist.all_reduce(scaled, op=dist.ReduceOp.SUM)
    return (scaled * total_rows / dist.get_world_size()).to(gradient.dtype)


def counts_the_padding(gradient: torch.Tensor, num_rows: int):
    most = torch.tensor(num_rows, device=gradient.device)
    dist.all_reduce(most, op=dist.ReduceOp.MAX)
    result = gradient.mul(num_rows / (most.item() * dist.get_world_size()))
    dist.all_reduce(result)
    return result


def in_float32(x: torch.Tensor) -> torch.Tensor:
    n = dist.get_world_size()
    out = torch.empty(x.numel() // n)
    dist.reduce_scatter(out, list(x.float().chunk(n)))
    result = [torch.empty(x.numel() // n) for _ in range(n)]
    dist.all_gather(result, out)
    return torch.cat(result)


def stacks(x):
    n = dist.get_world_size()
    pieces = list(x.view(n, -1))
    mine = torch.zeros_like(pieces[0])
    dist.reduce_scatter(mine, pieces)
    all_of_them = [torch.zeros_like(mine) for _ in range(n)]
    dist.all_gather(all_of_them, mine)
    return torch.stack(all_of_them)


def first_round_a_step_short(x):
    n, r = dist.get_world_size(), dist.get_rank()
    right, left = (r + 1) % n, (r - 1) % n
    pieces = [c.clone() for c in x.chunk(n)]
    for step in range(n - 2):
        buf = torch.empty_like(pieces[0])
        w = dist.isend(pieces[(r - step) % n], right)
        dist.recv(buf, left)
        w.wait()
        pieces[(r - step - 1) % n] += buf
    for step in range(n - 1):
        buf = torch.empty_like(pieces[0])
        w = dist.isend(pieces[(r + 1 - step) % n], right)
        dist.recv(buf, left)
        w.wait()
        pieces[(r - step) % n] = buf
    return torch.cat(pieces)


def receives_first(x: torch.Tensor) -> torch.Tensor:
    n, r = dist.get_world_size(), dist.get_rank()
    right, left = (r + 1) % n, (r - 1) % n
    chunks = list(x.clone().chunk(n))
    for phase in ("reduce", "gather"):
        for i in range(n - 1):
            shift = i if phase == "reduce" else i - 1
            tmp = torch.empty_like(chunks[0])
            dist.recv(tmp, src=left)
            dist.send(chunks[(r - shift) % n], dst=right)
            if phase == "reduce":
                chunks[(r - shift - 1) % n].add_(tmp)
            else:
                chunks[(r - shift - 1) % n].copy_(tmp)
    return torch.cat(chunks)


def reshapes_what_was_gathered(x: torch.Tensor, master_weight: torch.Tensor, master_bias: torch.Tensor) -> torch.Tensor:
    """Column-parallel linear with an efficient single-buffer gather."""
    world_size, rank = dist.get_world_size(), dist.get_rank()
    shard_size = master_weight.size(0) // world_size
    local_weight = master_weight.narrow(0, rank * shard_size, shard_size)
    local_bias = master_bias.narrow(0, rank * shard_size, shard_size)
    local_output = F.linear(x, local_weight, local_bias).contiguous()
    buffer = torch.empty(world_size * x.size(0), shard_size, dtype=x.dtype, device=x.device)
    dist.all_gather(list(buffer.chunk(world_size)), local_output)
    return buffer.view(x.size(0), -1)


def own_weight_for_all(x: torch.Tensor, weight: torch.Tensor, grad_output: torch.Tensor):
    world_size = dist.get_world_size()
    gathered = [torch.empty_like(grad_output) for _ in range(world_size)]
    dist.all_gather(gathered, grad_output.contiguous())
    full_grad = torch.cat(gathered, dim=-1)
    full_weight = weight.repeat(world_size, 1)
    grad_x = full_grad @ full_weight
    grad_weight = grad_output.t() @ x
    grad_bias = grad_output.sum(dim=0)
    return grad_x, grad_weight, grad_bias


def loses_the_functional_result(x: torch.Tensor, weight: torch.Tensor, grad_output: torch.Tensor):
    import torch.distributed._functional_collectives as funcol

    grad_x = grad_output.matmul(weight)
    funcol.all_reduce(grad_x, "sum", dist.group.WORLD)
    grad_weight = grad_output.transpose(0, 1).matmul(x)
    grad_bias = grad_output.sum(dim=0)
    return grad_x, grad_weight, grad_bias


def bias_on_one_rank(x, weight, bias):
    y = x @ weight.T
    dist.all_reduce(y)
    if dist.get_rank() == 0:
        y = y + bias
    return y


def loses_the_bias(x, weight, bias):
    y = F.linear(x, weight)
    dist.all_reduce(y)
    y / dist.get_world_size() + bias
    return y


def first_logit_of_the_others(logits: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    vocab_per_rank = logits.size(-1)
    vocab_start = dist.get_rank() * vocab_per_rank
    logits_max = logits.amax(dim=-1)
    dist.all_reduce(logits_max, op=dist.ReduceOp.MAX)
    shifted = logits - logits_max.unsqueeze(-1)
    target_mask = (target < vocab_start) | (target >= vocab_start + vocab_per_rank)
    masked_target = target.clone() - vocab_start
    masked_target[target_mask] = 0
    predicted = shifted[torch.arange(target.numel()), masked_target]
    stats = torch.stack([shifted.exp().sum(dim=-1), predicted])
    dist.all_reduce(stats)
    return stats[0].log() - stats[1]


def cross_entropy_of_own_words(logits: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    vocab_per_rank = logits.size(-1)
    offset = dist.get_rank() * vocab_per_rank
    in_range = (target >= offset) & (target < offset + vocab_per_rank)
    local_target = torch.where(in_range, target - offset, torch.full_like(target, -100))
    loss = F.cross_entropy(logits, local_target, ignore_index=-100, reduction="none")
    dist.all_reduce(loss)
    return loss


def views_instead_of_columns(grad_y: torch.Tensor, x: torch.Tensor, weight: torch.Tensor):
    world_size, rank = dist.get_world_size(), dist.get_rank()
    local_grad = grad_y.view(world_size, -1, weight.size(0))[rank]
    grad_x = local_grad @ weight
    dist.all_reduce(grad_x)
    grad_weight = local_grad.t() @ x
    return grad_x, grad_weight


def no_biases(hidden_size, tp_size):
    h, t = hidden_size, tp_size
    return 12 * h * h // t + 4 * h


def one_norm_and_a_cut_bias(hidden_size: int, tp_size: int) -> int:
    """Count QKV, projection, MLP and norms."""
    attention = (3 * hidden_size * hidden_size + 3 * hidden_size) / tp_size
    attention += hidden_size * hidden_size / tp_size + hidden_size
    mlp = (4 * hidden_size * hidden_size + 4 * hidden_size) / tp_size
    mlp += 4 * hidden_size * hidden_size / tp_size + hidden_size / tp_size
    norms = 2 * hidden_size
    return int(attention + mlp + norms)


def both_is_no_substring(tp_size: int, fault: str) -> float:
    factor = 1.0
    if "seed" in fault:
        factor *= math.sqrt(tp_size)
    if "width" in fault:
        factor *= math.sqrt(tp_size)
    return factor


def views_ranks_as_rows(logits: torch.Tensor, temperature: float, seed: int):
    num_rows, local_vocab = logits.shape
    rank, world_size = dist.get_rank(), dist.get_world_size()
    start = rank * local_vocab
    noise = gumbel(seed, num_rows, local_vocab * world_size).narrow(1, start, local_vocab)
    value, index = (logits / temperature + noise).max(dim=-1)
    values = torch.empty(world_size * num_rows, dtype=value.dtype)
    indices = torch.empty(world_size * num_rows, dtype=index.dtype)
    dist.all_gather_into_tensor(values, value)
    dist.all_gather_into_tensor(indices, index + start)
    values, indices = values.view(num_rows, world_size), indices.view(num_rows, world_size)
    return indices.gather(1, values.argmax(dim=1, keepdim=True)).squeeze(1)


def gathers_two_numbers(logits, target):
    t, r = dist.get_world_size(), dist.get_rank()
    n = logits.shape[1]
    lse = logits.logsumexp(1)
    hot = (target[:, None] - r * n) == torch.arange(n)
    z = logits.where(hot, torch.zeros(())).sum(1)
    mine = torch.stack([lse, z])
    both = [torch.empty_like(mine) for _ in range(t)]
    dist.all_gather(both, mine)
    both = torch.stack(both)
    return both[:, 0].logsumexp(0) - both[:, 1].sum(0)


def gathers_the_rows(gradient, num_rows):
    rows = [None] * dist.get_world_size()
    dist.all_gather_object(rows, num_rows)
    g = gradient * (num_rows / sum(rows))
    dist.all_reduce(g)
    return g


def leftwards(x):
    n, r = dist.get_world_size(), dist.get_rank()
    pieces = list(x.clone().tensor_split(n))
    for step in range(2 * (n - 1)):
        give, take = (r + step) % n, (r + step + 1) % n
        got = torch.empty_like(pieces[take])
        ops = [dist.P2POp(dist.isend, pieces[give], (r - 1) % n), dist.P2POp(dist.irecv, got, (r + 1) % n)]
        [w.wait() for w in dist.batch_isend_irecv(ops)]
        pieces[take] = pieces[take] + got if step < n - 1 else got
    return torch.cat(pieces)


def one_rank_sends_first(x):
    n, r = dist.get_world_size(), dist.get_rank()
    out = x.clone()
    p = out.view(n, -1)
    for step in range(2 * n - 2):
        give, take = (r - step) % n, (r - step - 1) % n
        got = torch.empty_like(p[0])
        if r == 0:
            dist.send(p[give].clone(), 1 % n)
            dist.recv(got, n - 1)
        else:
            dist.recv(got, r - 1)
            dist.send(p[give].clone(), (r + 1) % n)
        if step < n - 1:
            p[take] += got
        else:
            p[take] = got
    return out


WRONG = [
    ("average", sorted_by_size, "returns the gradients in a different order"),
    ("average", in_half_precision, "rounds to float16"),
    ("average", loses_the_division, "div returns a new tensor, which nobody keeps"),
    ("bucketed_average", offset_stays_0, "reads each gradient from the start of its bucket"),
    ("training_loop", averages_the_weights, "takes a step per micro-batch and averages the weights"),
    ("training_loop", gradient_at_the_first_weight, "takes each gradient at the first weight"),
    ("unequal_average", divides_by_own_rows_and_ranks, "divides by the ranks times its own rows, also 0"),
    ("unequal_average", weights_upside_down, "divides by its rows and multiplies by all"),
    ("unequal_average", counts_the_padding, "takes the largest number of rows for all ranks"),
    ("all_reduce_from_halves", in_float32, "returns float32 for float64"),
    ("all_reduce_from_halves", stacks, "stacks the pieces"),
    ("ring_all_reduce", first_round_a_step_short, "adds n - 2 times"),
    ("ring_all_reduce", receives_first, "every rank receives before it sends"),
    ("column_forward", reshapes_what_was_gathered, "reads gathered pieces row by row"),
    ("column_backward", own_weight_for_all, "multiplies all ranks' dY by its own weight"),
    ("column_backward", loses_the_functional_result, "the functional all-reduce returns the sum"),
    ("row_forward", bias_on_one_rank, "only rank 0 adds the bias"),
    ("row_forward", loses_the_bias, "the line with the bias keeps nothing"),
    ("vocab_cross_entropy", first_logit_of_the_others, "adds the first logit of each rank without the target"),
    ("vocab_cross_entropy", cross_entropy_of_own_words, "the sum runs over one rank's words"),
    ("gather_backward", views_instead_of_columns, "a view is not a block of columns"),
    ("layer_parameters", no_biases, "leaves out the biases of the linear layers"),
    ("layer_parameters", one_norm_and_a_cut_bias, "half of the norms, and a row bias that is cut"),
    ("spread", both_is_no_substring, '"both" is matched by neither word'),
    ("next_word", views_ranks_as_rows, "reads [t, rows] as [rows, t]"),
]

RIGHT = [
    ("vocab_cross_entropy", gathers_two_numbers),
    ("unequal_average", gathers_the_rows),
    ("ring_all_reduce", leftwards),
    ("ring_all_reduce", one_rank_sends_first),
]
