"""Answers that send by functional collectives, DTensor or `torch.distributed.nn`, where an exercise judges messages.

FORBIDDEN have right values and messages that the exercise does not allow; their third part is what the check must say.
"""

import warnings

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
import torch.distributed.nn.functional as dist_nn
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

from course.exercises import parallel_gpt

warnings.filterwarnings("ignore", category=FutureWarning)  # torch 2.13 renames functional collectives, as those of dist


def world():
    return dist.group.WORLD


def added(x, group=None):
    return funcol.all_reduce(x, "sum", group or world())


def gathered(x, dim=0):
    return funcol.all_gather_tensor(x.contiguous(), dim, world())


def as_dtensor(x, placement):
    return DTensor.from_local(x, init_device_mesh("cpu", (dist.get_world_size(),)), [placement])


def own(x, dim=0):
    return x.chunk(dist.get_world_size(), dim)[dist.get_rank()]


# -- right ----------------------------------------------------------------------------------------------------------


def halves_by_functions(x):
    return gathered(funcol.reduce_scatter_tensor(x, "sum", 0, world()))


def halves_by_dtensor(x):
    return (
        as_dtensor(x, Partial()).redistribute(placements=[Shard(0)]).redistribute(placements=[Replicate()]).to_local()
    )


def column_by_functions(x, master_weight, master_bias):
    return gathered(F.linear(x, own(master_weight), own(master_bias)), dim=1)


def column_by_dtensor(x, master_weight, master_bias):
    return as_dtensor(F.linear(x, own(master_weight), own(master_bias)), Shard(1)).full_tensor()


def column_by_dist_nn(x, master_weight, master_bias):
    return torch.cat(dist_nn.all_gather(F.linear(x, own(master_weight), own(master_bias))), -1)


def column_backward_by_functions(x, weight, grad_output):
    return added(grad_output @ weight), grad_output.T @ x, grad_output.sum(0)


def column_backward_by_dtensor(x, weight, grad_output):
    return as_dtensor(grad_output @ weight, Partial()).full_tensor(), grad_output.T @ x, grad_output.sum(0)


def row_by_dtensor(x, weight, bias):
    return as_dtensor(x @ weight.T, Partial()).full_tensor() + bias


def gather_backward_by_functions(grad_y, x, weight):
    return added(own(grad_y, 1) @ weight), own(grad_y, 1).T @ x


def cross_entropy_by_functions(logits, target):
    highest = funcol.all_reduce(logits.max(-1).values, "max", world())
    shifted = logits - highest[:, None]
    place = target - dist.get_rank() * logits.shape[1]
    is_mine = (place >= 0) & (place < logits.shape[1])
    chosen = shifted.gather(1, place.clamp(0, logits.shape[1] - 1)[:, None])[:, 0] * is_mine
    return added(shifted.exp().sum(-1)).log() - added(chosen)


def average_by_dist_nn(gradients):
    return [dist_nn.all_reduce(gradient) / dist.get_world_size() for gradient in gradients]


def buckets_by_functions(gradients, bucket_size):
    averages, bucket = [], []
    for gradient in gradients:
        bucket.append(gradient)
        if sum(each.numel() for each in bucket) >= bucket_size or gradient is gradients[-1]:
            flat = added(torch.cat([each.flatten() for each in bucket])) / dist.get_world_size()
            parts = flat.split([each.numel() for each in bucket])
            averages += [part.view_as(each) for part, each in zip(parts, bucket)]
            bucket = []
    return averages


def training_by_functions(weight, steps, lr):
    for micro_batches in steps:
        loss = sum((x @ weight).square().mean() for x in micro_batches) / len(micro_batches)
        (gradient,) = torch.autograd.grad(loss, weight)
        with torch.no_grad():
            weight -= lr * added(gradient) / dist.get_world_size()
    return weight


def unequal_by_functions(gradient, num_rows):
    return added(gradient * num_rows) / added(torch.tensor(float(num_rows)))


def next_word_by_functions(logits, temperature, seed):
    noise = own(parallel_gpt.gumbel(seed, len(logits), logits.shape[1] * dist.get_world_size()), 1)
    value, word = (logits / temperature + noise).max(-1)
    pairs = gathered(torch.stack([value, word + dist.get_rank() * logits.shape[1]])[None])
    return pairs[:, 1].gather(0, pairs[:, 0].argmax(0, keepdim=True))[0].long()


def norm_by_functions(gradients, kinds, tp_rank):
    counted = [g for g, kind in zip(gradients, kinds) if kind == "shard" or (kind == "whole" and tp_rank == 0)]
    return added(sum(each.square().sum() for each in counted)).sqrt()


def tied_by_functions(gradient, num_stages):
    ends = dist.new_group([0, num_stages - 1])
    return None if gradient is None else added(gradient, ends)


def ulysses_by_functions(grad, split_dim, join_dim):
    leaving = torch.stack(grad.chunk(dist.get_world_size(), join_dim))
    return torch.cat(funcol.all_to_all_single(leaving, None, None, world()).unbind(), split_dim)


def loss_by_functions(losses, is_counted):
    return losses[is_counted].sum() / added(is_counted.sum()) * dist.get_world_size()


def unit_forward_by_functions(x, shard, out_features):
    whole = funcol.wait_tensor(gathered(shard))
    end = out_features * x.shape[1]
    out = F.linear(x, whole[:end].view(out_features, -1), whole[end : end + out_features])
    whole.untyped_storage().resize_(0)
    return out


def unit_backward_by_functions(grad, x, shard):
    whole, end = gathered(shard), grad.shape[1] * x.shape[1]
    flat = torch.cat([(grad.T @ x).flatten(), grad.sum(0)])
    flat = F.pad(flat, (0, len(whole) - len(flat))) / dist.get_world_size()
    return grad @ whole[:end].view(grad.shape[1], -1), funcol.reduce_scatter_tensor(flat, "sum", 0, world())


def norm_of_shards_by_functions(gradients, is_cut, groups):
    counted = [g for g, cut in zip(gradients, is_cut) if cut or groups.tp.rank() == 0]
    total = sum((each.square().sum() for each in counted), torch.zeros(()))
    return added(added(total, groups.shard), groups.tp).sqrt()


def splits_by_functions(choices, num_experts):
    send = torch.bincount(choices.flatten() // (num_experts // dist.get_world_size()), minlength=dist.get_world_size())
    return send.tolist(), funcol.all_to_all_single(send, None, None, world()).tolist()


def dispatch_backward_by_functions(grad, tokens, num_tokens, send_splits, recv_splits):
    rows = funcol.all_to_all_single(grad, send_splits, recv_splits, world())
    return grad.new_zeros(num_tokens, grad.shape[1]).index_add_(0, tokens, rows)


# -- right values, by messages that are not allowed -----------------------------------------------------------------


def halves_at_once(x):
    return added(x)


def ring_at_once(x):
    return as_dtensor(x, Partial()).full_tensor()


def column_gathered_twice(x, master_weight, master_bias):
    y = F.linear(x, own(master_weight), own(master_bias))
    return (gathered(y, 1) + as_dtensor(y, Shard(1)).full_tensor()) / 2


def column_backward_of_all(x, weight, grad_output):
    grad_x = gathered(grad_output, 1) @ gathered(weight)
    return grad_x, grad_output.T @ x, grad_output.sum(0)


def row_of_all(x, weight, bias):
    return F.linear(as_dtensor(x, Shard(1)).full_tensor(), as_dtensor(weight, Shard(1)).full_tensor(), bias)


def row_backward_averages(grad_y, x, weight):
    grad_y = added(grad_y) / dist.get_world_size()
    return grad_y @ weight, grad_y.T @ x, grad_y.sum(0)


def row_backward_by_dist_nn(grad_y, x, weight):
    grad_y = dist_nn.all_reduce(grad_y.clone()) / dist.get_world_size()
    return grad_y @ weight, grad_y.T @ x, grad_y.sum(0)


def all_logits(logits, target):
    return F.cross_entropy(as_dtensor(logits, Shard(1)).full_tensor(), target, reduction="none")


def gather_backward_of_all_weights(grad_y, x, weight):
    return grad_y @ gathered(weight), own(grad_y, 1).T @ x


def average_of_gathered(gradients):
    return [gathered(gradient[None]).mean(0) for gradient in gradients]


def buckets_of_one(gradients, bucket_size):
    return [added(gradient) / dist.get_world_size() for gradient in gradients]


def training_sends_each_micro_batch(weight, steps, lr):
    for micro_batches in steps:
        gradient = torch.zeros_like(weight)
        for x in micro_batches:
            gradient += added(torch.autograd.grad((x @ weight).square().mean(), weight)[0])
        with torch.no_grad():
            weight -= lr * gradient / len(micro_batches) / dist.get_world_size()
    return weight


def next_word_of_all_logits(logits, temperature, seed):
    logits = gathered(logits, 1)
    return (logits / temperature + parallel_gpt.gumbel(seed, *logits.shape)).argmax(-1)


def norm_of_gathered(gradients, kinds, tp_rank):
    counted = [g for g, kind in zip(gradients, kinds) if kind == "shard" or (kind == "whole" and tp_rank == 0)]
    return gathered(sum(each.square().sum() for each in counted)[None]).sum().sqrt()


def all_keys(q, k, v):
    k, v = (as_dtensor(each, Shard(0)).full_tensor() for each in (k, v))
    last = (dist.get_rank() + 1) * len(q)
    is_seen = torch.ones(len(q), last, dtype=torch.bool).tril(last - len(q))
    return F.scaled_dot_product_attention(q[None], k[None, :last], v[None, :last], is_seen)[0]


def ulysses_of_all(grad, split_dim, join_dim):
    return own(as_dtensor(grad, Shard(split_dim)).full_tensor(), join_dim)


def ulysses_by_gathering(grad, split_dim, join_dim):
    return own(gathered(grad, split_dim), join_dim)


def loss_of_gathered_counts(losses, is_counted):
    return losses[is_counted].sum() / gathered(is_counted.sum()[None]).sum() * dist.get_world_size()


def unit_forward_twice(x, shard, out_features):
    gathered(shard).sum()
    return unit_forward_by_functions(x, shard, out_features)


def unit_backward_of_all(grad, x, shard):
    whole, end = gathered(shard), grad.shape[1] * x.shape[1]
    flat = torch.cat([(grad.T @ x).flatten(), grad.sum(0)])
    flat = F.pad(flat, (0, len(whole) - len(flat))) / dist.get_world_size()
    return grad @ whole[:end].view(grad.shape[1], -1), own(added(flat))


def norm_of_shards_each(gradients, is_cut, groups):
    squares = [g.square().sum() * (cut or groups.tp.rank() == 0) for g, cut in zip(gradients, is_cut)]
    return sum(added(added(square, groups.shard), groups.tp) for square in squares).sqrt()


def splits_of_all(choices, num_experts):
    send = torch.bincount(choices.flatten() // (num_experts // dist.get_world_size()), minlength=dist.get_world_size())
    return send.tolist(), gathered(send[None])[:, dist.get_rank()].tolist()


def dispatch_backward_and_more(grad, tokens, num_tokens, send_splits, recv_splits):
    added(torch.ones(1)).sum()
    return dispatch_backward_by_functions(grad, tokens, num_tokens, send_splits, recv_splits)


def tied_with_all(gradient, num_stages):
    dist.new_group([0, num_stages - 1])
    total = added(torch.zeros(2, 3) if gradient is None else gradient)
    return None if gradient is None else total


FORBIDDEN = [
    ("all_reduce_from_halves", halves_at_once, "It calls all_reduce"),
    ("ring_all_reduce", ring_at_once, "It calls all_reduce"),
    ("column_forward", column_gathered_twice, "Y has 24 bytes, and 48 were gathered"),
    ("column_backward", column_backward_of_all, "It calls all_gather"),
    ("row_forward", row_of_all, "It calls all_gather"),
    ("row_backward", row_backward_averages, "It calls all_reduce. Backward of this layer needs no message"),
    ("row_backward", row_backward_by_dist_nn, "It calls all_reduce. Backward of this layer needs no message"),
    ("vocab_cross_entropy", all_logits, "Each rank puts 80 bytes into collectives. Three numbers per token are enough"),
    ("gather_backward", gather_backward_of_all_weights, "It calls all_gather"),
    ("average", average_of_gathered, "It calls all_gather"),
    ("bucketed_average", buckets_of_one, "It sends 3 messages"),
    ("training_loop", training_sends_each_micro_batch, "It calls 6 all-reduces in 2 steps"),
    ("next_word", next_word_of_all_logits, "Nobody wants to gather the logits"),
    ("norm", norm_of_gathered, "It calls all_gather"),
    ("tied", tied_with_all, "This rank takes part in the all_reduce"),
    ("ring_forward", all_keys, "It calls all_gather"),
    ("ulysses_backward", ulysses_of_all, "It calls all_gather"),
    ("ulysses_backward", ulysses_by_gathering, "It calls all_gather"),
    ("loss_scale", loss_of_gathered_counts, "It calls all_gather"),
    ("unit_forward", unit_forward_twice, "once is enough, shard by shard"),
    ("unit_backward", unit_backward_of_all, "It calls all_reduce"),
    ("norm_of_shards", norm_of_shards_each, "One number in each group is enough"),
    ("split_sizes", splits_of_all, "It calls all_gather"),
    ("dispatch_backward", dispatch_backward_and_more, "It calls all_reduce"),
]

WRONG = FORBIDDEN

RIGHT = [
    ("all_reduce_from_halves", halves_by_functions),
    ("all_reduce_from_halves", halves_by_dtensor),
    ("column_forward", column_by_functions),
    ("column_forward", column_by_dtensor),
    ("column_forward", column_by_dist_nn),
    ("column_backward", column_backward_by_functions),
    ("column_backward", column_backward_by_dtensor),
    ("row_forward", row_by_dtensor),
    ("gather_backward", gather_backward_by_functions),
    ("vocab_cross_entropy", cross_entropy_by_functions),
    ("average", average_by_dist_nn),
    ("bucketed_average", buckets_by_functions),
    ("training_loop", training_by_functions),
    ("unequal_average", unequal_by_functions),
    ("next_word", next_word_by_functions),
    ("norm", norm_by_functions),
    ("tied", tied_by_functions),
    ("ulysses_backward", ulysses_by_functions),
    ("loss_scale", loss_by_functions),
    ("unit_forward", unit_forward_by_functions),
    ("unit_backward", unit_backward_by_functions),
    ("norm_of_shards", norm_of_shards_by_functions),
    ("split_sizes", splits_by_functions),
    ("dispatch_backward", dispatch_backward_by_functions),
]
