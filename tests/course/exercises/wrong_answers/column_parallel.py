"""Answers to the exercises on column parallel."""

import torch
import torch.distributed as dist
import torch.nn.functional as F


def own(tensor, dim=0):
    return tensor.chunk(dist.get_world_size(), dim=dim)[dist.get_rank()]


def gathered(y):
    parts = [torch.empty_like(y) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, y)
    return parts


def bias_of_every_rank(x, master_weight, master_bias):
    y = torch.cat(gathered(F.linear(x, own(master_weight))), dim=-1)
    return y + dist.get_world_size() * master_bias


def cuts_the_input_dim(x, master_weight, master_bias):
    y = F.linear(x, own(master_weight, dim=1), own(master_bias))
    return torch.cat(gathered(y), dim=-1)


def joins_rows(x, master_weight, master_bias):
    return torch.cat(gathered(F.linear(x, own(master_weight), own(master_bias))))


def shard_without_gather(x, master_weight, master_bias):
    return F.linear(x, own(master_weight), own(master_bias))


def no_bias(x, master_weight, master_bias):
    return torch.cat(gathered(F.linear(x, own(master_weight))), dim=-1)


def whole_bias_on_a_shard(x, master_weight, master_bias):
    return torch.cat(gathered(F.linear(x, own(master_weight), master_bias)), dim=-1)


def bias_in_shard_and_after(x, master_weight, master_bias):
    y = F.linear(x, own(master_weight), own(master_bias))
    return torch.cat(gathered(y), dim=-1) + master_bias


def whole_layer_everywhere(x, master_weight, master_bias):
    return F.linear(x, master_weight, master_bias)


def whole_layer_then_gather(x, master_weight, master_bias):
    y = own(F.linear(x, master_weight, master_bias), dim=-1).contiguous()
    return torch.cat(gathered(y), dim=-1)


def every_t_th_row(x, master_weight, master_bias):
    rank, t = dist.get_rank(), dist.get_world_size()
    y = F.linear(x, master_weight[rank::t], master_bias[rank::t])
    return torch.cat(gathered(y), dim=-1)


def adds_the_shards(x, master_weight, master_bias):
    y = F.linear(x, own(master_weight), own(master_bias))
    dist.all_reduce(y)
    return y


def one_buffer_for_all(x, master_weight, master_bias):
    y = F.linear(x, own(master_weight), own(master_bias))
    parts = [torch.empty_like(y)] * dist.get_world_size()
    dist.all_gather(parts, y)
    return torch.cat(parts, dim=-1)


def two_ranks_written_in(x, master_weight, master_bias):
    half = master_weight.shape[0] // 2
    mine = slice(0, half) if dist.get_rank() == 0 else slice(half, None)
    y = F.linear(x, master_weight[mine], master_bias[mine])
    return torch.cat(gathered(y), dim=-1)


def column_forward_by_slices(x, master_weight, master_bias):
    width = master_weight.size(0) // dist.get_world_size()
    mine = slice(dist.get_rank() * width, (dist.get_rank() + 1) * width)
    y = x @ master_weight[mine].T + master_bias[mine]
    result = x.new_zeros(dist.get_world_size(), *y.shape)
    dist.all_gather(list(result), y)
    return result.transpose(0, 1).reshape(len(x), -1)


def gradients(x, weight, grad_output):
    return grad_output @ weight, grad_output.T @ x, grad_output.sum(dim=0)


def no_all_reduce(x, weight, grad_output):
    return gradients(x, weight, grad_output)


def all_three_reduced(x, weight, grad_output):
    results = gradients(x, weight, grad_output)
    for result in results:
        dist.all_reduce(result)
    return results


def grad_x_averaged(x, weight, grad_output):
    grad_x, grad_weight, grad_bias = gradients(x, weight, grad_output)
    dist.all_reduce(grad_x)
    return grad_x / dist.get_world_size(), grad_weight, grad_bias


def grad_weight_transposed(x, weight, grad_output):
    grad_x, _, grad_bias = gradients(x, weight, grad_output)
    dist.all_reduce(grad_x)
    return grad_x, x.T @ grad_output, grad_bias


def bias_averaged_over_rows(x, weight, grad_output):
    grad_x, grad_weight, _ = gradients(x, weight, grad_output)
    dist.all_reduce(grad_x)
    return grad_x, grad_weight, grad_output.mean(dim=0)


def bias_summed_over_columns(x, weight, grad_output):
    grad_x, grad_weight, _ = gradients(x, weight, grad_output)
    dist.all_reduce(grad_x)
    return grad_x, grad_weight, grad_output.sum(dim=1)


def result_of_all_reduce(x, weight, grad_output):
    grad_x = dist.all_reduce(grad_output @ weight)
    return grad_x, grad_output.T @ x, grad_output.sum(dim=0)


def reduces_grad_output_first(x, weight, grad_output):
    grad_output = grad_output.clone()
    dist.all_reduce(grad_output)
    return gradients(x, weight, grad_output)


def weight_first(x, weight, grad_output):
    grad_x, grad_weight, grad_bias = gradients(x, weight, grad_output)
    dist.all_reduce(grad_x)
    return grad_weight, grad_x, grad_bias


def gathers_grad_x(x, weight, grad_output):
    grad_x, grad_weight, grad_bias = gradients(x, weight, grad_output)
    return torch.cat(gathered(grad_x), dim=-1), grad_weight, grad_bias


def backward_by_autograd(x, weight, grad_output):
    x, weight = x.detach().requires_grad_(), weight.detach().requires_grad_()
    grad_x, grad_weight = torch.autograd.grad(F.linear(x, weight), [x, weight], grad_output)
    dist.all_reduce(grad_x)
    return grad_x, grad_weight, grad_output.sum(dim=0)


def column_backward_by_einsum(x, weight, grad_output):
    grad_x = torch.einsum("bo,oi->bi", grad_output, weight)
    work = dist.all_reduce(grad_x, async_op=True)
    grad_weight = torch.einsum("bo,bi->oi", grad_output, x)
    work.wait()
    return [grad_x, grad_weight, grad_output.sum(0)]


def ignores_stride(master, rank, tp_size, stride):
    return master.chunk(tp_size)[rank]


def every_t_th_row_of_master(master, rank, tp_size, stride):
    return master[rank::tp_size]


def neighbouring_chunks(master, rank, tp_size, stride):
    chunks = master.chunk(tp_size * stride)
    return torch.cat(chunks[rank * stride : (rank + 1) * stride])


def steps_by_stride(master, rank, tp_size, stride):
    return torch.cat(master.chunk(tp_size * stride)[rank::stride])


def cuts_columns(master, rank, tp_size, stride):
    return torch.cat(master.chunk(tp_size * stride, dim=1)[rank::tp_size], dim=1)


def a_tuple_of_chunks(master, rank, tp_size, stride):
    return master.chunk(tp_size * stride)[rank::tp_size]


def stacked_chunks(master, rank, tp_size, stride):
    return torch.stack(master.chunk(tp_size * stride)[rank::tp_size])


def stride_3_written_in(master, rank, tp_size, stride):
    return torch.cat(master.chunk(3 * tp_size)[rank::tp_size])


def ranks_from_1(master, rank, tp_size, stride):
    return torch.cat(master.chunk(tp_size * stride)[rank - 1 :: tp_size])


def shard_by_view(master, rank, tp_size, stride):
    rows = master.size(0) // (tp_size * stride)
    return master.reshape(stride, tp_size, rows, *master.shape[1:])[:, rank].flatten(0, 1)


def column_backward_1(x: torch.Tensor, weight: torch.Tensor, grad_output: torch.Tensor) -> tuple[torch.Tensor, ...]:
    grad_x = grad_output @ weight
    grad_weight = grad_output.T @ x
    grad_bias = grad_output.sum(dim=0)
    return grad_x, grad_weight, grad_bias


def column_backward_2(x: torch.Tensor, weight: torch.Tensor, grad_output: torch.Tensor) -> tuple[torch.Tensor, ...]:
    grad_x = grad_output @ weight
    dist.all_reduce(grad_x)
    grad_x /= dist.get_world_size()
    return grad_x, grad_output.T @ x, grad_output.sum(0)


def column_backward_3(x: torch.Tensor, weight: torch.Tensor, grad_output: torch.Tensor) -> tuple[torch.Tensor, ...]:
    grad_x = grad_output @ weight
    dist.all_reduce(grad_x)
    grad_weight = grad_output.T @ x
    grad_bias = grad_output.sum(dim=1)
    return grad_x, grad_weight, grad_bias


def column_backward_4(x: torch.Tensor, weight: torch.Tensor, grad_output: torch.Tensor) -> tuple[torch.Tensor, ...]:
    grad_x = grad_output @ weight
    dist.all_reduce(grad_x)
    grad_weight = x.T @ grad_output
    grad_bias = grad_output.sum(dim=0)
    return grad_x, grad_weight, grad_bias


def column_forward_1(x: torch.Tensor, master_weight: torch.Tensor, master_bias: torch.Tensor) -> torch.Tensor:
    rank, t = dist.get_rank(), dist.get_world_size()
    y = F.linear(x, master_weight.chunk(t)[rank])
    parts = [torch.empty_like(y) for _ in range(t)]
    dist.all_gather(parts, y)
    return torch.cat(parts, dim=1)


def column_forward_2(x: torch.Tensor, master_weight: torch.Tensor, master_bias: torch.Tensor) -> torch.Tensor:
    rank, t = dist.get_rank(), dist.get_world_size()
    y = F.linear(x, master_weight.chunk(t)[rank], master_bias.chunk(t)[rank])
    parts = [torch.empty_like(y) for _ in range(t)]
    dist.all_gather(parts, y)
    return torch.cat(parts)


def column_forward_3(x: torch.Tensor, master_weight: torch.Tensor, master_bias: torch.Tensor) -> torch.Tensor:
    y = F.linear(x, master_weight, master_bias)
    return y


def column_forward_4(x: torch.Tensor, master_weight: torch.Tensor, master_bias: torch.Tensor) -> torch.Tensor:
    rank, t = dist.get_rank(), dist.get_world_size()
    weight = master_weight.chunk(t, dim=1)[rank]
    bias = master_bias.chunk(t)[rank]
    y = F.linear(x, weight, bias)
    parts = [torch.empty_like(y) for _ in range(t)]
    dist.all_gather(parts, y)
    return torch.cat(parts, dim=1)


def stride_shard_1(master: torch.Tensor, rank: int, tp_size: int, stride: int) -> torch.Tensor:
    return master[rank::tp_size]


def stride_shard_2(master: torch.Tensor, rank: int, tp_size: int, stride: int) -> torch.Tensor:
    return master.chunk(tp_size, dim=0)[rank]


def stride_shard_3(master: torch.Tensor, rank: int, tp_size: int, stride: int) -> torch.Tensor:
    chunks = master.chunk(tp_size * stride)
    return torch.cat(chunks[rank::stride])


def stride_shard_4(master: torch.Tensor, rank: int, tp_size: int, stride: int) -> torch.Tensor:
    return master.chunk(tp_size * stride, dim=0)[rank::tp_size]


def with_an_activation(x, master_weight, master_bias):
    t, rank = dist.get_world_size(), dist.get_rank()
    y_shard = F.linear(x, master_weight.chunk(t)[rank], master_bias.chunk(t)[rank]).relu()
    shards = [torch.empty_like(y_shard) for _ in range(t)]
    dist.all_gather(shards, y_shard)
    return torch.cat(shards, dim=-1)


WRONG = [
    ("column_forward", with_an_activation, "an activation that nobody asked for"),
    ("column_forward", bias_of_every_rank, "the bias t times"),
    ("column_forward", cuts_the_input_dim, "cuts the stored weight's inputs"),
    ("column_forward", joins_rows, "joins the shards as rows"),
    ("column_forward", shard_without_gather, "the gather is missing"),
    ("column_forward", no_bias, "the bias is missing"),
    ("column_forward", whole_bias_on_a_shard, "the whole bias on a shard"),
    ("column_forward", bias_in_shard_and_after, "the bias is added twice"),
    ("column_forward", whole_layer_everywhere, "every rank computes the whole layer"),
    ("column_forward", whole_layer_then_gather, "computes the whole layer, then gathers"),
    ("column_forward", every_t_th_row, "takes every t-th row"),
    ("column_forward", adds_the_shards, "adds the shards instead of joining"),
    ("column_forward", one_buffer_for_all, "one buffer receives all shards"),
    ("column_forward", two_ranks_written_in, "right for two ranks only"),
    ("column_backward", no_all_reduce, "the all-reduce is missing"),
    ("column_backward", all_three_reduced, "adds up the shards' gradients too"),
    ("column_backward", grad_x_averaged, "averages grad_x instead of adding"),
    ("column_backward", grad_weight_transposed, "grad_weight is transposed"),
    ("column_backward", bias_averaged_over_rows, "grad_bias is a mean"),
    ("column_backward", bias_summed_over_columns, "grad_bias adds the wrong dim"),
    ("column_backward", result_of_all_reduce, "all_reduce returns None"),
    ("column_backward", reduces_grad_output_first, "adds up different columns of dY"),
    ("column_backward", weight_first, "the results are in wrong order"),
    ("column_backward", gathers_grad_x, "joins grad_x instead of adding"),
    ("column_backward", backward_by_autograd, "calls autograd, not by hand"),
    ("stride_shard", ignores_stride, "ignores the stride"),
    ("stride_shard", every_t_th_row_of_master, "takes every t-th row"),
    ("stride_shard", neighbouring_chunks, "takes neighbouring chunks"),
    ("stride_shard", steps_by_stride, "steps by stride, not by t"),
    ("stride_shard", cuts_columns, "cuts dim 1"),
    ("stride_shard", a_tuple_of_chunks, "does not join the chunks"),
    ("stride_shard", stacked_chunks, "stacks the chunks instead of joining"),
    ("stride_shard", stride_3_written_in, "right for stride 3 only"),
    ("stride_shard", ranks_from_1, "counts ranks from 1"),
    ("column_backward", column_backward_1, "no all-reduce of grad_x"),
    ("column_backward", column_backward_2, "averages grad_x over ranks"),
    ("column_backward", column_backward_3, "bias gradient summed over columns"),
    ("column_backward", column_backward_4, "weight gradient transposed"),
    ("column_forward", column_forward_1, "forgot the bias"),
    ("column_forward", column_forward_2, "joins along the batch"),
    ("column_forward", column_forward_3, "whole layer, no shard used"),
    ("column_forward", column_forward_4, "cuts the columns as stored"),
    ("stride_shard", stride_shard_1, "takes every t-th row"),
    ("stride_shard", stride_shard_2, "ignores the stride"),
    ("stride_shard", stride_shard_3, "every stride-th chunk, not t-th"),
    ("stride_shard", stride_shard_4, "tuple of chunks, not joined"),
]

RIGHT = [
    ("column_forward", column_forward_by_slices),
    ("column_backward", column_backward_by_einsum),
    ("stride_shard", shard_by_view),
]
