"""Choose a model, a cluster and a plan: the memory of a GPU against its limit, a step's time, traffic, and days."""

import io
from collections.abc import Mapping
from html import escape
from typing import Any, NamedTuple

import ipywidgets as widgets
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from labkit.plots.sizing import WORDS, draw_memory, draw_step_time
from labkit.sizing import (
    DGX_A100,
    DGX_H100,
    GPT,
    RECOMPUTE,
    Hardware,
    Plan,
    StepTime,
    fullest,
    plan_traffic,
    step_time,
    table_1,
)
from labkit.widgets import STYLE

MODELS = {f"{row.billions:g} billion": row.plan.model for row in table_1()}
MODELS["GPT-3, 175 billion"] = GPT(96, 12288, 2048, 51200, 96)
CLUSTERS = {hardware.name: hardware for hardware in (DGX_A100, DGX_H100)}
WORLD_SIZES = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 1536, 1920, 2048, 2520, 3072, 4096, 8192)
BATCH_SIZES = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 1536, 1792, 2048, 2160, 2304, 2520, 3072, 4096, 6144)
SIZES = (1, 2, 4, 8, 16, 32, 64)
FIGURE_INCHES = (12.5, 5.2)


class Choice(NamedTuple):
    """What the controls say; it need not fit."""

    model: str
    cluster: str
    world_size: int
    batch_size: int
    tp_size: int
    pp_size: int
    micro_batch_size: int
    num_chunks: int
    recompute: str
    sequence_parallel: bool
    sharded_optimizer: bool
    billion_tokens: int

    def plan(self) -> Plan:
        """The plan of these sizes; ValueError if they do not fit together."""
        return Plan(
            MODELS[self.model],
            *self[2:9],
            sequence_parallel=self.sequence_parallel,
            zero_stage=1 if self.sharded_optimizer else 0,
        )


def sizing_explorer(
    model: str = "GPT-3, 175 billion",
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
    """A plan with a control for everything that decides it; ``cluster`` may be `measured_hardware()` of yours.

    Raises:
        ValueError: the start does not fit together.
    """
    given, clusters = locals(), dict(CLUSTERS)
    if isinstance(cluster, Hardware):
        clusters[cluster.name], given["cluster"] = cluster, cluster.name
    return SizingExplorer(Choice(**given), clusters)


class SizingExplorer(widgets.VBox):
    """Controls, what they come to, two pictures, and the same as a table.

    ``shown`` is the plan in the picture, the last whose sizes fitted together; ``fits`` says whether it is chosen now.
    """

    def __init__(self, choice: Choice, clusters: Mapping[str, Hardware] = CLUSTERS):
        self.shown, self.fits, self.clusters = choice.plan(), True, clusters
        self.model = _dropdown("model", MODELS, choice.model)
        self.cluster = _dropdown("cluster", clusters, choice.cluster)
        self.world_size = _selection("GPUs n", WORLD_SIZES, choice.world_size)
        self.batch_size = _selection("batch B", BATCH_SIZES, choice.batch_size)
        self.tp_size = _selection("tensor t", SIZES[:-1], choice.tp_size)
        self.pp_size = _selection("pipeline p", (*SIZES, 3, 5, 6, 10, 12, 20, 24, 30, 35, 40, 48), choice.pp_size)
        self.micro_batch_size = _selection("micro-batch b", SIZES[:-1], choice.micro_batch_size)
        self.num_chunks = _selection("chunks v", (1, 2, 3, 4, 6, 8), choice.num_chunks)
        self.recompute = _dropdown("recompute", RECOMPUTE, choice.recompute)
        self.sequence_parallel = _checkbox("sequence parallel", choice.sequence_parallel)
        self.sharded_optimizer = _checkbox("sharded optimizer", choice.sharded_optimizer)
        self.billion_tokens = _selection("tokens, 10⁹", (10, 30, 100, 300, 450, 1000, 2000), choice.billion_tokens)
        self.says, self.facts = widgets.HTML(), widgets.HTML()
        self.picture = widgets.Image(format="png")
        self.picture.add_class("labkit-grids")
        inputs = [getattr(self, name) for name in Choice._fields]
        controls = widgets.Box(inputs, layout=widgets.Layout(flex_flow="row wrap"))
        super().__init__([widgets.HTML(STYLE), controls, self.says, self.picture, self.facts])
        for control in inputs:
            control.observe(self._update, "value")
        self._update()

    def __repr__(self) -> str:
        """Short, because it is what a stored notebook keeps of a widget."""
        return f"sizing_explorer({', '.join(map(repr, self.choice))})"

    @property
    def choice(self) -> Choice:
        """What the controls say now."""
        return Choice(*(getattr(self, name).value for name in Choice._fields))

    def _update(self, change=None) -> None:
        choice, misfit = self.choice, ""
        try:
            self.shown, self.fits = choice.plan(), True
        except ValueError as error:
            self.fits, misfit = False, str(error)
        hardware = self.clusters[choice.cluster]
        estimate = step_time(self.shown, hardware)
        self.says.value = _misfit(misfit) if misfit else _says(estimate, choice.billion_tokens * 1e9)
        self.picture.value = _png(estimate)
        table = _table(estimate)
        self.facts.value = table if self.fits else f'<div class="labkit-stale">{table}</div>'


def _png(estimate: StepTime) -> bytes:
    canvas = FigureCanvasAgg(Figure(figsize=FIGURE_INCHES, dpi=100))
    figure = canvas.figure
    above = figure.add_axes((0.105, 0.69, 0.87, 0.22))
    below = figure.add_axes((0.105, 0.255, 0.87, 0.12))
    draw_memory({"": estimate.plan}, estimate.hardware, above)
    draw_step_time({"a step": estimate}, below)
    file = io.BytesIO()
    canvas.print_png(file, pil_kwargs={"compress_level": 1})  # quick: this is not sent far
    return file.getvalue()


def _says(estimate: StepTime, num_tokens: float) -> str:
    plan, hardware = estimate.plan, estimate.hardware
    needed, limit = fullest(plan).total, hardware.memory_bytes
    sizes = f"p · t · d = {plan.pp_size} · {plan.tp_size} · {plan.dp_size}, m = {plan.num_micro_batches} micro-batches"
    if needed > limit:
        text = f"<b>This does not fit.</b> {sizes}: {needed / 1e9:.0f} GB for a GPU of {limit / 1e9:.0f} GB"
        return f'<div class="labkit-says misfit" role="alert">{text}</div>'
    text = (
        f"{sizes}. <b>{estimate.days(num_tokens):.3g} days</b> for {num_tokens / 1e9:g} billion tokens, "
        f"{estimate.flops_per_gpu / 1e12:.0f} teraFLOP/s per GPU: {estimate.hardware_flops_utilisation:.0%} of the "
        f"peak, {estimate.model_flops_utilisation:.0%} without what is recomputed"
    )
    return f'<div class="labkit-says" role="status">{text}</div>'


def _misfit(why: str) -> str:
    text = f"<b>These sizes do not fit together.</b> {escape(why)}. Below: the last plan whose sizes did."
    return f'<div class="labkit-says misfit" role="alert">{text}</div>'


def _table(estimate: StepTime) -> str:
    """Memory, time and traffic as text."""
    plan, hardware = estimate.plan, estimate.hardware
    held = fullest(plan)
    parts = {"weights": held.weights, "gradients": held.gradients, "optimizer": held.optimizer}
    parts["activations"] = held.activations
    memory = ", ".join(f"{name} {value / 1e9:.3g}" for name, value in parts.items())
    seconds = ", ".join(
        f"{WORDS.get(name, name)} {value:.3g}" for name, value in estimate.parts.items() if value > 0.0005
    )
    rows = {
        "memory of the fullest GPU": f"{held.total / 1e9:.3g} GB of {hardware.memory_bytes / 1e9:.0f}: {memory}",
        "a step": f"{estimate.total:.3g} s: {seconds}",
        "bubble": f"{plan.bubble_over_ideal:.3g} idle / ideal, {estimate.bubble / estimate.total:.1%} of the step",
    }
    names = {"tp": "tensor", "dp": "data", "pp": "pipeline"}
    for axis, traffic in plan_traffic(plan, hardware.gpus_per_node).items():
        each, leaves = (value / plan.world_size / 1e9 for value in traffic)
        rows[f"{names[axis]}-parallel traffic"] = (
            f"{each:.3g} GB a step from each GPU, {leaves:.3g} GB of it to another node"
        )
    body = "".join(f"<tr><th>{name}</th><td>{escape(text)}</td></tr>" for name, text in rows.items())
    caption = f"<caption>{escape(hardware.name)}, estimated</caption>"
    return f'<table class="labkit-facts">{caption}<tbody>{body}</tbody></table>'


_LOOK: dict[str, Any] = {"layout": {"width": "285px"}, "style": {"description_width": "7em"}}


def _dropdown(description: str, options, value) -> widgets.Dropdown:
    return widgets.Dropdown(options=list(options), value=value, description=description, **_LOOK)


def _selection(description: str, usual, value: int) -> widgets.SelectionSlider:
    return widgets.SelectionSlider(options=sorted({*usual, value}), value=value, description=description, **_LOOK)


def _checkbox(description: str, value: bool) -> widgets.Checkbox:
    return widgets.Checkbox(value, description=description, indent=False, layout={"width": "165px"})
