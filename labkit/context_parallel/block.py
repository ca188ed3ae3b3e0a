"""Attention of some queries to some keys, with what is needed to put such blocks together afterwards.

A block's softmax knows only its own keys. Its log-sum-exp (lse) says how much weight these have together, so that
blocks can be merged one by one (online softmax). Backward takes the lse of the whole row instead: with it a block's
probabilities are those of the whole softmax.

On a GPU, torch's flash kernel computes blocks in float16 or bfloat16. For other blocks, plain tensors do, a few rows of
the [n, m] matrix at a time, so that these stay in the cache. Sums are in float32 or better.

Source: arXiv 2307.08691 (FlashAttention-2), section 3.1; the merge as in zhuzilin's ring-flash-attention.
"""

import math
from collections.abc import Iterator

import torch

from labkit.context_parallel.positions import Part

TILE = 128  # rows of a block's matrix that are computed at once


class Attended:
    """What queries have seen so far: ``out`` [b, h, n, d], and ``lse`` [b, h, n, 1], which is -inf before any key."""

    def __init__(self, q: torch.Tensor):
        self.out = torch.zeros_like(q, dtype=_wide(q), memory_format=torch.contiguous_format)
        self.lse = torch.full_like(self.out[..., :1], -math.inf)

    def add(self, q: torch.Tensor, kv: torch.Tensor, part: Part) -> None:
        """Merge in what this part of the block gives; kv: [2, b, h_kv, m, d]."""
        k, v = kv[..., part.keys, :]
        block_out, block_lse = attend(q[..., part.queries, :], k, v, part.causal)
        out, lse = self.out[..., part.queries, :], self.lse[..., part.queries, :]
        out += torch.sigmoid(block_lse - lse) * (block_out - out)  # sigmoid: the block's share of the weight
        lse.copy_(torch.logaddexp(lse, block_lse))


def add_gradients(dq: torch.Tensor, dkv: torch.Tensor, saved: tuple, grad: torch.Tensor, kv: torch.Tensor, part: Part):
    """Add to dq [b, h, n, d] and dkv [2, b, h_kv, m, d] the gradients of this part; saved: whole (q, out, lse)."""
    q, out, lse, grad = (x[..., part.queries, :] for x in (*saved, grad))
    k, v = kv[..., part.keys, :]
    totals = dq[..., part.queries, :], *dkv[..., part.keys, :]
    for total, gradient in zip(totals, attend_backward(grad, q, k, v, out, lse, part.causal)):
        total += gradient


def together(k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Return keys and values as one message, [2, b, h_kv, m, d]; torch alone may stack them transposed."""
    return torch.stack([k, v]).contiguous()


def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the out [b, h, n, d] and the lse [b, h, n, 1] of q [b, h, n, d] on k and v [b, h_kv, m, d]."""
    with torch.autocast(q.device.type, enabled=False):  # which would round the sums
        return (_flash if _has_flash(q) else _plain)(q, k, v, causal)


def attend_backward(grad, q, k, v, out, lse, causal: bool) -> tuple[torch.Tensor, ...]:
    """Return this block's gradients of q, k and v; ``grad``, ``out`` and ``lse`` are the whole row's."""
    with torch.autocast(q.device.type, enabled=False):
        return (_flash_backward if _has_flash(q) else _plain_backward)(grad, q, k, v, out, lse, causal)


def _plain(q, k, v, causal):
    q, k, v = (x.to(_wide(x)) for x in (q, k, v))
    out, lse = torch.empty_like(q), q.new_empty(*q.shape[:3], 1)
    for rows, seen in _tiles(q, k, causal):
        scores = _scores(q, k, rows, seen, causal)
        tile_lse = scores.logsumexp(-1, keepdim=True)
        lse[..., rows, :] = tile_lse.view_as(lse[..., rows, :])
        out[..., rows, :] = (scores.sub_(tile_lse).exp_() @ v[..., seen, :]).view_as(out[..., rows, :])
    return out, lse


def _plain_backward(grad, q, k, v, out, lse, causal):
    grad, q, k, v, out = (x.to(_wide(x)) for x in (grad, q, k, v, out))
    inner, scale = (grad * out).sum(-1, keepdim=True), 1 / math.sqrt(q.size(-1))
    dq, dk, dv = torch.empty_like(q), torch.zeros_like(k), torch.zeros_like(v)
    for rows, seen in _tiles(q, k, causal):
        q_tile, grad_tile, inner_tile, lse_tile = (_by_kv_head(x[..., rows, :], k) for x in (q, grad, inner, lse))
        probabilities = _scores(q, k, rows, seen, causal).sub_(lse_tile).exp_()  # [b, h_kv, g rows, seen]
        dv[..., seen, :] += probabilities.mT @ grad_tile
        dscores = probabilities.mul_((grad_tile @ v[..., seen, :].mT).sub_(inner_tile)).mul_(scale)
        dq[..., rows, :] = (dscores @ k[..., seen, :]).view_as(dq[..., rows, :])
        dk[..., seen, :] += dscores.mT @ q_tile
    return dq, dk, dv


def _tiles(q, k, causal) -> Iterator[tuple[slice, slice]]:
    """Yield a few queries at a time, and the keys that any of them sees."""
    for start in range(0, q.size(-2), TILE):
        stop = min(start + TILE, q.size(-2))
        yield slice(start, stop), slice(0, stop if causal else k.size(-2))


def _scores(q, k, rows: slice, seen: slice, causal: bool):
    """Return the scores of a tile, [b, h_kv, g rows, seen]; -inf for keys after the query."""
    scores = (_by_kv_head(q[..., rows, :], k) @ k[..., seen, :].mT).div_(math.sqrt(q.size(-1)))
    if causal:
        num_rows, num_keys = rows.stop - rows.start, seen.stop
        later = torch.ones(num_rows, num_keys, dtype=torch.bool, device=q.device).triu(1 + rows.start)
        scores.unflatten(2, (-1, num_rows)).masked_fill_(later, -math.inf)
    return scores


def _by_kv_head(x: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
    """Put the queries of the g heads that share a kv head below each other: [b, h, n, d] -> [b, h_kv, g n, d]."""
    return x.reshape(x.size(0), k.size(1), -1, x.size(-1))


# -- on a GPU: not yet run on one. Its calls and shapes were checked on torch's meta device. ------------------------


def _has_flash(q: torch.Tensor) -> bool:
    if not q.is_cuda or torch.cuda.get_device_capability(q.device) < (8, 0):  # Ampere
        return False
    return q.dtype in (torch.float16, torch.bfloat16) and q.size(-1) % 8 == 0 and q.size(-1) <= 256


def _flash(q, k, v, causal):
    out, lse, *_ = torch.ops.aten._scaled_dot_product_flash_attention(q, k, v, 0.0, causal)
    return out.to(_wide(out)), lse.unsqueeze(-1)


def _flash_backward(grad, q, k, v, out, lse, causal):
    grad, out, lse = grad.contiguous(), out.to(q.dtype), lse.squeeze(-1).contiguous()  # it reads lse as if contiguous
    one_length = (None, None, q.size(-2), k.size(-2))  # all sequences of the batch are equally long
    no_dropout = (0.0, causal, None, None)
    backward = torch.ops.aten._scaled_dot_product_flash_attention_backward
    return backward(grad, q, k, v, out, lse, *one_length, *no_dropout)


def _wide(x: torch.Tensor) -> torch.dtype:
    return torch.promote_types(x.dtype, torch.float32)
