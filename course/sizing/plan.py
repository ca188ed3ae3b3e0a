"""A plan for a run: the model, the size of the cluster, and how the model is laid over it."""

from collections import defaultdict
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, fields
from functools import cached_property
from itertools import accumulate, pairwise
from typing import Any, Literal, NamedTuple

from course.sizing.folded import UNITS, folded
from course.sizing.remembered import remembered
from course.sizing.shapes import latent_of
from labkit.fields import check_fields
from labkit.layout import ParallelLayout
from labkit.parallel_config import V_SHAPED, ParallelConfig, ScheduleName
from labkit.partition import split_layers
from labkit.shape import GPT
from labkit.sizes import Misfit, divisors, does_not_divide, either

MODULES = "core_attn", "layernorm", "mla_up_proj", "mlp", "moe", "moe_act", "shared_experts"
"""What recompute="selective" can compute again, by Megatron-LM's names (``--recompute-modules``, at d98e8a64ddf3 in
megatron/core/transformer/transformer_config.py): the core of attention; the two norms of a layer; q, k and v from their
latents; the MLP; the whole of router, experts and shared experts; what experts compute between their two products."""


class NotModelled(Misfit):
    """Sizes that may well fit together, but of which no estimate here knows the memory or the time."""


@dataclass(frozen=True)
class Plan:
    """Everything that must be decided before a run; sizes that do not fit together are refused.

    >>> gpt = GPT(num_layers=96, hidden_size=12288, seq_length=2048, vocab_size=51200, num_attention_heads=96)
    >>> plan = Plan(gpt, world_size=1024, batch_size=1536, tp_size=8, pp_size=16)
    >>> plan.dp_size, plan.num_micro_batches
    (8, 192)

    Raises:
        Misfit: sizes that do not fit together, as `ParallelConfig` says, with the rule and the way out.
        NotModelled: a Misfit, too; they may fit, but no estimate knows them.
        ValueError: a value that is wrong on its own.
    """

    model: GPT
    world_size: int
    batch_size: int
    tp_size: int = 1
    pp_size: int = 1
    micro_batch_size: int = 1
    num_chunks: int = 1
    recompute: str = "full"
    """What backward computes again: "none", whole layers ("full"), or modules of all layers ("selective")."""
    recompute_modules: Sequence[str] | None = None
    """With recompute="selective", which of `MODULES`; the core of attention if None."""
    recompute_layers: int | None = None
    """With recompute="full", the layers of each chunk that are computed again; all if None."""
    sequence_parallel: bool = False
    zero_stage: int = 0
    gradient_bytes: Literal[2, 4] = 4
    """Bytes per gradient: Megatron-LM accumulates in 4, the ZeRO paper counts 2."""
    fused_attention: bool = False
    """A FlashAttention kernel: scores are never stored, and those that the causal mask hides not computed."""
    dropout: bool = True
    """Whether layers keep the masks of a dropout, as GPT-3's did; today's models have none."""
    fused_mlp: bool = False
    """A kernel that computes SwiGLU at once and keeps its two inputs only."""
    fused_experts: bool = False
    """Kernels that weigh an expert's rows before its last product, so that what comes back is not kept, and a router
    that keeps a token in 16 bits. So does Megatron-LM since April 2025."""
    cp_size: int = 1
    offload_layers: int = 0
    """How many layers' activations go to the CPU's memory, and come back for backward."""
    optimizer_bytes: Literal[4, 8, 12] = 12
    """Bytes per parameter in Adam: a copy in 32 bits and two moments; 8 with moments in 16 bits; 4 without the copy."""
    context_parallel: str = "ring"
    """How context ranks compute attention together, in zigzag chunks: "ring", "ulysses" or "all_gather"."""
    ep_size: int = 1
    expert_tp_size: int | None = None
    """How many ranks divide each expert: tp_size if None."""
    stage_layers: Sequence[int] | None = None
    """Layers of each of the p v stages, as `labkit.partition.split_layers` makes them; equally many if None."""
    schedule: ScheduleName | None = None
    """One of a V, which needs 2 chunks (`course.sizing.folded`); else 1F1B, interleaved if there are chunks."""
    precision: Literal["bf16", "fp8"] = "bf16"
    """Of the products in linear layers; attention, logits and all else stay in 16 bits."""
    pad_vocab_to: int | None = None
    """Megatron-LM pads the vocabulary to a multiple of 128 t: give 128. Not padded if None."""

    def __post_init__(self):
        self.check_values()
        parallel = self.parallel
        object.__setattr__(self, "stage_layers", parallel.stage_layers)
        parallel.check_model(self.model)
        self.check_recompute()
        self.check_offload()
        parallel.check_num_micro_batches(parallel.num_micro_batches(self.world_size))
        self.check_attention()
        self.check_chunks()
        self.check_folds()
        self.check_rounds()

    @cached_property
    def parallel(self) -> ParallelConfig:
        """How the model lies over the ranks: it knows what fits together."""
        given: dict[str, Any] = {name: getattr(self, name) for name in _SHARED}
        given["schedule"] = self.schedule_name
        return ParallelConfig(**given)

    @property
    def schedule_name(self) -> ScheduleName:
        """The schedule by the name that labkit has for it."""
        return self.schedule or ("interleaved" if self.num_chunks > 1 else "1f1b")

    def check_values(self) -> None:
        """Raise ValueError if a value is wrong on its own; whole numbers become int."""
        check_fields(self, Plan, may_be_0=("zero_stage", "offload_layers"))
        if self.schedule not in (None, *V_SHAPED):
            raise ValueError(f"schedule={self.schedule!r} is unknown: use {either((None, *V_SHAPED))}")
        self.parallel  # noqa: B018  (checks its own fields)
        if self.recompute_layers is not None and self.recompute != "full":
            fault = f"recompute_layers={self.recompute_layers} is for whole layers, not recompute={self.recompute!r}"
            raise ValueError(f"{fault}: use recompute='full'")
        if self.recompute_modules is not None:
            object.__setattr__(self, "recompute_modules", self._checked_modules(self.recompute_modules))
        if self.model.num_attention_heads is None:
            raise ValueError(f"{self.model} does not say its num_attention_heads, on which attention's memory depends")

    def _checked_modules(self, names: Sequence[str]) -> tuple[str, ...]:
        """Return the modules, each once; raise ValueError for one that is unknown, or that this model does not have."""
        if self.recompute != "selective":
            fault = f"recompute_modules={names!r} are of recompute='selective', not {self.recompute!r}"
            raise ValueError(f"{fault}: use recompute='selective', or recompute_modules=None")
        has_experts = self.model.num_experts is not None
        needs = {
            "mla_up_proj": ("latent attention", latent_of(self.model) is not None),
            "moe": ("experts", has_experts),
            "moe_act": ("experts", has_experts),
            "shared_experts": ("shared experts", self.model.num_shared_experts > 0),
        }
        known = [name for name in MODULES if needs.get(name, ("", True))[1]]
        if isinstance(names, str) or not names:
            fault = f"recompute_modules={names!r} must be a list of names"
            raise ValueError(f"{fault}{', not a word' * isinstance(names, str)}: use {either(known)}, or None")
        for name in names:
            if name not in known:
                fault = f"has no {needs[name][0]} to compute again" if name in needs else "is unknown"
                raise ValueError(f"recompute_modules: {name!r} {fault}: use {either(known)}")
        return tuple(dict.fromkeys(names))

    @property
    def modules(self) -> Sequence[str]:
        """The modules of a layer that are computed again; none if whole layers are, or nothing."""
        return (self.recompute_modules or ("core_attn",)) if self.recompute == "selective" else ()

    def check_recompute(self) -> None:
        """Raise Misfit if attention would be computed again twice."""
        if "core_attn" in self.modules:
            self.parallel.check_recompute(self.fused_attention)

    def check_offload(self) -> None:
        """Raise NotModelled for activations that go to the CPU where Megatron-LM leaves them."""
        if not self.offload_layers:
            return
        given = f"offload_layers={self.offload_layers}"
        if self.pp_size > 1 or self.recompute != "none":
            raise NotModelled(
                "offload_layers needs one pipeline stage that computes nothing again",
                f"{given} with pp_size={self.pp_size} and recompute={self.recompute!r}",
                "use pp_size=1 and recompute='none', or offload_layers=0",
            )
        if self.offload_layers >= self.model.num_layers:
            raise NotModelled(
                "offload_layers must leave a layer",
                f"{given} of {self.model.num_layers} leaves none on the GPU",
                f"use {self.model.num_layers - 1} or fewer",
            )

    def check_attention(self) -> None:
        """Raise NotModelled for context parallelism with stored scores."""
        if self.cp_size > 1 and not self.fused_attention:
            raise NotModelled(
                "context parallelism needs fused attention",
                f"cp_size={self.cp_size} is modelled with fused attention only",
                "use fused_attention=True, or cp_size=1",
            )

    def check_chunks(self) -> None:
        """Raise NotModelled for chunks without a pipeline, or with unequal numbers of layers unless they are given."""
        p, v = self.pp_size, self.num_chunks
        if v > 1 and p == 1:
            raise NotModelled(
                "num_chunks needs a pipeline of several stages",
                f"num_chunks={v} needs a pipeline of several stages",
                "pp_size=1 has one, use num_chunks=1",
            )
        num_layers = self.model.num_layers
        if self.stage_layers is None and num_layers % (p * v):
            raise NotModelled(
                "pp_size * num_chunks must divide num_layers",
                does_not_divide("num_layers", num_layers, pp_size=p, num_chunks=v),
                f"use a product of {either(divisors(num_layers))}",
            )

    def check_folds(self) -> None:
        """Raise NotModelled for a V that has no two chunks to fold."""
        if self.schedule and (self.pp_size == 1 or self.num_chunks != 2):
            sizes = f"pp_size={self.pp_size}, num_chunks={self.num_chunks}"
            raise NotModelled(
                "a V needs a pipeline with 2 chunks",
                f"schedule={self.schedule!r} needs several stages with 2 chunks, not {sizes}",
                "use pp_size=2 or more and num_chunks=2, or schedule=None",
            )

    def check_rounds(self) -> None:
        """Raise NotModelled for interleaved chunks whose last round of p micro-batches is not full."""
        m, p = self.num_micro_batches, self.pp_size
        if not self.schedule and self.num_chunks > 1 and m % p:
            raise NotModelled(
                "pp_size must divide the micro-batches of interleaved chunks",
                f"pp_size={p} does not divide the {m} micro-batches",
                "use num_chunks=1, or a different micro_batch_size (Megatron-LM interleaves in rounds of p)",
            )

    @property
    def dp_size(self) -> int:
        """d, the number of replicas: the GPUs divided by t * c * p."""
        return self.world_size // (self.tp_size * self.cp_size * self.pp_size)

    @property
    def dp_cp_size(self) -> int:
        """d * c, the number of ranks with the same weights, which add up their gradients."""
        return self.dp_size * self.cp_size

    @property
    def etp_size(self) -> int:
        """The number of ranks that divide each expert."""
        return self.expert_tp_size or self.tp_size

    @property
    def expert_dp_size(self) -> int:
        """The number of ranks with the same experts, which add up the gradients of these."""
        return self.world_size // (self.etp_size * self.ep_size * self.pp_size)

    @property
    def num_micro_batches(self) -> int:
        """m, the micro-batches that each pipeline runs in a step."""
        return self.batch_size // (self.dp_size * self.micro_batch_size)

    @property
    def recomputed_share(self) -> float:
        """The share of the layers that are computed again, where recompute="full"."""
        return 1.0 if self.recompute_layers is None else min(1.0, self.recompute_layers / self.layers_per_chunk)

    @property
    def layers_per_chunk(self) -> int:
        """How many layers lie between two messages of the pipeline; if chunks differ, the most."""
        return max(self.stage_layers or [self.model.num_layers // (self.pp_size * self.num_chunks)])

    def layers_of_rank(self, pp_rank: int) -> int:
        """Return how many layers a GPU of this pipeline rank has, in all its chunks."""
        if self.stage_layers is None:
            return self.model.num_layers // self.pp_size
        return self.layers_of_ranks[pp_rank].all

    def num_moe_layers(self, pp_rank: int) -> int:
        """Return how many of them have experts."""
        return self.layers_of_ranks[pp_rank].with_experts if self.model.num_experts else 0

    @property
    def layers_of_ranks(self) -> Sequence["Layers"]:
        """The layers of each pipeline rank."""
        return _layers_of_ranks(self)[0]

    @property
    def ranks_by_layers(self) -> Sequence[Sequence[int]]:
        """The pipeline ranks, those with the same layers together."""
        return _layers_of_ranks(self)[1]

    @property
    def loss_rank(self) -> int:
        """The pipeline rank that has the last layer, the logits and the loss: the last, but in a V the first."""
        return 0 if self.schedule else self.pp_size - 1

    @property
    def vocab_size(self) -> int:
        """The words of the embedding, those that only fill it up included."""
        multiple = self.tp_size * (self.pad_vocab_to or 0)
        return -(-self.model.vocab_size // multiple) * multiple if multiple else self.model.vocab_size

    @cached_property
    def layout(self) -> ParallelLayout:
        """The ranks on their grids."""
        return self.parallel.grids(self.world_size)

    @property
    def bubble_slots(self) -> float:
        """In how many micro-batches' time a rank is idle in a step: (p-1)/v; in a V, what `folded` counts."""
        if self.schedule:
            return folded(self.schedule, self.pp_size, self.num_micro_batches).idle / UNITS
        return (self.pp_size - 1) / self.num_chunks

    @property
    def bubble_over_ideal(self) -> float:
        """Idle time over ideal time: (p-1)/(v m), but in a V."""
        return self.bubble_slots / self.num_micro_batches


_SHARED = [field.name for field in fields(ParallelConfig) if field.name in Plan.__dataclass_fields__]


class Layers(NamedTuple):
    """How many layers a pipeline rank has, and how many of them have experts."""

    all: int
    with_experts: int


@remembered("model", "pp_size", "num_chunks", "schedule", "stage_layers")
def _layers_of_ranks(plan: Plan) -> tuple[Sequence[Layers], Sequence[Sequence[int]]]:
    """Return the layers of each pipeline rank, and the ranks that have the same."""
    model, pp_size, num_stages = plan.model, plan.pp_size, plan.pp_size * plan.num_chunks
    num_layers = model.num_layers
    split = plan.stage_layers or split_layers(num_layers, num_stages)
    ends = [0, *accumulate(split)]
    found = [sum(map(model.has_experts, range(*pair))) if model.num_experts else 0 for pair in pairwise(ends)]
    of_rank, same = [], defaultdict(list)
    for rank in range(pp_size):
        own = (rank, num_stages - 1 - rank) if plan.schedule else range(rank, num_stages, pp_size)
        of_rank.append(Layers(sum(split[stage] for stage in own), sum(found[stage] for stage in own)))
        same[of_rank[-1]].append(rank)
    return of_rank, list(same.values())


def uneven_stages(num_layers: int, num_stages: int) -> Sequence[int] | None:
    """Return about as many layers for each stage, embedding and loss counted as one each; None if all get as many.

    >>> uneven_stages(126, 8), uneven_stages(96, 8)
    ((15, 16, 16, 16, 16, 16, 16, 15), None)
    """
    if num_layers % num_stages == 0 or num_stages > num_layers:
        return None
    both: dict = dict(account_for_embedding_in_pipeline_split=True, account_for_loss_in_pipeline_split=True)
    with suppress(ValueError):  # the ends would have no layer
        return split_layers(num_layers, num_stages, **both)
    return None
