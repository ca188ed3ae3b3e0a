"""Lets a sharded GPT write: the next word is chosen from logits that no rank ever has all of.

The Gumbel trick draws a word w with probability softmax(logits)[w] as the highest of logits[w] +
noise[w], where each noise is -log(-log(u)) with u uniform. So each rank finds the highest among its
own words, and one all-gather of t pairs (value, word) says which word it is: 2 t numbers for each
row instead of V. The noise of a word is drawn by seed, position, row and word alone, so every
layout writes the same text. Source: Gumbel, 1954; arXiv 1411.0030, section 2.
"""

import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from labkit import pipeline
from labkit.groups import ProcessGroups, local_device
from labkit.schedules import gpipe
from labkit.sizes import check_number, check_size, whole_number
from labkit.tensor_parallel.operators import all_gather
from torch import nn

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
        raise ValueError(
            f"model is a {type(model).__name__}: give this rank's ParallelGPT, or a wrapper of one"
        )
    num_tokens = check_size("num_tokens", num_tokens)
    temperature = check_number("temperature", temperature, most=1000)
    if top_k is not None and check_size("top_k", top_k) > gpt.shape.vocab_size:
        raise ValueError(
            f"top_k={top_k} is more than vocab_size={gpt.shape.vocab_size}: use at most that"
        )
    if groups.cp.size() > 1:
        raise ValueError(f"cp_size={groups.cp.size()}: a text that grows is not cut, use cp_size=1")
    drawn_by = whole_number(seed)
    if drawn_by is None or not 0 <= drawn_by < 1 << 31:
        raise ValueError(f"seed={seed!r} must be a whole number from 0 up, of at most 31 bits")
    tokens = _rows_of_words(tokens)
    if num_tokens > (most := gpt.shape.seq_length - tokens.size(1)):
        fault = (
            f"{tokens.size(1)} tokens and num_tokens={num_tokens} more are above "
            f"seq_length={gpt.shape.seq_length}"
        )
        raise ValueError(
            f"{fault}: use num_tokens up to {most}" if most > 0 else f"{fault}: give fewer tokens"
        )
    outside = tokens[(tokens < 0) | (tokens >= gpt.shape.vocab_size)]
    if outside.numel():
        fault = f"tokens contain {int(outside[0])}, which is outside the vocabulary"
        raise ValueError(f"{fault}: use words from 0 to {gpt.shape.vocab_size - 1}")
    total, schedule = tokens.size(1) + num_tokens, gpipe(groups.layout.pp_size, 1).forward_only()
    multiple, was_training = gpt.group.size() if gpt.sequence_parallel else 1, model.training
    layers: list[Any] = [*gpt.layers.values()]
    for layer in layers:
        layer.attention.attend = _Cache(gpt, total + multiple)
    model.eval()
    try:
        while tokens.size(1) < total:
            position, chosen = tokens.size(1), tokens.new_empty(len(tokens))
            # With sequence parallelism t divides how many are computed: earlier ones once more, or
            # padding after them.
            new = F.pad(tokens[:, gpt.num_past :], (0, (gpt.num_past - position) % multiple))

            def choose(logits: torch.Tensor, _, position=position, chosen=chosen) -> torch.Tensor:
                own = logits[:, position - 1 - gpt.num_past].double()  # [batch, V'/t]
                chosen.copy_(choose_word(own, gpt, temperature, top_k, (drawn_by << 32) + position))
                return logits.new_zeros(())

            if groups.layout.pp_size > 1:
                known = gpt.activation_spec(new)
                pipeline.run(
                    schedule,
                    [model],
                    groups,
                    [new],
                    loss=choose,
                    ignore_index=None,
                    activation_spec=known,
                )
                dist.broadcast(chosen, group=groups.pp, group_src=groups.layout.pp_size - 1)
            else:
                choose(model(new), None)
            tokens = torch.cat([tokens, chosen[:, None]], 1)
            gpt.num_past = max(0, tokens.size(1) - multiple)
    finally:
        model.train(was_training)
        gpt.num_past = 0
        for layer in layers:
            layer.attention.attend = None
    return tokens


def _rows_of_words(tokens: Any) -> torch.Tensor:
    """Return the tokens as int64 [batch, n]; in a smaller type the words that are added would wrap
    around.
    """
    if not isinstance(tokens, torch.Tensor):
        try:
            tokens = torch.as_tensor(tokens, device=local_device())
        except (TypeError, ValueError, RuntimeError) as error:
            raise ValueError(
                f"tokens={tokens!r} must be rows of equally many whole numbers, [batch, n]"
            ) from error
    if tokens.dim() != 2 or not tokens.numel():
        raise ValueError(
            f"tokens of shape {list(tokens.shape)}: give rows of at least one token, [batch, n]"
        )
    if tokens.dtype == torch.bool or tokens.is_floating_point() or tokens.is_complex():
        raise ValueError(
            f"tokens have dtype {tokens.dtype}, but words are whole numbers: use torch.int64"
        )
    return tokens.long()


class _Cache:
    """Attends to the keys and values of all tokens so far, which it keeps, in place of a layer's
    attention.
    """

    def __init__(self, gpt: ParallelGPT, num_tokens: int):
        self.gpt, self.num_tokens = gpt, num_tokens
        # [2, batch, kv heads/t, num_tokens, head_size] from the first call on
        self.kv = torch.empty(0)

    def __call__(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        past, end = self.gpt.num_past, self.gpt.num_past + k.size(-2)
        if not past:
            self.kv = k.new_empty(2, *k.shape[:2], self.num_tokens, k.size(-1))
        self.kv[..., past:end, :] = torch.stack([k, v])
        k, v = self.kv[..., :end, :]
        mask = torch.ones(end - past, end, dtype=torch.bool, device=q.device).tril(past)
        return F.scaled_dot_product_attention(q, k, v, mask, enable_gqa=q.size(1) > k.size(1))


def choose_word(
    logits: torch.Tensor, gpt: ParallelGPT, temperature: float, top_k: int | None, seed: int
) -> torch.Tensor:
    """Return a word for each row, [batch], the same on all ranks; logits: [batch, V'/t], this
    rank's words.
    """
    group, first, vocab_size = gpt.group, gpt.group.rank() * logits.size(-1), gpt.shape.vocab_size
    scores = logits[:, : max(0, min(vocab_size - first, logits.size(-1)))]  # the rest is padding
    if top_k is not None and temperature:
        best = (
            F.pad(scores, (0, max(0, top_k - scores.size(-1))), value=-math.inf).topk(top_k).values
        )
        # Of t * k, not of V
        least = _gather(best, group).movedim(0, 1).flatten(1).topk(top_k).values[:, -1:]
        scores = scores.masked_fill(scores < least, -math.inf)
    if temperature:
        # On the CPU, the same for every device
        generator = torch.Generator().manual_seed(seed % (1 << 63))
        uniform = torch.rand(len(scores), vocab_size, generator=generator, dtype=torch.float64)
        own = uniform[:, first : first + scores.size(-1)].to(scores.device)
        scores = scores / temperature - torch.log(-torch.log(own))
    value, word = F.pad(scores, (0, 1), value=-math.inf).max(-1)  # a rank may have only padding
    # [t, batch] each
    values, words = _gather(torch.stack([value, (first + word).double()], -1), group).unbind(-1)
    return words.gather(0, values.argmax(0, keepdim=True))[0].long()


def _gather(own: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """Return the tensors of all ranks, [t, ...]."""
    return all_gather(own[None], group, dim=0) if group.size() > 1 else own[None]
