"""Writes the pages on which nothing but explorers stands: all that need no ranks, and the one at the site's door.

Each is as its notebook stores it.
"""

from pathlib import Path

import nbformat

from course import working_copy
from course.explorers.jupyter import CONTROLS
from course.publish.living import explorer_call, explorer_place, folded

ROOT = Path(__file__).parents[2]
FRONT = Path(__file__).with_name("site") / "front.md"
AT_THE_DOOR = "layout_explorer"
ABOUT = """---
html_theme.sidebar_secondary.remove: true
---
# Play

Move a control by mouse, finger or keys: Python computes in this tab what follows from it. A choice that does not fit
moves others, and says which. The address keeps what you see, so that you can send it.
"""
SHOWN = {
    "layout_explorer": ("01_group_layout", "Which GPUs form a group",
        "Tensor, data and pipeline groups of up to 1,024 GPUs, and what each sends in a step. Point at a GPU to see "
        "its peers, and watch which groups leave their node."),
    "collective_explorer": ("02_collectives", "What ranks say to each other",
        "Broadcast, all-reduce, all-to-all and the others, message by message, on numbers that you can follow. Play "
        "the steps, and see how a ring and a tree do the same work."),
    "shard_explorer": ("03_column_parallel", "A sharded linear layer",
        "A weight is cut by its outputs or its inputs, and each rank multiplies its shard. See which parts travel, and "
        "how many bytes that takes."),
    "batch_explorer": ("05_data_parallel", "A batch among replicas",
        "A global batch is divided among replicas, and then into micro-batches. See which samples each rank has, and "
        "when gradients are averaged."),
    "schedule_explorer": ("07_pipeline_parallel", "Pipeline schedules",
        "Ten schedules from GPipe to DualPipeV, with your own numbers of ranks and micro-batches and your own times. "
        "Drag the playhead to see what each rank does, and for what it waits."),
    "schedule_builder": ("07_pipeline_parallel", "A schedule by hand",
        "Put the forward and backward passes of each rank in order, by clicks or by dragging. A deadlock shows as a "
        "red circle of ranks that wait for each other."),
    "sizing_explorer": ("16_planning", "Size a run before it runs",
        "Choose a model, a cluster and a layout: memory, time, utilisation and cost of a training run follow. Find the "
        "layout that is fastest of those that fit."),
    "context_explorer": ("13_context_parallel", "A sequence among GPUs",
        "Each GPU holds a part of a long sequence, and keys and values travel on a ring. See who computes what, and "
        "why consecutive tokens leave some ranks idle."),
    "stage_explorer": ("14_fully_sharded", "ZeRO, stage by stage",
        "Optimizer states, gradients and weights are sharded one after the other. See what each stage saves in memory, "
        "and what it sends in return."),
    "routing_explorer": ("15_experts", "Tokens choose experts",
        "Tokens travel to the experts that their router chose, and back. Make the choice uneven, and see which rank "
        "all others wait for."),
}  # fmt: skip
"""By the explorer's name: its notebook, a heading, and two sentences."""


def play() -> str:
    """Return the page with all explorers, as Markdown."""
    parts = [ABOUT]
    for name, (stem, heading, text) in SHOWN.items():
        path = working_copy.find(stem, ROOT)
        beyond = ", beyond the lab," if path.parent.name == "further" else ""
        link = f"[Notebook {stem[:2]}]({path}){beyond} has it, with what to try."
        parts += [f"## {heading}", f"{text} {link}", _explorer(name)]
    return "\n\n".join(parts)


def front() -> str:
    """Return the page at the site's door, as Markdown."""
    return FRONT.read_text().replace("EXPLORER", _explorer(AT_THE_DOOR, is_narrowed=False))  # it stays small


def _explorer(name: str, is_narrowed: bool = True) -> str:
    """Return an explorer as the first cell that shows it has it."""
    stored = nbformat.read(ROOT / working_copy.find(SHOWN[name][0], ROOT), as_version=4).cells
    for cell in stored:
        call = explorer_call(cell)
        if call and call[0] == name:
            place = explorer_place(*call, view=name.removesuffix("_explorer"))
            html = cell.outputs[0].data["text/html"].replace(CONTROLS, "")
            html = folded(html) if is_narrowed else html
            return f"```{{raw}} html\n<div {place}>{html}</div>\n```"
    raise ValueError(f"notebook {SHOWN[name][0]} stores no {name}")
