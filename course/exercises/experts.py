"""The exercises of notebook 15: the experts' groups, splits, backward of dispatch, auxiliary loss, and a divisor.

In the second and third, the expert-parallel group is the whole world, and its rank r has consecutive experts.
"""

import operator
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import torch
import torch.distributed as dist

from course.exercises.base import Exercise, Trial, Unaided
from course.exercises.calling import no_gradient_to
from course.exercises.on_ranks import Conduct, RankExercise, only, summed, whole_numbers
from labkit.grid import Grid
from labkit.layout import ParallelLayout

# -- the second grid ------------------------------------------------------------------------------------------------


def my_expert_groups(tp_size, cp_size, dp_size, pp_size, expert_tp_size, ep_size):
    stage_size = tp_size * cp_size * dp_size  # as many ranks in a pipeline stage as in the dense grid
    block = expert_tp_size * ep_size  # ranks that together have each expert once
    ep_groups, expert_dp_groups = [], []
    for stage in range(0, stage_size * pp_size, stage_size):
        for first in range(stage, stage + stage_size, block):
            ep_groups += [list(range(first + i, first + block, expert_tp_size)) for i in range(expert_tp_size)]
        expert_dp_groups += [list(range(stage + i, stage + stage_size, block)) for i in range(block)]
    return ep_groups, expert_dp_groups


class WithoutLayout(Unaided):
    labkits = ParallelLayout.groups.__code__


expert_groups = WithoutLayout(
    "expert_groups",
    my_expert_groups,
    notebook="15",
    cases=[
        (1, 1, 6, 1, 1, 3),
        (2, 2, 2, 2, 1, 4),  # the 16 GPUs of the notebook
        (2, 3, 2, 1, 1, 3),  # ep does not divide d
        (4, 1, 3, 2, 2, 3),  # expert_tp is not t
        (1, 4, 9, 1, 2, 6),  # expert_tp is larger than t
        (2, 2, 1, 2, 4, 1),  # each rank is a group of its own
    ],
    hints=[
        "A pipeline stage has t * c * d ranks in both grids. The experts' grid divides them anew, by expert_tp, ep and "
        "expert_dp, fastest first. So how many are in an expert_dp group?",
        "The members of an ep group are expert_tp_size apart. expert_tp_size * ep_size consecutive ranks are a block "
        "that has each expert once, and the members of an expert_dp group are a block apart, inside one stage.",
        "For each stage: in each block that begins at `first`, for each i below expert_tp_size, `range(first + i, "
        "first + block, expert_tp_size)`. And for each i below block, `range(stage + i, stage + stage_size, block)`.",
    ],
)


def expert_grid(t, c, d, p, etp, ep):
    return {"expert_tp": etp, "ep": ep, "expert_dp": t * c * d // (etp * ep), "pp": p}


def dense_grid(t, c, d, p, etp, ep):
    return {"tp": t, "cp": c, "dp": d, "pp": p}


def groups_wrongly(*sizes, grid=expert_grid, ep=("ep",), of=expert_grid, expert_dp=("expert_dp",), change=lambda x: x):
    """Return the groups along axes ``ep`` of one grid, and along ``expert_dp`` of another."""
    return change(Grid(grid(*sizes)).groups(*ep)), change(Grid(of(*sizes)).groups(*expert_dp))


def in_order(names, *sizes):
    """Return the experts' grid with its axes in a different order."""
    return {name: expert_grid(*sizes)[name] for name in names.split()}


EDP_FASTER, PP_FIRST = (
    partial(in_order, names) for names in ("expert_tp expert_dp ep pp", "pp expert_tp ep expert_dp")
)


def groups_by_ranges(t, c, d, p, etp, ep, *, stage=lambda t, c, d, etp, ep: t * c * d, own=None, members=None):
    """Do what `my_expert_groups` does, with another size of a stage, stride in ep or number of expert_dp members."""
    size, own = stage(t, c, d, etp, ep), (own or (lambda t, etp: etp))(t, etp)
    block, ep_groups, expert_dp_groups = own * ep, [], []
    for start in range(0, size * p, size):
        for first in range(start, start + size, block):
            ep_groups += [list(range(first + i, first + block, own)) for i in range(own)]
        end = start + (members(t, c, d, ep) * block if members else size)
        expert_dp_groups += [list(range(start + i, end, block)) for i in range(block)]
    return ep_groups, expert_dp_groups


AS_OF_OLD = (
    "An ep group need not lie inside a data-parallel group: that ep divides d is an old rule. The experts' grid "
    "divides all t * c * d ranks of a stage anew, so expert_dp has t * c * d / (expert_tp * ep) members."
)
DENSE = (
    "These are groups of the dense grid. Its data-parallel ranks have different experts: copies of an expert are on "
    "the ranks that are expert_tp_size * ep_size apart."
)
COPIES_OF_EXPERT = "An expert has t * c * d / (expert_tp * ep) copies."
WHOLE_STAGE = "A stage has t * c * d ranks, also in the experts' grid: expert_tp, ep and expert_dp divide all of them."
THROUGH_STAGES = (
    "These groups run through all pipeline stages. Different stages have different layers, and so different experts: "
    "an expert_dp group stays inside the t * c * d ranks of its stage."
)
EP_FASTEST = (
    "Your ep groups are neighbours. In the experts' grid expert_tp runs fastest, so the members of an ep group are "
    "expert_tp_size apart."
)
WITH_T = "Experts have a tensor axis of their own: the stride of ep is expert_tp_size, not tp_size."
BLOCK_APART = "The members of an expert_dp group are expert_tp_size * ep_size apart, a block with each expert once."
expert_groups.mistakes_of(
    groups_by_ranges,
    (dict(own=lambda t, etp: t), WITH_T),
    (dict(own=lambda t, etp: t, members=lambda t, c, d, ep: d // ep), AS_OF_OLD),
    (dict(members=lambda t, c, d, ep: d // ep), AS_OF_OLD),
    (dict(members=lambda t, c, d, ep: max(1, d // ep)), AS_OF_OLD),
    (dict(members=lambda t, c, d, ep: c * d // ep), f"You left out t. {COPIES_OF_EXPERT}"),
    (dict(members=lambda t, c, d, ep: d), f"You made d of them. {COPIES_OF_EXPERT}"),
    (dict(stage=lambda t, c, d, etp, ep: t * d), f"You left out c. {WHOLE_STAGE}"),
    (dict(stage=lambda t, c, d, etp, ep: c * d), f"You left out t. {WHOLE_STAGE}"),
    (dict(stage=lambda t, c, d, etp, ep: d), f"You left out t and c. {WHOLE_STAGE}"),
    (dict(stage=lambda t, c, d, etp, ep: etp * ep * d), f"You made a stage of expert_tp * ep * d. {WHOLE_STAGE}"),
)
expert_groups.mistakes_of(
    groups_wrongly,
    (dict(of=dense_grid, expert_dp=("dp",)), DENSE),
    (dict(of=dense_grid, expert_dp=("cp", "dp")), DENSE),
    (dict(grid=dense_grid, ep=("dp",), of=dense_grid, expert_dp=("cp", "dp")), DENSE),
    (dict(expert_dp=("expert_dp", "pp")), THROUGH_STAGES),
    (dict(grid=partial(in_order, "ep expert_tp expert_dp pp")), EP_FASTEST),
    (
        dict(grid=EDP_FASTER, of=EDP_FASTER),
        "expert_dp runs faster than ep in yours. It is the other way round: the ranks that exchange tokens are close.",
    ),
    (
        dict(grid=PP_FIRST, of=PP_FIRST),
        "The pipeline axis runs fastest in yours. It is the slowest, in both grids.",
    ),
    (dict(ep=("expert_tp", "ep")), "These are whole blocks. An ep group has one rank of each expert_tp group."),
    (dict(expert_dp=("ep", "expert_dp")), "These have different experts. expert_dp ranks have the same."),
    (dict(ep=("ep", "expert_dp")), "An ep group has each expert once. Your groups hold the copies, too."),
    (dict(change=lambda groups: [group[:-1] for group in groups]), "Each group lacks its last rank."),
    (dict(change=lambda groups: [group for group in groups if len(group) > 1]), "A group of one rank is a group, too."),
    (dict(change=lambda groups: [[1 + each for each in group] for group in groups]), "Ranks count from 0, not 1."),
)  # fmt: skip


@expert_groups.mistake("This is the first stage alone. There are pp_size of them, each with groups of its own.")
def first_stage_only(t, c, d, p, etp, ep):
    return my_expert_groups(t, c, d, 1, etp, ep)


@expert_groups.mistake("Ranks of ep are neighbours only if expert_tp is 1, and those of expert_dp are a block apart.")
def neighbours(t, c, d, p, etp, ep):
    n, sizes = t * c * d * p, (ep, t * c * d // (etp * ep))
    return [[[*range(first, first + size)] for first in range(0, n, size)] for size in sizes]


@expert_groups.mistake(
    "You divided the dense data-parallel groups by ep, an old rule. The experts' grid divides all ranks of a stage "
    "anew: expert_tp_size * ep_size consecutive ranks are a block that has each expert once."
)
def dense_groups_divided(t, c, d, p, etp, ep):
    groups = Grid(dense_grid(t, c, d, p, etp, ep)).groups("dp")
    ep_groups = [group[first : first + ep] for group in groups for first in range(0, d, ep)]
    return ep_groups, [group[first::ep] for group in groups for first in range(ep)]


@expert_groups.mistake(BLOCK_APART)
def ep_apart(t, c, d, p, etp, ep):
    size = t * c * d
    starts = range(0, size * p, size)
    return my_expert_groups(t, c, d, p, etp, ep)[0], [[*range(s + i, s + size, ep)] for s in starts for i in range(ep)]


@expert_groups.mistake("`/` gives a float, and neither a range nor a number of ranks can be one: use `//`.")
def divided_by_a_slash(t, c, d, p, etp, ep):
    return [[*range(t * c * d / (etp * ep))]]


# -- the splits of the all-to-all ----------------------------------------------------------------------------------


def my_split_sizes(experts, num_experts):
    ep_size = dist.get_world_size()
    ranks = experts.flatten() // (num_experts // ep_size)  # [tokens * k], where each choice goes
    send = torch.bincount(ranks, minlength=ep_size)
    recv = torch.empty_like(send)
    dist.all_to_all_single(recv, send)  # one number to each rank: how many rows will come
    return send.tolist(), recv.tolist()


def choices(num_tokens: int, top_k: int, num_experts: int, seed: int) -> torch.Tensor:
    """Return this rank's choices [tokens, k], sorted; each next rank has two tokens more, and the third none."""
    rank, generator = dist.get_rank(), torch.Generator().manual_seed(seed + dist.get_rank())
    scores = torch.rand(num_tokens + 2 * rank if rank != 2 else 0, num_experts, generator=generator)
    scores[:, 0] += 0.3  # the first is chosen often
    return scores.topk(top_k).indices.sort().values


def split_inputs(num_tokens: int, top_k: int, num_experts: int):
    """Return which experts this rank's tokens choose, [tokens, k], and the number of experts on all ranks."""
    return choices(num_tokens, top_k, num_experts, seed=1500), num_experts


def few_numbers(log: Conduct, experts, num_experts) -> str | None:
    if (sent := log.total_bytes("all_to_all")) <= 8 * num_experts:
        return None
    return f"It sends {sent} bytes. One number to each rank is enough: how many rows it will get from this one."


split_sizes = RankExercise(
    "split_sizes",
    my_split_sizes,
    notebook="15",
    cases=[(2, 4, 3, 6), (3, 4, 2, 12), (4, 5, 3, 8)],
    inputs=split_inputs,
    rule=only("all_to_all", also=few_numbers),
    hints=[
        "A rank has num_experts // ep_size consecutive experts. So on which rank is expert e? And a token is sent once "
        "for each of its k choices.",
        "`torch.bincount(ranks, minlength=ep_size)` counts how many choices go to each rank, also if that is 0.",
        "How many rows come is known to those who send them. Each rank tells each other one number, and "
        "`dist.all_to_all_single(recv, send)` with two tensors of ep_size numbers does just that.",
    ],
    if_stuck="an all-to-all that only some ranks call, or that a rank without tokens skips. It sends nothing, but it "
    "receives, so it must take part.",
)


def splits_wrongly(
    experts, num_experts, *, rank_of=lambda e, num, ep: e // (num // ep), used=lambda experts: experts.flatten(),
    count=lambda ranks, ep: torch.bincount(ranks, minlength=ep), receive=None, answer=lambda send, recv: (send, recv),
):  # fmt: skip
    """Do what `my_split_sizes` does, with one thing wrong."""
    ep_size = dist.get_world_size()
    send = count(rank_of(used(experts), num_experts, ep_size), ep_size)
    if receive is None:
        received = torch.empty_like(send)
        dist.all_to_all_single(received, send)
    else:
        received = receive(send)
    return answer(send, received)


def gathered_counts(send):
    """Return what every rank sends to every rank: [from, to]."""
    rows = [torch.empty_like(send) for _ in range(dist.get_world_size())]
    dist.all_gather(rows, send)
    return torch.stack(rows)


def without_own(splits):
    return splits * (torch.arange(len(splits)) != dist.get_rank())


def once_per_rank(experts, num_experts):
    """Return send splits in which a token goes to a rank once, however many of the rank's experts it chose."""
    ranks = experts // (num_experts // dist.get_world_size())
    return torch.stack([(ranks == rank).any(-1).sum() for rank in range(dist.get_world_size())])


CONSECUTIVE = (
    "A rank has num_experts // ep_size consecutive experts: expert e is on rank e // (num_experts // ep_size)."
)
K_CHOICES = "Each token makes k choices, and each sends a row: count all of `experts`, not one per token."
TOLD_BY_OTHERS = "What this rank receives depends on the others' tokens, and only they know: ask with an all-to-all."
OUTPUT_FIRST = "Is it the output that comes first? `dist.all_to_all_single(output, input)` writes into it."
ONE_EACH = "There is one number for each rank, 0 for one that gets nothing."
split_sizes.mistakes_of(
    splits_wrongly,
    (dict(rank_of=lambda e, num, ep: e % ep), f"You dealt out experts like cards. {CONSECUTIVE}"),
    (dict(rank_of=lambda e, num, ep: (e // ep).clamp(max=ep - 1)), f"You divided by ep_size. {CONSECUTIVE}"),
    (dict(rank_of=lambda e, num, ep: e.clamp(max=ep - 1)), f"You took an expert's number for a rank. {CONSECUTIVE}"),
    (dict(used=lambda experts: experts[:, 0]), K_CHOICES),
    (dict(used=lambda experts: experts[:, -1]), K_CHOICES),
    (dict(receive=lambda send: send), f"You receive what you send. {TOLD_BY_OTHERS}"),
    (dict(receive=lambda send: send.flip(0)), f"These are your own, in reverse. {TOLD_BY_OTHERS}"),
    (dict(receive=lambda send: torch.full_like(send, send[dist.get_rank()])), f"You repeat your own. {TOLD_BY_OTHERS}"),
    (dict(receive=lambda send: torch.zeros_like(send)), f"Nothing has arrived in the receive splits. {TOLD_BY_OTHERS}"),
    (dict(answer=lambda send, recv: (send * 0, recv * 0)), f"All is 0. {OUTPUT_FIRST}"),
    (
        dict(receive=summed),
        "You added up what all ranks send to each rank. The receive splits say what each rank sends to this one.",
    ),
    (
        dict(receive=lambda send: summed(send)[dist.get_rank()]),
        "This is how many rows come in all. Each rank's rows are counted apart: one number for each.",
    ),
    (dict(answer=lambda send, recv: (recv, send)), "The two are swapped: first what is sent, then what is received."),
    (
        dict(answer=lambda send, recv: (send.cumsum(0), recv.cumsum(0))),
        "These are the places where each rank's rows end. Splits say how many rows each rank has.",
    ),
    (dict(count=lambda ranks, ep: torch.full((ep,), len(ranks) // ep)), "Tokens choose freely, so splits are uneven."),
    (
        dict(answer=lambda send, recv: (without_own(send), without_own(recv))),
        "You left out what a rank sends to itself. An all-to-all has those rows, too, although they do not travel.",
    ),
    (dict(answer=lambda send, recv: send), f"These are the send splits alone. {TOLD_BY_OTHERS}"),
)  # fmt: skip


@split_sizes.mistake(
    "A token that chose two experts of one rank was counted once. Its row goes to both, so here it is sent twice."
)
def deduplicated(experts, num_experts):
    return splits_wrongly(experts, num_experts, count=lambda *_: once_per_rank(experts, num_experts))


@split_sizes.mistake("You counted by expert. The all-to-all sends to ranks: add up what the experts of a rank get.")
def by_expert(experts, num_experts):
    counts = splits_wrongly(
        experts, num_experts, rank_of=lambda e, *_: e, count=lambda e, _: e.bincount(minlength=num_experts)
    )
    return counts


@split_sizes.mistake(
    "You added up numbers of different ranks. What arrives begins with rank 0's numbers, one for each expert here, and "
    "then rank 1's: add up each rank's own, as by `received.view(ep_size, -1).sum(1)`."
)
def over_the_wrong_dim(experts, num_experts):
    ep_size = dist.get_world_size()
    counts = experts.flatten().bincount(minlength=num_experts)
    dist.all_to_all_single(received := torch.empty_like(counts), counts)
    return counts.view(ep_size, -1).sum(1), received.view(-1, ep_size).sum(0)


@split_sizes.mistake(f"Ranks that nobody chose are missing. {ONE_EACH}")
def without_zeros(experts, num_experts):
    send, recv = splits_wrongly(experts, num_experts)
    return send[send > 0], recv[recv > 0]


# -- backward of dispatch ------------------------------------------------------------------------------------------


def my_dispatch_backward(grad, tokens, num_tokens, send_splits, recv_splits):
    grad_rows = grad.new_empty(sum(send_splits), grad.shape[1])
    dist.all_to_all_single(grad_rows, grad, send_splits, recv_splits)  # out, in, splits of out, splits of in
    grad_x = grad.new_zeros(num_tokens, grad.shape[1])
    return grad_x.index_add_(0, tokens, grad_rows)  # a token that was copied k times gets k gradients


def backward_inputs(num_tokens: int, top_k: int, num_experts: int, hidden: int):
    """Return gradients of what this rank received, which token each sent row was, their number, and the splits."""
    experts, ep_size = choices(num_tokens, top_k, num_experts, seed=1520), dist.get_world_size()
    ranks = experts.flatten() // (num_experts // ep_size)
    send = ranks.bincount(minlength=ep_size)
    recv = gathered_counts(send)[:, dist.get_rank()]
    tokens = ranks.argsort(stable=True) // top_k  # of the rows that were sent, sorted by rank
    grad = whole_numbers((int(recv.sum()), hidden), seed=1540 + dist.get_rank()).cpu()
    return grad, tokens, len(experts), send.tolist(), recv.tolist()


dispatch_backward = RankExercise(
    "dispatch_backward",
    my_dispatch_backward,
    notebook="15",
    cases=[(2, 2, 3, 6, 1), (3, 4, 2, 12, 3), (4, 2, 3, 8, 2)],
    inputs=backward_inputs,
    rule=only("all_to_all"),
    hints=[
        "Forward was `rows = x[tokens]`, then an all-to-all with send_splits in and recv_splits out. Undo them in "
        "reverse order.",
        "A gradient goes back to where its row came from. What forward received from a rank is now sent to it, so the "
        "splits are exchanged: `dist.all_to_all_single(grad_rows, grad, send_splits, recv_splits)`.",
        "`x[tokens]` copied each token for each of its choices. The gradient of a copied number is the sum over its "
        "copies: `grad_x.index_add_(0, tokens, grad_rows)`, from zeros.",
    ],
    if_stuck="an all-to-all that a rank with nothing to send skips, or splits that two ranks see differently: what a "
    "rank sends to another must be what that one expects. Exchange the two splits of forward, on every rank.",
)


def backward_wrongly(
    grad, tokens, num_tokens, send_splits, recv_splits, *, back=None, order=lambda tokens, rows: rows,
    add=lambda x, tokens, rows: x.index_add_(0, tokens, rows), scale=lambda k: 1, result=lambda grad_x: grad_x,
):  # fmt: skip
    """Do what `my_dispatch_backward` does, with one thing wrong."""
    rows = grad.new_empty(sum(send_splits), grad.shape[1])
    dist.all_to_all_single(rows, grad, send_splits, recv_splits)
    rows = back(rows, grad) if back else rows
    grad_x = add(grad.new_zeros(num_tokens, grad.shape[1]), tokens, order(tokens, rows))
    return result(grad_x * scale(len(tokens) // max(1, num_tokens)))


def overwritten(x, tokens, rows):
    for token, row in zip(tokens, rows):
        x[token] = row
    return x


def first_of_copies(x, tokens, rows):
    return overwritten(x, tokens.flip(0), rows.flip(0))


def means_of_all(rows, grad):
    """Return rows that all have the mean of what is here."""
    return rows * 0 + (grad.sum(0) / max(1, len(grad)))


def as_many(rows, grad):
    """Return the gradients that are here as if they were those of the rows that were sent."""
    enough = torch.cat([grad, rows * 0])
    return enough[: len(rows)]


COPIED = "`x[tokens]` copied each token k times, and the gradient of a copied number is the sum over its copies."
ONLY_MOVED = "Dispatch moves and copies rows. Its backward moves gradients back, and adds up those of the copies."
NOT_EXCHANGED = (
    "The splits do not fit the rows. Now these go back: `grad` has those that were received, and they are sent by "
    "recv_splits; `grad_rows` has as many as were sent, and they arrive by send_splits. all_to_all_single has its "
    "output first, and the splits of its output: `(grad_rows, grad, send_splits, recv_splits)`."
)
COPIES_AGAIN = (
    "`[tokens]` copies, as forward did, and its backward adds up. And `grad` has the rows that this rank received, for "
    "tokens of other ranks: `tokens` says whose row each one is only when all are back where they came from."
)
dispatch_backward.mistakes_of(
    backward_wrongly,
    (
        dict(add=overwritten),
        "Of a token's copies the last alone counts: of several writes to one row by `=` or `+=`, the last stays. "
        f"{COPIED} Use index_add_.",
    ),
    (dict(add=first_of_copies), f"Of a token's copies one alone counts. {COPIED} Use index_add_."),
    (
        dict(add=lambda x, tokens, rows: x.scatter_add_(0, tokens[:, None], rows)),
        "Only the first column was added: scatter_add_ goes as far as its index, which has one column. Use index_add_.",
    ),
    (dict(scale=lambda k: 1 / max(1, k)), f"You averaged over a token's copies. {COPIED}"),
    (dict(scale=lambda k: k), f"Everything is k times too large. {ONLY_MOVED}"),
    (dict(scale=lambda k: 1 / dist.get_world_size()), f"Everything is divided by ep. {ONLY_MOVED}"),
    (dict(scale=lambda k: dist.get_world_size()), f"Everything is ep times too large. {ONLY_MOVED}"),
    (dict(scale=lambda k: -1), "The sign is wrong."),
    (
        dict(order=lambda tokens, rows: rows.flip(0)),
        "The rows are in reverse order. The gradient of row i comes back as row i.",
    ),
    (
        dict(order=lambda tokens, rows: rows[tokens.argsort(stable=True)]),
        "You sorted the rows after they came back, but not `tokens`: row i is for token tokens[i] as it arrives.",
    ),
    (dict(back=as_many), f"Nothing was sent: these are gradients of other ranks' tokens. {ONLY_MOVED}"),
    (dict(back=lambda rows, grad: rows * 0), f"All is 0: what arrived was not used. {OUTPUT_FIRST}"),
    (dict(back=means_of_all), "These are means of what this rank has. Each gradient belongs to one row: send it back."),
    (dict(add=lambda x, tokens, rows: rows[tokens]), COPIES_AGAIN),
    (dict(add=lambda x, tokens, rows: rows), f"These are gradients of the rows that were sent. {COPIED}"),
    (
        dict(add=lambda x, tokens, rows: x.index_add_(0, tokens.sort().values, rows)),
        "You took k rows in turn for those of one token. Rows were sorted by rank: `tokens` says whose each one is.",
    ),
    (
        dict(add=lambda x, tokens, rows: x.index_add_(0, torch.arange(len(rows)) % max(1, len(x)), rows)),
        "You took the rows for k passes over all tokens. Rows were sorted by rank: `tokens` says whose each one is.",
    ),
    (
        dict(add=lambda x, tokens, rows: x.index_add_(0, tokens, rows)[tokens]),
        "The sums are right, but they were copied again: there is one row for each token.",
    ),
    (dict(result=lambda grad_x: grad_x.sum(0)), "This is one row for all tokens. Each token has its own gradient."),
)  # fmt: skip


def refused(grad, tokens, num_tokens, send_splits, recv_splits, *, rows, splits):
    """Do an all-to-all that cannot be: of other sizes than the tensors that it is given."""
    into = grad.new_empty(sum(rows(send_splits, recv_splits)), grad.shape[1])
    dist.all_to_all_single(into, grad, *splits(send_splits, recv_splits))


@dispatch_backward.mistake(COPIES_AGAIN)
def not_even_sent(grad, tokens, num_tokens, send_splits, recv_splits):
    return grad[tokens]


dispatch_backward.mistakes_of(
    refused,
    (dict(rows=lambda send, recv: recv, splits=lambda send, recv: (recv, send)), NOT_EXCHANGED),
    (dict(rows=lambda send, recv: send, splits=lambda send, recv: (recv, send)), NOT_EXCHANGED),
    (
        dict(rows=lambda send, recv: send, splits=lambda send, recv: ()),
        "Without splits, each rank would get equally many rows. Give those of the output, then those of the input: "
        "`dist.all_to_all_single(grad_rows, grad, send_splits, recv_splits)`.",
    ),
)


# -- the auxiliary loss --------------------------------------------------------------------------------------------


def my_auxiliary_loss(scores, experts, coefficient):
    num_tokens, num_experts = scores.shape
    chosen = torch.bincount(experts.flatten(), minlength=num_experts)  # n_i
    fractions = chosen / (num_tokens * experts.shape[1])  # f_i: they add up to 1
    return coefficient * num_experts * (fractions * scores.mean(0)).sum()


class LossOfScores(Exercise):
    """A loss that does not lead back to the scores balances nothing."""

    def trials(self, function: Callable, case: tuple) -> list[Trial]:
        scores, *rest = case
        scores = scores.clone().requires_grad_()
        [trial] = super().trials(function, (scores, *rest))
        return [replace(trial, complaint=trial.complaint or _no_way_back(function, scores, rest))]


def _no_way_back(function: Callable, scores: torch.Tensor, rest: list) -> str | None:
    try:
        got = function(scores, *rest)
    except Exception:
        return None  # the trial says so
    return no_gradient_to("scores", scores, got)


tensor = partial(torch.tensor, dtype=torch.float64)

auxiliary_loss = LossOfScores(
    "auxiliary_loss",
    my_auxiliary_loss,
    notebook="15",
    cases=[
        # balanced: the loss is the coefficient
        (tensor([[5, 4, 1], [1, 5, 4], [4, 1, 5]]) / 10, torch.tensor([[0, 1], [1, 2], [2, 0]]), 0.7),
        # 5 tokens, 2 of 4 experts, the last one chosen by nobody
        (
            tensor([[4, 3, 2, 1], [6, 2, 1, 1], [5, 1, 3, 1], [3, 5, 2, 0], [7, 1, 2, 0]]) / 10,
            torch.tensor([[0, 1], [0, 1], [2, 0], [1, 0], [0, 2]]),
            0.3,
        ),
        # 4 tokens, 3 of 7 experts
        (
            tensor([[0, 1, 2, 3, 4, 5, 5], [6, 1, 1, 4, 2, 5, 1], [1, 1, 8, 0, 1, 2, 7], [0, 9, 2, 1, 3, 4, 1]]) / 20,
            torch.tensor([[6, 5, 4], [0, 5, 3], [2, 6, 5], [1, 5, 4]]),
            0.01,
        ),
        # 6 tokens, 1 of 2 experts
        (
            tensor([[9, 1], [6, 4], [7, 3], [2, 8], [8, 2], [6, 4]]) / 10,
            torch.tensor([[0], [0], [0], [1], [0], [0]]),
            2.5,
        ),
    ],
    hints=[
        "n_i is how many choices expert i got: `torch.bincount(experts.flatten(), minlength=num_experts)`. How many "
        "choices are there in all, if each of T tokens makes k?",
        "f_i = n_i / (T k), so the f_i add up to 1. P_i is the mean of column i of the scores, over all tokens.",
        "The loss is coefficient * E * sum of f_i P_i. If all is balanced, f_i = P_i = 1/E, and it is the coefficient.",
    ],
)


def chosen_by(scores, experts):
    return torch.bincount(experts.flatten(), minlength=scores.shape[1]).double()


def loss_wrongly(
    scores, experts, coefficient, *, fractions=lambda s, e: chosen_by(s, e) / e.numel(), means=lambda s, e: s.mean(0),
    total=lambda f, p: (f * p).sum(), factor=lambda s, e: s.shape[1], after=operator.mul,
):  # fmt: skip
    """Do what `my_auxiliary_loss` does, with one thing wrong."""
    loss = total(fractions(scores, experts), means(scores, experts)) * factor(scores, experts)
    return after(loss, coefficient)


def of_the_chosen(scores, experts):
    """Return scores that are 0 where a token did not choose."""
    return torch.zeros_like(scores).scatter(1, experts, scores.gather(1, experts))


def normalised(scores):
    return scores / scores.sum(1, keepdim=True)


K_FORGOTTEN = (
    "k is forgotten. T tokens make T * k choices, so f_i = n_i / (T k), and the f_i add up to 1. Yours add up to k, "
    "and so the loss is k times too large: k times the coefficient if all is balanced."
)
T_FORGOTTEN = (
    "Everything is T times too large. f_i = n_i / (T k) is a fraction of all choices, and P_i a mean over the tokens: "
    "both are divided by the number of tokens."
)
ALL_SCORES = (
    "P_i is the mean over all tokens of what the router gave expert i, also where it was not chosen. Only then does "
    "the loss have a gradient for what might be chosen."
)
BOTH = "The loss multiplies two different things: f_i, counted from the choices, and P_i, the mean of the scores."
auxiliary_loss.mistakes_of(
    loss_wrongly,
    (dict(fractions=lambda s, e: chosen_by(s, e) / len(s)), K_FORGOTTEN),
    (dict(fractions=lambda s, e: chosen_by(s, e) / e.shape[1]), T_FORGOTTEN),
    (dict(fractions=chosen_by), "You took n_i itself. f_i is the fraction of all choices, n_i / (T k)."),
    (dict(fractions=lambda s, e: chosen_by(s, e[:, :1]) / len(s)), "You counted first choices alone. All k count."),
    (dict(fractions=lambda s, e: chosen_by(s, e) / (e.numel() * e.shape[1])), "You divided by k twice."),
    (dict(fractions=lambda s, e: chosen_by(s, e) // e.numel()), "`//` rounds each fraction down to 0: use `/`."),
    (
        dict(factor=lambda s, e: 1),
        "E is forgotten, or the mean over experts was taken for the sum. The loss is E times the sum of f_i P_i, so "
        "that it is the coefficient if all is balanced.",
    ),
    (dict(factor=lambda s, e: s.shape[1] ** 2), "E is a factor twice: the sum of f_i P_i is multiplied by E once."),
    (
        dict(factor=lambda s, e: e.shape[1]),
        "k multiplies your sum, where E should: you wrote it so, or you forgot E and divided n_i by T instead of T k.",
    ),
    (
        dict(factor=lambda s, e: 1 / s.shape[1]),
        "You divided by E, as a mean over experts does, too. f_i and P_i are about 1/E: multiply by E.",
    ),
    (
        dict(factor=lambda s, e: len(s)),
        "T multiplies your sum, where E should: you wrote it so, or you divided the sums of the scores by E instead of "
        "T. P_i is a mean over the tokens.",
    ),
    (dict(after=lambda loss, _: loss), "The coefficient is forgotten."),
    (dict(after=lambda loss, coefficient: coefficient * (loss - 1)), "You subtracted the balanced loss: leave it in."),
    (dict(after=lambda loss, coefficient: coefficient + loss), "You added the coefficient. It is a factor."),
    (dict(after=lambda loss, coefficient: -coefficient * loss), "The sign is wrong: it is lowest if all is balanced."),
    (dict(means=lambda s, e: s.sum(0)), T_FORGOTTEN),
    (dict(means=lambda s, e: s.mean()), "P_i is a mean over the tokens, `dim=0`: one number for each expert."),
    (dict(means=lambda s, e: s.softmax(-1).mean(0)), "`scores` are probabilities already: no softmax is needed."),
    (dict(means=lambda s, e: of_the_chosen(s, e).mean(0)), ALL_SCORES),
    (dict(means=lambda s, e: normalised(of_the_chosen(s, e)).mean(0)), ALL_SCORES),
    (dict(means=lambda s, e: chosen_by(s, e) / e.numel()), f"{BOTH} You took f_i twice, which has no gradient."),
    (dict(fractions=lambda s, e: s.mean(0)), f"{BOTH} You took P_i twice."),
    (dict(fractions=lambda s, e: chosen_by(s, s.argmax(1)) / len(s)), "You counted first choices alone. All k count."),
    (
        dict(fractions=lambda s, e: s.gather(1, e), total=lambda f, p: f.mean()),
        f"{BOTH} You took the scores that each token gave to its own choices.",
    ),
    (dict(total=lambda f, p: f * p), "This is one number for each expert. The loss is their sum."),
    (dict(total=lambda f, p: f.sum() * p.sum()), "You multiplied two sums, and each is 1. Multiply first: f_i * P_i."),
    (dict(total=lambda f, p: (f - p).square().sum()), f"{BOTH} It does not compare them."),
    (
        dict(total=lambda f, p: f.std() / f.mean(), factor=lambda s, e: 1),
        "This measures how uneven the loads are, but it has no gradient.",
    ),
    (dict(total=lambda f, p: (f * p).max()), "This is the largest of the products. The loss is their sum."),
)  # fmt: skip


@auxiliary_loss.mistake(
    "Each expert counts once, however many tokens chose it. An index with a number twice writes there once: "
    "`index_add_` adds all, and `torch.bincount` counts."
)
def counted_once(scores, experts, coefficient):
    def fractions(scores, experts):
        return torch.bincount(experts.flatten(), minlength=scores.shape[1]).clamp(max=1) / experts.numel()

    return loss_wrongly(scores, experts, coefficient, fractions=fractions)


@auxiliary_loss.mistake("Experts that nobody chose are missing: `torch.bincount(..., minlength=num_experts)`.")
def without_minlength(scores, experts, coefficient):
    return loss_wrongly(scores, experts, coefficient, fractions=lambda s, e: e.flatten().bincount() / e.numel())


# -- what to divide an expert's gradient by ------------------------------------------------------------------------


def my_divisor(tp_size, cp_size, dp_size, expert_tp_size, ep_size):
    expert_dp_size = tp_size * cp_size * dp_size // (expert_tp_size * ep_size)  # ranks with copies of an expert
    return expert_dp_size, dp_size * cp_size  # and the losses are averaged over the dense replicas


gradient_divisor = Exercise(
    "gradient_divisor",
    my_divisor,
    notebook="15",
    cases=[(1, 1, 6, 1, 3), (2, 1, 6, 1, 4), (4, 3, 10, 2, 5), (8, 3, 5, 2, 6), (3, 4, 7, 6, 1), (4, 1, 6, 2, 12)],
    hints=[
        "An expert's gradient is added up over the ranks that have copies of it. How many are these, in a grid of "
        "expert_tp * ep * expert_dp = t * c * d ranks?",
        "And the sum? Each rank's loss is a mean over its own tokens, and the loss of all is the mean of those. Over "
        "how many losses is that? Tensor ranks have no loss of their own.",
        "The tokens of all d * c replicas reach an expert, through the all-to-all. So its gradients are divided by the "
        "same number as any other parameter's: d * c, however many copies there are.",
    ],
)


def divisor_wrongly(
    t, c, d, etp, ep, *, copies=lambda t, c, d, etp, ep: t * c * d // (etp * ep), divide=lambda t, c, d, etp, ep: d * c,
):  # fmt: skip
    return copies(t, c, d, etp, ep), divide(t, c, d, etp, ep)


TOO_LARGE = (
    "This averages over the copies of an expert. But the copies together get the tokens of all d * c replicas, so with "
    "t = expert_tp every gradient would be ep times too large. Divide by d * c, as for any other parameter."
)
COPIES = "An expert has t * c * d / (expert_tp * ep) copies: the experts' grid divides all ranks of a stage."
BY_EP = "You divided by ep. There are d * c losses, wherever the experts are."
NOT_TENSOR = "Tensor ranks have no loss of their own: together they compute one. So only d * c losses are averaged."
gradient_divisor.mistakes_of(
    divisor_wrongly,
    (dict(divide=lambda t, c, d, etp, ep: t * c * d // (etp * ep)), TOO_LARGE),
    (
        dict(divide=lambda t, c, d, etp, ep: d * c if t * c * d > etp * ep else 1),
        "Where an expert has one copy, you divided by nothing. That rank alone has the gradient, but it comes from the "
        "tokens of all d * c replicas: divide by d * c there, too.",
    ),
    (dict(divide=lambda t, c, d, etp, ep: d), "c is forgotten. Context ranks have different tokens, and a loss each."),
    (dict(divide=lambda t, c, d, etp, ep: c), "d is forgotten: each of d * c replicas has a loss."),
    (dict(divide=lambda t, c, d, etp, ep: t * c * d), NOT_TENSOR),
    (dict(divide=lambda t, c, d, etp, ep: t * d), NOT_TENSOR),
    (dict(divide=lambda t, c, d, etp, ep: t * c * d // etp), "These are expert_dp * ep ranks. There are d * c losses."),
    (dict(divide=lambda t, c, d, etp, ep: t * c * d // ep), "These are expert_dp * expert_tp ranks, not d * c losses."),
    (dict(divide=lambda t, c, d, etp, ep: d * c * ep), "ep is a factor, too. It adds no loss: divide by d * c."),
    (dict(divide=lambda t, c, d, etp, ep: d * c * etp), "expert_tp is a factor, and adds no loss: divide by d * c."),
    (dict(divide=lambda t, c, d, etp, ep: d * c // ep), BY_EP),
    (dict(divide=lambda t, c, d, etp, ep: d * c / ep), BY_EP),
    (dict(divide=lambda t, c, d, etp, ep: d // ep), BY_EP),
    (dict(divide=lambda t, c, d, etp, ep: ep), "ep is how many ranks share the experts. There are d * c losses."),
    (dict(divide=lambda t, c, d, etp, ep: 1), "A sum alone is not the gradient of a mean: divide it by d * c."),
    (dict(divide=lambda t, c, d, etp, ep: 1 / (d * c)), "This is a factor. Return what one divides by: d * c."),
    (
        dict(divide=lambda t, c, d, etp, ep: d * c * (t * c * d // (etp * ep))),
        "You divided by the number of copies, too. It adds no loss: divide by d * c.",
    ),
    (dict(divide=lambda t, c, d, etp, ep: d + c), "There are d * c replicas, the product: you added the two."),
    (
        dict(divide=lambda t, c, d, etp, ep: t * c * d / (etp * ep) / (d * c)),
        "This is the factor with which one would multiply before an average over the copies. The sum over the copies "
        "is divided by d * c.",
    ),
    (
        dict(divide=lambda t, c, d, etp, ep: d * c // (t * c * d // (etp * ep))),
        "This is how much is left to divide after an average over the copies. The sum is divided by d * c.",
    ),
    (
        dict(divide=lambda t, c, d, etp, ep: d * c / (t * c * d / (etp * ep))),
        "This is how much is left to divide after an average over the copies. The sum is divided by d * c.",
    ),
    (dict(copies=lambda t, c, d, etp, ep: d * c), f"These are the dense replicas. {COPIES}"),
    (dict(copies=lambda t, c, d, etp, ep: d), f"These are the dense replicas. {COPIES}"),
    (dict(copies=lambda t, c, d, etp, ep: d // ep), f"That ep divides d is an old rule. {COPIES}"),
    (dict(copies=lambda t, c, d, etp, ep: d * c // ep), f"This holds if expert_tp is t. {COPIES}"),
    (dict(copies=lambda t, c, d, etp, ep: t * c * d // ep), f"expert_tp is forgotten. {COPIES}"),
    (dict(copies=lambda t, c, d, etp, ep: t * c * d // etp), f"ep is forgotten. {COPIES}"),
    (dict(copies=lambda t, c, d, etp, ep: t * d // (etp * ep)), f"c is forgotten. {COPIES}"),
    (dict(copies=lambda t, c, d, etp, ep: c * d // (etp * ep)), f"t is forgotten. {COPIES}"),
    (dict(copies=lambda t, c, d, etp, ep: t * c * d), f"These are all ranks of a stage. {COPIES}"),
    (
        dict(copies=lambda t, c, d, etp, ep: t * c * d // etp * ep),
        "`a // b * c` divides by b alone. Put expert_tp * ep into parentheses.",
    ),
    (dict(copies=lambda t, c, d, etp, ep: ep), f"Ranks of an ep group have different experts. {COPIES}"),
    (dict(copies=lambda t, c, d, etp, ep: etp * ep), f"etp * ep ranks have each expert once. {COPIES}"),
)  # fmt: skip
gradient_divisor.mistakes_in(
    (None, lambda numbers: numbers[::-1], "The two are swapped: first the ranks, then what the sum is divided by."),
    (None, operator.itemgetter(1), "This is the divisor alone. Return first how many ranks' gradients are added up."),
)
