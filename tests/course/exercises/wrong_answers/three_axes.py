"""Answers to the exercises on all three axes."""

import torch
import torch.distributed as dist

SIZES = [(t, p, 8 // (t * p)) for t in (1, 2, 4, 8) for p in (1, 2, 4, 8) if t * p <= 8]


def possible(num_parameters, num_heads, num_layers, node_size, memory_bytes):
    found = []
    for t, p, d in SIZES:
        fits = 16 * num_parameters / (t * p) <= memory_bytes
        if num_heads % t == 0 and num_layers % p == 0 and t <= node_size and fits:
            found.append((t, p, d))
    return found


def fewest_replicas(*case):
    return min(possible(*case), key=lambda sizes: sizes[2], default=None)


def most_stages(*case):
    return max(possible(*case), key=lambda sizes: (sizes[2], sizes[1]), default=None)


def fewest_stages_first(*case):  # with powers of two, the most replicas as well
    return min(possible(*case), key=lambda sizes: (sizes[1], -sizes[2]), default=None)


def first_that_fits(*case):
    return next(iter(possible(*case)), None)


def node_size_ignored(num_parameters, num_heads, num_layers, node_size, memory_bytes):
    return best(num_parameters, num_heads, num_layers, 8, memory_bytes)


def layers_ignored(num_parameters, num_heads, num_layers, node_size, memory_bytes):
    return best(num_parameters, num_heads, 8, node_size, memory_bytes)


def heads_only_at_least_t(num_parameters, num_heads, num_layers, node_size, memory_bytes):
    fitting = [s for s in possible(num_parameters, 8, num_layers, node_size, memory_bytes) if s[0] <= num_heads]
    return max(fitting, key=lambda s: (s[2], -s[1]), default=None)


def replicas_share_the_memory(num_parameters, *case):
    heads, layers, node, memory = case
    fitting = [s for s in possible(0, heads, layers, node, memory) if 16 * num_parameters / 8 <= memory]
    return max(fitting, key=lambda s: (s[2], -s[1]), default=None)


def full_memory_refused(num_parameters, num_heads, num_layers, node_size, memory_bytes):
    fitting = possible(num_parameters, num_heads, num_layers, node_size, memory_bytes)
    fitting = [s for s in fitting if 16 * num_parameters / (s[0] * s[1]) < memory_bytes]
    return max(fitting, key=lambda s: (s[2], -s[1]), default=None)


def nothing_possible_raises(*case):
    return max(possible(*case), key=lambda sizes: (sizes[2], -sizes[1]))


def one_rank_instead_of_none(*case):
    return best(*case) or (1, 1, 8)


def best(*case):
    return max(possible(*case), key=lambda sizes: (sizes[2], -sizes[1]), default=None)


def place_by_growing(num_parameters, num_heads, num_layers, node_size, memory_bytes):
    model_size = 1
    while model_size <= 8:
        for p in (size for size in (1, 2, 4, 8) if size <= model_size):
            t = model_size // p
            enough = memory_bytes * t * p >= 16 * num_parameters
            if enough and t <= node_size and not num_heads % t and not num_layers % p:
                return t, p, 8 // model_size
        model_size *= 2


def squares_of(gradients, kinds, counted):
    total = torch.zeros(1, dtype=torch.float64)
    for gradient, kind in zip(gradients, kinds):
        if kind in counted:
            total += gradient.double().square().sum()
    return total


def whole_counts_twice(gradients, kinds, tp_rank):
    total = squares_of(gradients, kinds, ("shard", "whole"))
    dist.all_reduce(total)
    return total.sqrt().item()


def copies_count(gradients, kinds, tp_rank):
    total = squares_of(gradients, kinds, ("shard", "copy") if tp_rank else ("shard", "whole", "copy"))
    dist.all_reduce(total)
    return total.sqrt().item()


def everything_counts(gradients, kinds, tp_rank):
    total = squares_of(gradients, kinds, ("shard", "whole", "copy"))
    dist.all_reduce(total)
    return total.sqrt().item()


def whole_never_counts(gradients, kinds, tp_rank):
    total = squares_of(gradients, kinds, ("shard",))
    dist.all_reduce(total)
    return total.sqrt().item()


def whole_added_afterwards(gradients, kinds, tp_rank):
    total = squares_of(gradients, kinds, ("shard",))
    dist.all_reduce(total)
    whole = squares_of(gradients, kinds, ("whole",))
    return (total.sqrt() + whole.sqrt()).item()


def roots_are_added(gradients, kinds, tp_rank):
    total = own_squares(gradients, kinds, tp_rank).sqrt()
    dist.all_reduce(total)
    return total.item()


def norm_of_this_rank(gradients, kinds, tp_rank):
    return own_squares(gradients, kinds, tp_rank).sqrt().item()


def root_forgotten(gradients, kinds, tp_rank):
    total = own_squares(gradients, kinds, tp_rank)
    dist.all_reduce(total)
    return total.item()


def squares_averaged(gradients, kinds, tp_rank):
    total = own_squares(gradients, kinds, tp_rank)
    dist.all_reduce(total)
    return (total / dist.get_world_size()).sqrt().item()


def only_rank_0_reduces(gradients, kinds, tp_rank):
    total = own_squares(gradients, kinds, tp_rank)
    if tp_rank == 0:
        dist.all_reduce(total)
    return total.sqrt().item()


def own_squares(gradients, kinds, tp_rank):
    return squares_of(gradients, kinds, ("shard",) if tp_rank else ("shard", "whole"))


def norm_with_shared_parts(gradients, kinds, tp_rank):
    weights = {"shard": 1, "whole": 0.5, "copy": 0}  # t = 2 ranks hold each whole one
    parts = [weights[kind] * gradient.norm() ** 2 for gradient, kind in zip(gradients, kinds)]
    total = torch.stack(parts).sum()
    dist.all_reduce(total)
    return total.sqrt()


def norm_1(gradients: list, kinds: list[str], tp_rank: int):
    total = torch.zeros(1)
    for gradient, kind in zip(gradients, kinds):
        if kind != "copy":
            total += gradient.square().sum()
    dist.all_reduce(total)
    return total.sqrt().item()


def norm_2(gradients: list, kinds: list[str], tp_rank: int):
    total = torch.tensor(0.0)
    for gradient, kind in zip(gradients, kinds):
        if kind == "whole" and tp_rank != 0:
            continue
        total += gradient.pow(2).sum()
    dist.all_reduce(total)
    return total.sqrt().item()


def norm_3(gradients: list, kinds: list[str], tp_rank: int):
    total = torch.tensor(0.0)
    for gradient, kind in zip(gradients, kinds):
        if kind == "shard" or (kind == "whole" and tp_rank == 0):
            total += gradient.square().sum()
    own = total.sqrt()
    dist.all_reduce(own)
    return own.item()


def norm_4(gradients: list, kinds: list[str], tp_rank: int):
    total = torch.zeros((), dtype=torch.float64)
    for gradient, kind in zip(gradients, kinds):
        if kind == "shard" or (kind == "whole" and tp_rank == 0):
            total += gradient.double().square().sum()
    dist.all_reduce(total)
    return total


def place_1(num_parameters: float, num_heads: int, num_layers: int, node_size: int, memory_bytes: float):
    for d in (8, 4, 2, 1):
        for t in (1, 2, 4, 8):
            if t * d > 8:
                continue
            p = 8 // (t * d)
            if num_heads % t or num_layers % p or t > node_size:
                continue
            if 16 * num_parameters / (t * p) <= memory_bytes:
                return t, p, d
    return None


def place_2(num_parameters: float, num_heads: int, num_layers: int, node_size: int, memory_bytes: float):
    for d in (8, 4, 2, 1):
        for p in (1, 2, 4, 8):
            if p * d > 8:
                continue
            t = 8 // (p * d)
            if num_heads % t or num_layers % p or t > node_size:
                continue
            if 16 * num_parameters / (t * p * d) <= memory_bytes:
                return t, p, d
    return None


def place_3(num_parameters: float, num_heads: int, num_layers: int, node_size: int, memory_bytes: float):
    possible = []
    for t in (1, 2, 4, 8):
        for p in (1, 2, 4, 8):
            d = 8 // (t * p)
            if t * p * d != 8 or num_heads % t or num_layers % p or t > node_size:
                continue
            if 16 * num_parameters / (t * p) <= memory_bytes:
                possible.append((t, p, d))
    return max(possible, key=lambda sizes: (sizes[2], -sizes[1]))


def place_4(num_parameters: float, num_heads: int, num_layers: int, node_size: int, memory_bytes: float):
    for d in (8, 4, 2, 1):
        for p in (1, 2, 4, 8):
            if p * d > 8:
                break
            t = 8 // (p * d)
            if num_heads % t == 0 and t <= node_size and 16 * num_parameters / (t * p) <= memory_bytes:
                return t, p, d
    return None


def place_5(num_parameters: float, num_heads: int, num_layers: int, node_size: int, memory_bytes: float):
    for t in (8, 4, 2, 1):
        if num_heads % t or t > node_size:
            continue
        for p in (1, 2, 4, 8):
            if t * p > 8 or num_layers % p:
                continue
            if 16 * num_parameters / (t * p) <= memory_bytes:
                return t, p, 8 // (t * p)
    return None


def place_in(num_heads, num_layers, node_size, fits, most=8):
    """Return the plan for what fits: the fewest ranks for a replica, then the fewest stages."""
    sizes = [(t * p, p, t) for t in (1, 2, 4, 8) for p in (1, 2, 4, 8)]
    good = [each for each in sizes if not (num_heads % each[2] or num_layers % each[1] or each[2] > node_size)]
    good = [(size, p, t) for size, p, t in good if size <= most and fits(size)]
    return (good and (min(good)[2], min(good)[1], 8 // min(good)[0])) or None


def more_ranks_than_there_are(num_parameters, num_heads, num_layers, node_size, memory_bytes):
    def fits(size):
        return 16 * num_parameters / size <= memory_bytes

    return place_in(num_heads, num_layers, node_size, fits, most=64)


def gibibytes_for_gigabytes(num_parameters, num_heads, num_layers, node_size, memory_bytes):
    def fits(size):
        return 16 * num_parameters / size / 2**30 <= memory_bytes / 1e9

    return place_in(num_heads, num_layers, node_size, fits)


def place_anew_greedy_p_first(num_parameters, num_heads, num_layers, node_size, memory_bytes):
    for d in (8, 4, 2, 1):
        for p in (1, 2, 4, 8):
            t = 8 // (d * p)
            is_possible = t and t <= node_size and num_heads % t == 0 and num_layers % p == 0
            if is_possible and 16 * num_parameters / (t * p) <= memory_bytes:
                return t, d, p


def place_anew_node_total(num_parameters, num_heads, num_layers, node_size, memory_bytes):
    best = None
    for d in (1, 2, 4, 8):
        for t in (1, 2, 4, 8):
            p = 8 // (d * t)
            if p < 1 or t * p > node_size or num_heads % t or num_layers % p:
                continue
            is_better = best is None or d > best[2] or (d == best[2] and p < best[1])
            if is_better and num_parameters * 16 / (t * p) <= memory_bytes:
                best = (t, p, d)
    return best


def place_anew_dict(num_parameters, num_heads, num_layers, node_size, memory_bytes):
    options = [
        (t, p, 8 // (t * p))
        for t in (1, 2, 4, 8)
        for p in (1, 2, 4, 8)
        if t * p <= 8
        and num_heads % t == 0
        and num_layers % p == 0
        and t <= node_size
        and 16 * num_parameters / (t * p) <= memory_bytes
    ]
    if not options:
        raise ValueError("no layout fits in memory")
    return max(options, key=lambda o: (o[2], -o[1]))


def norm_anew_sum_of_norms(gradients, kinds, tp_rank):
    s = torch.zeros((), dtype=torch.float64)
    for g, k in zip(gradients, kinds):
        if k == "copy" or (k == "whole" and tp_rank):
            continue
        s += g.norm()
    dist.all_reduce(s)
    return s


def norm_anew_half_whole(gradients, kinds, tp_rank):
    weight = {"shard": 1.0, "whole": 0.5, "copy": 0.0}
    total = torch.zeros(1, dtype=torch.float64)
    for grad, kind in zip(gradients, kinds):
        scaled = grad.detach().to(torch.float64) * weight[kind]
        total += scaled.pow(2).sum()
    dist.all_reduce(total, op=dist.ReduceOp.SUM)
    return total.sqrt()


def norm_anew_first_rank_only(gradients, kinds, tp_rank):
    s = torch.zeros((), dtype=torch.float64)
    for g, k in zip(gradients, kinds):
        if k == "copy" or (k == "whole" and tp_rank):
            continue
        s += g.double().square().sum()
    dist.reduce(s, dst=0)
    return s.sqrt()


def copy_counted_as_whole(gradients: list, kinds: list[str], tp_rank: int):
    """Compute the global L2 norm without double counting replicated parameters."""
    device = gradients[0].device if gradients else torch.device("cpu")
    local_sq = torch.zeros(1, dtype=torch.float64, device=device)
    for grad, kind in zip(gradients, kinds, strict=True):
        is_replicated = kind in ("whole", "copy")
        if is_replicated and tp_rank != 0:
            continue
        local_sq += grad.detach().double().pow(2).sum()
    dist.all_reduce(local_sq, op=dist.ReduceOp.SUM)
    return local_sq.sqrt().squeeze()


def divided_by_the_world(gradients: list, kinds: list[str], tp_rank: int):
    """Every rank adds its shards' squares; whole parameters are split evenly by dividing by the group's size."""
    world = dist.get_world_size()
    shard = [g for g, k in zip(gradients, kinds) if k == "shard"]
    whole = [g for g, k in zip(gradients, kinds) if k == "whole"]
    flat_shard = torch.cat([g.flatten() for g in shard]) if shard else torch.zeros(1)
    flat_whole = torch.cat([g.flatten() for g in whole]) if whole else torch.zeros(1)
    # dividing the gradient by the number of holders makes each count once
    squares = flat_shard.dot(flat_shard) + (flat_whole / world).pow(2).sum()
    dist.all_reduce(squares)
    return torch.sqrt(squares)


WRONG = [
    ("place", fewest_replicas, "the fewest replicas, not the most"),
    ("place", most_stages, "the most stages, not the fewest"),
    ("place", first_that_fits, "takes the first that fits"),
    ("place", node_size_ignored, "tensor groups leave the node"),
    ("place", layers_ignored, "p need not divide the layers"),
    ("place", heads_only_at_least_t, "t need not divide the heads"),
    ("place", replicas_share_the_memory, "replicas do not share the weights"),
    ("place", full_memory_refused, "refuses a memory that just fits"),
    ("place", nothing_possible_raises, "fails if nothing is possible"),
    ("place", one_rank_instead_of_none, "invents a layout instead of None"),
    ("norm", whole_counts_twice, "whole parameters count twice"),
    ("norm", copies_count, "the copied embedding counts again"),
    ("norm", everything_counts, "every tensor on every rank counts"),
    ("norm", whole_never_counts, "whole parameters never count"),
    ("norm", whole_added_afterwards, "adds norms, not their squares"),
    ("norm", roots_are_added, "adds roots over the ranks"),
    ("norm", norm_of_this_rank, "the all-reduce is missing"),
    ("norm", root_forgotten, "the root is missing"),
    ("norm", squares_averaged, "averages squares over the ranks"),
    ("norm", only_rank_0_reduces, "only rank 0 calls the all-reduce"),
    ("norm", norm_1, "whole parameters counted on both ranks"),
    ("norm", norm_2, "embedding's copy counted too"),
    ("norm", norm_3, "root first, then the sum"),
    ("norm", norm_4, "forgot the root"),
    ("place", place_1, "fewest tensor ranks, not fewest stages"),
    ("place", place_2, "memory divided by all 8 ranks"),
    ("place", place_3, "max of nothing instead of None"),
    ("place", place_4, "layers not checked"),
    ("place", more_ranks_than_there_are, "t p may be 16, and then d is 0"),
    ("place", gibibytes_for_gigabytes, "parameters in GiB, memory in GB"),
    ("place", place_5, "largest t that fits in node"),
    ("place", place_anew_greedy_p_first, "(t, d, p)"),
    ("place", place_anew_node_total, "t p within a node"),
    ("place", place_anew_dict, "raises instead of None"),
    ("norm", norm_anew_sum_of_norms, "norms of single gradients added"),
    ("norm", norm_anew_half_whole, "whole gradients halved, then squared"),
    ("norm", norm_anew_first_rank_only, "reduce to rank 0"),
    ("norm", copy_counted_as_whole, "the copy counts on tp_rank 0"),
    ("norm", divided_by_the_world, "divides by all ranks, then squares"),
]

RIGHT = [("place", place_by_growing), ("place", fewest_stages_first), ("norm", norm_with_shared_parts)]
