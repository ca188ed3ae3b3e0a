"""Builds a small GPT of the sharded layers: one definition for one process and for many ranks.

Pre-norm and causal attention; the `GPT` decides the rest. Each weight is drawn from a generator of
its own, seeded by its name. So every layout of ranks starts from the same model, with the same
names in its state_dict.
"""

import hashlib
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.checkpoint import checkpoint

from labkit.context_parallel import (
    all_gather_attention,
    positions,
    ring_attention,
    ulysses_attention,
)
from labkit.expert_parallel import Load, MoELayer, attach_loss
from labkit.groups import group_of_one, groups_of_one
from labkit.partition import check_sequence_cut, layers_of_stage
from labkit.placement import Placement
from labkit.shape import GPT
from labkit.tensor_parallel import ParallelMLP, ParallelSelfAttention, ShardedDropout
from labkit.tensor_parallel.blocks import ReplicatedLayerNorm, ReplicatedRMSNorm, rotation
from labkit.tensor_parallel.operators import scatter_to_sequence
from labkit.tensor_parallel.shards import draw
from labkit.tensor_parallel.vocabulary import VocabParallelEmbedding, vocab_parallel_cross_entropy

STD = 0.02  # the standard deviation of a new weight, as in GPT-2
NORMS = {"layernorm": ReplicatedLayerNorm, "rmsnorm": ReplicatedRMSNorm}
CONTEXT_PARALLEL = {
    "ring": ring_attention,
    "ulysses": ulysses_attention,
    "all_gather": all_gather_attention,
}


class ParallelGPT(nn.Module):
    """A GPT, or one stage of it, on the ranks of a tensor-parallel group.

    ``forward(x)`` takes token ids [batch, seq] on the first stage, hidden states on the later ones.
    It returns hidden states, on the last stage logits [batch, seq, V'/t]: this rank's slice of the
    padded vocabulary. Hidden states are [batch, seq, hidden] (Megatron-LM's are
    [seq, batch, hidden]), with ``sequence_parallel`` this rank's [batch, seq/t, hidden]. With a
    ``cp_group``, seq is the number of tokens that this rank holds, those of
    `labkit.context_parallel.positions`.

    Args:
        group: the tensor-parallel group; `labkit.groups.group_of_one()` where no world is up.
        stage, num_stages: which of the model's consecutive chunks this is
            (`labkit.partition.layers_of_stage`). A tied embedding is on the first and the last
            stage, equal at the start: add up the gradients of the two.
        stage_layers: how many layers each stage has; about equally many unless given.
        first: the first stage, if this rank has it too: a tied last stage then uses its embedding,
            and has none.
        recompute: "full" keeps only each layer's input, and computes the rest again in backward.
        cp_group: the ranks that share each sequence.
        context_parallel: how they compute attention together: "ring", "ulysses" or "all_gather".
        zigzag: they hold an early and a late chunk each, not consecutive tokens.
        defer_grad_reduce: leave the sums of sequence parallelism to
            `labkit.gradients.all_reduce_grads`.
        experts: options of each `MoELayer` that the shape does not say; with several ranks it must
            contain ``groups``, this rank's `ProcessGroups`.
        num_micro_batches: how many forwards make a step; the losses of routers are averaged over
            them.
        factory: dtype and device. On "meta", no number is drawn until each module's
            `reset_parameters`.

    Raises:
        ValueError: the sizes do not fit together; raised before any communication.
    """

    def __init__(
        self,
        shape: GPT,
        group: dist.ProcessGroup,
        *,
        stage: int = 0,
        num_stages: int = 1,
        stage_layers: Sequence[int] | None = None,
        first: "ParallelGPT | None" = None,
        seed: int = 0,
        dropout: float = 0.0,
        sequence_parallel: bool = False,
        recompute: str = "none",
        cp_group: dist.ProcessGroup | None = None,
        context_parallel: str = "ring",
        zigzag: bool = True,
        defer_grad_reduce: bool = False,
        experts: dict[str, Any] | None = None,
        num_micro_batches: int = 1,
        **factory: Any,
    ):
        super().__init__()
        self.shape = shape
        self.group = group
        self.cp_group = cp_group or group_of_one()
        self.stage = stage
        self.is_first = stage == 0
        self.is_last = stage == num_stages - 1
        # In a list, so that its parameters are not this module's
        self._first = [first] if first and self.is_last else []
        self.seed = seed
        self.zigzag = zigzag
        self.recompute = recompute
        self.sequence_parallel = sequence_parallel
        self.num_micro_batches = num_micro_batches
        self.num_past = 0  # tokens before those of x, which `labtrain.generation` has computed
        self._check(dropout, experts or {})
        options = factory | {"sequence_parallel": sequence_parallel}
        self._make_input(options, factory, dropout)
        of_layers: dict[str, Any] = options | {"defer_grad_reduce": defer_grad_reduce}
        of_blocks: dict[str, Any] = dict(seed=seed, dropout=dropout)
        of_blocks["attend"] = self._attention(context_parallel)
        experts = {"groups": groups_of_one(), **(experts or {})}
        self.layers = nn.ModuleDict()
        for i in layers_of_stage(shape.num_layers, stage, num_stages, stage_layers):
            of_blocks["experts"] = experts if shape.has_experts(i) else None
            layer = TransformerLayer(shape, group, f"layers.{i}", **of_blocks, **of_layers)
            self.layers[str(i)] = layer
        if self.is_last:
            self._make_output(of_layers, options)

    def _check(self, dropout: float, experts: dict[str, Any]) -> None:
        shape = self.shape
        if shape.num_attention_heads is None:
            fault = f"{shape} has no num_attention_heads"
            raise ValueError(f"{fault}: give a number that divides hidden_size")
        if not 0.0 <= dropout < 1.0:
            raise ValueError(f"dropout={dropout} must be in [0, 1)")
        if self.recompute not in ("none", "full"):
            raise ValueError(f"recompute={self.recompute!r} is unknown: use none or full")
        if shape.num_experts and "groups" not in experts and self.group.size() > 1:
            fault = f"num_experts={shape.num_experts} on {self.group.size()} tensor ranks"
            raise ValueError(f"{fault}: give their groups too")
        tp_size = self.group.size() if self.sequence_parallel else 1
        check_sequence_cut(shape.seq_length, self.cp_group.size(), self.zigzag, tp_size)

    def _vocab_parallel(self, name: str, options: dict[str, Any]) -> VocabParallelEmbedding:
        """Return a [V, h] weight that is sharded over the vocabulary."""
        sizes = (self.shape.vocab_size, self.shape.hidden_size)
        init = normal(name, self.seed)
        return VocabParallelEmbedding(*sizes, self.group, init_method=init, **options)

    def _make_input(self, options: dict[str, Any], factory: dict[str, Any], dropout: float) -> None:
        if self.is_first:
            self.embedding = self._vocab_parallel("embedding", options)
        if self.is_first and self.shape.positions == "learned":
            size = (self.shape.seq_length, self.shape.hidden_size)
            self.positions = nn.Parameter(torch.empty(size, **factory))
            self.placements = {"positions": Placement(copy_groups=(self.group,))}
            self.reset_parameters()
        if self.is_first:
            self.dropout = _dropout(dropout, self.group, self.sequence_parallel)

    def _make_output(self, of_layers: dict[str, Any], options: dict[str, Any]) -> None:
        self.norm = _norm(self.shape, self.group, of_layers)
        if not self.shape.tied:
            self.output = self._vocab_parallel("output", options)
        elif not self.is_first and not self._first:
            # The first stage, on another rank, has the same weight. It stands here, after the
            # layers, because backward computes its gradient first (see `in_buckets`).
            self.embedding = self._vocab_parallel("embedding", options)
            table = self.embedding.placements
            table["weight"] = replace(table["weight"], is_tied_copy=True)

    def _attention(self, context_parallel: str) -> Callable[..., torch.Tensor] | None:
        """Return what computes attention on a sequence that is cut, or None if it is not."""
        attention = CONTEXT_PARALLEL[context_parallel]
        if self.cp_group.size() == 1:
            return None
        return partial(attention, group=self.cp_group, zigzag=self.zigzag)

    def reset_parameters(self) -> None:
        """Draw the model's own parameters: learned positions."""
        if "positions" in self._parameters:
            draw(self, "positions", normal("positions", self.seed))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        token_positions = self._positions_of(x)  # [seq]
        rotary = None
        if self.is_first:
            x = self._embed(x, token_positions)
        if self.shape.positions == "rope":
            rotary = rotation(token_positions, self.head_size, x.dtype, self.shape.rotary_base)
        recompute = self.recompute == "full" and self.training
        layer: Any
        for layer in self.layers.values():
            x = checkpoint(layer, x, rotary, use_reentrant=False) if recompute else layer(x, rotary)
            if isinstance(x, tuple):
                x, load = x
                # Outside of recomputation, so that each token is counted once
                if self.training:
                    loss = layer.mlp.router.loss(load) / self.num_micro_batches
                    x = attach_loss(x, loss)
        if not self.is_last:
            return x
        return self.output_layer(self.norm(x))

    def _embed(self, tokens: torch.Tensor, token_positions: torch.Tensor) -> torch.Tensor:
        """Return the first hidden states, [batch, seq, h], or this rank's [batch, seq/t, h]."""
        x = self.embedding(tokens)
        if self.shape.positions == "learned":
            learned = self.positions[token_positions]  # [seq, h]
            if self.sequence_parallel:
                learned = scatter_to_sequence(learned, self.group)  # [seq/t, h]
            x = x + learned
        return self.dropout(x)

    def activation_spec(self, tokens: torch.Tensor) -> tuple[torch.dtype, torch.Size]:
        """Return dtype and shape of what a stage hands to the next for these tokens,
        [batch, seq/c].
        """
        batch, num_tokens = tokens.shape
        if self.sequence_parallel:
            num_tokens //= self.group.size()
        dtype = next(self.parameters()).dtype
        return dtype, torch.Size([batch, num_tokens, self.shape.hidden_size])

    @property
    def head_size(self) -> int:
        """How many numbers a token has in each head."""
        assert self.shape.num_attention_heads is not None
        return self.shape.hidden_size // self.shape.num_attention_heads

    @property
    def output_layer(self) -> VocabParallelEmbedding:
        """The last stage's module that computes the logits."""
        if not self.shape.tied:
            return self.output
        return self._first[0].embedding if self._first else self.embedding

    @property
    def units(self) -> list[nn.Module]:
        """The units for FSDP, in the order of forward: each is gathered, used and freed
        on its own.
        """
        units: list[nn.Module] = [self.embedding] if self.is_first else []
        units += self.layers.values()
        if self.is_last and not (self.shape.tied and self._first):
            units.append(self.output_layer)
        # A tied embedding that is both the first and the last is left out: it is in use from start
        # to end.
        return [unit for unit in units if units.count(unit) == 1]

    def _positions_of(self, x: torch.Tensor) -> torch.Tensor:
        """Return where the tokens of x, or of its hidden states, stand in the whole sequence."""
        num_here = x.size(1)
        if self.sequence_parallel and not self.is_first:
            num_here *= self.group.size()  # hidden states are cut along the sequence too
        num_tokens = self.num_past + num_here * self.cp_group.size()
        if num_tokens > self.shape.seq_length:
            fault = f"{num_tokens} tokens are more than seq_length={self.shape.seq_length}"
            raise ValueError(f"{fault}: give fewer")
        cp_rank = self.cp_group.rank()
        held = positions(num_tokens, self.cp_group.size(), cp_rank, self.zigzag, device=x.device)
        return held[self.num_past :]

    def loss(
        self, logits: torch.Tensor, targets: torch.Tensor, reduction: str = "mean"
    ) -> torch.Tensor:
        """Return the cross-entropy in nats, by default its mean over the targets that count.

        targets: [batch, seq], the tokens that come next, on every rank; -100 does not count.
        """
        # In bfloat16, losses between 2 and 4 are multiples of 1/64.
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
        options: dict[str, Any] = dict(vocab_size=self.shape.vocab_size, reduction=reduction)
        return vocab_parallel_cross_entropy(logits, targets, self.group, **options)


class TransformerLayer(nn.Module):
    """x + attention(norm(x)), then the same with an MLP.

    It sends what `ParallelSelfAttention` and `ParallelMLP` (or `MoELayer`) send: with an MLP and
    without sequence parallelism, two all-reduces in forward and two in backward.

    ``experts`` are the options of a `MoELayer` in place of the MLP, whose `Load` forward returns
    beside the output.
    """

    def __init__(
        self,
        shape: GPT,
        group: dist.ProcessGroup,
        name: str,
        seed: int,
        dropout: float,
        attend: Callable[..., torch.Tensor] | None = None,
        experts: dict[str, Any] | None = None,
        **options,
    ):
        super().__init__()
        assert shape.num_attention_heads is not None
        # 2 l outputs are added to x, so their weights are drawn smaller (GPT-2; Megatron-LM:
        # scaled_init_method_normal)
        outer_std = STD / math.sqrt(2 * shape.num_layers)

        def pair(inner: str, outer: str) -> dict[str, Any]:
            """Return the options of two linear layers, one after the other."""
            inits = {"init_method": normal(f"{name}.{inner}", seed)}
            inits["output_layer_init_method"] = normal(f"{name}.{outer}", seed, outer_std)
            return options | inits | {"bias": shape.bias}

        self.attention_norm = _norm(shape, group, options)
        self.attention = ParallelSelfAttention(
            shape.hidden_size,
            shape.num_attention_heads,
            group,
            num_query_groups=shape.num_query_groups,
            dropout=dropout,
            attend=attend,
            **pair("attention.qkv", "attention.out"),
        )
        self.mlp_norm = _norm(shape, group, options)
        kind: dict[str, Any] = {"gated": shape.mlp == "swiglu"}
        kind["approximate"] = "tanh" if shape.mlp == "gelu_tanh" else "none"
        if experts:
            more = options | kind | experts
            self.mlp = _experts(shape, f"{name}.mlp", seed, outer_std, **more)
        else:
            more = pair("mlp.up", "mlp.down") | kind
            self.mlp = ParallelMLP(shape.hidden_size, shape.mlp_width, group, **more)
        self.dropout = _dropout(dropout, group, options["sequence_parallel"])

    def forward(
        self, x: torch.Tensor, rotary: torch.Tensor | None = None
    ) -> torch.Tensor | tuple[torch.Tensor, Load]:
        x = x + self.dropout(self.attention(self.attention_norm(x), rotary))
        output = self.mlp(self.mlp_norm(x))
        if isinstance(output, tuple):
            output, load = output
            return x + self.dropout(output), load
        return x + self.dropout(output)


def _experts(shape: GPT, name: str, seed: int, outer_std: float, **options: Any) -> MoELayer:
    def init(matrix: str, std: float) -> Callable[[torch.Tensor], object]:
        def fill(weight: torch.Tensor) -> None:
            # The weight of experts is [experts, out, in], that of shared ones [out, in]
            kind = "experts" if weight.dim() == 3 else "shared"
            normal(f"{name}.{kind}.{matrix}", seed, std)(weight)

        return fill

    router = {"score_function": shape.router_scores} | options.get("router", {})
    router["init_method"] = normal(f"{name}.router", seed)
    options["router"] = router
    return MoELayer(
        shape.hidden_size,
        shape.expert_width,
        shape.num_experts or 1,
        shape.top_k,
        num_shared_experts=shape.num_shared_experts,
        init_method=init("up", STD),
        output_layer_init_method=init("down", outer_std),
        **options,
    )


def normal(name: str, seed: int, std: float = STD) -> Callable[[torch.Tensor], object]:
    """Return an init method that draws normally distributed values, by name and seed, the same in
    every precision.
    """
    key = hashlib.blake2b(f"{seed} {name}".encode(), digest_size=7).digest()

    def fill(weight: torch.Tensor) -> None:
        generator = torch.Generator().manual_seed(int.from_bytes(key, "big"))
        numbers = weight.detach().view(-1)
        # In blocks, to save memory. Torch draws fewer than 16 in a different way: no block has less
        starts = [*range(1 << 20, len(numbers) - 15, 1 << 20)]
        for block in numbers.tensor_split(starts):
            block.copy_(torch.randn(len(block), generator=generator, dtype=torch.float32) * std)

    return fill


def _norm(shape: GPT, group, options: dict) -> nn.Module:
    return NORMS[shape.norm](shape.hidden_size, group, eps=shape.norm_eps, **options)


def _dropout(p: float, group, sequence_parallel: bool) -> nn.Module:
    """Return the dropout of hidden states: a mask per rank if ranks have different tokens, else one
    for all ranks.
    """
    return ShardedDropout(p, group) if sequence_parallel else nn.Dropout(p)
