"""Choose a model, a cluster and a plan: a GPU's memory against its limit, the time of a step, its traffic, and days."""

import re
from collections import namedtuple
from collections.abc import Mapping

from course.explorers.base import Explorer, nearest_that_fits, says_html
from course.explorers.choice import checkbox, menu, slider
from course.pictures.plans import PP_SIZES, TP_SIZES, draw_plans
from course.pictures.scene import Scene
from course.pictures.sizing import below, draw_memory, draw_step_time
from course.pictures.style import AXIS_NAME, three_digits
from course.sizing import (
    DGX_A100,
    DGX_H100,
    RECOMPUTE,
    Hardware,
    Plan,
    StepTime,
    fullest,
    plan_traffic,
    step_time,
    table_1,
)
from labkit.shape import GPT

MODELS = {f"{row.billions:g} billion": row.plan.model for row in table_1()}
MODELS["GPT-3, 175 billion"] = GPT(96, 12288, 2048, 51200, 96)
CLUSTERS = {hardware.name: hardware for hardware in (DGX_A100, DGX_H100)}
WORLD_SIZES = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 1536, 1920, 2048, 2520, 3072, 4096, 8192)
BATCH_SIZES = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 1536, 1792, 2048, 2160, 2304, 2520, 3072, 4096, 6144)
TASK = "model", "cluster", "billion_tokens"
REST = "micro_batch_size", "num_chunks", "recompute", "sequence_parallel", "zero_stage"
"""What of a plan is the same for every t and p in the picture."""


class Choice(
    namedtuple(
        "Choice",
        "model cluster world_size batch_size tp_size pp_size micro_batch_size num_chunks recompute sequence_parallel "
        "sharded_optimizer billion_tokens",
    )
):
    """What the controls say; it need not fit."""

    def plan(self, models: Mapping[str, GPT] = MODELS) -> Plan:
        """Return the plan of these sizes; ValueError if they do not fit together."""
        return Plan(models[self.model], *self[2:10], zero_stage=int(self.sharded_optimizer))


def sizing_explorer(
    model: str | GPT = "GPT-3, 175 billion",
    cluster: str | Hardware = DGX_A100.name,
    world_size: int = 1024,
    batch_size: int = 1536,
    tp_size: int = 8,
    pp_size: int = 8,
    micro_batch_size: int = 1,
    num_chunks: int = 1,
    recompute: str = "full",
    sequence_parallel: bool = False,
    sharded_optimizer: bool = False,
    billion_tokens: int = 300,
) -> "SizingExplorer":
    """Show a plan, with a control for everything that decides it.

    ``model`` may be a GPT of your own, and ``cluster`` may be `measured_hardware()`.

    Raises:
        ValueError: a name is unknown, or the start does not fit together.
    """
    given, models, clusters = locals(), dict(MODELS), dict(CLUSTERS)
    if isinstance(model, GPT):
        given["model"] = f"yours, {three_digits(model.num_parameters / 1e9)} billion"
        models[given["model"]] = model
    if isinstance(cluster, Hardware):
        clusters[cluster.name], given["cluster"] = cluster, cluster.name
    for what, known, own in (("model", models, "a GPT"), ("cluster", clusters, "a Hardware")):
        if given[what] not in known:
            raise ValueError(f"{what}={given[what]!r} is unknown: use {own} of yours, or {', '.join(known)}")
    return SizingExplorer(Choice(**given), models, clusters)


class SizingExplorer(Explorer):
    """Controls, what they come to, the days of other plans, memory and time; ``shown`` is a plan.

    A click on a cell of the days chooses its t and p.
    """

    function, choice_type = "sizing_explorer", Choice

    def __init__(self, choice: Choice, models: Mapping[str, GPT], clusters: Mapping[str, Hardware]):
        self.models, self.clusters = models, clusters
        self.model = menu("model", list(models), choice.model)
        self.cluster = menu("cluster", list(clusters), choice.cluster)
        self.world_size = slider("GPUs n", WORLD_SIZES, choice.world_size)
        self.batch_size = slider("batch B", BATCH_SIZES, choice.batch_size)
        self.tp_size = slider("tensor t", TP_SIZES, choice.tp_size)
        self.pp_size = slider("pipeline p", PP_SIZES, choice.pp_size)
        self.micro_batch_size = slider("micro-batch b", TP_SIZES, choice.micro_batch_size)
        self.num_chunks = slider("chunks v", (1, 2, 3, 4, 6, 8), choice.num_chunks)
        self.recompute = menu("recompute", RECOMPUTE, choice.recompute)
        self.sequence_parallel = checkbox("sequence parallel", choice.sequence_parallel)
        self.sharded_optimizer = checkbox("sharded optimizer", choice.sharded_optimizer)
        self.billion_tokens = slider("tokens, 10⁹", (10, 30, 100, 300, 450, 1000, 2000), choice.billion_tokens)
        super().__init__()
        self.picture.on_click(self._choose)

    def _choose(self, key: str) -> None:
        """Take the t and p of the cell that was clicked."""
        if cell := re.search(r"\bt(\d+)\.p(\d+)$", key):
            self._is_updating = True
            self.tp_size.value, self.pp_size.value = map(int, cell.groups())
            self._is_updating = False
            self._update()

    def _fit(self, choice: Choice) -> Plan:
        return choice.plan(self.models)

    def _options(self) -> dict[str, list]:
        """Return what may give way: all that is not the task itself."""
        return {name: options for name, options in super()._options().items() if name not in TASK}

    def _parts(self) -> tuple[Scene, str, str]:
        choice, hardware = self.choice, self.clusters[self.choice.cluster]
        estimate, num_tokens = step_time(self.shown, hardware), choice.billion_tokens * 1e9
        rest = {name: getattr(self.shown, name) for name in REST}
        run = self.shown.model, hardware, choice.world_size, choice.batch_size
        days = draw_plans(*run, num_tokens=num_tokens, chosen=(choice.tp_size, choice.pp_size), **rest)
        bars = draw_memory({"": self.shown}, hardware), draw_step_time({"a step": estimate})
        picture = below(f"{hardware.name}, estimated", [days, *bars], _facts(estimate))
        held, limit = fullest(self.shown).total, hardware.memory_bytes
        return picture, self._too_large(held, limit) if held > limit else _says(estimate, num_tokens), ""

    def _too_large(self, held: float, limit: float) -> str:
        """Say how far the plan is from fitting into memory, and the nearest that does."""

        def fit(choice: Choice) -> None:
            if fullest(choice.plan(self.models)).total > limit:
                raise ValueError

        options = {name: each for name, each in self._options().items() if name not in ("world_size", "batch_size")}
        near = nearest_that_fits(fit, self.choice, self.choice, options)
        changes = [
            f"{self._controls[name].description} = {_word(value)}"
            for name, value in near._asdict().items()
            if value != getattr(self.choice, name)
        ]
        way_out = f"The nearest plan that fits has {' and '.join(changes)}" if changes else "Use more GPUs"
        sizes = f"{_sizes(self.shown)}: {held / 1e9:.0f} GB for a GPU of {limit / 1e9:.0f} GB"
        return f'<div class="labkit-says moved" role="alert"><b>This does not fit.</b> {sizes}. {way_out}.</div>'


def _says(estimate: StepTime, num_tokens: float) -> str:
    return says_html(
        f"{_sizes(estimate.plan)}. <b>{three_digits(estimate.days(num_tokens))} days</b> for {num_tokens / 1e9:g} "
        f"billion tokens, {estimate.flops_per_gpu / 1e12:.0f} teraFLOP/s per GPU: "
        f"{estimate.hardware_flops_utilisation:.0%} of the peak, {estimate.model_flops_utilisation:.0%} without what "
        "is recomputed. To choose a different t and p, click its cell."
    )


def _sizes(plan: Plan) -> str:
    return f"p · t · d = {plan.pp_size} · {plan.tp_size} · {plan.dp_size}, m = {plan.num_micro_batches} micro-batches"


def _word(value) -> str:
    return ("off", "on")[value] if isinstance(value, bool) else str(value)


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
