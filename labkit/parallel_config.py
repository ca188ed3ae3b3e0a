"""Says how a model lies over ranks, for any number of them, and what does not fit together.

Integers and words only: no torch, no process. Whoever asks whether sizes fit asks here, so that a
run, an estimate and an explorer give the same answer in the same words.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Literal

from labkit import schedules
from labkit.fields import check_fields
from labkit.layout import ParallelLayout
from labkit.partition import (
    check_divides,
    check_sequence_cut,
    check_stage_layers,
    multiples_near,
    split_layers,
)
from labkit.schedules import Schedule
from labkit.shape import GPT
from labkit.sizes import Misfit, does_not_divide, either

ScheduleName = Literal[
    "gpipe",
    "1f1b",
    "interleaved",
    "zero-bubble",
    "zero-bubble-v",
    "v-half",
    "v-min",
    "dualpipe-v",
]
SCHEDULES: dict[ScheduleName, Callable[[int, int, int], Schedule]] = {
    "gpipe": lambda p, m, v: schedules.gpipe(p, m),
    "1f1b": lambda p, m, v: schedules.one_f_one_b(p, m),
    "interleaved": schedules.interleaved,
    "zero-bubble": lambda p, m, v: schedules.zero_bubble(p, m),
    "zero-bubble-v": lambda p, m, v: schedules.zero_bubble_v(p, m),
    "v-half": lambda p, m, v: schedules.v_half(p, m),
    "v-min": lambda p, m, v: schedules.v_min(p, m),
    "dualpipe-v": lambda p, m, v: schedules.dualpipe_v(p, m),
}
"""Make a schedule of p ranks, m micro-batches and v chunks."""
V_SHAPED = ("zero-bubble-v", "v-half", "v-min", "dualpipe-v")  # with two chunks per rank
SPLIT_BACKWARD = ("zero-bubble", *V_SHAPED)  # weights' gradients are computed later than inputs'


@dataclass(frozen=True)
class ParallelConfig:
    """How a batch and a model are divided. The data-parallel size follows from the number of ranks:
    world_size / (tp_size * cp_size * pp_size).

    >>> config = ParallelConfig(batch_size=64, micro_batch_size=4, tp_size=2, pp_size=2)
    >>> config.layout(world_size=16).dp_size, config.num_micro_batches(world_size=16)
    (4, 4)

    Raises:
        ValueError: a value that is wrong on its own. Whether values fit together, and a model and a
            number of ranks, only `check` says.
    """

    batch_size: int  # Sequences per step, over all replicas.
    micro_batch_size: int = 1  # Sequences that a rank computes at once.
    tp_size: int = 1  # Tensor parallelism: ranks that share each layer.
    cp_size: int = 1  # Context parallelism: ranks that share each sequence.
    # How context-parallel ranks compute attention.
    context_parallel: Literal["ring", "ulysses", "all_gather"] = "ring"
    # Each context-parallel rank has an early and a late chunk, not consecutive tokens.
    zigzag: bool = True
    pp_size: int = 1  # Pipeline parallelism: ranks that the layers are divided among.
    ep_size: int = 1  # Expert parallelism: ranks that share a layer's experts.
    # Expert tensor parallelism: ranks that share each expert; by default tp_size.
    expert_tp_size: int | None = None
    # Axes of the layout, fastest first; ep may be among them, and is before dp if not.
    order: str = "tp-cp-dp-pp"
    # The order of work in the pipeline. With the V-shaped ones, zero-bubble-v and those after it
    # in this list, rank 0 has the first layers and the last, and so on.
    schedule: ScheduleName = "1f1b"
    # Chunks of layers on each rank, of the interleaved schedule; those in a V always have 2.
    num_chunks: int = 1
    # Layers of each of the pp * chunks stages; by default about equal.
    stage_layers: tuple[int, ...] | None = None
    # Layers of the stage with the embedding; the others share the rest.
    first_stage_layers: int | None = None
    last_stage_layers: int | None = None  # Layers of the stage with the loss.
    # The embedding counts as a layer of the first stage.
    account_for_embedding_in_pipeline_split: bool = False
    # The loss counts as a layer of the last stage.
    account_for_loss_in_pipeline_split: bool = False
    # Also divide what lies between the tensor-parallel layers, along the sequence.
    sequence_parallel: bool = False
    # Replicas divide: 1 the optimizer's states, 2 gradients too, 3 weights too.
    zero_stage: Literal[0, 1, 2, 3] = 0
    # Divide among this many neighbours, not all replicas: hybrid sharding.
    shard_size: int | None = None
    # What backward computes again instead of keeping it: nothing, attention's scores, or each layer
    # from its input.
    recompute: Literal["none", "selective", "full"] = "none"

    def __post_init__(self):
        check_fields(self, ParallelConfig)
        if self.stage_layers is not None:
            object.__setattr__(self, "stage_layers", check_stage_layers(self.stage_layers))

    @property
    def chunks_per_rank(self) -> int:
        """v, how many stages of the pipeline each rank has."""
        return 2 if self.schedule in V_SHAPED else self.num_chunks

    @property
    def expert_shards(self) -> int:
        """How many ranks share each expert."""
        return self.expert_tp_size or self.tp_size

    def layout(self, world_size: int) -> ParallelLayout:
        """Return the ranks on their two grids.

        Raises:
            Misfit: the sizes do not divide the world, or replicas cannot share the batch, or
                shard_size them.
        """
        layout = self.grids(world_size)
        self.check_batch(layout)
        return layout

    def grids(self, world_size: int) -> ParallelLayout:
        """Return the same, whether or not the replicas can share the batch."""
        return ParallelLayout(
            world_size,
            self.tp_size,
            self.pp_size,
            self.cp_size,
            self.order,
            ep_size=self.ep_size,
            expert_tp_size=self.expert_shards,
        )

    def check_batch(self, layout: ParallelLayout) -> None:
        """Raise a Misfit unless replicas share the batch evenly, and divide into shard groups."""
        rows_at_once = layout.dp_size * self.micro_batch_size
        if self.batch_size % rows_at_once:
            factors = {"dp_size": layout.dp_size, "micro_batch_size": self.micro_batch_size}
            fits = either(multiples_near(self.batch_size, rows_at_once))
            raise Misfit(
                "dp_size * micro_batch_size must divide batch_size",
                does_not_divide("batch_size", self.batch_size, **factors),
                f"use batch_size {fits}",
            )
        if self.shard_size is not None:
            layout.check_shard_size(self.shard_size)

    def num_micro_batches(self, world_size: int) -> int:
        """Return m, how many micro-batches each pipeline takes in a step."""
        return self.batch_size // (self.layout(world_size).dp_size * self.micro_batch_size)

    def make_schedule(self, world_size: int) -> Schedule:
        """Return what each rank of a pipeline does in a step."""
        num_micro_batches = self.num_micro_batches(world_size)
        self.check_num_micro_batches(num_micro_batches)
        return SCHEDULES[self.schedule](self.pp_size, num_micro_batches, self.num_chunks)

    def layers_per_stage(self, num_layers: int) -> tuple[int, ...]:
        """Return how many layers each stage of the pipeline has."""
        return split_layers(
            num_layers,
            self.pp_size * self.chunks_per_rank,
            self.stage_layers,
            self.first_stage_layers,
            self.last_stage_layers,
            self.account_for_embedding_in_pipeline_split,
            self.account_for_loss_in_pipeline_split,
        )

    def check(self, model: GPT, world_size: int) -> None:
        """Raise a Misfit unless all this fits together, the model, and the number of ranks."""
        self.check_model(model)
        self.check_num_micro_batches(self.num_micro_batches(world_size))

    def check_model(self, model: GPT, is_given: bool = False) -> None:
        """Raise a Misfit for what no number of ranks could mend.

        Of a model that is given, as by its weights, it does not advise other sizes.
        """
        self.check_stages(model.num_layers, is_given)
        self.check_shards(model, is_given)
        self.check_zero()
        self.check_sequence(model.seq_length)
        self.check_experts(model, is_given)

    def check_stages(self, num_layers: int, is_given: bool = False) -> None:
        """Raise a Misfit unless the schedule has its chunks, and each stage a layer."""
        self._check_num_chunks()
        num_stages = self.pp_size * self.chunks_per_rank
        if num_stages > num_layers:
            product = f"pp_size={self.pp_size} * num_chunks={self.chunks_per_rank}"
            larger = "" if is_given else f"{num_stages} layers or more, or "
            raise Misfit(
                "each stage must have 1 layer or more",
                f"{product} = {num_stages} stages for num_layers={num_layers}",
                f"use {larger}fewer stages",
            )
        self.layers_per_stage(num_layers)  # which checks what is given

    def _check_num_chunks(self) -> None:
        if self.schedule == "interleaved":
            if self.num_chunks == 1:
                rule = "schedule='interleaved' needs num_chunks=2 or more"
                raise Misfit(rule, rule, "with one, use '1f1b'")
            return
        known = (1, 2) if self.schedule in V_SHAPED else (1,)
        if self.num_chunks not in known:
            needs = "needs schedule='interleaved'"
            raise Misfit(
                f"num_chunks {needs}",
                f"num_chunks={self.num_chunks} {needs}, not {self.schedule!r}",
                "use that, or num_chunks=1",
            )

    def check_shards(self, model: GPT, is_given: bool = False) -> None:
        """Raise a Misfit unless tensor and context ranks share heads and MLPs evenly."""
        check = partial(check_divides, is_given=is_given)
        for name in ("num_attention_heads", "num_query_groups"):
            number = getattr(model, name)
            if number is None:
                continue
            check(self.tp_size, name, number)
            if self.context_parallel == "ulysses":
                check(self.tp_size * self.cp_size, name, number, parts_name="tp_size * cp_size")
        if model.num_moe_layers < model.num_layers:
            check(self.tp_size, "ffn_hidden_size", model.mlp_width)

    def check_zero(self) -> None:
        """Raise a Misfit if replicas would send gradients too early, or shard nothing."""
        if self.zero_stage >= 2 and self.schedule in SPLIT_BACKWARD:
            sends = (
                f"zero_stage={self.zero_stage} sends a layer's gradients when its backward is done"
            )
            later = f"schedule={self.schedule!r} computes those of its weights later"
            raise Misfit(
                "ZeRO stages 2 and 3 do not go with a schedule that splits backward",
                f"{sends}, and {later}",
                "use zero_stage=1, or schedule='1f1b'",
            )
        if self.shard_size is not None and self.zero_stage == 0:
            raise Misfit(
                "shard_size needs a ZeRO stage",
                f"shard_size={self.shard_size} shards nothing with zero_stage=0",
                "use 1, 2 or 3",
            )

    def check_sequence(self, seq_length: int) -> None:
        """Raise a Misfit unless context ranks share a sequence, and tensor ranks each part."""
        tp_size = self.tp_size if self.sequence_parallel else 1
        check_sequence_cut(seq_length, self.cp_size, self.zigzag, tp_size)

    def check_experts(self, model: GPT, is_given: bool = False) -> None:
        """Raise a Misfit unless there are experts to share, and ranks share them evenly."""
        if model.num_experts is None:
            for name in ("ep_size", "expert_tp_size"):
                if getattr(self, name) != getattr(ParallelConfig, name):
                    raise Misfit(
                        f"{name} needs a model with experts",
                        f"{name}={getattr(self, name)!r} is for experts",
                        f"give num_experts too, or leave {name} out",
                    )
            return
        check = partial(check_divides, is_given=is_given)
        check(self.ep_size, "num_experts", model.num_experts, parts_name="ep_size")
        parts_name = "expert_tp_size" if self.expert_tp_size else "tp_size"
        width = model.expert_width
        check(self.expert_shards, "width of an expert", width, parts_name=parts_name)
        if shared_width := model.num_shared_experts * width:
            check(self.tp_size, "width of shared experts", shared_width)

    def check_num_micro_batches(self, num_micro_batches: int) -> None:
        """Raise a Misfit unless the schedule has an order for so many micro-batches."""
        least = 2 * self.pp_size
        if self.schedule == "dualpipe-v" and num_micro_batches < least:
            needs = "schedule='dualpipe-v' needs 2 * pp_size"
            raise Misfit(
                f"{needs} micro-batches",
                f"{needs}={least} micro-batches, there are {num_micro_batches}",
                "use a larger batch_size, or schedule='zero-bubble-v'",
            )

    def check_recompute(self, fused_attention: bool) -> None:
        """Raise a Misfit if attention would be computed again twice."""
        if fused_attention and self.recompute == "selective":
            raise Misfit(
                "selective recomputation needs attention that is not fused",
                "recompute='selective' computes the scores again, as fused attention does anyway",
                "use recompute='none'",
            )
