"""Lets a sharded GPT write: the next word is chosen from logits that no rank ever has all of.

The Gumbel trick draws a word w with probability softmax(logits)[w] as the highest of logits[w] +
noise[w], where each noise is -log(-log(u)) with u uniform. So each rank finds the highest among its
own words, and one all-gather of t pairs (value, word) says which word it is: 2 t numbers for each
row instead of V. The noise of a word is drawn by seed, position, row and word alone, so every
layout writes the same text. Source: Gumbel, 1954; arXiv 1411.0030, section 2.
"""

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from labkit import pipeline
from labkit.groups import ProcessGroups, local_device
from labkit.schedules import gpipe
from labkit.shape import GPT
from labkit.sizes import check_number, check_size, whole_number
from labkit.tensor_parallel.operators import all_gather
from labtrain.model import ParallelGPT


@torch.no_grad()
def generate(
    model: nn.Module,
    tokens: torch.Tensor | Sequence[Sequence[int]],
    groups: ProcessGroups,
    num_tokens: int,
    *,
    temperature: float,
    top_k: int | None = None,
    seed: int,
) -> torch.Tensor:
    """Return the tokens [batch, n] and ``num_tokens`` that the model writes after them, the same on
    every rank.

    All prompts have one length, and no token ends a text. The tokens come back as int64. Keys and
    values of earlier tokens are kept, so that a token computes only itself. Logits that differ by
    rounding, as float32's do from layout to layout, choose a different word only if two values are
    as close as that.

    Args:
        model: this rank's stage, a `ParallelGPT` or a wrapper of one; without context parallelism.
        tokens: rows of whole numbers, the same on all ranks of tp and pp. Replicas that share
            experts, or FSDP's shards, write equally many.
        temperature: divides the logits; 0 always takes the most probable word.
        top_k: choose among so many words, the most probable ones.
        seed: decides the words, from 0 up, of at most 31 bits.

    Raises:
        ValueError: a size or an option does not fit; nothing was sent.
    """
    gpt = getattr(model, "module", model)
    if not isinstance(gpt, ParallelGPT):
        fault = f"model is a {type(model).__name__}"
        raise ValueError(f"{fault}: give this rank's ParallelGPT, or a wrapper of one")
    num_tokens = check_size("num_tokens", num_tokens)
    choice = _Choice(gpt, temperature, top_k, seed)
    if groups.cp.size() > 1:
        raise ValueError(f"cp_size={groups.cp.size()}: a text that grows is not cut, use cp_size=1")
    tokens = _rows_of_words(tokens)
    _check_prompt(tokens, num_tokens, gpt.shape)
    was_training = model.training
    model.eval()
    try:
        with _caches(gpt, tokens.size(1) + num_tokens):
            for _ in range(num_tokens):
                words = _next_words(model, gpt, tokens, groups, choice)
                tokens = torch.cat([tokens, words[:, None]], 1)
                gpt.num_past = max(0, tokens.size(1) - _multiple(gpt))
    finally:
        model.train(was_training)
    return tokens


def _multiple(gpt: ParallelGPT) -> int:
    """Return which number divides how many tokens are computed at once."""
    return gpt.group.size() if gpt.sequence_parallel else 1


@contextmanager
def _caches(gpt: ParallelGPT, num_tokens: int) -> Iterator[None]:
    """Let the layers keep keys and values of up to so many tokens inside the block."""
    layers: list[Any] = [*gpt.layers.values()]
    for layer in layers:
        layer.attention.attend = _Cache(gpt, num_tokens + _multiple(gpt))
    try:
        yield
    finally:
        gpt.num_past = 0
        for layer in layers:
            layer.attention.attend = None


def _next_words(
    model: nn.Module,
    gpt: ParallelGPT,
    tokens: torch.Tensor,
    groups: ProcessGroups,
    choice: "_Choice",
) -> torch.Tensor:
    """Return the word that comes after each row of tokens, [batch], the same on every rank."""
    position = tokens.size(1)
    # With sequence parallelism t divides how many are computed: earlier ones once more, or padding
    # after them.
    padding = (gpt.num_past - position) % _multiple(gpt)
    new = F.pad(tokens[:, gpt.num_past :], (0, padding))
    words = tokens.new_empty(len(tokens))

    def choose(logits: torch.Tensor, _) -> torch.Tensor:
        of_last_token = logits[:, position - 1 - gpt.num_past].double()  # [batch, V'/t]
        words.copy_(choice.words(of_last_token, position))
        return logits.new_zeros(())

    pp_size = groups.layout.pp_size
    if pp_size == 1:
        choose(model(new), None)
        return words
    pipeline.run(
        gpipe(pp_size, 1).forward_only(),
        [model],
        groups,
        [new],
        loss=choose,
        ignore_index=None,
        activation_spec=gpt.activation_spec(new),
    )
    dist.broadcast(words, group=groups.pp, group_src=pp_size - 1)
    return words


def _check_prompt(tokens: torch.Tensor, num_tokens: int, shape: GPT) -> None:
    most = shape.seq_length - tokens.size(1)
    if num_tokens > most:
        both = f"{tokens.size(1)} tokens and num_tokens={num_tokens} more"
        fault = f"{both} are above seq_length={shape.seq_length}"
        way_out = f"use num_tokens up to {most}" if most > 0 else "give fewer tokens"
        raise ValueError(f"{fault}: {way_out}")
    outside = tokens[(tokens < 0) | (tokens >= shape.vocab_size)]
    if outside.numel():
        fault = f"tokens contain {int(outside[0])}, which is outside the vocabulary"
        raise ValueError(f"{fault}: use words from 0 to {shape.vocab_size - 1}")


def _rows_of_words(tokens: Any) -> torch.Tensor:
    """Return the tokens as int64 [batch, n]; in a smaller type the words that are added would wrap
    around.
    """
    if not isinstance(tokens, torch.Tensor):
        try:
            tokens = torch.as_tensor(tokens, device=local_device())
        except (TypeError, ValueError, RuntimeError) as error:
            rule = "must be rows of equally many whole numbers, [batch, n]"
            raise ValueError(f"tokens={tokens!r} {rule}") from error
    if tokens.dim() != 2 or not tokens.numel():
        fault = f"tokens of shape {list(tokens.shape)}"
        raise ValueError(f"{fault}: give rows of at least one token, [batch, n]")
    if tokens.dtype == torch.bool or tokens.is_floating_point() or tokens.is_complex():
        fault = f"tokens have dtype {tokens.dtype}, but words are whole numbers"
        raise ValueError(f"{fault}: use torch.int64")
    return tokens.long()


class _Cache:
    """Attends to the keys and values of all tokens so far, which it keeps, in place of a layer's
    attention.
    """

    def __init__(self, gpt: ParallelGPT, num_tokens: int):
        self.gpt = gpt
        self.num_tokens = num_tokens
        # [2, batch, kv heads/t, num_tokens, head_size] from the first call on
        self.kv = torch.empty(0)

    def __call__(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        past = self.gpt.num_past
        end = past + k.size(-2)
        if not past:
            self.kv = k.new_empty(2, *k.shape[:2], self.num_tokens, k.size(-1))
        self.kv[..., past:end, :] = torch.stack([k, v])
        k, v = self.kv[..., :end, :]
        mask = torch.ones(end - past, end, dtype=torch.bool, device=q.device).tril(past)
        return F.scaled_dot_product_attention(q, k, v, mask, enable_gqa=q.size(1) > k.size(1))


class _Choice:
    """How a word is chosen: by which temperature, among how many, and with which noise."""

    def __init__(self, gpt: ParallelGPT, temperature: float, top_k: int | None, seed: int):
        vocab_size = gpt.shape.vocab_size
        self.gpt = gpt
        self.temperature = check_number("temperature", temperature, most=1000)
        if top_k is not None and check_size("top_k", top_k) > vocab_size:
            fault = f"top_k={top_k} is more than vocab_size={vocab_size}"
            raise ValueError(f"{fault}: use at most that")
        self.top_k = top_k
        drawn_by = whole_number(seed)
        if drawn_by is None or not 0 <= drawn_by < 1 << 31:
            raise ValueError(f"seed={seed!r} must be a whole number from 0 up, of at most 31 bits")
        self.seed = drawn_by

    def words(self, logits: torch.Tensor, position: int) -> torch.Tensor:
        """Return a word for each row, [batch], the same on all ranks; logits: [batch, V'/t], this
        rank's words.
        """
        seed = (self.seed << 32) + position
        return choose_word(logits, self.gpt, self.temperature, self.top_k, seed)


def choose_word(
    logits: torch.Tensor, gpt: ParallelGPT, temperature: float, top_k: int | None, seed: int
) -> torch.Tensor:
    """Return a word for each row, [batch], the same on all ranks; logits: [batch, V'/t], this
    rank's words.
    """
    group = gpt.group
    vocab_size = gpt.shape.vocab_size
    first_word = group.rank() * logits.size(-1)
    num_words = max(0, min(vocab_size - first_word, logits.size(-1)))  # the rest is padding
    scores = logits[:, :num_words]
    if temperature:
        if top_k is not None:
            least = _kth_highest(scores, top_k, group)
            scores = scores.masked_fill(scores < least, -math.inf)
        # On the CPU, so that it is the same for every device; all words, so for every layout
        generator = torch.Generator().manual_seed(seed % (1 << 63))
        uniform = torch.rand(len(scores), vocab_size, generator=generator, dtype=torch.float64)
        local = uniform[:, first_word : first_word + num_words].to(scores.device)
        scores = scores / temperature - torch.log(-torch.log(local))
    value, word = F.pad(scores, (0, 1), value=-math.inf).max(-1)  # a rank may have only padding
    pairs = torch.stack([value, (first_word + word).double()], -1)  # [batch, 2]
    values, words = _gather(pairs, group).unbind(-1)  # [t, batch] each
    return words.gather(0, values.argmax(0, keepdim=True))[0].long()


def _kth_highest(scores: torch.Tensor, k: int, group: dist.ProcessGroup) -> torch.Tensor:
    """Return the k-th highest score of each row over all ranks, [batch, 1].

    Each rank sends its k highest: t * k numbers a row travel, not V.
    """
    missing = max(0, k - scores.size(-1))
    highest = F.pad(scores, (0, missing), value=-math.inf).topk(k).values  # [batch, k]
    of_ranks = _gather(highest, group).movedim(0, 1).flatten(1)  # [batch, t * k]
    return of_ranks.topk(k).values[:, -1:]


def _gather(local: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """Return the tensors of all ranks, [t, ...]."""
    if group.size() == 1:
        return local[None]
    return all_gather(local[None], group, dim=0)
