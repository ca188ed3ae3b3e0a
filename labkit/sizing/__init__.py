"""What a training run costs before it is run: formulas, with their sources. No measurements, and no torch."""

from labkit.sizing.hardware import DGX_A100, DGX_H100, Hardware, peak_flops
from labkit.sizing.memory import Memory, activation_bytes_per_layer, fullest, memory, zero_state_bytes
from labkit.sizing.plan import Plan
from labkit.sizing.search import Candidate, search
from labkit.sizing.shape import GPT, flops_per_step, training_days
from labkit.sizing.step_time import StepTime, step_time
from labkit.sizing.traffic import Traffic, step_traffic

__all__ = [
    "Candidate",
    "DGX_A100",
    "DGX_H100",
    "GPT",
    "Hardware",
    "Memory",
    "Plan",
    "StepTime",
    "Traffic",
    "activation_bytes_per_layer",
    "flops_per_step",
    "fullest",
    "memory",
    "peak_flops",
    "search",
    "step_time",
    "step_traffic",
    "training_days",
    "zero_state_bytes",
]
