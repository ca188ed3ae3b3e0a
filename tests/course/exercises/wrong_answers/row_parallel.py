"""Answers to the exercises on row parallel."""

import torch
import torch.distributed as dist
import torch.nn.functional as F


def added_up(tensor, op=dist.ReduceOp.SUM):
    tensor = tensor.clone()
    dist.all_reduce(tensor, op=op)
    return tensor


def joined(tensor):
    parts = [torch.empty_like(tensor) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, tensor.contiguous())
    return torch.cat(parts, dim=-1)


def bias_before_the_sum(x, weight, bias):
    y = F.linear(x, weight, bias)
    dist.all_reduce(y)
    return y


def partial_result(x, weight, bias):
    return F.linear(x, weight, bias)


def result_of_all_reduce(x, weight, bias):
    y = dist.all_reduce(x @ weight.T)
    return y + bias


def cuts_x_again(x, weight, bias):
    own = x.chunk(dist.get_world_size(), dim=1)[dist.get_rank()]
    return added_up(own @ weight.T) + bias


def joins_partial_results(x, weight, bias):
    return joined(x @ weight.T) + bias


def averages_partial_results(x, weight, bias):
    return added_up(x @ weight.T) / dist.get_world_size() + bias


def weight_not_transposed(x, weight, bias):
    return added_up(x @ weight) + bias


def bias_is_cut(x, weight, bias):
    return added_up(x @ weight.T) + bias.chunk(dist.get_world_size())[dist.get_rank()]


def no_bias(x, weight, bias):
    return added_up(x @ weight.T)


def adds_the_inputs(x, weight, bias):
    return F.linear(added_up(x), weight, bias)


def bias_on_rank_0(x, weight, bias):
    y = F.linear(x, weight, bias if dist.get_rank() == 0 else None)
    dist.all_reduce(y)
    return y


def row_gradients(grad_y, x, weight):
    return grad_y @ weight, grad_y.T @ x, grad_y.sum(dim=0)


def grad_x_reduced(grad_y, x, weight):
    grad_x, grad_weight, grad_bias = row_gradients(grad_y, x, weight)
    return added_up(grad_x), grad_weight, grad_bias


def grad_bias_reduced(grad_y, x, weight):
    grad_x, grad_weight, grad_bias = row_gradients(grad_y, x, weight)
    return grad_x, grad_weight, added_up(grad_bias)


def grad_x_joined(grad_y, x, weight):
    grad_x, grad_weight, grad_bias = row_gradients(grad_y, x, weight)
    return joined(grad_x), grad_weight, grad_bias


def grad_y_reduced(grad_y, x, weight):
    return row_gradients(added_up(grad_y), x, weight)


def grad_y_divided(grad_y, x, weight):
    return row_gradients(grad_y / dist.get_world_size(), x, weight)


def bias_shared_by_ranks(grad_y, x, weight):
    grad_x, grad_weight, grad_bias = row_gradients(grad_y, x, weight)
    return grad_x, grad_weight, grad_bias / dist.get_world_size()


def grad_weight_transposed(grad_y, x, weight):
    return grad_y @ weight, x.T @ grad_y, grad_y.sum(dim=0)


def grad_bias_averaged(grad_y, x, weight):
    return grad_y @ weight, grad_y.T @ x, grad_y.mean(dim=0)


def grad_bias_for_each_token(grad_y, x, weight):
    return grad_y @ weight, grad_y.T @ x, grad_y


def grad_y_cut(grad_y, x, weight):
    return row_gradients(grad_y.chunk(dist.get_world_size(), dim=1)[dist.get_rank()], x, weight)


def row_backward_by_autograd(grad_y, x, weight):
    x, weight = x.detach().requires_grad_(), weight.detach().requires_grad_()
    bias = torch.zeros_like(grad_y[0], requires_grad=True)
    return torch.autograd.grad(F.linear(x, weight, bias), [x, weight, bias], grad_y)


def row_backward_by_einsum(grad_y, x, weight):
    grad_x = torch.einsum("to,oi->ti", grad_y, weight)
    return [grad_x, torch.einsum("to,ti->oi", grad_y, x), torch.ones(len(x), dtype=x.dtype) @ grad_y]


def highest_logit(logits):
    return added_up(logits.max(dim=-1).values, dist.ReduceOp.MAX)


def own_target(logits, target, shift=0.0):
    """The target's logit on the rank that has the word, and zero on the others."""
    local = target - dist.get_rank() * logits.shape[-1]
    is_mine = (local >= 0) & (local < logits.shape[-1])
    picked = logits.gather(-1, local.clamp(0, logits.shape[-1] - 1).unsqueeze(-1)).squeeze(-1) - shift
    return torch.where(is_mine, picked, torch.zeros_like(picked))


def no_highest_logit(logits, target):
    return added_up(logits.exp().sum(dim=-1)).log() - added_up(own_target(logits, target))


def own_highest_logit(logits, target):
    high = logits.max(dim=-1).values
    total = added_up((logits - high.unsqueeze(-1)).exp().sum(dim=-1))
    return total.log() + high - added_up(own_target(logits, target))


def highest_logits_added(logits, target):
    high = added_up(logits.max(dim=-1).values)
    total = added_up((logits - high.unsqueeze(-1)).exp().sum(dim=-1))
    return total.log() + high - added_up(own_target(logits, target))


def highest_logit_not_given_back(logits, target):
    total = added_up((logits - highest_logit(logits).unsqueeze(-1)).exp().sum(dim=-1))
    return total.log() - added_up(own_target(logits, target))


def target_without_mask(logits, target):
    high = highest_logit(logits)
    total = added_up((logits - high.unsqueeze(-1)).exp().sum(dim=-1))
    local = (target - dist.get_rank() * logits.shape[-1]).clamp(0, logits.shape[-1] - 1)
    picked = logits.gather(-1, local.unsqueeze(-1)).squeeze(-1)
    return total.log() + high - added_up(picked)


def global_word_number(logits, target):
    high = highest_logit(logits)
    total = added_up((logits - high.unsqueeze(-1)).exp().sum(dim=-1))
    return total.log() + high - added_up(logits.gather(-1, target.unsqueeze(-1)).squeeze(-1))


def logarithms_added(logits, target):
    return added_up(logits.logsumexp(dim=-1)) - added_up(own_target(logits, target))


def gathers_all_logits(logits, target):
    return F.cross_entropy(joined(logits), target, reduction="none")


def mean_over_tokens(logits, target):
    return three_numbers(logits, target).mean()


def three_numbers(logits, target):
    high = logits.amax(-1)
    dist.all_reduce(high, op=dist.ReduceOp.MAX)
    both = torch.stack([(logits - high[:, None]).exp().sum(-1), own_target(logits, target, high)])
    dist.all_reduce(both)
    return both[0].log() - both[1]


def row_backward_1(grad_y: torch.Tensor, x: torch.Tensor, weight: torch.Tensor):
    grad_x = grad_y @ weight
    dist.all_reduce(grad_x)
    return grad_x, grad_y.T @ x, grad_y.sum(dim=0)


def row_backward_2(grad_y: torch.Tensor, x: torch.Tensor, weight: torch.Tensor):
    grad_x = grad_y @ weight
    grad_weight = grad_y.T @ x
    grad_bias = grad_y.sum(dim=0)
    dist.all_reduce(grad_bias)
    return grad_x, grad_weight, grad_bias


def row_backward_3(grad_y: torch.Tensor, x: torch.Tensor, weight: torch.Tensor):
    grad_x = grad_y @ weight
    grad_weight = grad_y.T @ x
    grad_bias = grad_y
    return grad_x, grad_weight, grad_bias


def row_backward_4(grad_y: torch.Tensor, x: torch.Tensor, weight: torch.Tensor):
    own = grad_y.chunk(dist.get_world_size(), dim=1)[dist.get_rank()]
    grad_x = own @ weight
    grad_weight = own.T @ x
    return grad_x, grad_weight, own.sum(dim=0)


def row_forward_1(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor):
    y = F.linear(x, weight, bias)
    dist.all_reduce(y)
    return y


def row_forward_2(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor):
    y = dist.all_reduce(x @ weight.T)
    return y + bias


def row_forward_3(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor):
    y = x @ weight.T
    dist.all_reduce(y)
    return y / dist.get_world_size() + bias


def row_forward_4(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor):
    y = x @ weight
    dist.all_reduce(y)
    return y + bias


def vocab_cross_entropy_1(logits: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    size = logits.shape[1]
    local = target - dist.get_rank() * size
    mine = (local >= 0) & (local < size)
    total = logits.exp().sum(dim=1)
    dist.all_reduce(total)
    picked = logits.gather(1, local.clamp(0, size - 1).unsqueeze(1)).squeeze(1)
    picked = torch.where(mine, picked, torch.zeros_like(picked))
    dist.all_reduce(picked)
    return total.log() - picked


def vocab_cross_entropy_2(logits: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    size = logits.shape[1]
    highest = logits.max(dim=1).values
    total = (logits - highest.unsqueeze(1)).exp().sum(dim=1)
    dist.all_reduce(total)
    local = target - dist.get_rank() * size
    mine = (local >= 0) & (local < size)
    picked = logits.gather(1, local.clamp(0, size - 1).unsqueeze(1)).squeeze(1)
    picked = picked * mine
    dist.all_reduce(picked)
    return total.log() + highest - picked


def vocab_cross_entropy_3(logits: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    size = logits.shape[1]
    highest = logits.max(dim=1).values
    dist.all_reduce(highest)
    total = (logits - highest.unsqueeze(1)).exp().sum(dim=1)
    dist.all_reduce(total)
    local = target - dist.get_rank() * size
    mine = (local >= 0) & (local < size)
    picked = logits.gather(1, local.clamp(0, size - 1).unsqueeze(1)).squeeze(1)
    picked = picked * mine
    dist.all_reduce(picked)
    return total.log() + highest - picked


def vocab_cross_entropy_4(logits: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    size = logits.shape[1]
    highest = logits.amax(dim=1)
    dist.all_reduce(highest, op=dist.ReduceOp.MAX)
    total = (logits - highest[:, None]).exp().sum(dim=1)
    dist.all_reduce(total)
    local = target - dist.get_rank() * size
    mine = (local >= 0) & (local < size)
    rows = torch.arange(len(target))
    picked = logits[rows, local.clamp(0, size - 1)] * mine
    dist.all_reduce(picked)
    return total.log() - picked


def vocab_cross_entropy_5(logits: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    parts = [torch.empty_like(logits) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, logits.contiguous())
    whole = torch.cat(parts, dim=1)
    return F.cross_entropy(whole, target, reduction="none")


def vocab_cross_entropy_6(logits: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    size = logits.shape[1]
    highest = logits.amax(dim=1, keepdim=True)
    dist.all_reduce(highest, op=dist.ReduceOp.MAX)
    shifted = logits - highest
    total = shifted.exp().sum(dim=1)
    dist.all_reduce(total)
    local = (target - dist.get_rank() * size).clamp(0, size - 1)
    picked = shifted.gather(1, local[:, None]).squeeze(1)
    dist.all_reduce(picked)
    return total.log() - picked


def shards_as_long_as_the_tokens(logits, target):
    highest = logits.max(dim=-1).values
    dist.all_reduce(highest, op=dist.ReduceOp.MAX)
    logits = logits - highest[:, None]
    total = logits.exp().sum(dim=-1)
    dist.all_reduce(total)
    shard_size = len(logits)
    place = target - dist.get_rank() * shard_size
    is_mine = (place >= 0) & (place < shard_size)
    chosen = logits.gather(-1, place.clamp(0, logits.size(-1) - 1)[:, None]).squeeze(-1)
    chosen = torch.where(is_mine, chosen, 0)
    dist.all_reduce(chosen)
    return total.log() - chosen


WRONG = [
    ("row_forward", bias_before_the_sum, "the bias is added t times"),
    ("row_forward", partial_result, "the all-reduce is missing"),
    ("row_forward", result_of_all_reduce, "all_reduce returns None"),
    ("row_forward", cuts_x_again, "x is cut a second time"),
    ("row_forward", joins_partial_results, "joins partial results instead of adding"),
    ("row_forward", averages_partial_results, "the mean instead of the sum"),
    ("row_forward", weight_not_transposed, "the stored weight is not transposed"),
    ("row_forward", bias_is_cut, "the bias is cut"),
    ("row_forward", no_bias, "the bias is missing"),
    ("row_forward", adds_the_inputs, "adds up inputs, not products"),
    ("row_backward", grad_x_reduced, "adds up different columns of dX"),
    ("row_backward", grad_bias_reduced, "the bias gradient counts t times"),
    ("row_backward", grad_x_joined, "joins dX, though x is cut"),
    ("row_backward", grad_y_reduced, "everything is t times too large"),
    ("row_backward", grad_y_divided, "everything is t times too small"),
    ("row_backward", bias_shared_by_ranks, "the bias gradient is divided"),
    ("row_backward", grad_weight_transposed, "grad_weight is transposed"),
    ("row_backward", grad_bias_averaged, "the bias gradient is a mean"),
    ("row_backward", grad_bias_for_each_token, "the sum over tokens is missing"),
    ("row_backward", grad_y_cut, "grad_y is cut, as if by columns"),
    ("row_backward", row_backward_by_autograd, "calls autograd, not by hand"),
    ("vocab_cross_entropy", shards_as_long_as_the_tokens, "takes the number of tokens for the words of a rank"),
    ("vocab_cross_entropy", no_highest_logit, "overflows for large logits"),
    ("vocab_cross_entropy", own_highest_logit, "every rank subtracts its own maximum"),
    ("vocab_cross_entropy", highest_logits_added, "maxima are added, not compared"),
    ("vocab_cross_entropy", highest_logit_not_given_back, "the maximum is not added back"),
    ("vocab_cross_entropy", target_without_mask, "other ranks' words are not masked"),
    ("vocab_cross_entropy", global_word_number, "indexes a slice with global numbers"),
    ("vocab_cross_entropy", logarithms_added, "adds logarithms, not exponentials"),
    ("vocab_cross_entropy", gathers_all_logits, "gathers all logits: too many bytes"),
    ("vocab_cross_entropy", mean_over_tokens, "one mean, not a loss per token"),
    ("row_backward", row_backward_1, "sums grad_x as column layer does"),
    ("row_backward", row_backward_2, "bias gradient summed over ranks"),
    ("row_backward", row_backward_3, "bias gradient is grad_y itself"),
    ("row_backward", row_backward_4, "slices grad_y by columns first"),
    ("row_forward", row_forward_1, "bias added before the sum"),
    ("row_forward", row_forward_2, "uses what all_reduce returns, None"),
    ("row_forward", row_forward_3, "averages the partial results"),
    ("row_forward", row_forward_4, "forgot to transpose the weight"),
    ("vocab_cross_entropy", vocab_cross_entropy_1, "no maximum subtracted: overflows"),
    ("vocab_cross_entropy", vocab_cross_entropy_2, "each rank its own maximum"),
    ("vocab_cross_entropy", vocab_cross_entropy_3, "maximum all-reduced as sum"),
    ("vocab_cross_entropy", vocab_cross_entropy_4, "forgot to add maximum back"),
    ("vocab_cross_entropy", vocab_cross_entropy_5, "gathers all the logits"),
    ("vocab_cross_entropy", vocab_cross_entropy_6, "other ranks' targets not zeroed"),
]

RIGHT = [
    ("row_forward", bias_on_rank_0),
    ("row_backward", row_backward_by_einsum),
    ("vocab_cross_entropy", three_numbers),
]
