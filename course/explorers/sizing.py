"""Choose a model, a cluster and a plan: a GPU's memory against its limit, the time of a step, its traffic, and days."""

import re
from dataclasses import replace
from typing import Any, ClassVar

from course.explorers.base import Explorer, Parts
from course.explorers.control import checkbox, menu, slider
from course.pictures.plans import PP_SIZES, TP_SIZES, draw_plans
from course.pictures.sizing import HALF, draw_memory, draw_step_time, together
from course.pictures.style import AXIS_NAME, three_digits
from course.sizing import DGX_A100, DGX_H100, RECOMPUTE, Hardware, Plan, StepTime, fullest, plan_traffic, step_time
from course.sizing.runs_of_2021 import table_1
from labkit.shape import GPT

MODELS = {f"{row.billions:g} billion": row.plan.model for row in table_1()}
MODELS["GPT-3, 175 billion"] = GPT(96, 12288, 2048, 51200, 96)
TODAY: dict[str, Any] = dict(norm="rmsnorm", mlp="swiglu", positions="rope", bias=False, tied=False, num_query_groups=8)
MODELS["Llama 3, 70 billion"] = GPT(80, 8192, 8192, 128256, 64, ffn_hidden_size=28672, **TODAY)
MODELS["Llama 3, 70 billion, s = 131072"] = replace(MODELS["Llama 3, 70 billion"], seq_length=131072)
CLUSTERS = {hardware.name: hardware for hardware in (DGX_A100, DGX_H100)}
WORLD_SIZES = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 1536, 1920, 2048, 2520, 3072, 4096, 8192)
BATCH_SIZES = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 1536, 1792, 2048, 2160, 2304, 2520, 3072, 4096, 6144)


class sizing_explorer(Explorer):
    """Show a plan, with a control for everything that decides it: its days beside those of others, memory and time.

    ``model`` may be a GPT of your own, and ``cluster`` may be `measured_hardware()`. ``shown`` is the plan. A click on
    a cell of the days chooses its t and p.
    """

    table = (
        ("model", menu, "model", MODELS, "GPT-3, 175 billion"),
        ("cluster", menu, "cluster", CLUSTERS, DGX_A100.name),
        ("world_size", slider, "GPUs n", WORLD_SIZES, 1024),
        ("batch_size", slider, "batch B", BATCH_SIZES, 1536),
        ("tp_size", slider, "tensor t", TP_SIZES, 8),
        ("pp_size", slider, "pipeline p", PP_SIZES, 8),
        ("micro_batch_size", slider, "micro-batch b", TP_SIZES, 1),
        ("num_chunks", slider, "chunks v", (1, 2, 3, 4, 6, 8), 1),
        ("recompute", menu, "recompute", RECOMPUTE, "full"),
        ("sequence_parallel", checkbox, "sequence parallel", False),
        ("sharded_optimizer", checkbox, "sharded optimizer", False),
        ("fused_attention", checkbox, "fused attention", False),
        ("cp_size", slider, "context c", TP_SIZES, 1),
        ("billion_tokens", slider, "tokens, 10⁹", (10, 30, 100, 300, 450, 1000, 2000), 300),
    )
    groups: ClassVar = {
        "Model": ("model", "batch_size", "billion_tokens"),
        "Cluster": ("cluster", "world_size"),
        "Plan": (
            "tp_size", "pp_size", "micro_batch_size", "num_chunks", "cp_size", "recompute", "sequence_parallel",
            "sharded_optimizer", "fused_attention",
        ),
    }  # fmt: skip
    keeps = "model", "cluster", "billion_tokens"

    def _in_table(self, model: str | GPT, cluster: str | Hardware, **rest: Any) -> list[Any]:
        """Give a model or a cluster of the reader's own a name, and keep it by that."""
        self.models, self.clusters = dict(MODELS), dict(CLUSTERS)
        if isinstance(model, GPT):
            own, model = model, f"yours, {three_digits(model.num_parameters / 1e9)} billion"
            self.models[model] = own
        if isinstance(cluster, Hardware):
            self.clusters[cluster.name], cluster = cluster, cluster.name
        for what, name, known in (("model", model, self.models), ("cluster", cluster, self.clusters)):
            if name not in known:
                raise ValueError(f"{what}={name!r} is unknown: use one of yours, or {', '.join(known)}")
        return [model, cluster, *rest.values()]

    def click(self, key: str) -> None:
        """Take the t and p of the cell that was clicked."""
        if cell := re.search(r"\bt(\d+)\.p(\d+)$", key):
            self.choose(tp_size=int(cell[1]), pp_size=int(cell[2]))

    def _fit(self, choice) -> Plan:
        context = dict(fused_attention=choice.fused_attention, cp_size=choice.cp_size)
        return Plan(self.models[choice.model], *choice[2:10], zero_stage=int(choice.sharded_optimizer), **context)

    def _parts(self) -> Parts:
        choice, plan, hardware = self.choice, self.shown, self.clusters[self.choice.cluster]
        estimate, num_tokens, limit = step_time(plan, hardware), choice.billion_tokens * 1e9, hardware.memory_bytes
        before = self._fit(self.before)
        was = step_time(before, self.clusters[self.before.cluster])
        bars = draw_memory({"": plan}, hardware, before, HALF), draw_step_time({"a step": estimate}, was, HALF)
        scenes = [draw_plans(plan, hardware, num_tokens), *bars]
        picture = together(f"{hardware.name}, estimated", scenes, _facts(estimate))
        c = f" · {plan.cp_size}" if plan.cp_size > 1 else ""
        sizes = f"p · t{c and ' · c'} · d = {plan.pp_size} · {plan.tp_size}{c} · {plan.dp_size}"
        if fullest(plan).total > limit:
            return Parts([picture], f"<b>This does not fit.</b> {sizes}: {self._way_out(limit)}", warns=True)
        says = (
            f"{sizes}, m = {plan.num_micro_batches} micro-batches. <b>{three_digits(estimate.days(num_tokens))} days"
            f"</b> for {num_tokens / 1e9:g} billion tokens, {estimate.flops_per_gpu / 1e12:.0f} teraFLOP/s per GPU: "
            f"{estimate.hardware_flops_utilisation:.0%} of the peak, {estimate.model_flops_utilisation:.0%} without "
            "what is recomputed. To choose a different t and p, click its cell."
        )
        return Parts([picture], says)

    def _way_out(self, limit: float) -> str:
        """Say how far the plan is from fitting into memory, and the nearest that does."""
        too_large = lambda choice: self._misfit(choice) or fullest(self._fit(choice)).total > limit  # noqa: E731
        near = self._nearest(self.choice, too_large, keeps=("world_size", "batch_size"))
        changes = " and ".join(f"{name} = {new}" for name, _, new in self._moves(self.choice, near))
        way_out = f"The nearest plan that fits has {changes}" if changes else "Use more GPUs"
        return f"{fullest(self.shown).total / 1e9:.0f} GB for a GPU of {limit / 1e9:.0f} GB. {way_out}."


def _facts(estimate: StepTime) -> list[tuple[str, str]]:
    """Return what the bars do not show: how large the bubble is, and the traffic."""
    plan, hardware = estimate.plan, estimate.hardware
    idle = f"{three_digits(plan.bubble_over_ideal)} idle / ideal, {estimate.bubble / estimate.total:.1%} of the step"
    facts = [("bubble", idle)]
    for axis, traffic in plan_traffic(plan, hardware.gpus_per_node).items():
        each, leaves = (three_digits(value / plan.world_size / 1e9) for value in traffic)
        what = f"{each} GB a step from each GPU, {leaves} GB of it to another node"
        facts.append((f"{AXIS_NAME[axis]}-parallel traffic", what))
    return facts
