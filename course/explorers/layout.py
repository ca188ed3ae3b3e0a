"""Choose the sizes of a layout and its order: the groups of each axis on the nodes, and what they send."""

from collections import namedtuple

import ipywidgets as widgets

from course.explorers.base import Controls, Explorer, checkbox, says_html
from course.pictures.layout import FIGURE_INCHES, THREE_PLACES, draw_layout
from course.pictures.layout_table import layout_table
from course.pictures.painter import Canvas
from course.sizing import step_traffic
from labkit.layout import ParallelLayout
from labkit.shape import GPT

WORLD_SIZES = (4, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024)
NODE_SIZES = (1, 2, 4, 8, 16, 36, 72)
MODEL, BATCH_SIZE = GPT(num_layers=36, hidden_size=4096, seq_length=2048, vocab_size=51200), 512
"""The model whose bytes the table counts: one of those in table 1 of arXiv 2104.04473."""
ORDERS = ("tp-dp-pp", "tp-pp-dp", "dp-tp-pp", "dp-pp-tp", "pp-tp-dp", "pp-dp-tp")


class Choice(namedtuple("Choice", "world_size tp_size pp_size cp_size order")):
    """What the controls say; it need not fit."""

    def layout(self) -> ParallelLayout:
        """Return the layout of these sizes; ValueError if they do not fit."""
        order = self.order if "cp" in self.order or self.cp_size == 1 else self.order.replace("tp", "tp-cp")
        return ParallelLayout(self.world_size, self.tp_size, self.pp_size, self.cp_size, order)


def layout_explorer(
    world_size: int = 16,
    tp_size: int = 2,
    pp_size: int = 4,
    cp_size: int = 1,
    order: str = "tp-dp-pp",
    gpus_per_node: int = 8,
    follow: int | None = None,
) -> "LayoutExplorer":
    """Show the grids of a layout, with a control for everything that decides it.

    Raises:
        ValueError: the start does not fit.
    """
    return LayoutExplorer(Choice(world_size, tp_size, pp_size, cp_size, order), gpus_per_node, follow)


class LayoutExplorer(Explorer):
    """Controls, three grids and their facts; ``shown`` is a layout."""

    function, choice_type = "layout_explorer", Choice

    def __init__(self, choice: Choice, gpus_per_node: int, follow: int | None):
        shown, make = choice.layout(), Controls("290px", "7.5em")  # three in a line at 1400 pixels
        self.world_size = make.selection("world size n", WORLD_SIZES, choice.world_size)
        self.tp_size = make.slider("tensor t", choice.tp_size, 1, 16)
        self.pp_size = make.slider("pipeline p", choice.pp_size, 1, 64)
        self.context = checkbox("context parallelism", choice.cp_size > 1, "c GPUs share each sequence")
        self.cp_size = make.slider("context c", choice.cp_size, 1, 16)
        self.order = make.dropdown("order", ORDERS, choice.order)
        self.gpus_per_node = make.dropdown("GPUs per node", NODE_SIZES, gpus_per_node)
        self.following = checkbox("follow a GPU", follow is not None, "show the peers of GPU g")
        self.follow = make.slider("GPU g", follow or 0, 0, choice.world_size - 1)
        self.context.observe(self._fold_context, "value")
        self._fold_context()
        self._canvas = Canvas(FIGURE_INCHES, THREE_PLACES)

        folded = [widgets.HBox([self.following, self.follow]), widgets.HBox([self.context, self.cp_size])]
        row = [self.world_size, self.tp_size, self.pp_size, self.order, self.gpus_per_node, *folded]
        super().__init__(shown, others=[self.gpus_per_node, self.following, self.follow], row=row)

    def __repr__(self) -> str:
        """Return the call with the names of its arguments, because there are many."""
        sizes = ", ".join(f"{name}={value!r}" for name, value in self.choice._asdict().items())
        return f"{self.function}({sizes}, gpus_per_node={self.gpus_per_node.value})"

    def _fold_context(self, change=None) -> None:
        """Show the slider of c when the checkbox asks for it; an ipywidgets accordion cannot be opened by a key."""
        self.cp_size.layout.display = None if self.context.value else "none"
        if not self.context.value:
            self.cp_size.value = 1

    def _chosen(self) -> ParallelLayout:
        self.follow.disabled = not self.following.value
        layout = self.choice.layout()
        self.follow.max = layout.world_size - 1
        return layout

    def _parts(self) -> tuple[bytes, str, str]:
        node: int = self.gpus_per_node.value  # type: ignore[assignment]
        follow = self.follow.value if self.following.value else None
        dimmed = not self.fits
        picture = self._canvas.png(lambda *axes: draw_layout(self.shown, node, axes, follow=follow, dimmed=dimmed))
        traffic = step_traffic(MODEL, self.shown, gpus_per_node=node, batch_size=BATCH_SIZE)
        facts = layout_table(self.shown, node, follow=follow, traffic=traffic, traffic_of=_MODEL_TEXT)
        return picture, _says(self.shown), facts


def _says(layout: ParallelLayout) -> str:
    factors = {"p": layout.pp_size, "t": layout.tp_size, "c": layout.cp_size, "d": layout.dp_size}
    if layout.cp_size == 1:
        del factors["c"]
    product = f"{' · '.join(factors)} = {' · '.join(map(str, factors.values()))} = {layout.world_size} = n"
    copies = "1 copy of the model," if layout.dp_size == 1 else f"{layout.dp_size} copies of the model, each"
    return says_html(f"{product}: {copies} on {layout.world_size // layout.dp_size} GPUs")


_MODEL_TEXT = (
    f"a GPT of {MODEL.num_parameters / 1e9:.1f} billion parameters, {BATCH_SIZE} sequences of {MODEL.seq_length} tokens"
)
