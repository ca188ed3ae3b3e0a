"""Choose an operation, its root and the number of ranks: real ranks run it, or a ring and a tree are simulated."""

from functools import partial
from html import escape

from course.explorers.base import Explorer, Parts
from course.explorers.choice import menu, slider
from course.measure.flow import numbered, row_and_column, trace_flow
from course.measure.operations import WITH_ROOT, WITHOUT_ROOT
from course.pictures.collectives import flow_steps
from course.pictures.messages import ring_steps, tree_and_ring

ON_A_RING = {f"{name} on a ring": name for name in ("all-reduce", "reduce-scatter", "all-gather")}
BOTH = "all-reduce on a tree and on a ring"


class collective_explorer(Explorer):
    """Show one operation in steps: what the ranks have before and after it, or every message."""

    table = (
        ("operation", menu, "operation", (*WITH_ROOT, *WITHOUT_ROOT, *ON_A_RING, BOTH), "broadcast"),
        ("world_size", slider, "ranks", range(2, 9), 4),
        ("root", slider, "root", range(8), 0),
    )

    def _fit(self, choice):
        operation, world_size, root = choice
        if operation in WITH_ROOT and root >= world_size:
            raise ValueError(f"root={root} is not one of {world_size} ranks: use 0 to {world_size - 1}")
        return choice

    def _parts(self) -> Parts:
        name, world_size, root = self.shown
        self.controls["root"].disabled = name not in WITH_ROOT
        if name in (BOTH, *ON_A_RING):
            numbers = numbered(world_size, 1 if name.startswith("all-gather") else world_size)
            steps = tree_and_ring(numbers) if name == BOTH else ring_steps(numbers, ON_A_RING[name])
            return Parts(steps, "Simulated, message by message. A number has 4 bytes. Press Play.")
        function, start = {**WITH_ROOT, **WITHOUT_ROOT}[name], numbered(world_size, world_size)
        if name == "all-to-all":  # its result on 0, 1, 2, ... plus the rank looks as if nothing had moved
            start = row_and_column(world_size, world_size)
        elif name in ("gather", "all-gather"):
            start = numbered(world_size, 2 if world_size <= 4 else 1)
        flow = trace_flow(partial(function, root=root) if name in WITH_ROOT else function, start)
        says = f"{function.__doc__} {world_size} real ranks have just run it. Press Forward to see what they have then."
        return Parts(flow_steps(flow, name), escape(says))
