"""The FLOPs of a training step, and the days that a run takes."""

from collections.abc import Sequence
from typing import get_args

from course.sizing.shapes import attention_layers, module_weights, once, query_size
from labkit.parallel_config import ParallelConfig
from labkit.shape import GPT

RECOMPUTE = get_args(ParallelConfig.__annotations__["recompute"])
"""What backward computes again instead of keeping: nothing, the core of the attention, or whole layers."""


def flops_per_step(
    model: GPT,
    batch_size: int,
    recompute: str = "full",
    causal: bool = False,
    modules: Sequence[str] = ("core_attn",),
) -> float:
    """Return the FLOPs of a step on ``batch_size`` sequences: forward, twice that for backward, and what is recomputed.

    With full recomputation F = 96 B s l h^2 (1 + s/(6h) + V/(16 l h)). Model FLOPs utilisation counts what the model
    needs (recompute="none"), hardware FLOPs utilisation all that was computed. ``causal`` counts only the scores that a
    query sees, about half of them: so does `course.sizing.step_time` where fused attention computes no others. Source:
    arXiv 2104.04473, equation 3, which counts all. With recompute="selective", ``modules`` are computed again.
    """
    tokens = batch_size * model.seq_length  # a product of [m, k] and [k, n] takes 2mkn
    of_a_key = 4 * tokens * query_size(model) * model.num_layers
    attention = of_a_key * model.seq_length  # its core, without weights
    layers = tokens * (model.flops_per_token // 3 - 2 * model.vocab_size * model.hidden_size)  # all but the logits
    needed = tokens * model.flops_per_token
    if causal:
        hidden = attention - of_a_key * sum(each.share * each.keys for each in attention_layers(model))
        attention, layers, needed = attention - hidden, layers - hidden, needed - 3 * hidden
    weights = sum(
        (model.num_layers - model.num_moe_layers) * module_weights(model, module, False)
        + model.num_moe_layers * module_weights(model, module, True)
        for module in once(modules)
    )
    selected = 2 * tokens * weights + (attention if "core_attn" in modules else 0.0)
    again = {"none": 0.0, "selective": selected, "full": layers}
    if recompute not in again:
        raise ValueError(f"recompute={recompute!r} is unknown: use {', '.join(RECOMPUTE)}")
    return needed + again[recompute]


def training_days(num_tokens: float, num_parameters: float, num_gpus: int, flops_per_gpu: float) -> float:
    """Return 8 T P / (n X) in days, where X is what a GPU achieves with full recomputation.

    Source: arXiv 2104.04473, equation 4.
    """
    return 8 * num_tokens * num_parameters / (num_gpus * flops_per_gpu) / 86400
