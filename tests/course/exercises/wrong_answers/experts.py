"""Answers to the exercises on mixtures of experts."""

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F

# -- expert_groups -------------------------------------------------------------------------------------------------


def t_for_etp(t, c, d, p, etp, ep):
    n = t * c * d * p
    stage, ep_groups, edp_groups = n // p, [], []
    for s in range(p):
        for first in range(s * stage, (s + 1) * stage, t * ep):
            for i in range(t):
                ep_groups.append(list(range(first + i, first + t * ep, t)))
        for i in range(t * ep):
            edp_groups.append(list(range(s * stage + i, (s + 1) * stage, t * ep)))
    return ep_groups, edp_groups


def ep_divides_dp(t, c, d, p, etp, ep):
    ep_groups, edp_groups = [], []
    edp = d // ep
    size = t * c * d
    for start in range(0, t * c * d * p, size):
        for first in range(start, start + size, etp * ep):
            for i in range(etp):
                ep_groups.append([first + i + etp * j for j in range(ep)])
        for i in range(etp * ep):
            edp_groups.append([start + i + etp * ep * j for j in range(edp)])
    return ep_groups, edp_groups


def neighbours(t, c, d, p, etp, ep):
    n, stage = t * c * d * p, t * c * d
    ep_groups = [list(range(i, i + ep)) for i in range(0, n, ep)]
    edp = [list(range(s + i, s + stage, etp * ep)) for s in range(0, n, stage) for i in range(etp * ep)]
    return ep_groups, edp


def all_neighbours(t, c, d, p, etp, ep):
    n = t * c * d * p
    edp = t * c * d // (etp * ep)
    return [[*range(i, i + ep)] for i in range(0, n, ep)], [[*range(i, i + edp)] for i in range(0, n, edp)]


def edp_over_stages(t, c, d, p, etp, ep):
    n, block = t * c * d * p, etp * ep
    eps = [[*range(first + i, first + block, etp)] for first in range(0, n, block) for i in range(etp)]
    return eps, [[*range(i, n, block)] for i in range(block)]


def one_stage(t, c, d, p, etp, ep):
    grid = torch.arange(t * c * d).view(-1, ep, etp)
    return [g.tolist() for x in grid for g in x.T], [g.tolist() for g in grid.view(-1, ep * etp).T]


def other_way_round(t, c, d, p, etp, ep):
    grid = np.arange(t * c * d * p).reshape(p, -1, ep, etp)
    ep_groups = np.moveaxis(grid, 2, -1).reshape(-1, ep).tolist()
    edp_groups = np.moveaxis(grid, 1, -1).reshape(-1, grid.shape[1]).tolist()
    return edp_groups, ep_groups


def etp_slowest(t, c, d, p, etp, ep):
    grid = np.arange(t * c * d * p).reshape(p, -1, etp, ep)
    return grid.reshape(-1, ep).tolist(), np.moveaxis(grid, 1, -1).reshape(-1, grid.shape[1]).tolist()


def edp_inside(t, c, d, p, etp, ep):
    edp = t * c * d // (etp * ep)
    grid = np.arange(t * c * d * p).reshape(p, ep, edp, etp)
    return np.moveaxis(grid, 1, -1).reshape(-1, ep).tolist(), np.moveaxis(grid, 2, -1).reshape(-1, edp).tolist()


def without_context(t, c, d, p, etp, ep):
    stage, block = t * d, etp * ep
    eps, edps = [], []
    for s in range(0, stage * p, stage):
        for f in range(s, s + stage, block):
            eps += [list(range(f + i, f + block, etp)) for i in range(etp)]
        edps += [list(range(s + i, s + stage, block)) for i in range(block)]
    return eps, edps


def dense_replicas(t, c, d, p, etp, ep):
    n, stage, block = t * c * d * p, t * c * d, etp * ep
    eps = [list(range(f + i, f + block, etp)) for f in range(0, n, block) for i in range(etp)]
    dps = [list(range(s + i, s + stage, t * c)) for s in range(0, n, stage) for i in range(t * c)]
    return eps, dps


def stride_ep(t, c, d, p, etp, ep):
    n, stage, block = t * c * d * p, t * c * d, etp * ep
    eps = [list(range(f + i, f + block, etp)) for f in range(0, n, block) for i in range(etp)]
    return eps, [list(range(s + i, s + stage, ep)) for s in range(0, n, stage) for i in range(ep)]


def with_floats(t, c, d, p, etp, ep):
    edp = t * c * d / (etp * ep)
    return [], [[i + j * etp * ep for j in range(edp)] for i in range(etp * ep)]


def stops_early(t, c, d, p, etp, ep):
    n, stage, block = t * c * d * p, t * c * d, etp * ep
    eps = [list(range(f + i, f + block - etp, etp)) for f in range(0, n, block) for i in range(etp)]
    return eps, [list(range(s + i, s + stage - block, block)) for s in range(0, n, stage) for i in range(block)]


def ep_of_dense_groups(t, c, d, p, etp, ep):
    n, stage = t * c * d * p, t * c * d
    dps = [list(range(s + i, s + stage, t * c)) for s in range(0, n, stage) for i in range(t * c)]
    return [g[i : i + ep] for g in dps for i in range(0, d, ep)], [g[i::ep] for g in dps for i in range(ep)]


def groups_of_two_or_more(t, c, d, p, etp, ep):
    return [[group for group in groups if len(group) > 1] for groups in by_coordinates(t, c, d, p, etp, ep)]


def refuses_what_is_allowed(t, c, d, p, etp, ep):
    if d % ep:
        raise ValueError("ep_size must divide dp_size")
    return by_coordinates(t, c, d, p, etp, ep)


def asks_the_layout(t, c, d, p, etp, ep):
    from labkit.layout import ParallelLayout

    layout = ParallelLayout(t * c * d * p, t, p, c, ep_size=ep, expert_tp_size=etp)
    return layout.groups("ep"), layout.groups("expert_dp")


def by_coordinates(tp_size, cp_size, dp_size, pp_size, expert_tp_size, ep_size):
    ep_groups, edp_groups, stage = {}, {}, tp_size * cp_size * dp_size
    for rank in range(stage * pp_size):
        etp, ep, edp = (
            rank % expert_tp_size,
            rank // expert_tp_size % ep_size,
            rank % stage // (expert_tp_size * ep_size),
        )
        ep_groups.setdefault((rank // stage, edp, etp), []).append(rank)
        edp_groups.setdefault((rank // stage, ep, etp), []).append(rank)
    return tuple(ep_groups.values()), tuple(edp_groups.values())


def by_reshaping(t, c, d, p, etp, ep):
    ranks = torch.arange(t * c * d * p).reshape(p, -1, ep, etp)
    return ranks.transpose(2, 3).reshape(-1, ep), ranks.permute(0, 2, 3, 1).reshape(p * ep * etp, -1)


# -- split_sizes ---------------------------------------------------------------------------------------------------


def told(send):
    recv = torch.empty_like(send)
    dist.all_to_all_single(recv, send)
    return recv


def dealt_out(experts, num_experts):
    ep = dist.get_world_size()
    send = torch.tensor([int((experts % ep == r).sum()) for r in range(ep)])
    return send.tolist(), told(send).tolist()


def same_back(experts, num_experts):
    ep = dist.get_world_size()
    own = num_experts // ep
    send = [int(((experts >= r * own) & (experts < (r + 1) * own)).sum()) for r in range(ep)]
    return send, send


def first_choice(experts, num_experts):
    ep = dist.get_world_size()
    send = torch.bincount(experts[:, 0] // (num_experts // ep), minlength=ep)
    return send, told(send)


def set_of_ranks(experts, num_experts):
    ep = dist.get_world_size()
    send = torch.zeros(ep, dtype=torch.long)
    for token in experts.tolist():
        for rank in {e // (num_experts // ep) for e in token}:
            send[rank] += 1
    return send, told(send)


def per_expert(experts, num_experts):
    send = torch.bincount(experts.flatten(), minlength=num_experts)
    return send.tolist(), told(send).tolist()


def unique_counts(experts, num_experts):
    ep = dist.get_world_size()
    ranks, send = torch.unique(experts // (num_experts // ep), return_counts=True)
    padded = torch.zeros(ep, dtype=torch.long)
    padded[ranks] = send
    recv = told(padded)
    return send.tolist(), recv[recv > 0].tolist()


def sum_of_all(experts, num_experts):
    ep = dist.get_world_size()
    send = torch.bincount(experts.flatten() // (num_experts // ep), minlength=ep)
    recv = send.clone()
    dist.all_reduce(recv)
    return send.tolist(), recv.tolist()


def total_only(experts, num_experts):
    ep = dist.get_world_size()
    send = torch.bincount(experts.flatten() // (num_experts // ep), minlength=ep)
    return send.tolist(), int(told(send).sum())


def swapped_splits(experts, num_experts):
    ep = dist.get_world_size()
    send = torch.bincount(experts.flatten() // (num_experts // ep), minlength=ep)
    return told(send), send


def gathers_all(experts, num_experts):
    ep = dist.get_world_size()
    send = torch.bincount(experts.flatten() // (num_experts // ep), minlength=ep)
    rows = [torch.empty_like(send) for _ in range(ep)]
    dist.all_gather(rows, send)
    return send.tolist(), [row[dist.get_rank()].item() for row in rows]


def even(experts, num_experts):
    ep = dist.get_world_size()
    send = torch.full((ep,), experts.numel() // ep)
    return send, told(send)


def only_if_it_has_tokens(experts, num_experts):
    ep = dist.get_world_size()
    if len(experts) == 0:
        return [0] * ep, [0] * ep
    send = torch.bincount(experts.flatten() // (num_experts // ep), minlength=ep)
    return send.tolist(), told(send).tolist()


def not_to_itself(experts, num_experts):
    ep = dist.get_world_size()
    send = torch.bincount(experts.flatten() // (num_experts // ep), minlength=ep)
    send[dist.get_rank()] = 0
    return send, told(send)


def by_ep_size(experts, num_experts):
    ep = dist.get_world_size()
    send = torch.bincount((experts.flatten() // ep).clamp(max=ep - 1), minlength=ep)
    return send, told(send)


def ends(experts, num_experts):
    ep = dist.get_world_size()
    send = torch.bincount(experts.flatten() // (num_experts // ep), minlength=ep)
    return send.cumsum(0), told(send).cumsum(0)


def never_filled(experts, num_experts):
    ep = dist.get_world_size()
    send = torch.bincount(experts.flatten() // (num_experts // ep), minlength=ep)
    return send.tolist(), torch.zeros_like(send).tolist()


def send_alone(experts, num_experts):
    ep = dist.get_world_size()
    return torch.bincount(experts.flatten() // (num_experts // ep), minlength=ep).tolist()


def sends_all_choices(experts, num_experts):
    ep = dist.get_world_size()
    send = torch.bincount(experts.flatten() // (num_experts // ep), minlength=ep)
    wide = send.repeat_interleave(num_experts * 2)
    return send.tolist(), told(wide)[:: num_experts * 2].tolist()


def counted_as_floats(experts, num_experts):
    ep = dist.get_world_size()
    send = F.one_hot(experts.flatten() // (num_experts // ep), ep).double().sum(0)
    return send.tolist(), told(send).tolist()


def without_minlength(experts, num_experts):
    send = torch.bincount(experts.flatten() // (num_experts // dist.get_world_size()))
    return send.tolist(), told(send).tolist()


def input_first(experts, num_experts):
    ep = dist.get_world_size()
    send = torch.bincount(experts.flatten() // (num_experts // ep), minlength=ep)
    recv = torch.zeros_like(send)
    dist.all_to_all_single(send, recv)
    return send.tolist(), recv.tolist()


def by_expert_then_rank(experts, num_experts):
    ep = dist.get_world_size()
    chosen = F.one_hot(experts, num_experts).sum((0, 1)).view(ep, -1)  # labkit's way: experts know how many come
    arrived = torch.empty_like(chosen)
    dist.all_to_all_single(arrived, chosen)
    return chosen.sum(1).tolist(), arrived.sum(1).tolist()


def with_lists_of_tensors(experts, num_experts):
    ep, own = dist.get_world_size(), num_experts // dist.get_world_size()
    send = [((experts >= own * r) & (experts < own * (r + 1))).sum().view(1) for r in range(ep)]
    recv = [torch.zeros(1, dtype=torch.long) for _ in range(ep)]
    dist.all_to_all(recv, send)
    return [int(each) for each in send], [int(each) for each in recv]


# -- dispatch_backward ---------------------------------------------------------------------------------------------


def returned(grad, send, recv):
    rows = torch.empty(sum(send), grad.shape[1])
    dist.all_to_all_single(rows, grad, send, recv)
    return rows


def splits_of_forward(grad, tokens, num_tokens, send_splits, recv_splits):
    rows = torch.empty(sum(send_splits), grad.shape[1])
    dist.all_to_all_single(rows, grad, recv_splits, send_splits)
    return torch.zeros(num_tokens, grad.shape[1]).index_add(0, tokens, rows)


def forward_again(grad, tokens, num_tokens, send_splits, recv_splits):
    rows = torch.empty(sum(recv_splits), grad.shape[1])
    dist.all_to_all_single(rows, grad, recv_splits, send_splits)
    return torch.zeros(num_tokens, grad.shape[1]).index_add(0, tokens, rows)


def assigned(grad, tokens, num_tokens, send_splits, recv_splits):
    rows = returned(grad, send_splits, recv_splits)
    out = torch.zeros(num_tokens, grad.shape[1])
    for i, token in enumerate(tokens.tolist()):
        out[token] = rows[i]
    return out


def plus_equals(grad, tokens, num_tokens, send_splits, recv_splits):
    out = torch.zeros(num_tokens, grad.shape[1])
    out[tokens] += returned(grad, send_splits, recv_splits)
    return out


def mean_over_choices(grad, tokens, num_tokens, send_splits, recv_splits):
    out = torch.zeros(num_tokens, grad.shape[1]).index_add(0, tokens, returned(grad, send_splits, recv_splits))
    return out / torch.bincount(tokens, minlength=num_tokens)[:, None]


def divided_by_ep(grad, tokens, num_tokens, send_splits, recv_splits):
    out = torch.zeros(num_tokens, grad.shape[1]).index_add(0, tokens, returned(grad, send_splits, recv_splits))
    return out / dist.get_world_size()


def rows_alone(grad, tokens, num_tokens, send_splits, recv_splits):
    return returned(grad, send_splits, recv_splits)


def local_only(grad, tokens, num_tokens, send_splits, recv_splits):
    rows = torch.zeros(len(tokens), grad.shape[1])
    n = min(len(rows), len(grad))
    rows[:n] = grad[:n]
    return torch.zeros(num_tokens, grad.shape[1]).index_add(0, tokens, rows)


def reshaped(grad, tokens, num_tokens, send_splits, recv_splits):
    rows = returned(grad, send_splits, recv_splits)
    k = len(rows) // num_tokens if num_tokens else 0
    return rows.view(num_tokens, k, grad.shape[1]).sum(1)


def reshaped_choice_first(grad, tokens, num_tokens, send_splits, recv_splits):
    rows = returned(grad, send_splits, recv_splits)
    k = len(rows) // num_tokens if num_tokens else 0
    return rows.view(k, num_tokens, grad.shape[1]).sum(0)


def without_splits(grad, tokens, num_tokens, send_splits, recv_splits):
    rows = torch.empty(sum(send_splits), grad.shape[1])
    dist.all_to_all_single(rows, grad)
    return torch.zeros(num_tokens, grad.shape[1]).index_add(0, tokens, rows)


def not_sent(grad, tokens, num_tokens, send_splits, recv_splits):
    rows = torch.zeros(sum(send_splits), grad.shape[1])
    return torch.zeros(num_tokens, grad.shape[1]).index_add(0, tokens, rows)


def backwards(grad, tokens, num_tokens, send_splits, recv_splits):
    rows = returned(grad, send_splits, recv_splits).flip(0)
    return torch.zeros(num_tokens, grad.shape[1]).index_add(0, tokens, rows)


def twice_copied(grad, tokens, num_tokens, send_splits, recv_splits):
    rows = returned(grad, send_splits, recv_splits)
    return torch.zeros(num_tokens, grad.shape[1]).index_add(0, tokens, rows)[tokens]


def all_reduced(grad, tokens, num_tokens, send_splits, recv_splits):
    total = grad.sum(0)
    dist.all_reduce(total)
    return total.expand(num_tokens, -1)


def skipped_if_empty(grad, tokens, num_tokens, send_splits, recv_splits):
    if num_tokens == 0:
        return torch.zeros(0, grad.shape[1])
    rows = returned(grad, send_splits, recv_splits)
    return torch.zeros(num_tokens, grad.shape[1]).index_add(0, tokens, rows)


def summed_in_all(grad, tokens, num_tokens, send_splits, recv_splits):
    rows = returned(grad, send_splits, recv_splits)
    return torch.zeros(num_tokens, grad.shape[1]).index_add(0, tokens, rows).sum(0)


def looked_up(grad, tokens, num_tokens, send_splits, recv_splits):
    return grad[tokens]


def looked_up_at_home(grad, tokens, num_tokens, send_splits, recv_splits):
    return returned(grad, send_splits, recv_splits)[tokens]


def into_new_memory(grad, tokens, num_tokens, send_splits, recv_splits):
    out = torch.empty(num_tokens, grad.shape[1])
    return out.index_add_(0, tokens, returned(grad, send_splits, recv_splits))


def by_lists(grad, tokens, num_tokens, send_splits, recv_splits):
    out = [torch.zeros(grad.shape[1]) for _ in range(num_tokens)]
    for token, row in zip(tokens.tolist(), returned(grad, send_splits, recv_splits)):
        out[token] = out[token] + row
    return torch.stack(out) if out else grad.new_zeros(0, grad.shape[1])


def uneven_lists(grad, tokens, num_tokens, send_splits, recv_splits):
    rows = [grad.new_empty(n, grad.shape[1]) for n in send_splits]
    dist.all_to_all(rows, list(grad.split(recv_splits)))
    return torch.zeros(num_tokens, grad.shape[1]).index_add(0, tokens, torch.cat(rows))


def by_one_hot(grad, tokens, num_tokens, send_splits, recv_splits):
    whose = (tokens[None, :] == torch.arange(num_tokens)[:, None]).to(grad.dtype)
    return whose @ returned(grad, send_splits, recv_splits)


# -- auxiliary_loss ------------------------------------------------------------------------------------------------


def by_transformers(scores, experts, coefficient):
    mask = F.one_hot(experts, scores.shape[1]).double()  # [tokens, k, experts]
    tokens_per_expert, prob_per_expert = mask.mean(0), scores.mean(0)
    return coefficient * (tokens_per_expert * prob_per_expert[None]).sum() * scores.shape[1]


def per_token(scores, experts, coefficient):
    f = torch.bincount(experts.flatten(), minlength=scores.size(1)) / scores.size(0)
    return coefficient * scores.size(1) * torch.dot(f.double(), scores.mean(0))


def switch_of_one(scores, experts, coefficient):
    top = F.one_hot(experts[:, 0], scores.size(1)).double().mean(0)
    return coefficient * scores.size(1) * (top * scores.mean(0)).sum()


def no_e(scores, experts, coefficient):
    f = F.one_hot(experts, scores.size(1)).double().mean((0, 1))
    return coefficient * (f * scores.mean(0)).sum()


def mean_of_products(scores, experts, coefficient):
    f = F.one_hot(experts, scores.size(1)).double().mean((0, 1))
    return coefficient * (f * scores.mean(0)).mean()


def e_twice(scores, experts, coefficient):
    e = scores.size(1)
    f = e * F.one_hot(experts, e).double().mean((0, 1))
    return coefficient * e * (f * scores.mean(0)).sum()


def k_for_e(scores, experts, coefficient):
    f = F.one_hot(experts, scores.size(1)).double().mean((0, 1))
    return coefficient * experts.size(1) * (f * scores.mean(0)).sum()


def sums_of_scores(scores, experts, coefficient):
    f = F.one_hot(experts, scores.size(1)).double().mean((0, 1))
    return coefficient * scores.size(1) * (f * scores.sum(0)).sum()


def counts_alone(scores, experts, coefficient):
    n = torch.bincount(experts.flatten(), minlength=scores.size(1))
    return coefficient * scores.size(1) * (n * scores.mean(0)).sum()


def of_the_chosen_only(scores, experts, coefficient):
    e = scores.size(1)
    f = F.one_hot(experts, e).double().mean((0, 1))
    chosen = scores * F.one_hot(experts, e).sum(1)
    return coefficient * e * (f * chosen.mean(0)).sum()


def counts_squared(scores, experts, coefficient):
    f = F.one_hot(experts, scores.size(1)).double().mean((0, 1))
    return coefficient * scores.size(1) * (f * f).sum()


def scores_squared(scores, experts, coefficient):
    return coefficient * scores.size(1) * scores.mean(0).square().sum()


def no_coefficient(scores, experts, coefficient):
    f = F.one_hot(experts, scores.size(1)).double().mean((0, 1))
    return scores.size(1) * (f * scores.mean(0)).sum()


def no_minlength(scores, experts, coefficient):
    f = torch.bincount(experts.flatten()) / experts.numel()
    return coefficient * scores.size(1) * (f * scores.mean(0)).sum()


def no_k_and_no_coefficient(scores, experts, coefficient):
    f = torch.bincount(experts.flatten(), minlength=scores.size(1)) / scores.size(0)
    return scores.size(1) * (f * scores.mean(0)).sum()


def mean_of_what_was_chosen(scores, experts, coefficient):
    return coefficient * scores.size(1) * scores.gather(1, experts).mean()


def index_counted_once(scores, experts, coefficient):
    n = torch.zeros(scores.size(1))
    n[experts.flatten()] += 1
    return coefficient * scores.size(1) * (n / experts.numel() * scores.mean(0)).sum()


def counted_in_new_memory(scores, experts, coefficient):
    n = torch.empty(scores.size(1)).index_add_(0, experts.flatten(), torch.ones(experts.numel()))
    return coefficient * scores.size(1) * (n / experts.numel() * scores.mean(0)).sum()


def as_vector(scores, experts, coefficient):
    f = F.one_hot(experts, scores.size(1)).double().mean((0, 1))
    return coefficient * scores.size(1) * f * scores.mean(0)


def coefficient_of_variation(scores, experts, coefficient):
    n = torch.bincount(experts.flatten(), minlength=scores.size(1)).double()
    return coefficient * n.std() / n.mean()


def minus_one(scores, experts, coefficient):
    f = F.one_hot(experts, scores.size(1)).double().mean((0, 1))
    return coefficient * (scores.size(1) * (f * scores.mean(0)).sum() - 1)


def as_number(scores, experts, coefficient):
    f = F.one_hot(experts, scores.size(1)).double().mean((0, 1))
    return (coefficient * scores.size(1) * (f * scores.mean(0)).sum()).item()


def without_grad(scores, experts, coefficient):
    with torch.no_grad():
        f = F.one_hot(experts, scores.size(1)).double().mean((0, 1))
        return coefficient * scores.size(1) * (f * scores.mean(0)).sum()


def in_numpy(scores, experts, coefficient):
    n = np.bincount(experts.numpy().ravel(), minlength=scores.shape[1])
    means = scores.detach().numpy().mean(0)
    return torch.tensor(coefficient * scores.shape[1] * (n / n.sum() * means).sum())


def detached_scores(scores, experts, coefficient):
    f = F.one_hot(experts, scores.size(1)).double().mean((0, 1))
    return coefficient * scores.size(1) * (f * scores.detach().mean(0)).sum()


def scales_in_place(scores, experts, coefficient):
    scores.data *= coefficient
    f = F.one_hot(experts, scores.size(1)).double().mean((0, 1))
    return scores.size(1) * (f * scores.mean(0)).sum()


def by_loops(scores, experts, coefficient):
    loss = 0.0
    for i in range(scores.shape[1]):
        loss = loss + (experts == i).double().mean() * scores[:, i].mean()
    return coefficient * scores.shape[1] * loss


def by_gathering(scores, experts, coefficient):
    # sum over choices of the mean score of what was chosen, divided by their number
    return coefficient * scores.shape[1] * scores.mean(0)[experts].mean()


def by_einsum(scores, experts, coefficient):
    num_tokens, e = scores.shape
    chosen = torch.zeros(num_tokens, e, dtype=scores.dtype).scatter_add_(1, experts, torch.ones_like(experts).double())
    return torch.einsum("ti,si->", chosen, scores) * coefficient * e / (num_tokens**2 * experts.shape[1])


# -- gradient_divisor ----------------------------------------------------------------------------------------------


def averaged(t, c, d, etp, ep):
    edp = t * c * d // (etp * ep)
    return edp, edp


def dp_only(t, c, d, etp, ep):
    return t * c * d // (etp * ep), d


def whole_stage(t, c, d, etp, ep):
    return t * c * d // (etp * ep), t * c * d


def edp_times_ep(t, c, d, etp, ep):
    edp = t * c * d // (etp * ep)
    return edp, edp * ep


def dp_by_ep(t, c, d, etp, ep):
    return d // ep, d * c


def dp_cp_by_ep(t, c, d, etp, ep):
    return d * c // ep, d * c


def dense_for_both(t, c, d, etp, ep):
    return d * c, d * c


def no_etp(t, c, d, etp, ep):
    return t * c * d // ep, c * d


def by_ep_too(t, c, d, etp, ep):
    return t * c * d // (etp * ep), d * c * ep


def scaling_of_megatron(t, c, d, etp, ep):
    edp = t * c * d // (etp * ep)
    return edp, edp / (d * c)


def sum_alone(t, c, d, etp, ep):
    return t * c * d // (etp * ep), 1


def divisor_first(t, c, d, etp, ep):
    return c * d, t * c * d // (etp * ep)


def divisor_alone(t, c, d, etp, ep):
    return c * d


def d_plus_c(t, c, d, etp, ep):
    return t * c * d // (etp * ep), d + c


def with_a_slash(t, c, d, etp, ep):
    return t * c * d / (etp * ep), d * c


def without_c(t, c, d, etp, ep):
    return t * d // (etp * ep), d


def all_by_ep(t, c, d, etp, ep):
    return d // ep, d // ep


def from_world(t, c, d, etp, ep):
    world = t * c * d
    return world // etp // ep, world // t


def from_numpy(t, c, d, etp, ep):
    return list(np.array([np.prod([t, c, d]) // np.prod([etp, ep]), c * d]))


def no_copies_no_mean(tp_size, cp_size, dp_size, expert_tp_size, ep_size):
    copies = tp_size * cp_size * dp_size // (expert_tp_size * ep_size)
    return copies, dp_size * cp_size if copies > 1 else 1


def other_order_of_groups(tp_size, cp_size, dp_size, pp_size, expert_tp_size, ep_size):
    world_size = tp_size * cp_size * dp_size * pp_size
    expert_dp_size = world_size // (pp_size * expert_tp_size * ep_size)
    strides = {"etp": 1, "ep": expert_tp_size, "edp": expert_tp_size * ep_size, "pp": world_size // pp_size}
    sizes = {"etp": expert_tp_size, "ep": ep_size, "edp": expert_dp_size, "pp": pp_size}

    def groups_along(axis):
        origins = [0]
        for name in ("etp", "ep", "edp", "pp"):
            if name != axis:
                origins = [o + i * strides[name] for o in origins for i in range(sizes[name])]
        return [[o + i * strides[axis] for i in range(sizes[axis])] for o in origins]

    return groups_along("ep"), groups_along("edp")


def adds_over_the_wrong_dim(experts, num_experts):
    world_size = dist.get_world_size()
    local = num_experts // world_size
    per_expert = torch.bincount(experts.flatten(), minlength=num_experts)
    received = torch.empty_like(per_expert)
    dist.all_to_all_single(received, per_expert)
    send = per_expert.view(world_size, local).sum(dim=1)
    recv = received.view(local, world_size).sum(dim=0)
    return send.tolist(), recv.tolist()


def index_of_one_column(grad, tokens, num_tokens, send_splits, recv_splits):
    hidden = grad.size(-1)
    returned = torch.empty(sum(send_splits), hidden, dtype=grad.dtype, device=grad.device)
    dist.all_to_all_single(returned, grad.contiguous(), output_split_sizes=send_splits, input_split_sizes=recv_splits)
    grad_x = torch.zeros(num_tokens, hidden, dtype=grad.dtype, device=grad.device)
    return grad_x.scatter_add_(0, tokens.unsqueeze(-1), returned)


def what_is_left_to_divide(tp_size, cp_size, dp_size, expert_tp_size, ep_size):
    expert_dp_size = (tp_size * cp_size * dp_size) // (expert_tp_size * ep_size)
    correction = (dp_size * cp_size) // expert_dp_size
    return expert_dp_size, correction


def sums_of_scores_over_e(scores: torch.Tensor, experts: torch.Tensor, coefficient: float) -> torch.Tensor:
    """Switch-Transformer load-balancing loss, generalised to top-k routing."""
    num_tokens, num_experts = scores.shape
    top_k = experts.shape[-1]
    one_hot = F.one_hot(experts, num_classes=num_experts).to(scores.dtype)  # [tokens, k, E]
    tokens_per_expert = one_hot.amax(dim=1).sum(dim=0)
    fraction = tokens_per_expert / (num_tokens * top_k)
    router_prob = scores.sum(dim=0) / num_experts
    return coefficient * num_experts * torch.dot(fraction, router_prob)


def rows_sorted_again(grad, tokens, num_tokens: int, send_splits: list[int], recv_splits: list[int]):
    """Invert the permutation that sorted the rows by rank, then add up the copies of each token."""
    returned = grad.new_empty(sum(send_splits), grad.shape[1])
    dist.all_to_all_single(returned, grad.contiguous(), send_splits, recv_splits)
    order = torch.argsort(tokens, stable=True)
    rows = returned[order]
    result = grad.new_zeros(num_tokens, grad.shape[1])
    return result.index_add_(0, tokens, rows)


WRONG = [
    ("expert_groups", t_for_etp, "t instead of expert_tp"),
    ("expert_groups", ep_divides_dp, "d / ep members"),
    ("expert_groups", neighbours, "ep groups are neighbours"),
    ("expert_groups", all_neighbours, "all groups are neighbours"),
    ("expert_groups", edp_over_stages, "through all stages"),
    ("expert_groups", one_stage, "the first stage only"),
    ("expert_groups", other_way_round, "swapped"),
    ("expert_groups", etp_slowest, "ep runs fastest"),
    ("expert_groups", edp_inside, "expert_dp runs faster than ep"),
    ("expert_groups", without_context, "c is forgotten"),
    ("expert_groups", dense_replicas, "dense data-parallel groups"),
    ("expert_groups", stride_ep, "ep apart"),
    ("expert_groups", with_floats, "a float in a range"),
    ("expert_groups", stops_early, "the last member is missing"),
    ("expert_groups", ep_of_dense_groups, "cuts the dense groups"),
    ("expert_groups", groups_of_two_or_more, "no groups of one"),
    ("expert_groups", refuses_what_is_allowed, "an error of its own"),
    ("expert_groups", asks_the_layout, "labkit's own function"),
    ("split_sizes", dealt_out, "like cards"),
    ("split_sizes", same_back, "receives what it sends"),
    ("split_sizes", first_choice, "first choices only"),
    ("split_sizes", set_of_ranks, "once per rank"),
    ("split_sizes", per_expert, "by expert"),
    ("split_sizes", unique_counts, "no zeros"),
    ("split_sizes", sum_of_all, "an all-reduce"),
    ("split_sizes", total_only, "the total"),
    ("split_sizes", swapped_splits, "swapped"),
    ("split_sizes", gathers_all, "an all-gather"),
    ("split_sizes", even, "even splits"),
    ("split_sizes", only_if_it_has_tokens, "a rank without tokens does not take part"),
    ("split_sizes", not_to_itself, "leaves itself out"),
    ("split_sizes", by_ep_size, "divides by ep"),
    ("split_sizes", ends, "cumulative"),
    ("split_sizes", never_filled, "nothing was received"),
    ("split_sizes", send_alone, "one of the two"),
    ("split_sizes", sends_all_choices, "too many numbers"),
    ("split_sizes", counted_as_floats, "floats"),
    ("split_sizes", without_minlength, "ends a rank"),
    ("split_sizes", input_first, "output and input swapped"),
    ("dispatch_backward", splits_of_forward, "the splits of forward"),
    ("dispatch_backward", forward_again, "the forward again"),
    ("dispatch_backward", assigned, "overwrites"),
    ("dispatch_backward", plus_equals, "+= with repeated indices"),
    ("dispatch_backward", mean_over_choices, "averages"),
    ("dispatch_backward", divided_by_ep, "divides by ep"),
    ("dispatch_backward", rows_alone, "one row per choice"),
    ("dispatch_backward", local_only, "sends nothing"),
    ("dispatch_backward", reshaped, "k rows in turn"),
    ("dispatch_backward", reshaped_choice_first, "k passes"),
    ("dispatch_backward", without_splits, "no splits"),
    ("dispatch_backward", not_sent, "zeros"),
    ("dispatch_backward", uneven_lists, "uneven lists, which gloo refuses"),
    ("dispatch_backward", backwards, "reversed"),
    ("dispatch_backward", twice_copied, "copies again"),
    ("dispatch_backward", all_reduced, "an all-reduce"),
    ("dispatch_backward", skipped_if_empty, "a rank without tokens does not take part"),
    ("dispatch_backward", summed_in_all, "one row"),
    ("dispatch_backward", looked_up, "nothing sent, and copied"),
    ("dispatch_backward", looked_up_at_home, "copied"),
    ("dispatch_backward", into_new_memory, "not zeros"),
    ("auxiliary_loss", by_transformers, "k forgotten"),
    ("auxiliary_loss", per_token, "k forgotten"),
    ("auxiliary_loss", switch_of_one, "first choices"),
    ("auxiliary_loss", no_e, "E forgotten"),
    ("auxiliary_loss", mean_of_products, "a mean over experts"),
    ("auxiliary_loss", e_twice, "E twice"),
    ("auxiliary_loss", k_for_e, "k instead of E"),
    ("auxiliary_loss", sums_of_scores, "sums"),
    ("auxiliary_loss", counts_alone, "counts"),
    ("auxiliary_loss", of_the_chosen_only, "chosen scores only"),
    ("auxiliary_loss", counts_squared, "f twice"),
    ("auxiliary_loss", scores_squared, "P twice"),
    ("auxiliary_loss", no_coefficient, "no coefficient"),
    ("auxiliary_loss", no_minlength, "experts missing"),
    ("auxiliary_loss", as_vector, "not added up"),
    ("auxiliary_loss", coefficient_of_variation, "another loss"),
    ("auxiliary_loss", minus_one, "minus the balanced loss"),
    ("auxiliary_loss", as_number, "a float"),
    ("auxiliary_loss", without_grad, "no graph"),
    ("auxiliary_loss", in_numpy, "no graph"),
    ("auxiliary_loss", detached_scores, "no graph"),
    ("auxiliary_loss", no_k_and_no_coefficient, "two at once"),
    ("auxiliary_loss", mean_of_what_was_chosen, "own choices"),
    ("auxiliary_loss", index_counted_once, "repeated indices"),
    ("auxiliary_loss", counted_in_new_memory, "not zeros"),
    ("auxiliary_loss", scales_in_place, "changes the scores"),
    ("gradient_divisor", no_copies_no_mean, "a sum over one rank is divided, too"),
    ("gradient_divisor", averaged, "averages over expert_dp"),
    ("gradient_divisor", dp_only, "c forgotten"),
    ("gradient_divisor", whole_stage, "t in it"),
    ("gradient_divisor", edp_times_ep, "expert_dp * ep"),
    ("gradient_divisor", dp_by_ep, "d / ep"),
    ("gradient_divisor", dp_cp_by_ep, "d c / ep"),
    ("gradient_divisor", dense_for_both, "dense replicas"),
    ("gradient_divisor", no_etp, "expert_tp forgotten"),
    ("gradient_divisor", by_ep_too, "ep in it"),
    ("gradient_divisor", scaling_of_megatron, "the factor before an average"),
    ("gradient_divisor", sum_alone, "not divided"),
    ("gradient_divisor", divisor_first, "swapped"),
    ("gradient_divisor", divisor_alone, "one of the two"),
    ("gradient_divisor", d_plus_c, "added"),
    ("gradient_divisor", with_a_slash, "a float"),
    ("gradient_divisor", without_c, "c forgotten in both"),
    ("gradient_divisor", all_by_ep, "d / ep in both"),
    ("expert_groups", other_order_of_groups, "order of the groups"),
    ("split_sizes", adds_over_the_wrong_dim, "wrong dim"),
    ("dispatch_backward", index_of_one_column, "first column only"),
    ("gradient_divisor", what_is_left_to_divide, "what is left"),
    ("auxiliary_loss", sums_of_scores_over_e, "divides the sums of the scores by E"),
    ("dispatch_backward", rows_sorted_again, "sorts the rows, not the tokens"),
]

RIGHT = [
    ("expert_groups", by_coordinates),
    ("expert_groups", by_reshaping),
    ("split_sizes", by_expert_then_rank),
    ("split_sizes", with_lists_of_tensors),
    ("dispatch_backward", by_lists),
    ("dispatch_backward", by_one_hot),
    ("auxiliary_loss", by_loops),
    ("auxiliary_loss", by_gathering),
    ("auxiliary_loss", by_einsum),
    ("gradient_divisor", from_world),
    ("gradient_divisor", from_numpy),
]
