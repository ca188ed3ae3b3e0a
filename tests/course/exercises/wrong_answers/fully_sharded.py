"""Answers to the exercises on fully sharded data parallelism."""

import math

import torch
import torch.distributed as dist
import torch.nn.functional as F

from labkit.collectives import all_gather_single, reduce_scatter_single


def all_shards(shard):
    whole = torch.empty(dist.get_world_size() * shard.numel())
    all_gather_single(whole, shard)
    return whole


def free(whole):
    whole.untyped_storage().resize_(0)


def bias_at_the_end(x, shard, out_features):
    whole = all_shards(shard)
    out = x @ whole[: out_features * x.shape[1]].view(out_features, -1).T + whole[-out_features:]
    free(whole)
    return out


def weight_only(x, shard, out_features):
    whole = all_shards(shard)
    out = F.linear(x, whole[: x.shape[1] * out_features].reshape(out_features, x.shape[1]))
    free(whole)
    return out


def weight_as_in_out(x, shard, out_features):
    whole, n = all_shards(shard), x.shape[1] * out_features
    out = x @ whole[:n].view(x.shape[1], out_features) + whole[n : n + out_features]
    free(whole)
    return out


def padding_not_cut(x, shard, out_features):
    whole = all_shards(shard)
    weight, bias = whole[:-out_features].view(out_features, -1), whole[-out_features:]
    return F.linear(x, weight, bias)


def own_shard_as_the_weight(x, shard, out_features):
    return F.linear(x, shard.view(out_features, -1))


def frees_first(x, shard, out_features):
    whole = all_shards(shard)
    n = out_features * x.shape[1]
    weight, bias = whole[:n].view(out_features, x.shape[1]), whole[n : n + out_features]
    whole.untyped_storage().resize_(0)
    return F.linear(x, weight, bias)


def adds_up_like_a_row_layer(x, shard, out_features):
    out = keeps_the_weight(x, shard, out_features).detach()
    dist.all_reduce(out)
    return out


def gathers_the_rows(x, shard, out_features):
    rows = [torch.empty_like(x) for _ in range(dist.get_world_size())]
    dist.all_gather(rows, x.detach())
    return keeps_the_weight(torch.cat(rows), shard, out_features)


def dealt_like_cards(x, shard, out_features):
    parts = [torch.empty_like(shard) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, shard)
    whole, n = torch.stack(parts, dim=1).flatten(), out_features * x.shape[1]
    return F.linear(x, whole[:n].view(out_features, -1), whole[n : n + out_features])


def keeps_the_weight(x, shard, out_features):
    whole, n = all_shards(shard), out_features * x.shape[1]
    return F.linear(x, whole[:n].view(out_features, -1), whole[n : n + out_features])


def deletes_the_name(x, shard, out_features):
    whole, n = all_shards(shard), out_features * x.shape[1]
    out = F.linear(x, whole[:n].view(out_features, -1), whole[n : n + out_features])
    del whole
    return out


def adds_zeros(x, shard, out_features):
    whole = torch.zeros(dist.get_world_size(), len(shard))
    whole[dist.get_rank()] = shard
    dist.all_reduce(whole)
    n = out_features * x.shape[1]
    with torch.no_grad():
        return F.linear(x, whole.flatten()[:n].view(out_features, -1), whole.flatten()[n : n + out_features])


def without_autograd(x, shard, out_features):
    parts = [torch.empty_like(shard) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, shard)
    weight, bias, _ = torch.cat(parts).tensor_split([out_features * x.shape[1], out_features * (x.shape[1] + 1)])
    with torch.no_grad():
        return x @ weight.view(out_features, -1).T + bias


def forward_that_frees(x, shard, out_features, freed):
    parts = [torch.empty_like(shard) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, shard)
    whole = torch.cat(parts)
    weight, bias, _ = whole.tensor_split([out_features * x.shape[1], out_features * (x.shape[1] + 1)])
    out = F.linear(x, weight.view(out_features, -1), bias)
    for tensor in (whole, *freed(shard, out)):
        tensor.untyped_storage().resize_(0)
    return out


def frees_the_shard(x, shard, out_features):
    return forward_that_frees(x, shard, out_features, lambda shard, out: [shard])


def returns_freed_memory(x, shard, out_features):
    return forward_that_frees(x, shard, out_features, lambda shard, out: [out])


def pieces(grad, x, shard):
    """The layer's weight, and both gradients in a flat tensor."""
    whole, n = all_shards(shard), grad.shape[1] * x.shape[1]
    flat = torch.zeros_like(whole)
    flat[:n], flat[n : n + grad.shape[1]] = (grad.T @ x).flatten(), grad.sum(dim=0)
    return whole[:n].view(grad.shape[1], x.shape[1]), flat


def scattered(flat):
    mine = torch.empty(len(flat) // dist.get_world_size())
    reduce_scatter_single(mine, flat)
    return mine


def not_averaged(grad, x, shard):
    weight, flat = pieces(grad, x, shard)
    return grad @ weight, scattered(flat)


def divided_before_and_after(grad, x, shard):
    weight, flat = pieces(grad, x, shard)
    d = dist.get_world_size()
    return grad @ weight / d, scattered(flat / d) / d


def own_piece(grad, x, shard):
    weight, flat = pieces(grad, x, shard)
    return grad @ weight, flat.chunk(dist.get_world_size())[dist.get_rank()]


def whole_average(grad, x, shard):
    weight, flat = pieces(grad, x, shard)
    dist.all_reduce(flat)
    return grad @ weight, flat / dist.get_world_size()


def all_reduced_and_cut(grad, x, shard):
    weight, flat = pieces(grad, x, shard)
    dist.all_reduce(flat)
    return grad @ weight, flat.chunk(dist.get_world_size())[dist.get_rank()] / dist.get_world_size()


def weight_gradient_transposed(grad, x, shard):
    weight, flat = pieces(grad, x, shard)
    flat[: weight.numel()] = (x.T @ grad).reshape(-1)
    return grad @ weight, scattered(flat / dist.get_world_size())


def no_bias_gradient(grad, x, shard):
    weight, flat = pieces(grad, x, shard)
    flat[weight.numel() :] = 0
    return grad @ weight, scattered(flat / dist.get_world_size())


def bias_gradient_is_a_mean(grad, x, shard):
    weight, flat = pieces(grad, x, shard)
    flat[weight.numel() :] /= len(x)
    return grad @ weight, scattered(flat / dist.get_world_size())


def input_gradient_reduced(grad, x, shard):
    weight, flat = pieces(grad, x, shard)
    grad_x = grad @ weight
    dist.all_reduce(grad_x)
    return grad_x, scattered(flat) / dist.get_world_size()


def scatters_into_the_shard(grad, x, shard):
    weight, flat = pieces(grad, x, shard)
    reduce_scatter_single(shard, flat / dist.get_world_size())
    return grad @ weight, shard


def no_padding(grad, x, shard):
    weight, flat = pieces(grad, x, shard)
    flat = flat[: weight.numel() + grad.shape[1]]
    grad_shard = torch.empty_like(shard)
    reduce_scatter_single(grad_shard, flat / dist.get_world_size())
    return grad @ weight, grad_shard


def no_padding_in_a_list(grad, x, shard):
    weight, flat = pieces(grad, x, shard)
    flat = flat[: weight.numel() + grad.shape[1]] / dist.get_world_size()
    grad_shard = torch.empty_like(shard)
    dist.reduce_scatter(grad_shard, list(flat.chunk(dist.get_world_size())))
    return grad @ weight, grad_shard


def in_the_wrong_order(grad, x, shard):
    weight, flat = pieces(grad, x, shard)
    return scattered(flat / dist.get_world_size()), grad @ weight


def every_dth(grad, x, shard):
    weight, flat = pieces(grad, x, shard)
    flat = flat.view(-1, dist.get_world_size()).T.flatten()
    return grad @ weight, scattered(flat / dist.get_world_size())


def in_lists(grad, x, shard):
    weight, flat = pieces(grad, x, shard)
    mine = torch.zeros_like(shard)
    dist.reduce_scatter(mine, [part.contiguous() for part in flat.split(len(shard))])
    return torch.einsum("no,oi->ni", grad, weight), mine / dist.get_world_size()


def fits(held, gib, unit=2**30):
    return next((stage for stage, each in enumerate(held) if each <= gib * unit), None)


def in_gb(n, d, gib):
    k = math.ceil(n / d)
    return fits([18 * n, 6 * n + 12 * k, 2 * n + 16 * k, 18 * k], gib, 10**9)


def as_in_the_zero_paper(n, d, gib):
    k = -(-n // d)
    return fits([16 * n, 4 * n + 12 * k, 2 * n + 14 * k, 16 * k], gib)


def without_rounding(n, d, gib):
    return fits([18 * n, (6 + 12 / d) * n, (2 + 16 / d) * n, 18 / d * n], gib)


def rounded_down(n, d, gib):
    return fits([18 * n, 6 * n + 12 * (n // d), 2 * n + 16 * (n // d), 18 * (n // d)], gib)


def only_less(n, d, gib):
    k = math.ceil(n / d)
    held = [18 * n, 6 * n + 12 * k, 2 * n + 16 * k, 18 * k]
    for stage in range(4):
        if held[stage] < gib * 1024**3:
            return stage


def each_part_alone(n, d, gib):
    k = math.ceil(n / d)
    return fits([18 * n, 6 * n + 12 * k, 14 * n + 4 * k, 16 * n + 2 * k], gib)


def never_stage_0(n, d, gib):
    k = math.ceil(n / d)
    for stage, held in ((1, 6 * n + 12 * k), (2, 2 * n + 16 * k), (3, 18 * k)):
        if held <= gib * 2**30:
            return stage


def the_largest(n, d, gib):
    k = math.ceil(n / d)
    return 3 if 18 * k <= gib * 2**30 else None


def always_3(n, d, gib):
    k = math.ceil(n / d)
    stage = fits([18 * n, 6 * n + 12 * k, 2 * n + 16 * k], gib)
    return 3 if stage is None else stage


def weights_first(n, d, gib):
    k = math.ceil(n / d)
    return fits([18 * n, 16 * n + 2 * k, 12 * n + 6 * k, 18 * k], gib)


def all_memory_together(n, d, gib):
    return fits([18 * n, 18 * n, 18 * n, 18 * n], gib * d)


def two_moments(n, d, gib):
    k = math.ceil(n / d)
    return fits([14 * n, 6 * n + 8 * k, 2 * n + 12 * k, 14 * k], gib)


def in_a_loop(n, d, gib):
    held = {"optimizer": 12 * n, "gradients": 4 * n, "weights": 2 * n}
    for stage, name in enumerate([None, *held]):
        if name:
            held[name] = held[name] // n * -(-n // d)
        if sum(held.values()) / 2**30 <= gib:
            return stage
    return None


def grads(model):
    return [p.grad for p in model.parameters()]


def sends_every_time(model, micro_batches):
    for x in micro_batches:
        (model(x).square().mean() / len(micro_batches)).backward()
    return grads(model)


def only_forward_inside(model, micro_batches):
    for x in micro_batches:
        with model.no_sync():
            loss = model(x).square().mean() / len(micro_batches)
        loss.backward()
    return grads(model)


def never_sends(model, micro_batches):
    with model.no_sync():
        for x in micro_batches:
            (model(x).square().mean() / len(micro_batches)).backward()
    return grads(model)


def sends_the_first(model, micro_batches):
    (model(micro_batches[0]).square().mean() / len(micro_batches)).backward()
    with model.no_sync():
        for x in micro_batches[1:]:
            (model(x).square().mean() / len(micro_batches)).backward()
    return grads(model)


def accumulated(model, micro_batches, divisor):
    for i, x in enumerate(micro_batches):
        loss = model(x).square().mean() / divisor
        if i < len(micro_batches) - 1:
            with model.no_sync():
                loss.backward()
        else:
            loss.backward()
    return grads(model)


def one_too_few(model, micro_batches):
    return accumulated(model, micro_batches, len(micro_batches) - 1)


def by_all_numbers(model, micro_batches):
    return accumulated(model, micro_batches, micro_batches[0].numel())


def in_a_second_pass(model, micro_batches):
    never_sends(model, micro_batches)
    (0 * model(micro_batches[0]).square().mean()).backward()
    return grads(model)


def forgets_to_divide(model, micro_batches):
    return accumulated(model, micro_batches, 1)


def divides_by_ranks(model, micro_batches):
    return accumulated(model, micro_batches, len(micro_batches) * dist.get_world_size())


def divides_at_the_end_too(model, micro_batches):
    return [grad / len(micro_batches) for grad in accumulated(model, micro_batches, len(micro_batches))]


def averages_again(model, micro_batches):
    for grad in (found := accumulated(model, micro_batches, len(micro_batches))):
        dist.all_reduce(grad)
        grad /= dist.get_world_size()
    return found


def forgets_the_last(model, micro_batches):
    return accumulated(model, micro_batches[:-1], len(micro_batches))


def one_large_batch(model, micro_batches):
    model(torch.cat(micro_batches)).square().mean().backward()
    return grads(model)


def returns_weights(model, micro_batches):
    accumulated(model, micro_batches, len(micro_batches))
    return list(model.parameters())


def sends_afterwards(model, micro_batches):
    never_sends(model, micro_batches)
    model.sync_gradients()
    return grads(model)


def squares(gradients):
    return sum((g.pow(2).sum() for g in gradients), torch.zeros(()))


def over(total, *groups):
    for group in groups:
        dist.all_reduce(total, group=group)
    return total.sqrt()


def over_the_world(gradients, is_cut, groups):
    here = [g for g, cut in zip(gradients, is_cut) if cut or groups.tp.rank() == 0]
    return over(squares(here), None)


def everything_over_the_world(gradients, is_cut, groups):
    return over(squares(gradients), None)


def whole_counted_on_each(gradients, is_cut, groups):
    return over(squares(gradients), groups.shard, groups.tp)


def shards_only(gradients, is_cut, groups):
    return over(squares(gradients), groups.shard)


def tensor_ranks_only(gradients, is_cut, groups):
    here = [g for g, cut in zip(gradients, is_cut) if cut or groups.tp.rank() == 0]
    return over(squares(here), groups.tp)


def local_norm(gradients, is_cut, groups):
    return torch.nn.utils.get_total_norm(gradients)


def norms_of_norms(gradients, is_cut, groups):
    total = torch.nn.utils.get_total_norm([g for g, cut in zip(gradients, is_cut) if cut or groups.tp.rank() == 0])
    dist.all_reduce(total, group=groups.shard)
    dist.all_reduce(total, group=groups.tp)
    return total


def no_root(gradients, is_cut, groups):
    return right_norm(gradients, is_cut, groups) ** 2


def averaged(gradients, is_cut, groups):
    total = right_norm(gradients, is_cut, groups) ** 2
    return (total / groups.shard.size() / groups.tp.size()).sqrt()


def only_first_tensor_rank(gradients, is_cut, groups):
    return over(squares(gradients) * (groups.tp.rank() == 0), groups.shard, groups.tp)


def leaves_early(gradients, is_cut, groups):
    total = squares(gradients)
    if groups.tp.rank() == 0:
        dist.all_reduce(total, group=groups.shard)
        dist.all_reduce(total, group=groups.tp)
    return total.sqrt()


def over_replicas_too(gradients, is_cut, groups):
    here = [g * (cut or groups.tp.rank() == 0) for g, cut in zip(gradients, is_cut)]
    return over(squares(here), groups.tp, groups.shard, groups.replicate)


def message_per_parameter(gradients, is_cut, groups):
    total = torch.zeros(())
    for g, cut in zip(gradients, is_cut):
        square = g.square().sum()
        dist.all_reduce(square, group=groups.shard)
        if cut:
            dist.all_reduce(square, group=groups.tp)
        total += square
    return total.sqrt()


def right_norm(gradients, is_cut, groups):
    total = sum(g.norm() ** 2 / (1 if cut else groups.tp.size()) for g, cut in zip(gradients, is_cut))
    dist.all_reduce(total, group=groups.tp)
    dist.all_reduce(total, group=groups.shard)
    return total.sqrt()


def by_broadcasts(x, shard, out_features):
    parts = [
        shard.clone() if rank == dist.get_rank() else torch.empty_like(shard) for rank in range(dist.get_world_size())
    ]
    for rank, part in enumerate(parts):
        dist.broadcast(part, src=rank)
    whole, n = torch.cat(parts), out_features * x.shape[1]
    out = F.linear(x, whole[:n].view(out_features, -1), whole[n : n + out_features])
    free(whole)
    return out


def gathers_twice(x, shard, out_features):
    n = out_features * x.shape[1]
    for_weight, for_bias = all_shards(shard), all_shards(shard)
    out = F.linear(x, for_weight[:n].view(out_features, -1), for_bias[n : n + out_features])
    free(for_weight)
    free(for_bias)
    return out


def gathers_all_whole_gradients(grad, x, shard):
    weight, flat = pieces(grad, x, shard)
    everything = torch.empty(dist.get_world_size() * len(flat))
    all_gather_single(everything, flat)
    return grad @ weight, everything.view(dist.get_world_size(), -1).mean(0).chunk(dist.get_world_size())[
        dist.get_rank()
    ].clone()


def gather_only_started(x, shard, out_features):
    world_size = dist.get_world_size()
    flat = shard.new_zeros(world_size * shard.numel())
    dist.all_gather_into_tensor(flat, shard, async_op=True)  # overlaps with the views below
    num_weight = out_features * x.shape[-1]
    weight = flat[:num_weight].view(out_features, -1)
    bias = flat[num_weight:][:out_features]
    output = F.linear(x, weight, bias)
    flat.untyped_storage().resize_(0)
    return output


def no_padding_at_all(grad, x, shard):
    d = dist.get_world_size()
    whole = torch.empty(d * len(shard), dtype=shard.dtype)
    dist.all_gather_into_tensor(whole, shard)
    n = grad.shape[1] * x.shape[1]
    grad_x = grad @ whole[:n].view(grad.shape[1], x.shape[1])
    flat = torch.cat([(grad.T @ x).flatten(), grad.sum(0)]) / d
    mine = torch.empty_like(shard)
    dist.reduce_scatter_tensor(mine, flat)
    return grad_x, mine


def padded_apart(grad, x, shard):
    world_size, out_features = dist.get_world_size(), grad.shape[1]
    in_features = x.size(1)
    flat = shard.new_empty(world_size * shard.numel())
    dist.all_gather_into_tensor(flat, shard)
    grad_x = grad @ flat[: out_features * in_features].view(out_features, in_features)

    def pad(t):
        return F.pad(t, (0, -t.numel() % world_size))

    flat_grad = torch.cat([pad((grad.T @ x).flatten()), pad(grad.sum(0))])
    flat_grad = F.pad(flat_grad, (0, flat.numel() - flat_grad.numel()))
    grad_shard = torch.empty_like(shard)
    dist.reduce_scatter_tensor(grad_shard, flat_grad)
    return grad_x, grad_shard / world_size


def none_for_stage_0(num_parameters, num_ranks, memory_gib):
    p, s = num_parameters, -(-num_parameters // num_ranks)
    needs = [18 * p, 6 * p + 12 * s, 2 * p + 16 * s, 18 * s]
    return next((i for i in range(4) if needs[i] <= memory_gib * 2**30), 0) or None


def weights_before_gradients(num_parameters, num_ranks, memory_gib):
    budget = memory_gib * 1024**3
    per_rank = (num_parameters + num_ranks - 1) // num_ranks
    parts = [12, 2, 4]  # optimizer, weights, gradients: sharded one after the other
    for stage in range(4):
        sharded, whole = sum(parts[:stage]), sum(parts[stage:])
        if sharded * per_rank + whole * num_parameters <= budget:
            return stage
    return None


def bytes_rounded_up(num_parameters, num_ranks, memory_gib):
    budget = memory_gib * 1024**3
    sharded_bytes = {0: 0, 1: 12, 2: 16, 3: 18}
    for stage, sharded in sharded_bytes.items():
        replicated = (18 - sharded) * num_parameters
        shard = -(-sharded * num_parameters // num_ranks)
        if replicated + shard <= budget:
            return stage
    return None


def as_with_fully_shard(model, micro_batches):
    for index, batch in enumerate(micro_batches):
        model.set_requires_gradient_sync(index == len(micro_batches) - 1)
        loss = model(batch).pow(2).mean() / len(micro_batches)
        loss.backward()
    return [p.grad for p in model.parameters() if p.grad is not None]


def norm_of_each_parameter_added(gradients, is_cut, groups):
    cut = torch.stack([g.norm() for g, c in zip(gradients, is_cut) if c]).sum()
    rest = torch.stack([g.norm() for g, c in zip(gradients, is_cut) if not c]).sum()
    dist.all_reduce(cut, group=groups.tp)
    total = cut + rest
    dist.all_reduce(total, group=groups.shard)
    return total


def root_before_the_last_sum(gradients, is_cut, groups):
    device = gradients[0].device
    tp_sq = torch.zeros((), dtype=gradients[0].dtype, device=device)
    replicated_sq = torch.zeros_like(tp_sq)
    for grad, cut in zip(gradients, is_cut, strict=True):
        if cut:
            tp_sq += grad.pow(2).sum()
        else:
            replicated_sq += grad.pow(2).sum()
    if dist.get_world_size(groups.tp) > 1:
        dist.all_reduce(tp_sq, group=groups.tp)
    norm = torch.sqrt(tp_sq + replicated_sq)
    if dist.get_world_size(groups.shard) > 1:
        dist.all_reduce(norm, group=groups.shard)
    return norm


def by_counting(num_parameters, num_ranks, memory_gib):
    s = (num_parameters - 1) // num_ranks + 1
    too_large = sum(18 * num_parameters - cut * (num_parameters - s) > memory_gib << 30 for cut in (0, 12, 16, 18))
    return (0, 1, 2, 3, None)[too_large]


def whole_not_over_shards(gradients: list[torch.Tensor], is_cut: list[bool], groups) -> torch.Tensor:
    """Global gradient norm for FSDP x TP: sharded squares are reduced, replicated ones are added once."""
    device = gradients[0].device
    cut_sq = torch.zeros((), dtype=torch.float64, device=device)
    whole_sq = torch.zeros((), dtype=torch.float64, device=device)
    for gradient, cut in zip(gradients, is_cut, strict=True):
        square = torch.linalg.vector_norm(gradient.double()) ** 2
        if cut:
            cut_sq += square
        else:
            whole_sq += square
    dist.all_reduce(cut_sq, group=groups.shard)
    dist.all_reduce(cut_sq, group=groups.tp)
    return (cut_sq + whole_sq).sqrt()


def norms_over_both_groups(gradients: list[torch.Tensor], is_cut: list[bool], groups) -> torch.Tensor:
    """Count replicated parameters on the first tensor rank only, then reduce over shards and tensor ranks."""
    tp_rank = dist.get_rank(groups.tp)
    kept = [g for g, cut in zip(gradients, is_cut) if cut or tp_rank == 0]
    local_norm = torch.stack([g.norm() for g in kept]).norm() if kept else torch.zeros(())
    dist.all_reduce(local_norm, group=groups.shard)
    dist.all_reduce(local_norm, group=groups.tp)
    return local_norm


def last_backward_twice(model, micro_batches):
    with model.no_sync():
        for mb in micro_batches:
            (model(mb).square().mean() / len(micro_batches)).backward()
    (model(micro_batches[-1]).square().mean() / len(micro_batches)).backward()
    return [p.grad for p in model.parameters()]


WRONG = [
    ("unit_forward", gathers_twice, "gathers twice"),
    ("unit_backward", gathers_all_whole_gradients, "gathers d whole gradients"),
    ("unit_forward", without_autograd, "no graph, so x gets no gradient"),
    ("unit_forward", bias_at_the_end, "counts the bias from the end"),
    ("unit_forward", weight_only, "no bias"),
    ("unit_forward", weight_as_in_out, "the weight as [in, out]"),
    ("unit_forward", padding_not_cut, "the padding is not cut"),
    ("unit_forward", own_shard_as_the_weight, "gathers nothing"),
    ("unit_forward", frees_first, "frees before it computes"),
    ("unit_forward", adds_up_like_a_row_layer, "adds up the outputs"),
    ("unit_forward", gathers_the_rows, "gathers the rows"),
    ("unit_forward", dealt_like_cards, "every d-th number"),
    ("unit_forward", keeps_the_weight, "does not free"),
    ("unit_forward", deletes_the_name, "del frees nothing"),
    ("unit_forward", adds_zeros, "an all-reduce"),
    ("unit_backward", not_averaged, "a sum"),
    ("unit_backward", divided_before_and_after, "divides twice"),
    ("unit_backward", own_piece, "sends nothing"),
    ("unit_backward", whole_average, "the whole average"),
    ("unit_backward", all_reduced_and_cut, "an all-reduce"),
    ("unit_backward", weight_gradient_transposed, "transposed"),
    ("unit_backward", no_bias_gradient, "no gradient of the bias"),
    ("unit_backward", bias_gradient_is_a_mean, "the bias's gradient is a mean"),
    ("unit_backward", input_gradient_reduced, "grad_x is added up"),
    ("unit_forward", frees_the_shard, "frees the shard, too"),
    ("unit_forward", returns_freed_memory, "frees the result"),
    ("unit_backward", scatters_into_the_shard, "overwrites the parameters"),
    ("unit_backward", no_padding, "no padding"),
    ("unit_backward", no_padding_in_a_list, "no padding, a list of pieces"),
    ("unit_backward", in_the_wrong_order, "swapped"),
    ("unit_backward", every_dth, "every d-th number"),
    ("which_stage_fits", in_gb, "GB"),
    ("which_stage_fits", as_in_the_zero_paper, "16 bytes"),
    ("which_stage_fits", without_rounding, "not rounded up"),
    ("which_stage_fits", rounded_down, "rounded down"),
    ("which_stage_fits", only_less, "less than"),
    ("which_stage_fits", each_part_alone, "each stage divides one part"),
    ("which_stage_fits", never_stage_0, "begins at stage 1"),
    ("which_stage_fits", the_largest, "only stage 3"),
    ("which_stage_fits", always_3, "3 where nothing fits"),
    ("which_stage_fits", weights_first, "divides the weights first"),
    ("which_stage_fits", all_memory_together, "all GPUs' memory"),
    ("which_stage_fits", two_moments, "no float32 weight"),
    ("accumulate", sends_every_time, "sends every time"),
    ("accumulate", only_forward_inside, "backward is outside"),
    ("accumulate", never_sends, "never sends"),
    ("accumulate", sends_the_first, "sends the first"),
    ("accumulate", one_too_few, "divides by m - 1"),
    ("accumulate", by_all_numbers, "divides by all numbers of a micro-batch"),
    ("accumulate", in_a_second_pass, "goes through a micro-batch twice, to send"),
    ("accumulate", forgets_to_divide, "a sum"),
    ("accumulate", divides_by_ranks, "divides by d too"),
    ("accumulate", divides_at_the_end_too, "divides twice"),
    ("accumulate", averages_again, "averages shards of different places"),
    ("accumulate", forgets_the_last, "without the last"),
    ("accumulate", one_large_batch, "one batch"),
    ("accumulate", returns_weights, "the weights"),
    ("norm_of_shards", message_per_parameter, "a message per parameter"),
    ("norm_of_shards", over_the_world, "replicas count"),
    ("norm_of_shards", everything_over_the_world, "everything, over the world"),
    ("norm_of_shards", whole_counted_on_each, "what is whole counts t times"),
    ("norm_of_shards", shards_only, "not over tensor ranks"),
    ("norm_of_shards", tensor_ranks_only, "not over shards"),
    ("norm_of_shards", local_norm, "what is here"),
    ("norm_of_shards", norms_of_norms, "adds up norms"),
    ("norm_of_shards", no_root, "no root"),
    ("norm_of_shards", averaged, "averages squares"),
    ("norm_of_shards", only_first_tensor_rank, "tensor rank 0 only"),
    ("norm_of_shards", leaves_early, "some ranks only"),
    ("norm_of_shards", over_replicas_too, "over all three groups"),
    ("unit_forward", gather_only_started, "never waits"),
    ("unit_backward", no_padding_at_all, "no padding"),
    ("unit_backward", padded_apart, "padded apart"),
    ("which_stage_fits", none_for_stage_0, "or None"),
    ("which_stage_fits", weights_before_gradients, "weights in stage 2"),
    ("which_stage_fits", bytes_rounded_up, "rounds bytes"),
    ("accumulate", as_with_fully_shard, "a method of fully_shard"),
    ("norm_of_shards", norm_of_each_parameter_added, "adds norms up"),
    ("norm_of_shards", root_before_the_last_sum, "root too early"),
    ("norm_of_shards", whole_not_over_shards, "what is not cut is not summed over shards"),
    ("norm_of_shards", norms_over_both_groups, "adds norms over both groups"),
    ("accumulate", last_backward_twice, "the last micro-batch counts twice"),
]

RIGHT = [
    ("unit_forward", by_broadcasts),
    ("unit_backward", in_lists),
    ("which_stage_fits", in_a_loop),
    ("accumulate", sends_afterwards),
    ("norm_of_shards", right_norm),
    ("which_stage_fits", by_counting),
]
