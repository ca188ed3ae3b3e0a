"""Shows the run of the GPUs' wing twice: on CPU ranks as they are, and on CPU ranks that follow NCCL's rules."""

import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from html import escape

from course.museum.cases import Symptoms, Tables, Wing, one_process
from course.museum.gpu_faults import GPU_FAULTS
from course.museum.tiny_run import CONFIG, on_rank
from course.nccl_rules import Under
from course.table import Table
from labkit.launch import Deadlock, launch

ON_GLOO, BY_NCCLS_RULES = "On CPU ranks, with gloo:", "By NCCL's rules:"


@dataclass(frozen=True, repr=False)
class ByBothRules(Tables):
    """What the run shows with gloo, and by NCCL's rules: the same tables, or the launcher's report of a standstill."""

    on_gloo: Tables
    by_nccls_rules: Tables | str

    def tables(self) -> list[Table]:
        found = self.on_gloo.tables()
        return found if isinstance(self.by_nccls_rules, str) else [*found, *self.by_nccls_rules.tables()]

    def __repr__(self) -> str:
        shown = self.by_nccls_rules
        second = shown if isinstance(shown, str) else repr(shown)
        return f"{ON_GLOO}\n\n{self.on_gloo!r}\n\n{BY_NCCLS_RULES}\n\n{second}"

    def _repr_html_(self) -> str:
        shown = self.by_nccls_rules
        second = (
            f"<p>✗ It stands still.</p><pre>{escape(shown)}</pre>" if isinstance(shown, str) else shown._repr_html_()
        )
        return f"<p><b>{ON_GLOO}</b></p>{self.on_gloo._repr_html_()}<p><b>{BY_NCCLS_RULES}</b></p>{second}"


class GPUWing(Wing):
    """The wing whose faults CPU ranks show by NCCL's rules only."""

    def symptoms(self, apply: Callable[[], None]) -> ByBothRules:
        on_gloo = super().symptoms(apply)
        expected = one_process()
        try:
            ranks = launch(Under(on_rank), apply, expected, self.config, world_size=self.world_size, backend="gloo")
        except Deadlock as deadlock:
            report = str(deadlock).splitlines()
            return ByBothRules(on_gloo, "\n".join(line for line in report if not re.match(r"    in \S*labkit/", line)))
        return ByBothRules(on_gloo, Symptoms(expected, ranks, self.layout))


GPUS = GPUWing("gpu_museum", GPU_FAULTS, replace(CONFIG, tp_size=1), world_size=2)
