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
from labkit.context_parallel import (
    all_gather_attention,
    positions,
    ring_attention,
    ulysses_attention,
)
from labkit.expert_parallel import Load, MoELayer, attach_loss
from labkit.groups import group_of_one, groups_of_one
from labkit.partition import check_sequence_cut, layers_of_stage
from labkit.placement import PlacedModule, Placement, placement_of
from labkit.shape import GPT
from labkit.tensor_parallel import ParallelMLP, ParallelSelfAttention, ShardedDropout
from labkit.tensor_parallel.blocks import ReplicatedLayerNorm, ReplicatedRMSNorm, rotation
from labkit.tensor_parallel.operators import scatter_to_sequence
from labkit.tensor_parallel.shards import draw
from labkit.tensor_parallel.vocabulary import VocabParallelEmbedding, vocab_parallel_cross_entropy
from torch import nn
from torch.utils.checkpoint import checkpoint

STD = 0.02  # the standard deviation of a new weight, as in GPT-2
NORMS = {"layernorm": ReplicatedLayerNorm, "rmsnorm": ReplicatedRMSNorm}
CONTEXT_PARALLEL = {
    "ring": ring_attention,
    "ulysses": ulysses_attention,
    "all_gather": all_gather_attention,
}


class ParallelGPT(PlacedModule):
    """A GPT, or one stage of it, on the ranks of a tensor-parallel group.

    ``forward(x)`` takes token ids [batch, seq] on the first stage, hidden states on the later ones.
    It returns hidden states, on the last stage logits [batch, seq, V'/t]: this rank's slice of the
    padded vocabulary. Hidden states are [batch, seq, hidden], with ``sequence_parallel`` this
    rank's [batch, seq/t, hidden]. With a ``cp_group``, seq is the number of tokens that this rank
    holds, those of `labkit.context_parallel.positions`.

    Args:
        group: the tensor-parallel group; `labkit.groups.group_of_one()` where no world is up.
        stage, num_stages: which of the model's consecutive chunks this is
            (`labkit.partition.layers_of_stage`). A tied embedding is on the first and the last
            stage, equal at the start: add up the gradients of the two.
        stage_layers: how many layers each stage has; about equally many unless given.
        first: the first stage, if this rank has it too: a tied last stage then uses its embedding,
            and has none.
        recompute: keep only each layer's input, and compute the rest again in backward.
        cp_group: the ranks that share each sequence.
        context_parallel: how they compute attention together: "ring", "ulysses" or "all_gather".
        zigzag: they hold an early and a late chunk each, not consecutive tokens.
        defer_grad_reduce: leave the sums of sequence parallelism to
            `labkit.gradients.all_reduce_grads`.
        experts: options of each `MoELayer` that the shape does not say; on several ranks, all their
            ``groups``.
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
        recompute: bool = False,
        cp_group: dist.ProcessGroup | None = None,
        context_parallel: str = "ring",
        zigzag: bool = True,
        defer_grad_reduce: bool = False,
        experts: dict[str, Any] | None = None,
        num_micro_batches: int = 1,
        **factory: Any,
    ):
        super().__init__()
        if shape.num_attention_heads is None:
            raise ValueError(
                f"{shape} has no num_attention_heads: give a number that divides hidden_size"
            )
        if not 0.0 <= dropout < 1.0:
            raise ValueError(f"dropout={dropout} must be in [0, 1)")
        if shape.num_experts and "groups" not in (experts or {}) and group.size() > 1:
            raise ValueError(
                f"num_experts={shape.num_experts} on {group.size()} tensor "
                "ranks: give their groups too"
            )
        self.shape, self.group, self.stage, self.seed = shape, group, stage, seed
        self.head_size = shape.hidden_size // shape.num_attention_heads
        self.cp_group, self.zigzag = cp_group or group_of_one(), zigzag
        # Tokens before those of x, which `labtrain.generation` has computed already
        self.num_past = 0
        check_sequence_cut(
            shape.seq_length, self.cp_group.size(), zigzag, group.size() if sequence_parallel else 1
        )
        self.is_first, self.is_last = stage == 0, stage == num_stages - 1
        self.recompute, self.sequence_parallel, self.num_micro_batches = (
            recompute,
            sequence_parallel,
            num_micro_batches,
        )
        options = factory | dict(sequence_parallel=sequence_parallel)
        vocab_parallel = partial(
            VocabParallelEmbedding, shape.vocab_size, shape.hidden_size, group, **options
        )
        options |= dict(defer_grad_reduce=defer_grad_reduce)
        # In a list: its parameters are not this module's
        self._first = [first] if first and self.is_last else []
        if self.is_first or (self.is_last and shape.tied and not self._first):
            self.embedding = vocab_parallel(init_method=normal("embedding", seed))
            if not self.is_first:
                self.embedding.set_placements(
                    weight=replace(placement_of(self.embedding.weight), is_tied_copy=True)
                )
        if self.is_first:
            if shape.positions == "learned":
                self.positions = nn.Parameter(
                    torch.empty(shape.seq_length, shape.hidden_size, **factory)
                )
                self.set_placements(positions=Placement(copy_groups=(group,)))
                self.reset_parameters()
            self.dropout = _dropout(dropout, group, sequence_parallel)
        cp_attention = partial(
            CONTEXT_PARALLEL[context_parallel], group=self.cp_group, zigzag=zigzag
        )
        attend = cp_attention if self.cp_group.size() > 1 else None
        make_layer = partial(
            TransformerLayer, shape, group, seed=seed, dropout=dropout, attend=attend, **options
        )
        experts = {"groups": groups_of_one(), **(experts or {})}
        self.layers = nn.ModuleDict()
        for i in layers_of_stage(shape.num_layers, stage, num_stages, stage_layers):
            self.layers[str(i)] = make_layer(
                f"layers.{i}", experts=experts if shape.has_experts(i) else None
            )
        if self.is_last:
            self.norm = _norm(shape, group, options)
            if not shape.tied:
                # Sharded over the vocabulary
                self.output = vocab_parallel(init_method=normal("output", seed))

    def reset_parameters(self) -> None:
        """Draw the model's own parameters: learned positions."""
        if "positions" in self._parameters:
            draw(self.positions, normal("positions", self.seed))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        token_positions, rotary = self._positions_of(x), None  # [seq]
        if self.is_first:
            x = self.embedding(x)
            if self.shape.positions == "learned":
                learned = self.positions[token_positions]
                x = x + (
                    scatter_to_sequence(learned, self.group) if self.sequence_parallel else learned
                )
            x = self.dropout(x)
        if self.shape.positions == "rope":
            rotary = rotation(token_positions, self.head_size, x.dtype, self.shape.rotary_base)
        recompute = self.recompute and self.training
        layer: Any
        for layer in self.layers.values():
            x = checkpoint(layer, x, rotary, use_reentrant=False) if recompute else layer(x, rotary)
            # With the load of its experts: outside of recomputation, tokens are counted once
            if isinstance(x, tuple):
                x = (
                    attach_loss(x[0], layer.mlp.router.loss(x[1]) / self.num_micro_batches)
                    if self.training
                    else x[0]
                )
        return self.output_layer(self.norm(x)) if self.is_last else x

    def activation_spec(self, tokens: torch.Tensor) -> tuple[torch.dtype, torch.Size]:
        """Return dtype and shape of what a stage hands to the next for these tokens,
        [batch, seq/c].
        """
        t = self.group.size() if self.sequence_parallel else 1
        return next(self.parameters()).dtype, torch.Size(
            [len(tokens), tokens.size(1) // t, self.shape.hidden_size]
        )

    @property
    def output_layer(self) -> VocabParallelEmbedding:
        """The last stage's module that computes the logits."""
        return next(iter(self._first), self).embedding if self.shape.tied else self.output

    @property
    def units(self) -> list[nn.Module]:
        """The units for FSDP, in the order of forward: each is gathered, used and freed
        on its own.
        """
        units: list[nn.Module] = [
            *([self.embedding] if self.is_first else []),
            *self.layers.values(),
        ]
        if self.is_last and not (self.shape.tied and self._first):
            units.append(self.output_layer)
        # A tied embedding that is both the first and the last is left out: it is in use from start
        # to end.
        return [unit for unit in units if units.count(unit) == 1]

    def _positions_of(self, x: torch.Tensor) -> torch.Tensor:
        """Return where the tokens of x, or of its hidden states, stand in the whole sequence."""
        divided_by = self.group.size() if self.sequence_parallel and not self.is_first else 1
        num_tokens = self.num_past + x.size(1) * divided_by * self.cp_group.size()
        if num_tokens > self.shape.seq_length:
            raise ValueError(
                f"{num_tokens} tokens are more than seq_length={self.shape.seq_length}: give fewer"
            )
        held = positions(
            num_tokens, self.cp_group.size(), self.cp_group.rank(), self.zigzag, device=x.device
        )
        return held[self.num_past :]

    def loss(
        self, logits: torch.Tensor, targets: torch.Tensor, reduction: str = "mean"
    ) -> torch.Tensor:
        """Return the cross-entropy in nats, by default its mean over the targets that count.

        targets: [batch, seq], the tokens that come next, on every rank; -100 does not count.
        """
        # bfloat16 would round a loss of 3 to 0.02
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
        options: dict[str, Any] = dict(vocab_size=self.shape.vocab_size, reduction=reduction)
        return vocab_parallel_cross_entropy(logits, targets, self.group, **options)


class TransformerLayer(nn.Module):
    """x + attention(norm(x)), then the same with an MLP: two all-reduces in forward, two in
    backward.

    ``experts`` are the options of a `MoELayer` in place of the MLP, whose `Load` forward returns
    beside the output.
    """

    def __init__(
        self,
        shape: GPT,
        group,
        name: str,
        seed: int,
        dropout: float,
        attend=None,
        experts=None,
        **options,
    ):
        super().__init__()
        assert shape.num_attention_heads is not None
        # 2 l outputs are added to x
        h, outer_std = shape.hidden_size, STD / math.sqrt(2 * shape.num_layers)

        def linear(inner: str, outer: str) -> dict:
            inner_init, outer_init = (
                normal(f"{name}.{inner}", seed),
                normal(f"{name}.{outer}", seed, outer_std),
            )
            return options | dict(
                init_method=inner_init, output_layer_init_method=outer_init, bias=shape.bias
            )

        self.attention_norm = _norm(shape, group, options)
        attention: dict = dict(
            num_query_groups=shape.num_query_groups, dropout=dropout, attend=attend
        )
        attention |= linear("attention.qkv", "attention.out")
        self.attention = ParallelSelfAttention(h, shape.num_attention_heads, group, **attention)
        self.mlp_norm = _norm(shape, group, options)
        kind: dict = dict(
            gated=shape.mlp == "swiglu", approximate="tanh" if shape.mlp == "gelu_tanh" else "none"
        )
        mlp = partial(ParallelMLP, h, shape.mlp_width, group, **linear("mlp.up", "mlp.down"))
        moe = partial(_experts, shape, f"{name}.mlp", seed, outer_std, experts or {}, **options)
        self.mlp = (moe if experts else mlp)(**kind)
        self.dropout = _dropout(dropout, group, options["sequence_parallel"])

    def forward(
        self, x: torch.Tensor, rotary: torch.Tensor | None = None
    ) -> torch.Tensor | tuple[torch.Tensor, Load]:
        x = x + self.dropout(self.attention(self.attention_norm(x), rotary))
        output = self.mlp(self.mlp_norm(x))
        if isinstance(output, tuple):
            return x + self.dropout(output[0]), output[1]
        return x + self.dropout(output)


def _experts(
    shape: GPT, name: str, seed: int, outer_std: float, options: dict, **more: Any
) -> MoELayer:
    # Of experts, of 3 dims, and of shared ones
    def init(matrix: str, std: float) -> Callable[[torch.Tensor], object]:
        return lambda weight: normal(
            f"{name}.{('shared', 'experts')[weight.dim() - 2]}.{matrix}", seed, std
        )(weight)

    router: dict = dict(score_function=shape.router_scores, **options.get("router", {}))
    router |= {"init_method": normal(f"{name}.router", seed)}
    more |= options | {"router": router, "num_shared_experts": shape.num_shared_experts}
    inits: dict = dict(
        init_method=init("up", STD), output_layer_init_method=init("down", outer_std)
    )
    return MoELayer(
        shape.hidden_size, shape.expert_width, shape.num_experts or 1, shape.top_k, **inits, **more
    )


def normal(name: str, seed: int, std: float = STD) -> Callable[[torch.Tensor], object]:
    """Return an init method that draws normally distributed values, by name and seed, the same in
    every precision.
    """
    key = hashlib.blake2b(f"{seed} {name}".encode(), digest_size=7).digest()

    def fill(weight: torch.Tensor) -> None:
        generator, numbers = (
            torch.Generator().manual_seed(int.from_bytes(key, "big")),
            weight.detach().view(-1),
        )
        # Torch draws fewer than 16 in a different way
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
