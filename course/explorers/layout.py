"""Choose the sizes of a layout and its order: the groups of each axis on the nodes, and what they send."""

import re
from collections import namedtuple

from course.explorers.base import Explorer, says_html
from course.explorers.choice import menu, slider
from course.pictures.layout import draw_layout
from course.pictures.scene import Scene
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
) -> "LayoutExplorer":
    """Show the grids of a layout, with a control for everything that decides it.

    Raises:
        ValueError: the start does not fit.
    """
    return LayoutExplorer(Choice(world_size, tp_size, pp_size, cp_size, order), gpus_per_node)


class LayoutExplorer(Explorer):
    """Controls, a grid for each axis and their facts; ``shown`` is a layout. A click on a node shows its GPUs alone."""

    function, choice_type = "layout_explorer", Choice

    def __init__(self, choice: Choice, gpus_per_node: int):
        self.world_size = slider("world size n", WORLD_SIZES, choice.world_size)
        self.tp_size = slider("tensor t", range(1, 17), choice.tp_size)
        self.pp_size = slider("pipeline p", range(1, 65), choice.pp_size)
        self.cp_size = slider("context c", range(1, 17), choice.cp_size)
        self.order = menu("order", ORDERS, choice.order)
        self.gpus_per_node = menu("GPUs per node", NODE_SIZES, gpus_per_node)
        self.node: int | None = None
        super().__init__(others=[self.gpus_per_node])
        self.picture.on_click(self._zoom)

    def __repr__(self) -> str:
        """Return the call with the names of its arguments, because there are many."""
        sizes = ", ".join(f"{name}={value!r}" for name, value in self.choice._asdict().items())
        return f"{self.function}({sizes}, gpus_per_node={self.gpus_per_node.value})"

    def _zoom(self, key: str) -> None:
        """Show the node that was clicked, or all of them again."""
        block = re.search(r"block(\d+)$", key)
        self.node = int(block[1]) if block else None
        self._update()

    def _fit(self, choice: Choice) -> ParallelLayout:
        return choice.layout()

    def _parts(self) -> tuple[Scene, str, str]:
        node: int = self.gpus_per_node.value
        if self.node is not None and self.node * node >= self.shown.world_size:
            self.node = None
        traffic = step_traffic(MODEL, self.shown, gpus_per_node=node, batch_size=BATCH_SIZE)
        picture = draw_layout(self.shown, node, node=self.node, traffic=traffic, traffic_of=_MODEL_TEXT)
        return picture, _says(self.shown), ""


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
