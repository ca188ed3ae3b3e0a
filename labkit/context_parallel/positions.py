"""Says which tokens each context-parallel rank holds, and which part of each attention block the
mask leaves.

With a causal mask, early tokens see few keys and late ones many. To balance the work of every step,
the sequence is split into 2c chunks, and rank r holds chunks r and 2c - 1 - r.

    c = 2, chunks 0 to 3      rank 0: [0] [3]      rank 1: [1] [2]

Source: zhuzilin's ring-flash-attention ("zigzag"); Megatron-LM's `get_batch_on_this_cp_rank`.
"""

from typing import NamedTuple

import torch

from labkit.partition import check_divides, check_sequence_cut, tokens_of_rank
from labkit.sizes import check_size


def positions(
    seq_length: int, cp_size: int, cp_rank: int, zigzag: bool = True, *, device=None
) -> torch.Tensor:
    """Return the positions of a rank's tokens in the whole sequence, [seq/c], ascending; errors as
    in `tokens_of_rank`.

    ``tokens[:, positions(...)]`` are its tokens. Shift the labels first: the token after a chunk is
    on another rank.

    >>> positions(8, cp_size=2, cp_rank=0).tolist(), positions(8, cp_size=2, cp_rank=1).tolist()
    ([0, 1, 6, 7], [2, 3, 4, 5])
    """
    held = tokens_of_rank(seq_length, cp_size, cp_rank, zigzag)
    return torch.cat([torch.arange(tokens.start, tokens.stop, device=device) for tokens in held])


class Part(NamedTuple):
    """The part of an attention block to compute: these queries attend to these keys."""

    queries: slice
    keys: slice
    causal: bool  # query i sees keys 0 to i, otherwise all of them


def part_with_work(
    cp_rank: int, source: int, length: int, causal: bool, zigzag: bool
) -> Part | None:
    """Return the part of the block of a rank's ``length`` queries and rank ``source``'s keys to
    compute, or None.

    If zigzag, this is a triangle for a rank's own keys, and half a block for those of any other:
    the chunks of an earlier rank lie before and after both of this rank's; those of a later rank
    lie between them.
    """
    everything = slice(0, length)
    if not causal or source == cp_rank:
        return Part(everything, everything, causal)
    if not zigzag:
        return Part(everything, everything, causal=False) if source < cp_rank else None
    early_half = slice(0, length // 2)
    late_half = slice(length // 2, length)
    if source < cp_rank:
        return Part(everything, early_half, causal=False)
    return Part(late_half, everything, causal=False)


def check_fit(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, cp_size: int, zigzag: bool
) -> None:
    """Raise a ValueError if these are not a rank's queries, keys and values, or the sequence cannot
    be split so.
    """
    expected = (q.size(0), k.size(1), *q.shape[2:]) if q.dim() == k.dim() == 4 else None
    if tuple(k.shape) != expected or k.shape != v.shape:
        fault = f"q {list(q.shape)}, k {list(k.shape)} and v {list(v.shape)} do not fit together"
        way_out = "use q [batch, heads, seq/c, head_size], and k and v like it with as many heads"
        raise ValueError(f"{fault}: {way_out} or fewer")
    if not q.dtype == k.dtype == v.dtype:
        raise ValueError(
            f"q is {q.dtype}, k {k.dtype} and v {v.dtype}: use one dtype for all three"
        )
    num_kv_heads = check_size("num_kv_heads", k.size(1))
    check_divides(num_kv_heads, "num_heads", q.size(1), parts_name="num_kv_heads")
    check_sequence_cut(cp_size * q.size(2), cp_size, zigzag)
