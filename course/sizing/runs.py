"""Published runs of 2023 to 2026 as plans: what was measured, and what the sources do not say.

runs.csv has a row for each run, as its source has it, and what had to be assumed is said; models.csv has the shapes. An
empty cell is a default of `Plan` or `GPT`. Where a source prints FLOP/s, the seconds of a step follow from them: they
count the whole attention, all logits, and what is computed again. The seconds of D36 to D38 follow from an MFU.

What is computed again, or goes to the CPU, is what the recipe of that time says: for Megatron-Bridge at the tag that
the row names, for Automodel its configurations, for dgxc-benchmarking a launch.sh. D39 to D41 say that they send tokens
with DeepEP; where nobody says how, each expert gets a message. What their sources leave open decides as much as the
constants. D60b is one reading, too: its time for a token is almost a fifth below a line through D60a, c and d.
"""

import csv
from collections.abc import Sequence
from dataclasses import replace
from pkgutil import get_data
from typing import Any, NamedTuple

from course.sizing.flops import flops_per_step
from course.sizing.hardware import DGX_A100, FITTED, Hardware, HardwareByName
from course.sizing.plan import Plan, uneven_stages
from course.sizing.shapes import (
    DEEPSEEK_V3,
    GPT_OSS_120B,
    GROK_1,
    KIMI_K2,
    LLAMA_4_MAVERICK,
    MIXTRAL_8X22B,
    QWEN3_30B_A3B,
    QWEN3_235B_A22B,
)
from course.sizing.step_seconds import step_time
from course.table import Table
from labkit.partition import split_layers
from labkit.shape import GPT

SECTIONS: tuple[str, ...] = "dense bf16", "dense fp8", "long sequences", "Blackwell", "experts"
SAME_CONSTANTS: dict[str, str] = {"A100 40GB": "A100", "H100 DeepEP": "H100", "B200 HybridEP": "B200"}
SAME_WITH_EXPERTS: dict[str, str] = dict.fromkeys(("GB200", "GB300"), "GB200 and GB300")
SAME_WITH_EXPERTS |= dict.fromkeys(("GB200 of 2026", "GB300 of 2026"), "GB200 and GB300 of 2026")
"""Kinds of GPU whose runs are fitted together."""
KINDS = HardwareByName(FITTED | {"A100 in 2021": DGX_A100})
"""The hardware of each kind of GPU in the tables; the software of 2021 has constants of its own."""


class Run(NamedTuple):
    """A published run: its name, what it trained on what, the seconds of a step, and who says so."""

    name: str
    model: str
    gpu: str
    plan: Plan
    seconds: float
    source: str
    assumed: str = ""
    fits: bool = True
    """Whether constants are fitted to it (`course.sizing.fit`); not if what is assumed could explain any error."""

    @property
    def group(self) -> str:
        """Which runs share their constants: those on one kind of GPU and software, in a precision or with experts."""
        kind = SAME_CONSTANTS.get(self.gpu, self.gpu)
        if not self.plan.model.num_experts:
            return f"{kind} {self.plan.precision}"
        return f"{SAME_WITH_EXPERTS.get(kind, kind)} experts"

    @property
    def section(self) -> str:
        """What is said of its error: one of `SECTIONS`."""
        if self.plan.model.seq_length >= 32768:
            return "long sequences"
        if self.plan.model.num_experts:
            return "experts"
        if "B" in self.gpu.split()[0]:
            return "Blackwell"
        return f"dense {self.plan.precision}"

    @property
    def hardware(self) -> Hardware:
        return KINDS[self.gpu]

    @property
    def estimate(self) -> float:
        """The seconds of a step by `course.sizing.step_time`."""
        return step_time(self.plan, self.hardware).total

    @property
    def error(self) -> float:
        """The relative error of the estimate."""
        return self.estimate / self.seconds - 1

    def __str__(self) -> str:
        return f"{self.name} {self.model}, {self.plan.world_size} {self.gpu}"


def published(runs: Sequence[Run] = ()) -> Table:
    """Return each run, of all or of these, with its estimate from the constants that `course.sizing.fit` finds."""
    rows = [
        (run.name, f"{run.model}, {run.plan.precision}", f"{run.plan.world_size} {run.gpu}", f"{run.seconds:.3g}",
         f"{run.estimate:.3g}", f"{run.error:+.1%}", run.source, run.assumed)
        for run in runs or RUNS
    ]  # fmt: skip
    heads = "row", "model", "GPUs", "measured, s", "estimated, s", "error", "source", "assumed"
    return Table(heads, rows)


FIELDS = {
    "gpus": "world_size", "batch_sequences": "batch_size", "micro_batch_sequences": "micro_batch_size",
    "layers": "num_layers", "attention_heads": "num_attention_heads", "query_groups": "num_query_groups",
    "sequence_tokens": "seq_length", "vocabulary_tokens": "vocab_size",
}  # fmt: skip
"""The fields of `Plan` and `GPT` for columns of the tables; all others have the field's name."""
NO_FIELDS = ("run", "model", "gpu", "step_seconds", "teraflops_per_gpu", "fitted", "source", "assumed", "note")


def read_rows(name: str) -> list[dict[str, str]]:
    """Return the rows of a table in this folder; a page in a browser has the folder in a zip file."""
    found = get_data("course.sizing", name)
    if found is None:
        raise FileNotFoundError(f"{name} is missing from course.sizing")
    return list(csv.DictReader(found.decode().splitlines()))


def read_runs(name: str) -> list[Run]:
    """Return the runs of a table."""
    return [_run(row) for row in read_rows(name)]


def _run(row: dict[str, str]) -> Run:
    model = MODELS[row["model"].partition(", ")[0]]  # after the comma stands how it was run
    options = _options(row)
    if seq_length := options.pop("seq_length", None):
        model = replace(model, seq_length=seq_length)
    num_stages = options["pp_size"] * options["num_chunks"]
    if model.num_layers % num_stages:
        options["stage_layers"] = uneven_stages(model.num_layers, num_stages) or split_layers(
            model.num_layers, num_stages
        )
    plan = Plan(model, **options)
    if row["step_seconds"]:
        seconds = float(row["step_seconds"])
    else:
        flops = flops_per_step(model, plan.batch_size, plan.recompute, modules=plan.modules)
        seconds = flops / (plan.world_size * float(row["teraflops_per_gpu"]) * 1e12)
    fits = row["fitted"] == "yes"
    return Run(row["run"], row["model"], row["gpu"], plan, seconds, row["source"], row["assumed"], fits)


def _options(row: dict[str, str]) -> dict[str, Any]:
    """Return the fields that a row gives."""
    found = {FIELDS.get(head, head): _value(text) for head, text in row.items() if text and head not in NO_FIELDS}
    if names := found.get("recompute_modules"):
        found["recompute_modules"] = tuple(names.split())
    return found


def _value(text: str) -> Any:
    """Return what a cell says: yes or no, a whole number or another, or a word.

    >>> [_value(text) for text in ("yes", "128", "500000.0", "rope")]
    [True, 128, 500000.0, 'rope']
    """
    if text in ("yes", "no"):
        return text == "yes"
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            pass
    return text


MODELS: dict[str, GPT] = {row["model"]: GPT(**_options(row)) for row in read_rows("models.csv")}
MODELS |= {
    "Mixtral 8x22B": MIXTRAL_8X22B,
    "Grok-1 314B": GROK_1,
    "Qwen3-30B-A3B": QWEN3_30B_A3B,
    "Qwen3-235B-A22B": QWEN3_235B_A22B,
    "GPT-OSS 120B": GPT_OSS_120B,
    "Llama 4 Maverick": LLAMA_4_MAVERICK,
    "DeepSeek-V3": DEEPSEEK_V3,
    "Kimi K2": KIMI_K2,
}
LLAMA_8B = MODELS["Llama 3.1 8B"]
LLAMA_70B = MODELS["Llama 3.1 70B"]
LLAMA_405B = MODELS["Llama 3.1 405B"]
RUNS = read_runs("runs.csv")
