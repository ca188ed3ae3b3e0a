"""Choose the sizes of a layout and its order: the groups of each axis on the nodes, and what they send."""

import re
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

from course.explorers.base import Explorer, Parts
from course.explorers.control import checkbox, menu, slider
from course.pictures.layout import axes_in_use, draw_layout
from course.pictures.rack import MOST_GPUS, rack_steps
from course.sizing import step_traffic
from labkit.layout import EXPERT_AXES, ParallelLayout
from labkit.partition import check_divides
from labkit.shape import GPT
from labkit.sizes import counted

WORLD_SIZES = (4, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024)
NODE_SIZES = (1, 2, 4, 8, 16, 36, 72)
MODEL, BATCH_SIZE = GPT(num_layers=36, hidden_size=4096, seq_length=2048, vocab_size=51200), 512
"""The model whose bytes the table counts: one of those in table 1 of arXiv 2104.04473."""
MODEL_TEXT = f"a GPT of {MODEL.num_parameters / 1e9:.1f} billion parameters, {BATCH_SIZE} sequences of 2048 tokens"
WITH_EXPERTS = replace(MODEL, num_experts=64, top_k=2, moe_ffn_hidden_size=MODEL.mlp_width // 2)
"""The same with experts, of which a token uses two of half the width: as many FLOPs."""
EXPERTS_TEXT = (
    f"a GPT with {WITH_EXPERTS.num_experts} experts in each layer, {WITH_EXPERTS.num_parameters / 1e9:.0f} billion "
    f"parameters, of which {WITH_EXPERTS.num_active_parameters / 1e9:.1f} billion process a token, "
    f"{BATCH_SIZE} sequences of 2048 tokens"
)
ORDERS = ("tp-dp-pp", "tp-pp-dp", "dp-tp-pp", "dp-pp-tp", "pp-tp-dp", "pp-dp-tp")
AS_TP = "t"  # the size of expert_tp unless another is chosen
FIRST_AXES = {"cp_size": 1, "ep_size": 1, "expert_tp_size": AS_TP}
"""What the controls behind "more axes" say while they are hidden: the first notebook has tensor, pipeline and data."""


def has_more_axes(given: Mapping[str, Any]) -> bool:
    """Say whether a value was given that only "more axes" has."""
    return any(given.get(name, first) != first for name, first in FIRST_AXES.items())


class layout_explorer(Explorer):
    """Show the grids of a layout, with a control for everything that decides it; ``shown`` is the layout.

    A click on a node shows its GPUs alone. ``one_rack`` shows up to 64 GPUs that regroup, step by step.
    """

    table = (
        ("world_size", slider, "world size n", WORLD_SIZES, 16),
        ("tp_size", slider, "tensor t", range(1, 17), 2),
        ("pp_size", slider, "pipeline p", range(1, 65), 4),
        ("cp_size", slider, "context c", range(1, 17), 1),
        ("order", menu, "order", ORDERS, "tp-dp-pp"),
        ("gpus_per_node", menu, "GPUs per node", NODE_SIZES, 8),
        ("more_axes", checkbox, "more axes", False),
        ("ep_size", slider, "experts ep", (1, 2, 4, 8, 16, 32, 64), 1),
        ("expert_tp_size", menu, "expert_tp", (AS_TP, 1, 2, 4, 8, 16), AS_TP),
        ("one_rack", checkbox, "one rack that regroups", False),
    )
    seconds = 2.0
    node: int | None = None

    def __repr__(self) -> str:
        """Return the call with the names of its arguments, because there are many; without axes that are off."""
        choice = self.choice._asdict()
        off = {**FIRST_AXES, "more_axes": has_more_axes(choice), "one_rack": False}
        given = [f"{name}={value!r}" for name, value in choice.items() if value != off.get(name)]
        return f"layout_explorer({', '.join(given)})"

    def choose(self, **values: Any) -> None:
        """Do so; without "more axes" their sizes go back to the first ones, and a size of theirs brings them in."""
        if values.get("more_axes") is False:
            values = FIRST_AXES | values
        if has_more_axes(values):
            values["more_axes"] = True
        super().choose(**values)

    @property
    def keeps(self) -> tuple[str, ...]:
        """Hidden controls never give way."""
        return ("more_axes", "one_rack", *(() if self.choice.more_axes else FIRST_AXES))

    def _in_table(self, **given: Any) -> Iterable[Any]:
        given["more_axes"] = given["more_axes"] or has_more_axes(given)
        return given.values()

    def click(self, key: str) -> None:
        """Show the node that was clicked, or all of them again."""
        block = re.search(r"block(\d+)$", key)
        self.node = int(block[1]) if block else None
        self.choose()

    @property
    def picked(self) -> dict[str, str]:
        return {"node": "" if self.node is None else str(self.node)}

    def pick(self, words: Mapping[str, str]) -> None:
        word = words["node"]
        if word and not word.isdecimal():
            raise ValueError(f"node = {word} must be the number of a node: use 0 or more")
        self.node = int(word) if word else None

    def _fit(self, choice) -> ParallelLayout:
        n, t, p, c, order, _, _, ep, etp, _ = choice
        order = order if "cp" in order or c == 1 else order.replace("tp", "tp-cp")
        check_divides(ep, "num_experts", WITH_EXPERTS.num_experts or 1, parts_name="ep_size")
        return ParallelLayout(n, t, p, c, order, ep_size=ep, expert_tp_size=t if etp == AS_TP else etp)

    def _why(self, choice) -> str:
        return super()._why(choice).replace("n/pipeline p", "n/p")

    def _parts(self) -> Parts:
        layout, per_node = self.shown, self.choice.gpus_per_node
        for name in FIRST_AXES:
            self.controls[name].hidden = not self.choice.more_axes
        if self.node is not None and self.node * per_node >= layout.world_size:
            self.node = None
        axes = axes_in_use(layout)
        model, text = (WITH_EXPERTS, EXPERTS_TEXT) if "ep" in axes else (MODEL, MODEL_TEXT)
        traffic = step_traffic(model, layout, gpus_per_node=per_node, batch_size=BATCH_SIZE)
        shown: dict = dict(node=self.node, traffic=traffic, traffic_of=text, num_experts=model.num_experts)
        letters = [axis[0] for axis in ("pp", "tp", "cp", "dp") if axis in axes]
        world_size = self.controls["world_size"]
        numbers = [world_size.dragged_by(layout.dp_size, "data d")]
        numbers[:0] = [
            self.controls[f"{letter}p_size"].dragged_by(layout.size(f"{letter}p")) for letter in letters[:-1]
        ]
        product = f"{' · '.join(letters)} = {' · '.join(numbers)} = {world_size.dragged_by(layout.world_size)} = n"
        copies = "1 copy of the model," if layout.dp_size == 1 else f"{layout.dp_size} copies of the model, each"
        says = f"{product}: {copies} on {counted(layout.world_size // layout.dp_size, 'GPU')}"
        if "ep" in axes:
            sizes = {"p": layout.pp_size} | {name: layout.size(name) for name in EXPERT_AXES}
            own, copies = len(layout.experts_of(0, WITH_EXPERTS.num_experts or 1)), layout.expert_dp_size
            part = f" (1/{layout.expert_tp_size} of each)" if layout.expert_tp_size > 1 else ""
            same = f"{copies} GPUs have the same" if copies > 1 else "no two GPUs have the same"
            says += f"<br>{' · '.join(sizes)} = {' · '.join(map(str, sizes.values()))} = n: a GPU has {own} of "
            says += f"{WITH_EXPERTS.num_experts} experts{part}, and {same}"
        is_large = layout.world_size > MOST_GPUS
        self.controls["one_rack"].disabled = is_large
        if self.choice.one_rack and not is_large:
            return Parts(rack_steps(layout, per_node, traffic), f"{says}. Press Play to see who talks to whom.")
        return Parts([draw_layout(layout, per_node, **shown)], says)
