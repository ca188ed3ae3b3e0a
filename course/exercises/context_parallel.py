"""The first exercises of notebook 13: which tokens a rank holds, merging two blocks of attention, and the ring.

The context-parallel group is the whole world. The other exercises are in `context_parallel_gradients`.
"""

import math
from functools import partial

import torch
import torch.distributed as dist

from course.exercises.base import Exercise, Unaided
from course.exercises.on_ranks import Conduct, RankExercise, gathered, only, whole_numbers
from labkit.context_parallel import block
from labkit.partition import tokens_of_rank

# -- which tokens a rank holds --------------------------------------------------------------------------------------


def my_positions(seq_length, cp_size, cp_rank):
    size = seq_length // (2 * cp_size)
    early, late = cp_rank, 2 * cp_size - 1 - cp_rank  # the numbers of the two chunks
    return [*range(early * size, (early + 1) * size), *range(late * size, (late + 1) * size)]


class OwnPositions(Unaided):
    labkits = tokens_of_rank.__code__


balanced_positions = OwnPositions(
    "balanced_positions",
    my_positions,
    notebook="13",
    cases=[(8, 2, 0), (8, 2, 1), (16, 4, 1), (24, 4, 3), (18, 3, 2), (6, 1, 0)],
    hints=[
        "How long is a chunk, if there are 2c of them? And where does chunk number i start?",
        "Chunk i has the positions from i * size up to (i + 1) * size, with size = seq_length // (2 * cp_size).",
        "The first chunk and the last together have as many keys to see as the second and the second to last: rank r "
        "holds chunks r and 2c - 1 - r. Join the two ranges into one list.",
    ],
)


def positions_wrongly(
    seq_length, cp_size, cp_rank, *, chunks=lambda r, c: (r, 2 * c - 1 - r), per_rank=2,
    join=lambda early, late: early + late,
):  # fmt: skip
    """Return ``join(early, late)`` of two chunks, if ``per_rank`` chunks are counted for each rank."""
    size = seq_length // (per_rank * cp_size)
    return join(*([*range(i * size, (i + 1) * size)] for i in chunks(cp_rank, cp_size)))


TOO_LONG = "You cut the sequence into c chunks. Each rank gets two of them, so there are 2c, of s / (2c) tokens each."
ONE_TOO_FAR = "The late chunk is one too far: chunks count from 0, so the last of 2c is number 2c - 1. Rank 0 gets it."
ONE_ONLY = "This is one of the rank's two chunks. It holds an early and a late one: r and 2c - 1 - r."
balanced_positions.mistakes_of(
    positions_wrongly,
    (
        dict(chunks=lambda r, c: (2 * r, 2 * r + 1)),
        "These are consecutive tokens. With a causal mask the last rank would then do the most work, and all others "
        "wait for it: give each rank one early chunk and one late chunk.",
    ),
    (
        dict(chunks=lambda r, c: (r, r + c)),
        "Chunks r and r + c are both later on a later rank, so that the last still does the most work. The earliest "
        "chunk goes together with the latest: r and 2c - 1 - r.",
    ),
    (dict(chunks=lambda r, c: (r, 2 * c - r)), ONE_TOO_FAR),
    (
        dict(chunks=lambda r, c: sorted((2 * r, 2 * c - 1 - 2 * r))),
        "Of the 2c chunks these are numbers 2r and 2c - 1 - 2r. The rank holds numbers r and 2c - 1 - r.",
    ),
    (
        dict(join=lambda early, late: early + late[::-1]),
        "The late chunk is backwards. Chunks are counted from the end, but the tokens in them stay in their order.",
    ),
    (
        dict(join=lambda early, late: late + early),
        "The late chunk comes first. Positions are wanted in ascending order.",
    ),
    (dict(join=lambda early, late: (early + late)[::-1]), "The order is descending. Positions are wanted ascending."),
    (dict(join=lambda early, late: [early, late]), "These are two lists. Return all positions in one."),
    (dict(join=lambda early, late: early), ONE_ONLY),
    (dict(join=lambda early, late: late), ONE_ONLY),
    (
        dict(join=lambda early, late: early[:-1] + late[:-1]),
        "The last of each chunk is missing: `range` stops before it.",
    ),
    (dict(join=lambda early, late: [i + 1 for i in early + late]), "Positions count from 0, and you count from 1."),
    (
        dict(join=lambda early, late: [early[0] // len(early), late[0] // len(early)]),
        "These are the numbers of the chunks. Return the positions of all tokens in them.",
    ),
    (dict(per_rank=1), TOO_LONG),
    (dict(per_rank=1, chunks=lambda r, c: (r, c - 1 - r)), TOO_LONG),
    (
        dict(chunks=lambda r, c: (r, c - 1 - r)),
        "These are two chunks of the first half, and the second half is on no rank. There are 2c chunks, not c: the "
        "late one is 2c - 1 - r.",
    ),
)


@balanced_positions.mistake(
    "The rank takes every c-th token, as in striped attention, which balances the work, too. Here it takes two chunks."
)
def striped(seq_length, cp_size, cp_rank):
    return list(range(cp_rank, seq_length, cp_size))


@balanced_positions.mistake(
    "Single tokens were dealt out, to and fro, 2c at a time. That balances the work, too. Here a rank gets two chunks "
    "of consecutive tokens."
)
def dealt_to_and_fro(seq_length, cp_size, cp_rank):
    starts = range(0, seq_length, 2 * cp_size)
    return [start + place for start in starts for place in (cp_rank, 2 * cp_size - 1 - cp_rank)]


@balanced_positions.mistake(ONE_TOO_FAR)
def chunk_that_does_not_exist(seq_length, cp_size, cp_rank):
    chunks = torch.arange(seq_length).chunk(2 * cp_size)
    return torch.cat([chunks[cp_rank], chunks[2 * cp_size - cp_rank]])


# -- merging two blocks ---------------------------------------------------------------------------------------------


def my_merge(out, lse, block_out, block_lse):
    new_lse = torch.logaddexp(lse, block_lse)  # log(exp(lse) + exp(block_lse)), without overflow
    share, block_share = (lse - new_lse).exp(), (block_lse - new_lse).exp()  # they add up to 1
    return share * out + block_share * block_out, new_lse


merge, tensor = my_merge, partial(torch.tensor, dtype=torch.float64)
LOG_3 = math.log(3)

merge_blocks = Exercise(
    "merge_blocks",
    my_merge,
    notebook="13",
    cases=[
        (tensor([[4, 8]]), tensor([[0]]), tensor([[8, 0]]), tensor([[LOG_3]])),  # a quarter, and three quarters
        (tensor([[2, 0], [1, 3]]), tensor([[2], [-1]]), tensor([[6, 4], [5, 2]]), tensor([[1], [1.5]])),
        (tensor([[0, 0], [2, 6]]), tensor([[-math.inf], [1]]), tensor([[3, 5], [4, 2]]), tensor([[2], [3]])),
        (
            tensor([[4, 8], [4, 0]]),
            tensor([[1000], [-1e3]]),
            tensor([[8, 0], [0, 8]]),
            tensor([[1000 + LOG_3], [-1e3]]),
        ),
        (tensor([[4, 8], [4, 0]]), tensor([[1000], [0]]), tensor([[8, 0], [0, 8]]), tensor([[0], [1000]])),
    ],
    may_change=("out", "lse"),
    hints=[
        "exp(lse) is the sum of the weights of all keys so far. What is that sum when the block's keys are added?",
        "torch.logaddexp(lse, block_lse) is the new lse. The keys so far have the share exp(lse) / exp(new lse) of the "
        "weight, and the block has the rest.",
        "Write a share as exp(lse - new_lse): it is at most 1, however large the scores are. Then out is the sum of "
        "share times out on both sides.",
    ],
)


def merge_wrongly(out, lse, block_out, block_lse, mix=lambda *case: my_merge(*case)[0], total=torch.logaddexp):
    return mix(out, lse, block_out, block_lse), total(lse, block_lse)


def with_weights(out, lse, block_out, block_lse, weigh):
    """Return the weighted mean of the outs, if ``weigh(lse)`` is a weight."""
    weight, block_weight = weigh(lse), weigh(block_lse)
    return (weight * out + block_weight * block_out) / (weight + block_weight)


def with_ratio(out, lse, block_out, block_lse, ratio):
    """Return the weighted mean of the outs, if the block's weight is 1."""
    weight = ratio(lse, block_lse)
    return (weight * out + block_out) / (weight + 1)


def below_one_maximum(out, lse, block_out, block_lse, least):
    """Return the weighted mean of the outs, of weights below the largest of all queries."""
    most = torch.maximum(lse.max(), block_lse.max())
    weight, block_weight = (lse - most).exp(), (block_lse - most).exp()
    return (weight * out + block_weight * block_out) / (weight + block_weight).clamp(min=least)


def total_below_one_maximum(lse, block_lse):
    most = torch.maximum(lse.max(), block_lse.max())
    return most + ((lse - most).exp() + (block_lse - most).exp()).log()


def seen(lse):
    return torch.where(lse == -math.inf, -100.0, lse)


OVERFLOWS = (
    "The formula is right, but exp(1000) is infinite, and exp(-1000) is 0. Take the exponentials of differences: "
    "exp(lse - new_lse), with new_lse from torch.logaddexp."
)
NOT_FROM_NOTHING = (
    "lse is -inf where nothing has been seen yet, and this formula subtracts infinite numbers there, which gives nan. "
    "torch.logaddexp(lse, block_lse) knows that case."
)
ONE_SIDED = (
    "exp(lse - block_lse) is infinite where one side is far above the other, and infinite / infinite is nan. Subtract "
    "from both the new lse, the one of torch.logaddexp: no share is then above 1."
)
ONE_MAXIMUM = (
    "One maximum was subtracted from the lse of all queries: where a query's own is far below it, both weights become "
    "0. Subtract each query's own: torch.maximum(lse, block_lse)."
)
FLAT = "The lse has lost its last dim. It is [queries, 1], as the one that you got, so that it fits the rows of out."
NOTHING_SEEN_BY_ALL = (
    "One query that has seen nothing yet decides for all of them. torch.logaddexp treats each query by itself, "
    "also where lse is -inf: no if is needed."
)
NOT_DIVIDED = (
    "out is not divided by the sum of the weights. Both outs are weighted means already, so that their shares must add "
    "up to 1."
)
merge_blocks.mistakes_of(
    merge_wrongly,
    (
        dict(mix=lambda out, lse, other, other_lse: (out + other) / 2),
        "This out is the plain mean of the two. A block counts by the weight of its keys, exp(lse): many keys with "
        "high scores count more than a few with low ones.",
    ),
    (dict(mix=lambda out, lse, other, other_lse: out + other), NOT_DIVIDED),
    (dict(mix=lambda out, lse, other, other_lse: lse.exp() * out + other_lse.exp() * other), NOT_DIVIDED),
    (
        dict(
            mix=lambda out, lse, other, other_lse: (
                (lse - lse.maximum(other_lse)).exp() * out + (other_lse - lse.maximum(other_lse)).exp() * other
            )
        ),
        NOT_DIVIDED,
    ),
    (
        dict(mix=lambda out, lse, other, other_lse: out + torch.sigmoid(other_lse - lse) * other),
        "What was seen before keeps its full weight. When the block gets its share, the rest shrinks to 1 minus that.",
    ),
    (
        dict(mix=lambda out, lse, other, other_lse: out + torch.sigmoid(lse - other_lse) * (other - out)),
        "The shares are swapped: the sign in the exponent or in the sigmoid is wrong. The block's share grows with "
        "block_lse, it is sigmoid(block_lse - lse).",
    ),
    (
        dict(mix=partial(with_weights, weigh=lambda lse: lse)),
        "You took lse itself for the weight. It is a logarithm: the weight is exp(lse).",
    ),
    (dict(mix=partial(with_weights, weigh=torch.exp)), OVERFLOWS),
    (dict(mix=partial(below_one_maximum, least=0), total=total_below_one_maximum), ONE_MAXIMUM),
    (dict(mix=partial(below_one_maximum, least=1e-37), total=total_below_one_maximum), ONE_MAXIMUM),
    (dict(mix=partial(with_ratio, ratio=lambda lse, other: (lse - other).exp())), ONE_SIDED),
    (
        dict(
            mix=lambda *case: with_ratio(*case, ratio=lambda lse, other: (lse - other).exp()),
            total=lambda lse, other: other + (lse - other).exp().log1p(),
        ),
        ONE_SIDED,
    ),
    (
        dict(
            mix=lambda out, lse, other, other_lse: with_ratio(
                other, other_lse, out, seen(lse), ratio=lambda lse, other: (lse - other).exp()
            ),
            total=lambda lse, other: seen(lse) + (other - seen(lse)).exp().log1p(),
        ),
        ONE_SIDED,
    ),
    (
        dict(mix=lambda out, lse, other, other_lse: other),
        "Only the block's out is left. What was seen before still has its share.",
    ),
    (
        dict(mix=lambda out, lse, other, other_lse: torch.where(other_lse > lse, other, out)),
        "You took the out with the higher lse. Softmax does not choose one: all keys keep their share of the weight.",
    ),
    (
        dict(total=lambda lse, other: lse + other),
        "You added lse to lse. They are logarithms: their exponentials add up. torch.logaddexp does it.",
    ),
    (dict(total=torch.maximum), "This lse is the higher of the two. It is the logarithm of a sum: torch.logaddexp."),
    (
        dict(total=lambda lse, other: lse),
        "The lse is still the old one. Without the block's weight in it, the next block would count too much.",
    ),
    (
        dict(total=lambda lse, other: other),
        "This lse is the block's alone: the weight of what was seen before is lost.",
    ),
    (dict(total=lambda lse, other: (lse + other) / 2), "This is the mean of the two lse. Their exponentials add up."),
    (dict(total=lambda lse, other: lse.exp() + other.exp()), "This is the sum of the weights. lse is its logarithm."),
    (dict(total=lambda lse, other: (lse.exp() + other.exp()).log()), OVERFLOWS),
    (dict(total=lambda lse, other: lse + (other - lse).exp().log1p()), NOT_FROM_NOTHING),
    (dict(total=lambda lse, other: lse - torch.nn.functional.logsigmoid(lse - other)), NOT_FROM_NOTHING),
)

merge_blocks.mistakes_in(
    (1, lambda lse: lse.squeeze(-1), FLAT),
    (1, lambda lse: lse.squeeze(), FLAT),
)


@merge_blocks.mistake(FLAT)
def flat(out, lse, block_out, block_lse):
    return merge(out, lse.flatten(), block_out, block_lse.flatten())


@merge_blocks.mistake(NOTHING_SEEN_BY_ALL)
def starts_with_the_block(out, lse, block_out, block_lse):
    return (block_out, block_lse) if torch.isinf(lse).any() else merge(out, lse, block_out, block_lse)


# -- the ring -------------------------------------------------------------------------------------------------------


def attend(q, k, v, causal):
    """Return the out [n, head_size] and the lse [n, 1] of one head's queries on a block of keys and values."""
    out, lse = block.attend(q[None, None], k[None, None], v[None, None], causal)
    return out[0, 0], lse[0, 0]


def my_ring(q, k, v):
    c, rank = dist.get_world_size(), dist.get_rank()
    out, lse = torch.zeros_like(q), torch.full_like(q[:, :1], -math.inf)
    kv = torch.stack([k, v])
    for step in range(c):
        source = (rank - step) % c  # whose keys and values these are
        if source <= rank:  # those of later ranks are masked
            out, lse = merge(out, lse, *attend(q, kv[0], kv[1], causal=source == rank))
        if step < c - 1:
            arriving = torch.empty_like(kv)
            send = dist.P2POp(dist.isend, kv, (rank + 1) % c)
            receive = dist.P2POp(dist.irecv, arriving, (rank - 1) % c)
            for work in dist.batch_isend_irecv([send, receive]):
                work.wait()
            kv = arriving
    return out


def ring_inputs(tokens: int):
    """Return this rank's q, k and v, [tokens, 2] each."""
    seed = 600 + 10 * dist.get_rank()
    return tuple(whole_numbers((tokens, 2), seed + i).cpu().double() / 4 for i in range(3))


def sends_no_more_than_a_ring(log: Conduct, q, k, v) -> str | None:
    steps, sent = dist.get_world_size() - 1, log.total_bytes("send")
    enough = steps * 2 * k.numel() * k.element_size()
    if sent <= enough:
        return None
    return (
        f"Each rank sends {sent} bytes. Its keys and values, {steps} times, are {enough}: after the last step nobody "
        "needs them any more."
    )


ring_forward = RankExercise(
    "ring_forward",
    my_ring,
    notebook="13",
    cases=[(3, 2), (4, 1)],  # on two ranks, the ring is the same in both directions
    inputs=ring_inputs,
    rule=only("send", "recv", also=sends_no_more_than_a_ring),
    hints=[
        "A loop of c steps. In each: attend to the keys and values that are here, merge; then, but for the last step, "
        "pass them on. Start from out = 0 and lse = -inf.",
        "At step 0 a rank has its own, after s steps those of rank (rank - s) % c, if it sends to (rank + 1) % c and "
        "receives from (rank - 1) % c. If that rank is later than yours, attend to nothing, but pass them on.",
        "`kv = torch.stack([k, v])` travels as one tensor, into a new `arriving = torch.empty_like(kv)`. Wait for both "
        "works of `batch_isend_irecv`, then `kv = arriving`. The mask: `attend(..., causal=source == rank)`.",
    ],
    if_stuck="each rank sends before it receives, and `dist.send` waits until the next rank receives: nobody gets that "
    "far. Start both at once, with batch_isend_irecv. Or a rank that has nothing to compute does not pass on what it "
    "has: every rank sends and receives at every step but the last.",
)


def ring_wrongly(
    q, k, v, *, has=lambda rank, step: rank - step, source=lambda rank, step: rank - step, steps=lambda steps: steps,
    sees=lambda source, rank: source <= rank, causal=lambda source, rank: source == rank, stays=None, join=merge,
):  # fmt: skip
    """Attend at each step to the keys of one rank, as if they were those of ``source``; ``stays`` is not sent."""
    c, rank = dist.get_world_size(), dist.get_rank()
    keys, values = ([x] * c if name == stays else gathered(x[None], 0) for name, x in (("k", k), ("v", v)))
    out, lse = torch.zeros_like(q), torch.full_like(q[:, :1], -math.inf)
    for step in steps(range(c)):
        now, here = source(rank, step) % c, has(rank, step) % c
        if sees(now, rank):
            out, lse = join(out, lse, *attend(q, keys[here], values[here], causal(now, rank)))
    return out


def always(*_):
    return True


def never(*_):
    return False


NEIGHBOURS = (
    "You are one step off: the keys are not those that you take them for. At step 0 a rank has its own, so after s "
    "steps it has those of rank (rank - s) % c: attend first, then pass on."
)
APART = "Keys and values belong together: a rank needs both of each source. Send both, as in `torch.stack([k, v])`."
ring_forward.mistakes_of(
    ring_wrongly,
    (
        dict(sees=always, causal=never),
        "There is no mask: every query sees all keys. A rank's own block is causal, and later ranks are left out.",
    ),
    (
        dict(sees=always),
        "Later ranks' keys are seen, too. If the source is later than this rank, only pass its block on.",
    ),
    (
        dict(causal=never),
        "In the rank's own block queries see later keys: attend with causal=True where source == rank.",
    ),
    (
        dict(causal=always),
        "The causal mask is on the earlier ranks' blocks, too. All their keys come before all your queries: those "
        "blocks are whole, and only the rank's own has a triangle.",
    ),
    (
        dict(sees=always, causal=always),
        "Every block has the same triangle. The mask is about places in the whole sequence: an earlier rank's block is "
        "whole, your own a triangle, and a later rank's is left out.",
    ),
    (
        dict(sees=lambda source, rank: source >= rank),
        "The comparison is the wrong way round: the earlier ranks' keys are seen, the later ones' are masked.",
    ),
    (
        dict(sees=lambda source, rank: source < rank),
        "The rank's own keys are left out: attend to them, too, with the causal mask.",
    ),
    (
        dict(steps=lambda steps: steps[:-1]),
        "The last block is missing. There are c - 1 messages, but c blocks: after the last message, attend once more.",
    ),
    (dict(steps=lambda steps: steps[:1]), "These are the rank's own keys alone. The earlier ranks' come by the ring."),
    (
        dict(has=lambda rank, step: rank - min(step, 1)),
        "Each rank sends its own keys and values at every step, so you get your neighbour's again and again. Pass on "
        "what arrived: `kv = arriving`.",
    ),
    (
        dict(has=lambda rank, step: rank + step),
        "You took these keys for a different rank's, so the mask is wrong. If you send to the next rank and receive "
        "from the one before, you have those of rank (rank - s) % c after s steps. The other way round it is rank + s.",
    ),
    (
        dict(has=lambda rank, step: rank - max(step - 1, 0)),
        "At each step you attend to the keys of the step before, as if they were those of rank (rank - s) % c, which "
        "are still on their way. Wait for those, and then attend to what arrived.",
    ),
    (dict(has=lambda rank, step: rank - step - 1), NEIGHBOURS),
    (dict(source=lambda rank, step: rank - step - 1), NEIGHBOURS),
    (dict(stays="v"), APART),
    (dict(stays="k"), APART),
    (
        dict(join=lambda out, lse, block_out, block_lse: (block_out, lse)),
        "Only the last block is left: the blocks were not merged, or the new lse was not kept. Without it each merge "
        "believes that nothing has been seen yet.",
    ),
    (
        dict(join=lambda out, lse, block_out, block_lse: merge(out, lse, block_out, torch.zeros_like(lse))),
        "The blocks' outs were averaged, as if all had the same weight. A block counts by exp(its lse): use `merge`.",
    ),
    (
        dict(join=lambda out, lse, *rest: merge(out, torch.where(lse == -math.inf, 0.0, lse), *rest)),
        "lse starts from 0: that is a weight of exp(0) = 1 for no key at all. Start from -inf.",
    ),
    (
        dict(join=lambda out, lse, block_out, block_lse: (out + block_out, lse)),
        "The blocks' outs were added up. Each is divided by its own sum of weights: `merge` gives each its share.",
    ),
)
