"""Shards the embedding and the cross-entropy over the vocabulary.

Each rank holds the rows of its own words. The loss never gathers logits: it sends four numbers per
token, not V.
"""

from collections.abc import Callable

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from labkit.autograd import first_derivative_only, refuse_autocast
from labkit.sizes import check_number, check_size
from labkit.tensor_parallel.linear import column_linear
from labkit.tensor_parallel.operators import all_reduce, reduce_from_tp, reduce_scatter_to_sequence
from labkit.tensor_parallel.shards import ShardedWeight


class VocabParallelEmbedding(ShardedWeight):
    """An embedding sharded along the vocabulary; weight [V'/t, d].

    Communication, if the vectors [..., seq, d] have n bytes: each rank looks up its own words, has
    zeros for all others, and forward all-reduces them; a rank sends 2 (t - 1)/t n. Backward sends
    nothing. With ``sequence_parallel`` it is a reduce-scatter in forward and an all-gather in
    backward, (t - 1)/t n each. As an output layer it is a column-parallel layer, with that one's
    messages.

    V' is ``num_embeddings`` rounded up to a multiple of t. The added rows are zero and never looked
    up. ``forward(ids)`` takes ids [..., seq] and returns [..., seq, d] on every rank, or with
    ``sequence_parallel`` this rank's [..., seq/t, d]. As a tied output layer it takes such hidden
    states instead, and returns the logits [..., seq, V'/t] of this rank's words. The other options
    are as in `ColumnParallelLinear`.

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
        sequence_parallel: bool = False,
        **options,
    ):
        self.num_embeddings = check_size("num_embeddings", num_embeddings)
        self.embedding_dim = check_size("embedding_dim", embedding_dim)
        sizes = (self.num_embeddings, self.embedding_dim)
        super().__init__(sizes, 0, group, init_method, **options)
        self.sequence_parallel = sequence_parallel
        self.first_word = group.rank() * len(self.weight)
        self.reset_parameters()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        refuse_autocast("VocabParallelEmbedding", x.device)
        if x.is_floating_point() and x.dim() > 1:  # hidden states, not a vector of float ids
            return column_linear(x, self.weight, None, self.group, self.sequence_parallel)
        ids = _checked("ids", x, self.num_embeddings)
        row, elsewhere = _local_index(ids, self.first_word, self.weight.size(0))
        vectors = F.embedding(row, self.weight)
        vectors = vectors.masked_fill(elsewhere.unsqueeze(-1), 0.0)  # another rank has the word
        reduce = reduce_scatter_to_sequence if self.sequence_parallel else reduce_from_tp
        return reduce(vectors, self.group)


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
    """Return `torch.nn.functional.cross_entropy` of logits sharded along the vocabulary.

    Args:
        logits_shard: [..., V'/t], this rank's words; the loss is computed in float32 or better.
        target: [...], the true words, the same on every rank.
        vocab_size: V, if the last words of V' are padding and do not count.

    Raises:
        ValueError: before any communication, if a target is outside the vocabulary, or sizes or
            options do not fit.

    Source: arXiv 1909.08053, section 3. Label smoothing e is (1-e) times the loss, plus e/V times
    the sum over all words of -log p.
    """
    refuse_autocast("vocab_parallel_cross_entropy", logits_shard.device)
    if reduction not in ("mean", "sum", "none"):
        raise ValueError(f"reduction={reduction!r} is unknown: use 'mean', 'sum' or 'none'")
    words = _num_words(logits_shard, target, group, vocab_size)
    label_smoothing = check_number("label_smoothing", label_smoothing, most=1)
    target = _checked("target", target, words, ignore_index)
    ignored = target == ignore_index
    logits = logits_shard.to(torch.promote_types(logits_shard.dtype, torch.float32))
    column = target.masked_fill(ignored, 0).unsqueeze(-1)
    losses = _CrossEntropy.apply(logits, column, group, label_smoothing, words).squeeze(-1)
    # Filled, not multiplied by 0: an ignored token may have a loss of nan.
    losses = losses.masked_fill(ignored, 0.0)
    if reduction != "none":
        losses = losses.sum()
    if reduction == "mean":
        losses = losses / (~ignored).sum()
    return losses.to(logits_shard.dtype)


def _num_words(
    logits_shard: torch.Tensor, target: torch.Tensor, group: dist.ProcessGroup, vocab_size
) -> int:
    """Return how many words count; raise a ValueError if the logits do not have them, or do not fit
    the target.
    """
    width = logits_shard.size(-1) * group.size()
    words = width if vocab_size is None else check_size("vocab_size", vocab_size)
    if words > width:
        fault = f"vocab_size={words} is more than the {width} words that the ranks have"
        raise ValueError(f"{fault}: use at most {width}")
    shape = logits_shard.shape[:-1]
    if target.shape != shape:
        raise ValueError(
            f"target has shape {list(target.shape)}: logits of so many tokens need {list(shape)}"
        )
    if not logits_shard.is_floating_point():
        way_out = "use a floating-point type, such as torch.float32"
        raise ValueError(f"logits have dtype {logits_shard.dtype}: {way_out}")
    return words


class _CrossEntropy(torch.autograd.Function):
    """Per token, [..., 1]: log Z - the target's logit, with Z = the sum over words of
    exp(logit).

    Communication: forward all-reduces the highest logit of each token, and then three sums. So a
    rank sends 2 (t - 1)/t times four numbers per token. Backward sends nothing.
    """

    @staticmethod
    def forward(ctx, logits, target, group, label_smoothing, vocab_size):
        width = logits.size(-1)
        first = group.rank() * width
        is_word = first + torch.arange(width, device=logits.device) < vocab_size  # else padding

        # The highest logit of each token over all ranks: after it is subtracted, no exp overflows.
        shifted = logits.masked_fill(~is_word, float("-inf"))
        highest = shifted.amax(-1, keepdim=True)
        if group.size() > 1:
            dist.all_reduce(highest, dist.ReduceOp.MAX, group=group)
        shifted -= highest

        # The target's logit: one rank has it, and all others add 0 to it.
        column, elsewhere = _local_index(target, first, width)
        target_logit = shifted.gather(-1, column).masked_fill(elsewhere, 0.0)
        all_logits = torch.zeros_like(highest)
        if label_smoothing:
            num_words = min(max(vocab_size - first, 0), width)  # of this rank; the rest is padding
            all_logits = shifted[..., :num_words].sum(-1, keepdim=True)
        normaliser = shifted.exp_().sum(-1, keepdim=True)
        sums = torch.stack([normaliser, target_logit, all_logits])  # one message for all three
        if group.size() > 1:
            sums = all_reduce(sums, group)
        normaliser, target_logit, all_logits = sums
        ctx.save_for_backward(logits, highest, normaliser, column, elsewhere, is_word)
        ctx.label_smoothing = label_smoothing
        ctx.vocab_size = vocab_size

        losses = normaliser.log() - target_logit
        if label_smoothing:  # 0 times the infinite loss of a word at -inf would be nan
            mean_over_words = normaliser.log() - all_logits / vocab_size
            losses = (1 - label_smoothing) * losses + label_smoothing * mean_over_words
        return losses

    @staticmethod
    @first_derivative_only
    def backward(ctx, grad):  # pyright: ignore[reportIncompatibleMethodOverride]
        logits, highest, normaliser, column, elsewhere, is_word = ctx.saved_tensors
        smooth = is_word.to(logits.dtype) * (ctx.label_smoothing / ctx.vocab_size)
        hit = (~elsewhere).to(logits.dtype) * (1 - ctx.label_smoothing)
        # Logits are the largest tensor of many models: allocate only one more of their size, the
        # result.
        result = logits.masked_fill(~is_word, float("-inf")).sub_(highest).exp_()
        result.div_(normaliser)  # the softmax
        # Subtract what is wanted: e/V of each word, and of the target (1 - e) more.
        result.sub_(smooth)
        result.scatter_add_(-1, column, -hit)
        result.mul_(grad)
        return result, None, None, None, None


def _local_index(
    words: torch.Tensor, first: int, num_words: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return each word's index among this rank's words, and a mask of the words of other ranks,
    whose index is 0.
    """
    index = words - first
    elsewhere = (index < 0) | (index >= num_words)
    return index.masked_fill(elsewhere, 0), elsewhere


def _checked(
    name: str, words: torch.Tensor, vocab_size: int, ignore_index: int = 0
) -> torch.Tensor:
    """Return words as int64, or raise a ValueError if one is neither in the vocabulary nor ignored.

    On a GPU the assertion is asynchronous: the host need not synchronize.
    """
    if words.is_floating_point() or words.is_complex() or words.dtype == torch.bool:
        raise ValueError(
            f"{name} has dtype {words.dtype}: words are whole numbers, use torch.int64"
        )
    words = words.long()
    wrong = ((words < 0) | (words >= vocab_size)) & (words != ignore_index)
    allowed = f"use words from 0 to {vocab_size - 1}"
    try:
        torch.ops.aten._assert_async.msg(
            ~wrong.any(), f"{name} contains words outside the vocabulary: {allowed}"
        )
    except RuntimeError:
        raise ValueError(
            f"{name} contains {words[wrong][0].item()}, outside the vocabulary: {allowed}"
        ) from None
    return words
