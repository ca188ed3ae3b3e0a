"""Choose a model, a cluster and a plan: a GPU's memory against its limit, the time of a step, its traffic, and days."""

from collections import namedtuple
from collections.abc import Mapping
from dataclasses import asdict

from matplotlib.figure import Figure

from course.explorers.base import Controls, Explorer, checkbox, facts_html, misfit_html, says_html
from course.pictures.painter import png
from course.pictures.sizing import WORDS, draw_memory, draw_step_time
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
SIZES = (1, 2, 4, 8, 16, 32, 64)
FIGURE_INCHES = (12.5, 5.2)


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
    """Controls, what they come to, two pictures, and the same as a table; ``shown`` is a plan."""

    function, choice_type = "sizing_explorer", Choice

    def __init__(self, choice: Choice, models: Mapping[str, GPT], clusters: Mapping[str, Hardware]):
        self.models, self.clusters, make = models, clusters, Controls("285px", "7em")
        shown = choice.plan(models)
        self.model = make.dropdown("model", models, choice.model)
        self.cluster = make.dropdown("cluster", clusters, choice.cluster)
        self.world_size = make.selection("GPUs n", WORLD_SIZES, choice.world_size)
        self.batch_size = make.selection("batch B", BATCH_SIZES, choice.batch_size)
        self.tp_size = make.selection("tensor t", SIZES[:-1], choice.tp_size)
        self.pp_size = make.selection("pipeline p", (*SIZES, 3, 5, 6, 10, 12, 20, 24, 30, 35, 40, 48), choice.pp_size)
        self.micro_batch_size = make.selection("micro-batch b", SIZES[:-1], choice.micro_batch_size)
        self.num_chunks = make.selection("chunks v", (1, 2, 3, 4, 6, 8), choice.num_chunks)
        self.recompute = make.dropdown("recompute", RECOMPUTE, choice.recompute)
        self.sequence_parallel = checkbox("sequence parallel", choice.sequence_parallel)
        self.sharded_optimizer = checkbox("sharded optimizer", choice.sharded_optimizer)
        self.billion_tokens = make.selection("tokens, 10⁹", (10, 30, 100, 300, 450, 1000, 2000), choice.billion_tokens)
        super().__init__(shown)

    def _chosen(self) -> Plan:
        return self.choice.plan(self.models)

    def _parts(self) -> tuple[bytes, str, str]:
        estimate = step_time(self.shown, self.clusters[self.choice.cluster])
        figure = Figure(figsize=FIGURE_INCHES, dpi=100)
        draw_memory({"": estimate.plan}, estimate.hardware, figure.add_axes((0.105, 0.69, 0.87, 0.22)))
        draw_step_time({"a step": estimate}, figure.add_axes((0.105, 0.255, 0.87, 0.12)))
        return png(figure), _says(estimate, self.choice.billion_tokens * 1e9), facts_table(estimate)


def _says(estimate: StepTime, num_tokens: float) -> str:
    plan, hardware = estimate.plan, estimate.hardware
    needed, limit = fullest(plan).total, hardware.memory_bytes
    sizes = f"p · t · d = {plan.pp_size} · {plan.tp_size} · {plan.dp_size}, m = {plan.num_micro_batches} micro-batches"
    if needed > limit:
        return misfit_html(f"{sizes}: {needed / 1e9:.0f} GB for a GPU of {limit / 1e9:.0f} GB")
    return says_html(
        f"{sizes}. <b>{three_digits(estimate.days(num_tokens))} days</b> for {num_tokens / 1e9:g} billion tokens, "
        f"{estimate.flops_per_gpu / 1e12:.0f} teraFLOP/s per GPU: {estimate.hardware_flops_utilisation:.0%} of the "
        f"peak, {estimate.model_flops_utilisation:.0%} without what is recomputed"
    )


def facts_table(estimate: StepTime) -> str:
    """Return memory, time and traffic as an HTML table."""
    plan, hardware = estimate.plan, estimate.hardware
    held = fullest(plan)
    memory = ", ".join(f"{name} {three_digits(value / 1e9)}" for name, value in asdict(held).items())
    seconds = ", ".join(
        f"{WORDS.get(name, name)} {three_digits(value)}" for name, value in estimate.parts.items() if value > 0.0005
    )
    needed, bubble = three_digits(held.total / 1e9), three_digits(plan.bubble_over_ideal)
    facts = {
        "memory of the fullest GPU": f"{needed} GB of {hardware.memory_bytes / 1e9:.0f}: {memory}",
        "a step": f"{three_digits(estimate.total)} s: {seconds}",
        "bubble": f"{bubble} idle / ideal, {estimate.bubble / estimate.total:.1%} of the step",
    }
    for axis, traffic in plan_traffic(plan, hardware.gpus_per_node).items():
        each, leaves = (value / plan.world_size / 1e9 for value in traffic)
        facts[f"{AXIS_NAME[axis]}-parallel traffic"] = (
            f"{three_digits(each)} GB a step from each GPU, {three_digits(leaves)} GB of it to another node"
        )
    return facts_html(f"{hardware.name}, estimated", facts)
