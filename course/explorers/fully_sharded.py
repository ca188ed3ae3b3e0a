"""Choose a model and a cluster: what each ZeRO stage holds and sends there, and whether its messages hide."""

from dataclasses import replace

from course.explorers.base import Explorer, Parts
from course.explorers.control import menu, slider
from course.explorers.sizing import MODELS
from course.pictures.sizing import draw_held
from course.pictures.style import bytes_text, three_digits
from course.sizing import DGX_A100, DGX_H100, Plan, step_time
from course.sizing.fully_sharded import Sharding, sharding
from course.table import Table

DENSE = {name: model for name, model in MODELS.items() if not model.num_experts}
SLOW = replace(DGX_H100, name="8 H100, 100 Gb/s a node", network_bytes_per_second=100e9 / 8 / 8)
CLUSTERS = {hardware.name: hardware for hardware in (DGX_H100, DGX_A100, SLOW)}
POWERS = [2**power for power in range(1, 11)]


class stage_explorer(Explorer):
    """Show all stages of ZeRO for a model on GPUs that are all replicas; ``shown`` is the plan of stage 3.

    ``num_micro_batches`` of ``micro_batch_size`` sequences are what each GPU computes in a step. In the last row,
    ``shard_size`` neighbours share a copy.
    """

    table = (
        ("model", menu, "model", DENSE, "Llama 3, 8 billion"),
        ("cluster", menu, "cluster", CLUSTERS, DGX_H100.name),
        ("world_size", slider, "GPUs n", POWERS, 64),
        ("micro_batch_size", slider, "micro-batch b", (1, 2, 4, 8), 1),
        ("num_micro_batches", slider, "micro-batches m", (1, 2, 4, 8, 16), 1),
        ("shard_size", slider, "hybrid: shards of", POWERS, 8),
        ("recompute", menu, "recompute", ("none", "full"), "none"),
    )
    keeps = "model", "cluster"

    def _fit(self, choice) -> Plan:
        n, b, batch = choice.world_size, choice.micro_batch_size, choice.num_micro_batches * choice.micro_batch_size
        options = dict(micro_batch_size=b, recompute=choice.recompute, fused_attention=True, zero_stage=3)
        plan = Plan(DENSE[choice.model], n, n * batch, **options)
        plan.layout.check_shard_size(choice.shard_size)
        return plan

    def _parts(self) -> Parts:
        plan, hardware = self.shown, CLUSTERS[self.choice.cluster]
        found = {f"stage {stage}": sharding(replace(plan, zero_stage=stage), hardware) for stage in range(4)}
        found[f"stage 3, shards of {self.choice.shard_size}"] = sharding(plan, hardware, self.choice.shard_size)
        parts = step_time(replace(plan, zero_stage=1), hardware).parts
        computing = sum(seconds for part, seconds in parts.items() if part != "data_parallel")
        fit = [name for name, each in found.items() if each.memory.total <= hardware.memory_bytes]
        best = min(fit, key=lambda name: found[name].waiting_seconds, default=None)
        says = f"A step computes for about {three_digits(computing)} s. "
        says += f"Of what fits, <b>{best}</b> waits least." if best else "<b>Nothing fits.</b>"
        heads = "way", "sent by a GPU", "to other nodes", "messages", "not hidden", "layers hide theirs"
        rows = [[name, *_facts(each, computing)] for name, each in found.items()]
        caption = "Estimated, for a step. A layer's messages hide beside its neighbour; the embedding's do not."
        scene = draw_held({name: each.memory for name, each in found.items()}, hardware)
        return Parts([scene], says, Table(heads, rows, caption), warns=best is None)


def _facts(found: Sharding, computing_seconds: float) -> list[str]:
    sizes = found.sent_bytes, found.leaving_bytes
    seconds = [f"{three_digits(each)} s" for each in (found.message_seconds, found.waiting_seconds)]
    share = f" ({found.waiting_seconds / computing_seconds:.0%} more)"
    return [*map(bytes_text, sizes), seconds[0], seconds[1] + share, "yes" if found.hides else "no"]
