"""Choose an operation, its root and the number of ranks: real ranks run it, or a ring and a tree are simulated."""

from collections import namedtuple
from collections.abc import Sequence
from functools import partial
from html import escape

from course.explorers.base import Explorer, says_html
from course.explorers.choice import menu, slider
from course.measure.flow import Flow, numbered, row_and_column, trace_flow
from course.measure.operations import WITH_ROOT, WITHOUT_ROOT
from course.pictures.collectives import flow_steps
from course.pictures.messages import ring_steps, tree_and_ring
from course.pictures.scene import Scene

ON_A_RING = {f"{name} on a ring": name for name in ("all-reduce", "reduce-scatter", "all-gather")}
BOTH = "all-reduce on a tree and on a ring"


def collective_explorer(operation: str = "broadcast", world_size: int = 4, root: int = 0) -> "CollectiveExplorer":
    """Show one operation step by step, with a control for its root and the number of ranks."""
    return CollectiveExplorer(operation, world_size, root)


class CollectiveExplorer(Explorer):
    """Controls, and a picture with its steps: what the ranks have before and after, or every message."""

    function, choice_type = "collective_explorer", namedtuple("Choice", "operation world_size root")

    def __init__(self, operation: str, world_size: int, root: int):
        self.operation = menu("operation", [*WITH_ROOT, *WITHOUT_ROOT, *ON_A_RING, BOTH], operation)
        self.world_size, self.root = slider("ranks", range(2, 9), world_size), slider("root", range(8), root)
        super().__init__()

    def _fit(self, choice):
        if choice.operation in WITH_ROOT and choice.root >= choice.world_size:
            raise ValueError(
                f"root={choice.root} is not one of {choice.world_size} ranks: use 0 to {choice.world_size - 1}"
            )
        return choice

    def _parts(self) -> tuple[Sequence[Scene], str, str]:
        name, world_size, root = self.shown
        self.root.disabled = name not in WITH_ROOT
        if name in (BOTH, *ON_A_RING):
            numbers = numbered(world_size, 1 if name.startswith("all-gather") else world_size)
            scenes = tree_and_ring(numbers) if name == BOTH else ring_steps(numbers, ON_A_RING[name])
            return scenes, says_html("Simulated, message by message. A number has 4 bytes. Press Play."), ""
        does = {**WITH_ROOT, **WITHOUT_ROOT}[name].__doc__ or ""
        says = f"{does} {world_size} real ranks have just run it. Press Forward to see what they have then."
        return flow_steps(run_example(name, world_size, root), name), says_html(escape(says)), ""


def run_example(name: str, world_size: int, root: int = 0) -> Flow:
    """Run one operation on real ranks, on a tensor that suits it."""
    function = partial(WITH_ROOT[name], root=root) if name in WITH_ROOT else WITHOUT_ROOT[name]
    if name == "all-to-all":  # its result on 0, 1, 2, ... plus the rank looks as if nothing had moved
        return trace_flow(function, row_and_column(world_size, world_size))
    if name in ("gather", "all-gather"):
        return trace_flow(function, numbered(world_size, 2 if world_size <= 4 else 1))
    return trace_flow(function, numbered(world_size, world_size))
