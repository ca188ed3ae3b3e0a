"""What a training run costs before it is run: formulas, with their sources. No measurements, and no torch."""

from course.sizing.hardware import DGX_A100, DGX_H100, Hardware, peak_flops
from course.sizing.plan import Plan
from course.sizing.plan_search import Candidate, reasons, search
from course.sizing.published import Published, fitted, table_1
from course.sizing.stage_memory import (
    Memory,
    activation_bytes_per_layer,
    fullest,
    memory,
    stage_parameters,
    zero_state_bytes,
)
from course.sizing.step_seconds import StepTime, step_time
from course.sizing.traffic import Traffic, plan_traffic, step_traffic
from labkit.shape import RECOMPUTE, flops_per_step, training_days

__all__ = [
    "Candidate",
    "DGX_A100",
    "DGX_H100",
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
