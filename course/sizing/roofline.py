"""Counts what the operations of a layer compute and move: which of them the peak limits, and which the memory.

A GPU cannot compute faster than its peak, nor faster than its memory brings numbers: FLOP/s are at most the smaller of
the peak and of FLOPs a byte times the memory's bytes per second. Source: Williams, Waterman and Patterson, "Roofline",
CACM 52(4), 2009. Counted is the forward pass of one micro-batch on one GPU, and each number once: what a kernel reads
from outside and what it writes, as if all in between stayed in its cache.
"""

from typing import NamedTuple

from course.sizing.hardware import Hardware
from course.sizing.layer_seconds import SCORES, core_flops, num_tokens
from course.sizing.plan import Plan
from course.sizing.shapes import query_size

NORM_FLOPS = {"layernorm": 7, "rmsnorm": 4}
"""For each number: mean, difference, square and sum (2), scale, weight, bias; RMSNorm has no mean, difference, bias."""
ACTIVATION_FLOPS = {"gelu": 5, "gelu_tanh": 9, "swiglu": 5}
"""For each hidden unit, where erf, tanh and exp count as one: x/2 (1 + erf(x/sqrt(2))); its form with tanh; SiLU of the
gate, x/(1 + exp(-x)), times the other factor."""
SOFTMAX_FLOPS = 5
"""For each score or logit: maximum, difference, exponential, sum, quotient."""


class Operation(NamedTuple):
    """What an operation computes and moves."""

    name: str
    kind: str
    """"product", "attention", or "memory" for those that have few FLOPs for each number."""
    flops: float
    moved_bytes: float

    @property
    def intensity(self) -> float:
        """FLOPs a byte."""
        return self.flops / self.moved_bytes

    def seconds(self, hardware: Hardware) -> float:
        """Return what it takes at least: computing and moving at the same time, each at the hardware's full speed."""
        return max(self.flops / hardware.peak_flops, self.moved_bytes / hardware.memory_bytes_per_second)

    def is_limited_by_memory(self, hardware: Hardware) -> bool:
        """Return whether moving takes longer than computing."""
        return self.intensity < ridge(hardware)


def ridge(hardware: Hardware) -> float:
    """Return the FLOPs a byte from which on the peak limits, and no longer the memory.

    >>> from course.sizing import DGX_A100, DGX_H100
    >>> round(ridge(DGX_A100)), round(ridge(DGX_H100))
    (153, 295)
    """
    return hardware.peak_flops / hardware.memory_bytes_per_second


def operations(plan: Plan, element_bytes: int = 2) -> list[Operation]:
    """Return the operations of a layer without experts, and of the logits, in the order in which a token meets them.

    A number takes ``element_bytes``: 2 on GPUs, 4 in float32.
    """
    model, t, tokens, e = plan.model, plan.tp_size, num_tokens(plan), element_bytes
    h, q, kv, f, up = model.hidden_size, query_size(model), model.kv_size, model.mlp_width, 1 + (model.mlp == "swiglu")
    own = tokens / t if plan.sequence_parallel else tokens  # tokens between the two halves of a layer
    words, cast = plan.vocab_size / t, 4 + e if e < 4 else 0  # logits are copied to float32

    def product(name: str, inputs: float, outputs: float) -> Operation:
        numbers = tokens * inputs + inputs * outputs + tokens * outputs
        return Operation(name, "product", 2 * tokens * inputs * outputs, e * numbers)

    heads = 0 if plan.fused_attention else model.num_attention_heads or 0
    scores = heads / t * tokens * model.seq_length  # that are stored
    core = core_flops(plan) + SOFTMAX_FLOPS * scores
    moved = e * tokens * (2 * q + 2 * kv) / t + (2 + SCORES + 2) * e / 2 * scores
    of_loss = SOFTMAX_FLOPS * tokens * words, (cast + 4 + 8) * tokens * words
    return [
        Operation("norm", "memory", NORM_FLOPS[model.norm] * own * h, 2 * e * own * h),
        product("q, k and v: column-parallel", h, (q + 2 * kv) / t),
        Operation("attention", "attention", core, moved),
        product("attention's output: row-parallel", q / t, h),
        Operation("residual", "memory", own * h, 3 * e * own * h),
        product("MLP, up: column-parallel", h, up * f / t),
        Operation(model.mlp, "memory", ACTIVATION_FLOPS[model.mlp] * tokens * f / t, (up + 1) * e * tokens * f / t),
        product("MLP, down: row-parallel", f / t, h),
        product("logits: column-parallel", h, words),
        Operation("vocabulary-parallel loss", "memory", *of_loss),
    ]
