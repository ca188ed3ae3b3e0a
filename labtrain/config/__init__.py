"""Holds everything that decides a training run in one object, the same in a notebook and on the
command line.

Each section has its own file, with its own checks. A field's comment, beside or above it, is what
``--help`` says of the option.
"""

from dataclasses import asdict, dataclass, replace

from labkit.fields import check_fields
from labkit.parallel_config import ParallelConfig
from labkit.shape import GPT
from labkit.sizes import counted
from labtrain.config.data import DataOptions
from labtrain.config.experts import ExpertOptions
from labtrain.config.parallel import ParallelOptions, nearest_fit
from labtrain.config.run import RunOptions
from labtrain.config.values import set_value
from labtrain.memory_estimate import node_memory_bytes

MAY_BE_0 = ("warmup_steps", "eval_interval", "save_interval", "keep", "num_shared_experts")


@dataclass(frozen=True)
class TrainConfig(RunOptions, ParallelOptions, ExpertOptions, DataOptions):
    """Train a GPT with data, tensor, context, pipeline and expert parallelism.

    The data-parallel size follows from the number of ranks: world size / (tp * cp * pp).
    """

    def __post_init__(self):
        if self.init_from is not None:
            self._take_shape(self.init_from)
        if self.text is None:
            if self.init_from is not None and self.tokens is None and self.check is None:
                fault = f"init_from={self.init_from!r} has nothing to learn"
                raise ValueError(f"{fault}: name a text, or a file of tokens")
            set_value(self, "text", "invented")
        model = self.shape  # which checks its own fields
        self._check_seed()
        check_fields(self, TrainConfig, MAY_BE_0, but=("seed",))
        self._check_dropout()
        self._check_rates()
        self._check_dataset()
        self._check_run()
        self._check_parallel(model)
        self._check_balance(model)
        self._check_vocabulary(model)

    def _check_parallel(self, model: GPT) -> None:
        ParallelConfig.__post_init__(self)
        self.check_model(model, is_given=self.init_from is not None)
        self.check_recompute(fused_attention=True)
        if self.cp_size > 1 and self.dropout:
            fault = f"dropout={self.dropout} does not work with cp_size={self.cp_size}"
            raise ValueError(f"{fault}: use dropout=0")

    def resize_to(self, world_size: int) -> "TrainConfig":
        """Return this config; with ``fit_ranks``, one with the nearest sizes that fit, by the rule
        at that field.

        Tensor groups of a divisor stay inside the nodes that the old ones were in; with a larger pp
        no rank holds more layers than before. If no sizes fit, a ValueError names a smaller number
        of ranks for which some do.
        """
        if not self.fit_ranks:
            return self
        parallel = self.parallel
        model = self.shape
        resized = nearest_fit(parallel, model, world_size)
        if resized == parallel:
            return self
        if resized is not None:
            return replace(self, **asdict(resized))
        way_out = "use a batch_size that micro_batch_size divides"
        for fewer in range(world_size - 1, 0, -1):
            if nearest_fit(parallel, model, fewer):
                way_out = f"use {counted(fewer, 'rank')}"
                break
        if self.stage_layers:
            way_out += f", or leave out stage_layers, which keep pp_size={self.pp_size}"
        fault = f"fit_ranks: no tp, cp and pp fit {counted(world_size, 'rank')}"
        raise ValueError(f"{fault}: {way_out}")

    def check_memory(self, ranks_here: int) -> None:
        """Raise a ValueError if the weights alone are more than this node's memory: to make them
        would take hours.
        """
        model = self.shape
        experts = model.num_moe_layers * (model.num_experts or 0) * model.num_expert_parameters
        parameters = (model.num_parameters - experts) / self.tp_size
        parameters += experts / (self.ep_size * self.expert_shards)
        weights = parameters * self.dtype.itemsize / self.pp_size * ranks_here
        memory = node_memory_bytes()
        if weights > memory:
            needed = f"the weights of {counted(ranks_here, 'rank')}, {weights / 1e9:,.0f} GB,"
            fault = f"{needed} are more than this node's {memory / 1e9:,.0f} GB of memory"
            way_out = "use a smaller model, or a larger tp_size, pp_size or ep_size over more nodes"
            raise ValueError(f"{fault}: {way_out}")
