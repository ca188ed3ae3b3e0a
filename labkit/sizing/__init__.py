"""What a training run costs before it is run: formulas, with their sources. No measurements, and no torch."""

from labkit.sizing.hardware import DGX_A100, DGX_H100, Hardware, peak_flops
from labkit.sizing.memory import (
    Memory,
    activation_bytes_per_layer,
    fullest,
    memory,
    stage_parameters,
    zero_state_bytes,
)
from labkit.sizing.plan import Plan
from labkit.sizing.published import Published, fitted, table_1
from labkit.sizing.search import Candidate, reasons, search
from labkit.sizing.shape import GPT, RECOMPUTE, flops_per_step, training_days
from labkit.sizing.step_time import StepTime, step_time
from labkit.sizing.traffic import Traffic, plan_traffic, step_traffic

__all__ = [
    "Candidate",
    "DGX_A100",
    "DGX_H100",
    "GPT",
    "Hardware",
    "Memory",
    "Plan",
    "Published",
    "RECOMPUTE",
    "StepTime",
    "Traffic",
    "activation_bytes_per_layer",
    "fitted",
    "flops_per_step",
    "fullest",
    "memory",
    "peak_flops",
    "plan_traffic",
    "reasons",
    "search",
    "stage_parameters",
    "step_time",
    "step_traffic",
    "table_1",
    "training_days",
    "zero_state_bytes",
]
