"""Options of the layout: labkit's, and what to do when the ranks that are there do not fit them."""

from contextlib import suppress
from dataclasses import dataclass, fields, replace
from itertools import product

from labkit.parallel_config import ParallelConfig
from labkit.shape import GPT
from labkit.sizes import Misfit, divisors


@dataclass(frozen=True)
class ParallelOptions(ParallelConfig):
    """How a batch and a model are divided, with the sizes of a small run."""

    batch_size: int = 16  # Sequences per step, over all replicas.
    micro_batch_size: int = 4  # Sequences that a rank computes at once.
    # Where these sizes do not fit the ranks that are there, as after a node has died, use the
    # nearest that do: tp, then cp, ep and expert_tp keep their largest divisors that fit; pp
    # becomes the next larger size that fits, or smaller.
    fit_ranks: bool = False

    @property
    def parallel(self) -> ParallelConfig:
        """How the model lies over ranks, without the other options."""
        names = [field.name for field in fields(ParallelConfig)]
        return ParallelConfig(**{name: getattr(self, name) for name in names})

    @property
    def one_queue(self) -> bool:
        """Whether a GPU should start all kernels in the order in which they are launched
        (`labkit.device.prepare_gpu`).

        Fully sharded it should not: messages and products would wait for each other (so says the
        guide of Megatron-FSDP). Nor with a pipeline, whose receives are launched long before their
        messages come.
        """
        return self.tp_size > 1 and self.zero_stage == 0 and not self.posts_receives

    @property
    def posts_receives(self) -> bool:
        """Whether a rank may post receives long before their messages come, as a pipeline does."""
        return self.pp_size > 1 or self.fit_ranks


def nearest_fit(config: ParallelConfig, model: GPT, world_size: int) -> ParallelConfig | None:
    """Return the config with the nearest sizes that fit these ranks, or None."""

    def distance(pp_size: int) -> tuple[bool, int]:
        # Smaller ones last: with them, each rank would hold more layers
        return pp_size < config.pp_size, abs(pp_size - config.pp_size)

    expert_tp_sizes: list[int | None] = [None]
    if config.expert_tp_size:
        expert_tp_sizes = [*reversed(divisors(config.expert_tp_size))]
    candidates = {
        "tp_size": divisors(config.tp_size)[::-1],
        "cp_size": divisors(config.cp_size)[::-1],
        "ep_size": divisors(config.ep_size)[::-1],
        "expert_tp_size": expert_tp_sizes,
        "pp_size": sorted(divisors(world_size), key=distance),
        # Not smaller: each rank would hold more
        "shard_size": dict.fromkeys([config.shard_size, None]),
    }
    for sizes in product(*candidates.values()):
        resized = replace(config, **dict(zip(candidates, sizes)))
        with suppress(Misfit):
            resized.check(model, world_size)
            return resized
    return None
