"""The explorer of collectives, whose operations real ranks run."""

from collections.abc import Sequence
from functools import partial

from course.explorers import collectives
from course.explorers.jupyter import in_jupyter
from course.measure.flow import trace_flow
from course.measure.operations import WITH_ROOT, WITHOUT_ROOT
from course.sizing.flow import Flow


@in_jupyter
class collective_explorer(collectives.collective_explorer):
    """Show one operation message by message; ``numbers`` may be your own, a row for each rank."""

    def _run(self, name: str, start: Sequence[Sequence[float]], root: int) -> tuple[Flow, str]:
        function = partial(WITH_ROOT[name], root=root) if name in WITH_ROOT else WITHOUT_ROOT[name]
        flow = trace_flow(function, start, backend="gloo")  # a control is answered at once, which GPUs' start is not
        return flow, f"{len(start)} real ranks have just run it."
