"""Computes one block of attention, some queries on some keys, for
`labkit.context_parallel.blockwise`.

A block's softmax sees only its own keys. Its log-sum-exp (lse) is their total weight, with which
blocks are merged one by one (online softmax). Backward takes the lse of the whole row instead.

Plain tensor ops define the result; torch's flash kernels, where the device and dtype have one,
compute it without the [n, m] matrix. Sums are in float32 or better.

Source: arXiv 2307.08691 (FlashAttention-2), section 3.1; the merge as in zhuzilin's
ring-flash-attention.
"""

import math

import torch

aten = torch.ops.aten


def attend(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the output [b, h, n, d] and the lse [b, h, n, 1] of q [b, h, n, d] on k and v
    [b, h_kv, m, d].
    """
    compute = _flash if _has_flash(q, k) else _plain
    return compute(q, k, v, causal)


def attend_backward(grad, q, k, v, out, lse, causal: bool) -> tuple[torch.Tensor, ...]:
    """Return this block's gradients of q, k and v; ``grad``, ``out`` and ``lse`` are the whole
    row's.
    """
    compute = _flash_backward if _has_flash(q, k) else _plain_backward
    return compute(grad, q, k, v, out, lse, causal)


def sum_dtype(x: torch.Tensor) -> torch.dtype:
    """Return the dtype in which to sum tensors like x."""
    return torch.promote_types(x.dtype, torch.float32)


def _plain(q, k, v, causal):
    q, k, v = _by_kv_head(q, k, v)
    scores = _scores(q, k, causal)
    lse = scores.logsumexp(-1, keepdim=True)
    return ((scores - lse).exp() @ v).flatten(1, 2), lse.flatten(1, 2)


def _plain_backward(grad, q, k, v, out, lse, causal):
    q, k, v, grad, out, lse = _by_kv_head(q, k, v, grad, out, lse)
    probabilities = (_scores(q, k, causal) - lse).exp()
    dprobabilities = grad @ v.mT
    # The softmax's backward: D = rowsum(dO * O), and dS = P * (dP - D)
    row_sums = (grad * out).sum(-1, keepdim=True)
    dscores = probabilities * (dprobabilities - row_sums) / math.sqrt(q.size(-1))
    dq = dscores @ k
    dk = (dscores.mT @ q).sum(2)  # over the heads that share a kv head
    dv = (probabilities.mT @ grad).sum(2)
    return dq.flatten(1, 2), dk, dv


def _scores(q, k, causal):
    scores = q @ k.mT / math.sqrt(q.size(-1))  # [b, h_kv, g, n, m]
    later = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).triu(1)
    return scores.masked_fill(later, -math.inf) if causal else scores


def _by_kv_head(q, k, *others):
    """Return the tensors with heads as [h_kv, g], or [h_kv, 1] in k and v: g heads
    share a kv head.
    """
    return [x.to(sum_dtype(x)).unflatten(1, (k.size(1), -1)) for x in (q, k, *others)]


def _rows(*tensors):
    """Return the tensors in the dtype of sums, with contiguous rows, which the kernels assume."""
    widened = (x.to(sum_dtype(x)) for x in tensors)
    return [x if x.stride(-1) == 1 else x.contiguous() for x in widened]


def _has_flash(q, k) -> bool:
    if q.device.type == "cpu":
        return True
    if not q.is_cuda or torch.cuda.get_device_capability(q.device) < (8, 0):  # Ampere
        return False
    return q.dtype in (torch.float16, torch.bfloat16) and q.size(-1) % 8 == 0 and q.size(-1) <= 256


def _flash(q, k, v, causal):
    if q.device.type == "cpu":  # widened, or each block's output and gradients would be rounded
        out, lse = aten._scaled_dot_product_flash_attention_for_cpu(*_rows(q, k, v), 0.0, causal)
    else:  # not yet run on a GPU: calls and shapes were checked on torch's meta device
        out, lse, *_ = aten._scaled_dot_product_flash_attention(q, k, v, 0.0, causal)
    return out.to(sum_dtype(out)), lse.unsqueeze(-1)


def _flash_backward(grad, q, k, v, out, lse, causal):
    if q.device.type == "cpu":
        rows = _rows(grad, q, k, v, out)
        return aten._scaled_dot_product_flash_attention_for_cpu_backward(
            *rows, lse.squeeze(-1), 0.0, causal
        )
    # The kernel assumes contiguous gradients and sums, and an output in the dtype of q.
    grad = grad.contiguous()
    out = out.to(q.dtype)
    lse = lse.squeeze(-1).contiguous()
    one_length = (None, None, q.size(-2), k.size(-2))
    no_dropout = (0.0, causal, None, None)
    backward = aten._scaled_dot_product_flash_attention_backward
    return backward(grad, q, k, v, out, lse, *one_length, *no_dropout)
