"""What a large vocabulary makes expensive, cut by words: the embedding, and the loss on the logits.

Each rank holds the rows of its own words. The loss never gathers the logits: per token, not V numbers travel but four.
"""

from collections.abc import Callable

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from labkit.sizes import check_size
from labkit.tensor_parallel.operators import all_reduce, reduce_from_tp, reduce_scatter_to_sequence
from labkit.tensor_parallel.shards import Shard, draw_master_weight, mark_shard, own_shard


class VocabParallelEmbedding(nn.Module):
    """An embedding whose words are divided among the ranks; weight [V'/t, d].

    V' is ``num_embeddings`` rounded up to a multiple of t. The added rows are zero and never looked up.
    ``forward(ids)`` takes ids [..., seq] and returns [..., seq, d] on every rank, or with ``sequence_parallel``
    this rank's [..., seq/t, d]. The other options are as in `ColumnParallelLinear`.

    Raises:
        ValueError: in ``forward``, before any communication, if an id is outside the vocabulary.
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
        self.num_embeddings = check_size("num_embeddings", num_embeddings)
        self.embedding_dim = check_size("embedding_dim", embedding_dim)
        self.group, self.sequence_parallel = group, sequence_parallel
        master = draw_master_weight((self.num_embeddings, self.embedding_dim), init_method, group, dtype)
        self.master_weight = master if keep_master_weight_for_test else None
        rows = -(-self.num_embeddings // group.size())
        self.first_word = group.rank() * rows
        weight = own_shard(F.pad(master, (0, 0, 0, rows * group.size() - self.num_embeddings)), group, 0)
        self.weight = mark_shard(nn.Parameter(weight.to(device)), Shard(0, self.num_embeddings))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        _check_words("ids", ids, self.num_embeddings)
        row, elsewhere = _local_index(ids, self.first_word, self.weight.size(0))
        vectors = F.embedding(row, self.weight).masked_fill(elsewhere.unsqueeze(-1), 0.0)  # where others have the word
        add_up = reduce_scatter_to_sequence if self.sequence_parallel else reduce_from_tp
        return add_up(vectors, self.group)

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
    """Return `torch.nn.functional.cross_entropy` of logits whose words are divided among the ranks.

    Args:
        logits_shard: [..., V'/t], this rank's words.
        target: [...], the true words, the same on every rank.
        ignore_index, reduction: as in `torch.nn.functional.cross_entropy`.
        vocab_size: V, if the last words of V' are padding and do not count.

    Raises:
        ValueError: before any communication, if a target is outside the vocabulary or the reduction is unknown.

    Source: arXiv 1909.08053, section 3. Label smoothing e is torch's: (1-e) times the loss, plus e/V times the
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
        column, elsewhere = _local_index(target, first, logits.size(-1))
        target_logit = logits.gather(-1, column.unsqueeze(-1)).squeeze(-1).masked_fill(elsewhere, 0.0)
        exponentials = logits.exp()
        all_logits = logits.masked_fill(~is_word, 0.0).sum(-1)  # for label smoothing
        sums = torch.stack([exponentials.sum(-1), target_logit, all_logits])
        normaliser, target_logit, all_logits = all_reduce(sums, group) if group.size() > 1 else sums  # one message
        log_normaliser = normaliser.log()
        softmax = exponentials / normaliser.unsqueeze(-1)
        ctx.save_for_backward(softmax, column, elsewhere, is_word)
        ctx.label_smoothing, ctx.vocab_size = label_smoothing, vocab_size
        smooth = log_normaliser - all_logits / vocab_size
        return (1 - label_smoothing) * (log_normaliser - target_logit) + label_smoothing * smooth

    @staticmethod
    def backward(ctx, grad):  # pyright: ignore[reportIncompatibleMethodOverride]
        softmax, column, elsewhere, is_word = ctx.saved_tensors
        smooth = is_word.to(softmax.dtype) * (ctx.label_smoothing / ctx.vocab_size)
        wanted = smooth.expand_as(softmax).clone()
        hit = (~elsewhere).to(softmax.dtype).unsqueeze(-1) * (1 - ctx.label_smoothing)
        wanted.scatter_add_(-1, column.unsqueeze(-1), hit)
        return (softmax - wanted) * grad.unsqueeze(-1), None, None, None, None


def _local_index(words: torch.Tensor, first: int, num_words: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return each word's index among this rank's own, and where that is meaningless: the words of other ranks."""
    index = words - first
    elsewhere = (index < 0) | (index >= num_words)
    return index.masked_fill(elsewhere, 0), elsewhere


def _check_words(name: str, words: torch.Tensor, vocab_size: int) -> None:
    if words.numel() and (words.min() < 0 or words.max() >= vocab_size):
        wrong = words[(words < 0) | (words >= vocab_size)][0].item()
        raise ValueError(f"{name} contains {wrong}, outside the vocabulary: use words from 0 to {vocab_size - 1}")
