"""Holds everything that decides a training run in one object, the same in a notebook and on the
command line.

A field's comment, beside or above it, is what ``--help`` says of the option.
"""

import math
import os
from contextlib import suppress
from dataclasses import asdict, dataclass, fields, replace
from functools import partial
from itertools import product
from numbers import Real
from pathlib import Path
from typing import Annotated, Any, Literal, get_args, get_origin, get_type_hints

import torch

from labkit import schedules
from labkit.expert_parallel import LoadBalancing
from labkit.layout import ParallelLayout
from labkit.partition import check_divides, check_sequence_cut, multiples_near, split_layers
from labkit.schedules import Schedule
from labkit.shape import GPT
from labkit.sizes import check_number, check_size, counted, divisors, either, whole_number
from labtrain.data import InventedText, TokenFile, find_tokenizer

SCHEDULES = {
    "gpipe": lambda p, m, v: schedules.gpipe(p, m),
    "1f1b": lambda p, m, v: schedules.one_f_one_b(p, m),
    "interleaved": schedules.interleaved,
    "zero-bubble": lambda p, m, v: schedules.zero_bubble(p, m),
    "zero-bubble-v": lambda p, m, v: schedules.zero_bubble_v(p, m),
    "v-half": lambda p, m, v: schedules.v_half(p, m),
    "v-min": lambda p, m, v: schedules.v_min(p, m),
    "dualpipe-v": lambda p, m, v: schedules.dualpipe_v(p, m),
}
V_SHAPED = ("zero-bubble-v", "v-half", "v-min", "dualpipe-v")  # with two chunks per rank

MAY_BE_0 = ("warmup_steps", "eval_interval", "save_interval", "keep", "num_shared_experts")
MOST = {
    "learning_rate": 1000,
    "min_learning_rate": 1000,
    "weight_decay": 1000,
    "clip_norm": 1000,
    "exit_duration": 1_000_000,
    "gpu_memory_gib": 1_000_000,
}
"""Fields that are numbers from 0 up, and the highest that makes sense."""
OF_CHECKPOINTS = ("resume", "save_interval", "keep", "async_save")
OF_EXPERTS = ("top_k", "capacity_factor", "ep_size", "expert_tp_size", "moe_layer_freq")


@dataclass(frozen=True)
class ShortOption:
    """A second, shorter option for a field. Only the command line needs a library to read it."""

    name: str


@dataclass(frozen=True)
class TrainConfig:
    """Train a GPT with data, tensor, context, pipeline and expert parallelism.

    The data-parallel size follows from the number of ranks: world size / (tp * cp * pp).
    """

    steps: int = 100  # Steps of the optimizer.
    batch_size: int = 16  # Sequences per step, over all replicas.
    micro_batch_size: int = 4  # Sequences that a rank computes at once.
    seq_length: int = 64  # Tokens per sequence.
    num_layers: int = 4  # Transformer layers.
    hidden_size: int = 64  # Width of the hidden states.
    num_attention_heads: int = 4  # Attention heads per layer.
    # Heads of keys and values, shared by attention heads; by default as many.
    num_query_groups: int | None = None
    ffn_hidden_size: int | None = None  # Width of the MLPs; by default 4 hidden_size.
    norm: Literal["layernorm", "rmsnorm"] = "layernorm"  # What normalises the hidden states.
    # What an MLP computes inside; swiglu has a third matrix.
    mlp: Literal["gelu", "gelu_tanh", "swiglu"] = "gelu"
    # A learned vector for each position, or rotary positions.
    positions: Literal["learned", "rope"] = "learned"
    bias: bool = True  # Biases in linear layers.
    tied: bool = True  # The embedding's weight is the output layer's, too.
    norm_eps: float = 1e-5  # What a norm adds to the mean square before its root.
    rotary_base: float = 10_000.0  # Base of the angles of rotary positions; Llama 3 has 500000.
    num_experts: int | None = None  # Experts of a layer, in place of its MLP; by default none.
    top_k: int = 2  # Experts that process a token.
    moe_layer_freq: int = 1  # Every n-th layer has experts, from the first one on.
    num_shared_experts: int = 0  # Experts beside them that compute all tokens.
    moe_ffn_hidden_size: int | None = None  # Width of an expert; by default that of the MLPs.
    # A token's probabilities of experts, from the logits.
    router_scores: Literal["softmax", "sigmoid"] = "softmax"
    # Where the auxiliary loss counts choices. What is learned depends on no layout with "sequence",
    # only on micro_batch_size with "micro_batch"; with "global" on dp too, unless a step is one
    # micro-batch. For the same coefficient "global" is dp times as strong as Megatron-core's.
    aux_loss: Literal["micro_batch", "sequence", "global"] = "micro_batch"
    # Weight of the auxiliary loss, which evens out the loads of experts; often 0.01.
    aux_loss_coefficient: float = 0.0
    # Weight of the routers' z-loss, which keeps logits small; often 0.001.
    z_loss_coefficient: float = 0.0
    # By which a step moves each expert's bias towards an even load; often 0.001.
    expert_bias_update_rate: float = 0.0
    # An expert drops what is above this multiple of an even load of a rank's tokens, so the loss
    # depends on the layout; by default nothing is dropped.
    capacity_factor: float | None = None
    # A file to learn byte by byte, or by the tokenizer.json of init_from, with its last tenth kept
    # for evaluation. Every epoch has each window of seq_length tokens once, in a new order;
    # documents are not told apart. By default "invented": words that labtrain makes up, with a
    # known best loss.
    text: str | None = None
    # A file of token numbers instead: little-endian ones and nothing else, or an .npy.
    tokens: str | None = None
    vocab_size: int | None = None  # How many tokens the tokenizer of the token file knows.
    # A folder in Hugging Face's format (GPT-2, Llama, Mistral, Mixtral) to start from. It says the
    # shape; only the seq_length may be less. With --resume, weights of a checkpoint take the place
    # of its weights.
    init_from: str | None = None
    # Bits of each number in the token file; by default 16 up to a vocab_size of 65,536, else 32,
    # and a file that looks otherwise is refused. An .npy states it.
    token_bits: Literal[16, 32, 64, None] = None

    # Tensor parallelism: ranks that share each layer.
    tp_size: Annotated[int, ShortOption("--tp")] = 1
    # Context parallelism: ranks that share each sequence.
    cp_size: Annotated[int, ShortOption("--cp")] = 1
    # How context-parallel ranks compute attention.
    context_parallel: Literal["ring", "ulysses", "all_gather"] = "ring"
    # Each context-parallel rank has an early and a late chunk, not consecutive tokens.
    zigzag: bool = True
    # Pipeline parallelism: ranks that the layers are divided among.
    pp_size: Annotated[int, ShortOption("--pp")] = 1
    # Expert parallelism: ranks that share a layer's experts.
    ep_size: Annotated[int, ShortOption("--ep")] = 1
    # Expert tensor parallelism: ranks that share each expert; by default tp_size.
    expert_tp_size: Annotated[int | None, ShortOption("--expert-tp")] = None
    # Where these sizes do not fit the ranks that are there, as after a node has died, use the
    # nearest that do: tp, then cp, ep and expert_tp keep their largest divisors that fit; pp
    # becomes the next larger size that fits, or smaller.
    fit_ranks: bool = False
    # Axes of the layout, fastest first; ep may be among them, and is before dp if not.
    order: str = "tp-cp-dp-pp"
    # The order of work in the pipeline. From zero-bubble-v on, rank 0 has the first layers and the
    # last, and so on.
    schedule: Literal[
        "gpipe",
        "1f1b",
        "interleaved",
        "zero-bubble",
        "zero-bubble-v",
        "v-half",
        "v-min",
        "dualpipe-v",
    ] = "1f1b"
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
    recompute: bool = False  # Keep only each layer's input, and compute the rest again in backward.

    # Type of weights and activations; with bfloat16 the optimizer keeps float32 master weights.
    precision: Literal["float32", "float64", "bfloat16"] = "float32"
    learning_rate: float = 3e-3  # The highest learning rate of AdamW.
    # The rate after a cosine's last step; by default a tenth of learning_rate.
    min_learning_rate: float | None = None
    warmup_steps: int = 10  # Steps in which the learning rate rises to its highest value.
    weight_decay: float = 0.1  # Weight decay of AdamW, for matrices only.
    # Gradients are scaled down to this global norm; 0 leaves them as they are.
    clip_norm: float = 1.0
    dropout: float = 0.0  # Probability to drop, in attention and hidden states.
    seed: int = 0  # Decides the weights, the data and the dropout.

    eval_interval: int = 0  # Steps between evaluations; 0 for none.
    checkpoint_dir: str | None = None  # Where checkpoints are written, and read by --resume.
    save_interval: int = 0  # Steps between checkpoints; 0 for one at the end only.
    keep: int = 0  # Complete checkpoints to keep, the newest ones; 0 keeps all.
    # Write checkpoints in the background; a step waits only for a copy in the CPU's memory.
    async_save: bool = False
    # Continue from the newest complete checkpoint in checkpoint_dir, whatever its layout was.
    resume: bool = False
    # Minutes after which the run ends early, as it does on SIGTERM and SIGUSR1: it finishes the
    # step and saves.
    exit_duration: float | None = None
    log_interval: int = 10  # Steps between lines in a log; a terminal shows a bar instead.
    # A file that gets a JSON object for each step, after what it already has. A resumed run
    # replaces the lines of steps that it computes again.
    metrics: str | None = None
    tensorboard: str | None = None  # A folder for TensorBoard, if that package is there.
    # Train nothing: say what each of this many ranks would hold, and whether it fits.
    check: int | None = None
    # With --check: the memory of a GPU in GiB, such as 80, to plan a run on a machine without GPUs;
    # by default that of this machine's GPUs.
    gpu_memory_gib: float | None = None
    # Where each rank writes torch's trace of some steps; ui.perfetto.dev opens it.
    profile_dir: str | None = None
    profile_step_start: int = 10  # The first step that is profiled, counted from 1.
    profile_step_end: int = 20  # The step before which profiling stops.

    def __post_init__(self):
        if self.init_from is not None:
            self._take_shape(self.init_from)
        if self.text is None:
            if self.init_from is not None and self.tokens is None and self.check is None:
                fault = f"init_from={self.init_from!r} has nothing to learn"
                raise ValueError(f"{fault}: name a text, or a file of tokens")
            self._set("text", "invented")
        shape = self.shape  # which checks its own fields
        for name, kind in get_type_hints(TrainConfig).items():
            self._check_field(name, kind)
        self._check_rates()
        self._check_dataset()
        self._check_run()
        self._check_stages()
        self._check_parallelism(shape)
        self._check_experts(shape)
        self._check_vocabulary(shape)

    def _set(self, name: str, value: Any) -> None:
        object.__setattr__(self, name, value)  # the class is frozen

    def _check_field(self, name: str, kind: Any) -> None:
        """Check one field's value by its type; a number is kept as Python's own."""
        value = getattr(self, name)
        kinds = get_args(kind) or (kind,)
        known = None
        if kind is bool:
            known = (True, False)
        elif get_origin(kind) is Literal:
            known = kinds
        if known and value not in known:
            raise ValueError(f"{name}={value!r} is unknown: use {', '.join(map(str, known))}")
        if value is None and type(None) in kinds:
            return
        if name == "seed":
            self._check_seed()
        elif int in kinds:
            self._set(name, check_size(name, value, least=0 if name in MAY_BE_0 else 1))
        if name in MOST:
            self._set(name, check_number(name, value, MOST[name]))
        is_path = isinstance(value, str | Path) and value != ""
        if name in ("checkpoint_dir", "profile_dir") and not is_path:
            raise ValueError(f"{name}={value!r} is not a folder: name one, or leave it out")

    def _check_seed(self) -> None:
        seed = whole_number(self.seed)
        if seed is None or not 0 <= seed < 1 << 63:
            fault = f"seed={self.seed!r} must be a whole number from 0 up"
            raise ValueError(f"{fault}, of at most 63 bits")
        self._set("seed", seed)

    def _take_shape(self, folder: str) -> None:
        """Set the fields of the shape to those of the weights in a folder, which is whole and fits
        them.
        """
        from labtrain import pretrained  # it imports half of torch

        shape = pretrained.read_shape(folder, self.seq_length)
        of_shape = {field.name for field in fields(GPT)}
        for field in fields(self):
            name = field.name
            if name not in of_shape:
                continue
            given = getattr(self, name)
            there = getattr(shape, name)
            if given not in (there, field.default) and name != "seq_length":
                fault = f"{name}={given!r} contradicts init_from={folder}, which has {there!r}"
                raise ValueError(f"{fault}: leave it out")
            self._set(name, there)
        pretrained.check(folder, shape)

    def _check_rates(self) -> None:
        if self.learning_rate == 0:
            raise ValueError("learning_rate=0 learns nothing: use a number above 0, such as 0.003")
        if self.lowest_learning_rate > self.learning_rate:
            lowest = f"min_learning_rate={self.min_learning_rate}"
            fault = f"{lowest} is above learning_rate={self.learning_rate}, so the rate would rise"
            raise ValueError(f"{fault}: use at most that, or leave it out for a tenth of it")
        if not (isinstance(self.dropout, Real) and 0 <= self.dropout < 1):
            raise ValueError(f"dropout={self.dropout!r} must be in [0, 1)")

    def _check_dataset(self) -> None:
        if not isinstance(self.text, str | Path):
            raise ValueError(f"text={self.text!r} is not a file: name one, or use 'invented'")
        if self.tokens is None:
            given = None
            if self.vocab_size is not None and not self.init_from:
                given = "vocab_size"
            elif self.token_bits is not None:
                given = "token_bits"
            if given:
                fault = f"{given}={getattr(self, given)} is for a file of tokens"
                raise ValueError(f"{fault}: name one by tokens=, or leave out {given}")
            return
        if not isinstance(self.tokens, str | Path) or self.text != "invented":
            both = f"text={self.text!r} and tokens={self.tokens!r}"
            raise ValueError(f"{both}: name one file, a text or tokens")
        if self.vocab_size is None:
            fault = f"tokens={self.tokens!r} needs the vocab_size of its tokenizer"
            raise ValueError(f"{fault}, such as 50257 for GPT-2's")

    def _check_run(self) -> None:
        if self.gpu_memory_gib is not None and self.check is None:
            fault = f"gpu_memory_gib={self.gpu_memory_gib:g} is for check="
            raise ValueError(f"{fault}: give a number of ranks too")
        if self.profile_dir and not self.profiled_steps:
            start = f"profile_step_start={self.profile_step_start}"
            given = f"{start} and profile_step_end={self.profile_step_end}"
            fault = f"{given} profile none of {counted(self.steps, 'step')}"
            raise ValueError(f"{fault}: use, for example, 1 and 6")
        given = [name for name in OF_CHECKPOINTS if getattr(self, name)]
        if given and self.checkpoint_dir is None:
            fault = f"{given[0]}={getattr(self, given[0])} needs a checkpoint_dir"
            raise ValueError(f"{fault}: name a folder")

    @property
    def _chunks_per_rank(self) -> int:
        return 2 if self.schedule in V_SHAPED else self.num_chunks

    def _check_stages(self) -> None:
        """Check that the schedule has its chunks, and each stage a layer."""
        if self.schedule == "interleaved":
            if self.num_chunks == 1:
                fault = "schedule='interleaved' needs num_chunks=2 or more"
                raise ValueError(f"{fault}: with one, use '1f1b'")
        elif self.num_chunks not in ((1, 2) if self.schedule in V_SHAPED else (1,)):
            needs = "needs schedule='interleaved'"
            fault = f"num_chunks={self.num_chunks} {needs}, not {self.schedule!r}"
            raise ValueError(f"{fault}: use that, or num_chunks=1")
        num_stages = self.pp_size * self._chunks_per_rank
        if num_stages > self.num_layers:
            product = f"pp_size={self.pp_size} * num_chunks={self._chunks_per_rank}"
            fault = f"{product} = {num_stages} stages for num_layers={self.num_layers}"
            more = "" if self.init_from else f"{num_stages} layers or more, or "
            raise ValueError(f"{fault}: use {more}fewer stages")
        split = self.layers_per_stage  # which checks what is given
        self._set("stage_layers", None if self.stage_layers is None else split)

    def _check_parallelism(self, shape: GPT) -> None:
        """Check that the sizes divide what they share, and that the ways to share fit together."""
        check = partial(check_divides, is_given=self.init_from is not None)
        for name in ("num_attention_heads", "num_query_groups"):
            number = getattr(shape, name)
            if number is None:
                continue
            check(self.tp_size, name, number)
            if self.context_parallel == "ulysses":
                check(self.tp_size * self.cp_size, name, number, parts_name="tp_size * cp_size")
        if shape.num_moe_layers < shape.num_layers:
            check(self.tp_size, "ffn_hidden_size", shape.mlp_width)
        if self.zero_stage >= 2 and self.schedule in ("zero-bubble", *V_SHAPED):
            stage = f"zero_stage={self.zero_stage}"
            fault = f"{stage} sends a layer's gradients when its backward is done"
            why = f"schedule={self.schedule!r} computes those of its weights later"
            raise ValueError(f"{fault}, and {why}: use zero_stage=1, or schedule='1f1b'")
        if self.shard_size is not None and self.zero_stage == 0:
            fault = f"shard_size={self.shard_size} shards nothing with zero_stage=0"
            raise ValueError(f"{fault}: use 1, 2 or 3")
        tp_size = self.tp_size if self.sequence_parallel else 1
        check_sequence_cut(self.seq_length, self.cp_size, self.zigzag, tp_size)
        if self.cp_size > 1 and self.dropout:
            fault = f"dropout={self.dropout} does not work with cp_size={self.cp_size}"
            raise ValueError(f"{fault}: use dropout=0")

    def _check_experts(self, shape: GPT) -> None:
        """Check what the layers with experts would, before any rank starts."""
        balance = self.balance  # which checks its own fields
        factor = self.capacity_factor
        if factor is not None and not (isinstance(factor, Real) and 0 < float(factor) < math.inf):
            fault = f"capacity_factor={factor!r} must be a number above 0"
            raise ValueError(f"{fault}: leave it out to drop no token")
        if shape.num_experts is None:
            for name in (*asdict(balance), *OF_EXPERTS):
                if getattr(self, name) != getattr(TrainConfig, name):
                    fault = f"{name}={getattr(self, name)!r} is for experts"
                    raise ValueError(f"{fault}: give num_experts too, or leave {name} out")
            return
        check = partial(check_divides, is_given=self.init_from is not None)
        check(self.ep_size, "num_experts", shape.num_experts, parts_name="ep_size")
        tp_name = "expert_tp_size" if self.expert_tp_size else "tp_size"
        tp_size = self.expert_tp_size or self.tp_size
        check(tp_size, "width of an expert", shape.expert_width, parts_name=tp_name)
        if width := shape.num_shared_experts * shape.expert_width:
            check(self.tp_size, "width of shared experts", width)

    def _check_vocabulary(self, shape: GPT) -> None:
        needed = self.make_dataset().vocab_size
        if needed > shape.vocab_size:
            has = f"the model in {self.init_from} {shape.vocab_size}"
            fault = f"the text has {needed} different tokens, {has}"
            way_out = "give tokens= made by its tokenizer, or put its tokenizer.json there"
            raise ValueError(f"{fault}: {way_out}")

    def layout(self, world_size: int) -> ParallelLayout:
        """Return the ranks on their two grids.

        Raises:
            ValueError: the sizes do not divide the world, or replicas cannot share the batch, or
                shard_size them.
        """
        names = ("tp_size", "pp_size", "cp_size", "order", "ep_size", "expert_tp_size")
        sizes = {name: getattr(self, name) for name in names}
        layout = ParallelLayout(world_size, **sizes)
        rows_at_once = layout.dp_size * self.micro_batch_size
        if self.batch_size % rows_at_once:
            product = f"dp_size={layout.dp_size} * micro_batch_size={self.micro_batch_size}"
            fault = f"{product} does not divide batch_size={self.batch_size}"
            fits = either(multiples_near(self.batch_size, rows_at_once))
            raise ValueError(f"{fault}: use batch_size {fits}")
        if self.shard_size is not None:
            layout.shard_groups(self.shard_size)
        return layout

    def resize_to(self, world_size: int) -> "TrainConfig":
        """Return this config; with ``fit_ranks``, one with the nearest sizes that fit, by the rule
        at that field.

        Tensor groups of a divisor stay inside the nodes that the old ones were in; with a larger pp
        no rank holds more layers than before. If no sizes fit, a ValueError names a smaller number
        of ranks for which some do.
        """
        if not self.fit_ranks:
            return self
        resized = self._resize_to(world_size)
        if resized is not None:
            return self if resized == self else resized
        way_out = "use a batch_size that micro_batch_size divides"
        for fewer in range(world_size - 1, 0, -1):
            if self._resize_to(fewer):
                way_out = f"use {counted(fewer, 'rank')}"
                break
        if self.stage_layers:
            way_out += f", or leave out stage_layers, which keep pp_size={self.pp_size}"
        fault = f"fit_ranks: no tp, cp and pp fit {counted(world_size, 'rank')}"
        raise ValueError(f"{fault}: {way_out}")

    def _resize_to(self, world_size: int) -> "TrainConfig | None":
        """Return the config with the nearest sizes that fit, or None."""

        def distance(pp_size: int) -> tuple[bool, int]:
            # Smaller ones last: with them, each rank would hold more layers
            return pp_size < self.pp_size, abs(pp_size - self.pp_size)

        expert_tp_sizes: list[int | None] = [None]
        if self.expert_tp_size:
            expert_tp_sizes = [*reversed(divisors(self.expert_tp_size))]
        candidates = {
            "tp_size": divisors(self.tp_size)[::-1],
            "cp_size": divisors(self.cp_size)[::-1],
            "ep_size": divisors(self.ep_size)[::-1],
            "expert_tp_size": expert_tp_sizes,
            "pp_size": sorted(divisors(world_size), key=distance),
            # Not smaller: each rank would hold more
            "shard_size": dict.fromkeys([self.shard_size, None]),
        }
        for sizes in product(*candidates.values()):
            with suppress(ValueError):
                resized = replace(self, **dict(zip(candidates, sizes)))
                resized.make_schedule(world_size)
                return resized
        return None

    def check_memory(self, ranks_here: int) -> None:
        """Raise a ValueError if the weights alone are more than this node's memory: to make them
        would take hours.
        """
        shape = self.shape
        experts = shape.num_moe_layers * (shape.num_experts or 0) * shape.num_expert_parameters
        expert_ranks = self.ep_size * (self.expert_tp_size or self.tp_size)
        parameters = (shape.num_parameters - experts) / self.tp_size + experts / expert_ranks
        weights = parameters * self.dtype.itemsize / self.pp_size * ranks_here
        memory = node_memory_bytes()
        if weights > memory:
            needed = f"the weights of {counted(ranks_here, 'rank')}, {weights / 1e9:,.0f} GB,"
            fault = f"{needed} are more than this node's {memory / 1e9:,.0f} GB of memory"
            way_out = "use a smaller model, or a larger tp_size, pp_size or ep_size over more nodes"
            raise ValueError(f"{fault}: {way_out}")

    def num_micro_batches(self, world_size: int) -> int:
        """Return m, how many micro-batches each pipeline takes in a step."""
        return self.batch_size // (self.layout(world_size).dp_size * self.micro_batch_size)

    def make_schedule(self, world_size: int) -> Schedule:
        """Return what each rank of a pipeline does in a step."""
        make = SCHEDULES[self.schedule]
        return make(self.pp_size, self.num_micro_batches(world_size), self.num_chunks)

    def make_dataset(self) -> InventedText | TokenFile:
        """Return what there is to learn."""
        if self.tokens is not None and self.vocab_size is not None:
            return TokenFile(self.tokens, self.seed, self.token_bits, self.vocab_size)
        if self.text is None or self.text == "invented":
            return InventedText(seed=self.seed)
        vocab_size = self.shape.vocab_size
        tokenizer = find_tokenizer(self.init_from, vocab_size) if self.init_from else None
        return TokenFile(self.text, self.seed, vocab_size=vocab_size, tokenizer=tokenizer)

    @property
    def layers_per_stage(self) -> tuple[int, ...]:
        """How many layers each stage of the pipeline has."""
        return split_layers(
            self.num_layers,
            self.pp_size * self._chunks_per_rank,
            self.stage_layers,
            self.first_stage_layers,
            self.last_stage_layers,
            self.account_for_embedding_in_pipeline_split,
            self.account_for_loss_in_pipeline_split,
        )

    @property
    def profiled_steps(self) -> range:
        """The numbers of the steps that are profiled."""
        if not self.profile_dir:
            return range(0)
        return range(self.profile_step_start, min(self.profile_step_end, self.steps + 1))

    @property
    def shape(self) -> GPT:
        """The model's shape; its vocabulary is that of the text or the tokens."""
        dataset = InventedText if self.text == "invented" else TokenFile
        values = self._values_of(GPT)
        values["vocab_size"] = self.vocab_size or dataset.vocab_size
        return GPT(**values)

    @property
    def balance(self) -> LoadBalancing:
        """How the loads of experts are kept even."""
        return LoadBalancing(**self._values_of(LoadBalancing))

    def _values_of(self, kind: Any) -> dict[str, Any]:
        """Return the values of the fields that another dataclass has too."""
        return {field.name: getattr(self, field.name) for field in fields(kind)}

    @property
    def dtype(self) -> torch.dtype:
        """The precision as a torch dtype."""
        return getattr(torch, self.precision)

    @property
    def lowest_learning_rate(self) -> float:
        """The learning rate after the last step."""
        return self.learning_rate / 10 if self.min_learning_rate is None else self.min_learning_rate

    @property
    def one_queue(self) -> bool:
        """Whether a GPU should start all kernels in the order in which they are launched
        (`labkit.device.prepare_gpu`).

        Fully sharded it should not: messages and products would wait for each other (so says the
        guide of Megatron-FSDP). Nor with a pipeline, whose receives are launched long before their
        messages come.
        """
        may_become_a_pipeline = self.pp_size > 1 or self.fit_ranks
        return self.tp_size > 1 and self.zero_stage == 0 and not may_become_a_pipeline

    @property
    def posts_receives(self) -> bool:
        """Whether a rank may post receives long before their messages come, as a pipeline does."""
        return self.pp_size > 1 or self.fit_ranks

    def learning_rate_at(self, step: int) -> float:
        """Return the rate of a step, counted from 0: it rises linearly, then falls along half a
        cosine.
        """
        if step < self.warmup_steps:
            return self.learning_rate * (step + 1) / self.warmup_steps
        done = (step - self.warmup_steps) / max(1, self.steps - self.warmup_steps)
        cosine = 0.5 * (1.0 + math.cos(math.pi * min(1.0, done)))
        return self.lowest_learning_rate + (self.learning_rate - self.lowest_learning_rate) * cosine


def node_memory_bytes() -> int:
    """Return how much memory this machine has."""
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
