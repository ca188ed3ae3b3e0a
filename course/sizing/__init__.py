"""Estimates what a training run costs before it is run: formulas with their sources. No measurements, no torch."""

from course.sizing.arguments import Arguments, arguments
from course.sizing.context import (
    CONTEXT_PARALLEL,
    Message,
    Messages,
    attention_messages,
    attention_pairs,
    attention_work,
    pace,
)
from course.sizing.failures import Goodput, Intervals, checkpoint_interval, exponential_share, goodput, time_to_failure
from course.sizing.flops import RECOMPUTE, flops_per_step, training_days
from course.sizing.fully_sharded import Moment, Sharding, moments, sharded_memory, sharding
from course.sizing.hardware import DGX_A100, DGX_H100, FITTED, Hardware, Hidden
from course.sizing.like import how_sure, runs_like
from course.sizing.plan import Plan
from course.sizing.roofline import Operation, operations, ridge
from course.sizing.runs import RUNS, Run, published
from course.sizing.runs_of_2021 import fitted, table_1
from course.sizing.search import Candidate, Found, search
from course.sizing.simulated import read_ops, simulate
from course.sizing.stage_memory import MemoryEstimate, activation_bytes_per_layer, fullest, memory, stage_parameters
from course.sizing.step_seconds import StepTime, step_time
from course.sizing.traffic import Traffic, plan_traffic, step_traffic

__all__ = [
    "Arguments", "arguments", "Goodput", "Intervals", "checkpoint_interval", "exponential_share", "goodput",
    "time_to_failure",
    "CONTEXT_PARALLEL", "Message", "Messages", "attention_messages", "attention_pairs", "attention_work", "pace",
    "RECOMPUTE", "flops_per_step", "training_days", "DGX_A100", "DGX_H100", "FITTED", "Hardware", "Hidden",
    "Operation", "operations", "ridge", "RUNS", "Run", "published", "Plan", "MemoryEstimate",
    "activation_bytes_per_layer", "fullest", "memory", "stage_parameters", "StepTime", "step_time", "Traffic",
    "plan_traffic", "step_traffic", "how_sure", "runs_like", "Candidate", "Found", "search", "fitted", "table_1",
    "read_ops", "simulate", "Moment", "Sharding", "moments", "sharded_memory", "sharding",
]  # fmt: skip
