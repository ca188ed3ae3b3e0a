"""Choose a model, a cluster and a plan: a GPU's memory against its limit, the time of a step, its traffic, and days."""

import re
from dataclasses import replace
from functools import lru_cache, partial
from typing import Any, ClassVar

from course.explorers.base import Explorer, Parts
from course.explorers.control import checkbox, menu, slider
from course.pictures.plans import PP_SIZES, TP_SIZES, draw_plans
from course.pictures.sizing import HALF, draw_memory, draw_step_time, together
from course.pictures.style import AXIS_NAME, three_digits
from course.sizing import (
    DGX_A100,
    FITTED,
    RECOMPUTE,
    Candidate,
    Found,
    Hardware,
    Plan,
    StepTime,
    fullest,
    goodput,
    how_sure,
    plan_traffic,
    search,
    step_time,
)
from course.sizing.plan import uneven_stages
from course.sizing.runs import LLAMA_8B, LLAMA_70B, LLAMA_405B
from course.sizing.runs import MODELS as PUBLISHED
from course.sizing.runs_of_2021 import table_1
from labkit.parallel_config import V_SHAPED
from labkit.shape import GPT

MODELS = {run.model: run.plan.model for run in table_1()}
MODELS["GPT-3, 175 billion"] = GPT(96, 12288, 2048, 51200, 96)
MODELS |= {"Llama 3, 8 billion": LLAMA_8B, "Llama 3, 70 billion": LLAMA_70B, "Llama 3, 405 billion": LLAMA_405B}
MODELS["Llama 3, 70 billion, s = 131072"] = replace(LLAMA_70B, seq_length=131072)
MODELS |= {name: model for name, model in PUBLISHED.items() if model.num_experts}
CLUSTERS = {DGX_A100.name: DGX_A100, "DGX A100 80GB, newer software": FITTED["A100"]}
CLUSTERS |= {hardware.name: hardware for kind, hardware in FITTED.items() if kind != "A100"}
SEQUENCES = {"as published": None} | {f"{2**power} k": 1024 * 2**power for power in range(1, 11)}
WORLD_SIZES = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 1536, 1920, 2048, 2520, 3072, 4096, 8192, 16384)
BATCH_SIZES = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 1536, 1792, 2048, 2160, 2304, 2520, 3072, 4096, 6144, 8192)
CHUNKS = 1, 2, 3, 4, 5, 6, 7, 8
EP_SIZES, ETP_SIZES = (1, 2, 4, 8, 16, 32, 64, 128, 256), (1, 2, 4, 8)
BILLION_TOKENS = (10, 30, 100, 300, 450, 1000, 2000, 5000, 15000)
ONE_F_ONE_B = "1F1B"
PLAINLY = (
    "world_size",
    "batch_size",
    "tp_size",
    "pp_size",
    "micro_batch_size",
    "num_chunks",
    "recompute",
    "cp_size",
    "zero_stage",
)
FAILURES = {"not counted": 0.0, "2.3, as on RSC-2": 2.34e-3, "3.8, as for Llama 3": 3.8e-3, "6.5, as on RSC-1": 6.5e-3}
"""Of 1,000 nodes, a day. Sources: arXiv 2410.21680, RSC-1 and RSC-2 are Meta's; arXiv 2407.21783, section 3.3.4."""
SAVE_SECONDS, RESTART_SECONDS = 30.0, 600.0  # what goodput takes a save and a restart to stop the job for


class sizing_explorer(Explorer):
    """Show a plan, with a control for everything that decides it: its days beside those of others, memory and time.

    With fused attention, SwiGLU is one kernel, too.

    ``model`` may be a GPT of your own, and ``cluster`` may be `measured_hardware()`. ``shown`` is the plan. A click on
    a cell of the days chooses its t and p, one on the line below them the fastest plan that a search finds.
    """

    table = (
        ("model", menu, "model", MODELS, "GPT-3, 175 billion"),
        ("cluster", menu, "cluster", CLUSTERS, DGX_A100.name),
        ("world_size", slider, "GPUs n", WORLD_SIZES, 1024),
        ("batch_size", slider, "batch B", BATCH_SIZES, 1536),
        ("tp_size", slider, "tensor t", TP_SIZES, 8),
        ("pp_size", slider, "pipeline p", PP_SIZES, 8),
        ("micro_batch_size", slider, "micro-batch b", TP_SIZES, 1),
        ("num_chunks", slider, "chunks v", CHUNKS, 1),
        ("recompute", menu, "recompute", RECOMPUTE, "full"),
        ("billion_tokens", slider, "tokens, 10⁹", BILLION_TOKENS, 300),
        ("zero_stage", menu, "ZeRO stage", (0, 1, 2, 3), 0),
        ("schedule", menu, "schedule", (ONE_F_ONE_B, *V_SHAPED), ONE_F_ONE_B),
        ("failures", menu, "failures", FAILURES, "not counted"),
        ("ep_size", slider, "expert ep", EP_SIZES, 1),
        ("expert_tp_size", slider, "expert etp", ETP_SIZES, 1),
        ("cp_size", slider, "context c", TP_SIZES, 1),
        ("sequence_parallel", checkbox, "sequence parallel", False),
        ("fused_attention", checkbox, "fused attention", False),
        ("uneven", checkbox, "uneven stages", False),
        ("fp8", checkbox, "fp8", False),
        ("sequence", menu, "sequence s", SEQUENCES, "as published"),
    )
    groups: ClassVar = {
        "Model": ("model", "sequence", "batch_size", "billion_tokens"),
        "Cluster": ("cluster", "world_size", "failures"),
        "Plan": (
            "tp_size", "cp_size", "pp_size", "num_chunks", "schedule", "uneven", "ep_size", "expert_tp_size",
            "micro_batch_size", "recompute", "zero_stage", "sequence_parallel", "fused_attention", "fp8",
        ),
    }  # fmt: skip
    keeps = "model", "sequence", "cluster", "billion_tokens", "failures", "fp8"

    def __repr__(self) -> str:
        """Return the call that makes this explorer, with what differs from its defaults."""
        defaults = {name: usual for name, *_, usual in self.table}
        changed = {name: value for name, value in self.choice._asdict().items() if value != defaults[name]}
        return f"sizing_explorer({', '.join(f'{name}={value!r}' for name, value in changed.items())})"

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
        """Take the t and p of the cell that was clicked, or the plan that the search found."""
        if cell := re.search(r"\bt(\d+)\.p(\d+)$", key):
            self.choose(tp_size=int(cell[1]), pp_size=int(cell[2]))
        elif key.endswith("best") and (best := self._best(self.choice)):
            found = dict(best.choice) | {"schedule": best.choice["schedule"] or ONE_F_ONE_B}
            self.choose(**{name: value for name, value in found.items() if value is not None})

    def _model(self, choice) -> GPT:
        """Return the model that is chosen, with the sequence that is chosen."""
        model, seq_length = self.models[choice.model], SEQUENCES[choice.sequence]
        return model if seq_length is None else _with_sequence(model, seq_length)

    def _fit(self, choice) -> Plan:
        p, v, options, model = choice.pp_size, choice.num_chunks, self._options(choice), self._model(choice)
        split = uneven_stages(model.num_layers, p * v) if choice.uneven else None
        if model.num_experts:
            options |= dict(ep_size=choice.ep_size, expert_tp_size=choice.expert_tp_size)
        named = {name: getattr(choice, name) for name in (*PLAINLY, "zero_stage")}
        schedule = None if choice.schedule == ONE_F_ONE_B else choice.schedule
        return Plan(model, **named, schedule=schedule, stage_layers=split, **options)

    def _options(self, choice) -> dict[str, Any]:
        """Return what a search does not change."""
        fp8 = choice.fp8 and self.clusters[choice.cluster].fp8_peak_flops is not None
        kept = {name: getattr(choice, name) for name in ("sequence_parallel", "fused_attention")}
        return kept | dict(precision="fp8" if fp8 else "bf16", fused_mlp=choice.fused_attention)

    def _best(self, choice) -> Candidate | None:
        """Return the fastest plan for this model and cluster, with ZeRO's stage and c as they are."""
        model, hardware = self._model(choice), self.clusters[choice.cluster]
        lists: dict[str, Any] = dict(tp_size=TP_SIZES, pp_size=PP_SIZES, micro_batch_size=TP_SIZES[:4])
        lists |= dict(num_chunks=CHUNKS, cp_size=choice.cp_size, zero_stage=choice.zero_stage)
        if model.num_experts:
            lists |= dict(ep_size=EP_SIZES, expert_tp_size=choice.expert_tp_size)
        asked = lists | self._options(choice) | dict(memory_share=1.0, uneven=choice.uneven)
        found = _searched(model, choice.world_size, choice.batch_size, hardware, *map(_hashable, asked.items()))
        return found.best if found.fitting else None

    def _show(self, fitting, moved: str = "") -> None:
        has_experts = self.models[fitting.model].num_experts is not None
        for name in ("ep_size", "expert_tp_size"):
            self.controls[name].disabled = not has_experts
        self.controls["fp8"].disabled = self.clusters[fitting.cluster].fp8_peak_flops is None
        for name in ("num_chunks", "schedule", "uneven"):
            self.controls[name].disabled = fitting.pp_size == 1
        for name, control in self.controls.items():
            if control.look == "slider":
                control.leads_to = partial(self._leads_to, name)
        super()._show(fitting, moved)

    def _parts(self) -> Parts:
        choice, plan, hardware = self.choice, self.shown, self.clusters[self.choice.cluster]
        estimate, num_tokens, limit = step_time(plan, hardware), choice.billion_tokens * 1e9, hardware.memory_bytes
        before = self._fit(self.before)
        was = step_time(before, self.clusters[self.before.cluster])
        bars = draw_memory({"": plan}, hardware, before, HALF), draw_step_time({"a step": estimate}, was, HALF)
        scenes = [draw_plans(plan, hardware, num_tokens, self._best(choice)), *bars]
        days, rate = estimate.days(num_tokens), FAILURES[choice.failures]
        picture = together(f"{hardware.name}, estimated", scenes, [*_facts(estimate), *_failures(plan, days, rate)])
        sizes = self._product(plan)
        if plan.model.num_experts:
            sizes += f", of experts etp · ep · edp = {plan.etp_size} · {plan.ep_size} · {plan.expert_dp_size}"
        if fullest(plan).total > limit:
            return Parts([picture], f"<b>This does not fit.</b> {sizes}: {self._way_out(limit)}", warns=True)
        lost = "".join(f" ({words})" for _, words in _failures(plan, days, rate))
        says = (
            f"{sizes}, m = {plan.num_micro_batches} micro-batches. <b>{three_digits(days)} days"
            f"</b> for {num_tokens / 1e9:,g} billion tokens{lost}, {estimate.flops_per_gpu / 1e12:.0f} teraFLOP/s per "
            f"GPU: {estimate.hardware_flops_utilisation:.0%} of the {plan.precision} peak, "
            f"{estimate.model_flops_utilisation:.0%} without what is recomputed. The estimate: "
            f"{how_sure(plan, hardware)}. To choose a different t and p, click its cell."
        )
        return Parts([picture], says)

    def _product(self, plan: Plan) -> str:
        """Return the sizes of the axes, which can be dragged."""
        letters = ["p", "t", *["c"] * (plan.cp_size > 1)]
        numbers = [self.controls[f"{letter}p_size"].dragged_by(getattr(plan, f"{letter}p_size")) for letter in letters]
        numbers.append(self.controls["world_size"].dragged_by(plan.dp_size, "data d"))
        return f"{' · '.join([*letters, 'd'])} = {' · '.join(numbers)}"

    def _leads_to(self, name: str, value: Any) -> str:
        """Say what a different value of a control does to the days and to the fullest GPU's memory."""
        asked = self.choice._replace(**{name: value})
        text = self.controls[name].word(value)
        if self._misfit(asked):
            return f"{text}: {self._why(asked)}"
        plan, hardware = self._fit(asked), self.clusters[asked.cluster]
        days = step_time(plan, hardware).days(asked.billion_tokens * 1e9)
        held = fullest(plan).total
        too_much = ", too much" if held > hardware.memory_bytes else ""
        return f"{text}: {three_digits(days)} days, {three_digits(held / 1e9)} GB{too_much}"

    def _way_out(self, limit: float) -> str:
        """Say how far the plan is from fitting into memory, and the nearest that does."""
        too_large = lambda choice: self._misfit(choice) or fullest(self._fit(choice)).total > limit  # noqa: E731
        near = self._nearest(self.choice, too_large, keeps=("world_size", "batch_size"))
        changes = " and ".join(f"{name} = {new}" for name, _, new in self._moves(self.choice, near))
        way_out = f"The nearest plan that fits has {changes}" if changes else "Use more GPUs"
        return f"{fullest(self.shown).total / 1e9:.0f} GB for a GPU of {limit / 1e9:.0f} GB. {way_out}."


def _failures(plan: Plan, days: float, rate: float) -> list[tuple[str, str]]:
    """Return the days with the failures of nodes, and how often to save, in words; nothing if none are counted."""
    if not rate:
        return []
    kept = goodput(plan.world_size, rate, SAVE_SECONDS, RESTART_SECONDS)
    every, between = kept.interval_seconds / 60, kept.failure_seconds / 3600
    words = f"{three_digits(days / kept.share)} with a failure every {three_digits(between)} hours, of which "
    return [("failures", f"{words}{kept.share:.0%} are new work, if it saves every {three_digits(every)} minutes")]


@lru_cache(maxsize=64)
def _with_sequence(model: GPT, seq_length: int) -> GPT:
    """Return the model with a sequence of its own: one object, for what `course.sizing.remembered` remembers."""
    return replace(model, seq_length=seq_length)


def _hashable(item: tuple[str, Any]) -> tuple[str, Any]:
    name, value = item
    return name, tuple(value) if isinstance(value, list) else value


@lru_cache(maxsize=16)
def _searched(model: GPT, world_size: int, batch_size: int, hardware: Hardware, *options: tuple[str, Any]) -> Found:
    return search(model, world_size, batch_size, hardware, **dict(options))


def _facts(estimate: StepTime) -> list[tuple[str, str]]:
    """Return what the bars do not show: how large the bubble is, and the traffic."""
    plan, hardware = estimate.plan, estimate.hardware
    idle = f"{three_digits(plan.bubble_over_ideal)} idle / ideal, {estimate.bubble / estimate.total:.1%} of the step"
    facts = [("bubble", idle), ("published runs", how_sure(plan, hardware))]
    if plan.zero_stage > 1 or plan.schedule:
        return [*facts, ("traffic", "counted for ZeRO stages 0 and 1 without a V only")]
    for axis, traffic in plan_traffic(plan, hardware.gpus_per_node).items():
        each, leaves = (three_digits(value / plan.world_size / 1e9) for value in traffic)
        what = f"{each} GB a step from each GPU, {leaves} GB of it to another node"
        facts.append((f"{AXIS_NAME[axis]}-parallel traffic", what))
    return facts
