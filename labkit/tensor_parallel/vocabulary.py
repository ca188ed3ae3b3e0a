"""The two layers that a large vocabulary makes expensive, cut by words: the embedding, and the loss on its logits.

Each rank holds the rows of its own words. The loss never gathers the logits: per token, three numbers travel
instead of V.
"""

from collections.abc import Callable

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from labkit.tensor_parallel.operators import all_reduce, reduce_from_tp, reduce_scatter_to_sequence
from labkit.tensor_parallel.shards import Shard, draw_master_weight, mark_shard


class VocabParallelEmbedding(nn.Module):
    """An embedding whose words are divided among the ranks; weight [V'/t, d].

    V' is ``num_embeddings`` rounded up to a multiple of t; the rows added are zero and never looked up.
    ``forward(ids)`` takes ids: [..., seq] and returns [..., seq, d], replicated, or with ``sequence_parallel``
    this rank's [..., seq/t, d].

    Raises:
        ValueError: in ``forward``, an id outside the vocabulary, before any communication.
    """

    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        group: dist.ProcessGroup,
        *,
        init_method: Callable[[torch.Tensor], object] = nn.init.normal_,
        keep_master_weight_for_test: bool = False,
        sequence_parallel: bool = False,
        device=None,
        dtype=None,
    ):
        super().__init__()
        self.num_embeddings, self.embedding_dim, self.group = num_embeddings, embedding_dim, group
        self.sequence_parallel = sequence_parallel
        master = draw_master_weight((num_embeddings, embedding_dim), init_method, group, dtype)
        self.master_weight = master if keep_master_weight_for_test else None
        rows = -(-num_embeddings // group.size())
        self.first_word = group.rank() * rows
        padded = F.pad(master, (0, 0, 0, rows * group.size() - num_embeddings))
        weight = padded[self.first_word : self.first_word + rows].clone()
        self.weight = mark_shard(nn.Parameter(weight.to(device)), Shard(0, num_embeddings))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        _check_words("ids", ids, self.num_embeddings)
        local = ids - self.first_word
        elsewhere = (local < 0) | (local >= self.weight.size(0))
        vectors = F.embedding(local.masked_fill(elsewhere, 0), self.weight)
        vectors = vectors.masked_fill(elsewhere.unsqueeze(-1), 0.0)  # the rank that has the word adds its vector
        if self.sequence_parallel:
            return reduce_scatter_to_sequence(vectors, self.group)
        return reduce_from_tp(vectors, self.group)

    def extra_repr(self) -> str:
        return f"{self.num_embeddings} / {self.group.size()} ranks, {self.embedding_dim}"


def vocab_parallel_cross_entropy(
    logits_shard: torch.Tensor,
    target: torch.Tensor,
    group: dist.ProcessGroup,
    label_smoothing: float = 0.0,
    *,
    ignore_index: int = -100,
    reduction: str = "mean",
    vocab_size: int | None = None,
) -> torch.Tensor:
    """`torch.nn.functional.cross_entropy` of logits whose words are divided among the ranks.

    Args:
        logits_shard: [..., V'/t], this rank's words.
        target: [...], the true words, the same on every rank.
        ignore_index, reduction: as in `torch.nn.functional.cross_entropy`.
        vocab_size: V, when the last words of V' are padding: they take no part.

    Raises:
        ValueError: a target outside the vocabulary, or an unknown reduction, before any communication.

    Source: arXiv 1909.08053, section 3. Label smoothing e is that of torch: (1-e) times the loss, plus e/V times the
    sum over all words of -log p.
    """
    if reduction not in ("mean", "sum", "none"):
        raise ValueError(f"reduction={reduction!r} is unknown: use 'mean', 'sum' or 'none'")
    words = logits_shard.size(-1) * group.size() if vocab_size is None else vocab_size
    counts = target != ignore_index
    target = target.masked_fill(~counts, 0)
    _check_words("target", target, words)
    losses = _CrossEntropy.apply(logits_shard, target, group, label_smoothing, words) * counts
    if reduction == "none":
        return losses
    return losses.sum() if reduction == "sum" else losses.sum() / counts.sum()


class _CrossEntropy(torch.autograd.Function):
    """Per token: log Z - the target's logit, with Z = the sum over words of exp(logit)."""

    @staticmethod
    def forward(ctx, logits, target, group, label_smoothing, vocab_size):
        first = group.rank() * logits.size(-1)
        is_word = first + torch.arange(logits.size(-1), device=logits.device) < vocab_size  # else padding
        logits = logits.masked_fill(~is_word, float("-inf"))
        highest = logits.max(-1).values
        if group.size() > 1:
            dist.all_reduce(highest, dist.ReduceOp.MAX, group=group)
        logits = logits - highest.unsqueeze(-1)  # no exp can overflow
        local = target - first
        elsewhere = (local < 0) | (local >= logits.size(-1))
        target_logit = logits.gather(-1, local.masked_fill(elsewhere, 0).unsqueeze(-1)).squeeze(-1)
        exponentials = logits.exp()
        sums = torch.stack(
            [
                exponentials.sum(-1),
                target_logit.masked_fill(elsewhere, 0.0),
                logits.masked_fill(~is_word, 0.0).sum(-1),  # for label smoothing
            ]
        )
        if group.size() > 1:
            sums = all_reduce(sums, group)  # all three in one message
        normaliser, target_logit, all_logits = sums
        log_normaliser = normaliser.log()
        softmax = exponentials / normaliser.unsqueeze(-1)
        ctx.save_for_backward(softmax, local, elsewhere, is_word)
        ctx.label_smoothing, ctx.vocab_size = label_smoothing, vocab_size
        smooth = log_normaliser - all_logits / vocab_size
        return (1 - label_smoothing) * (log_normaliser - target_logit) + label_smoothing * smooth

    @staticmethod
    def backward(ctx, grad):  # pyright: ignore[reportIncompatibleMethodOverride]
        softmax, local, elsewhere, is_word = ctx.saved_tensors
        wanted = is_word.to(softmax.dtype) * (ctx.label_smoothing / ctx.vocab_size)
        wanted = wanted.expand_as(softmax).clone()
        hit = (~elsewhere).to(softmax.dtype).unsqueeze(-1) * (1 - ctx.label_smoothing)
        wanted.scatter_add_(-1, local.masked_fill(elsewhere, 0).unsqueeze(-1), hit)
        return (softmax - wanted) * grad.unsqueeze(-1), None, None, None, None


def _check_words(name: str, words: torch.Tensor, vocab_size: int) -> None:
    if words.numel() and (words.min() < 0 or words.max() >= vocab_size):
        wrong = words[(words < 0) | (words >= vocab_size)][0].item()
        raise ValueError(f"{name} contain {wrong}, outside the vocabulary: words run from 0 to {vocab_size - 1}")
