"""Times the operations of a layer on this machine, and its roof: how fast one large product and one large copy are."""

import math
import time
from collections.abc import Callable, Mapping

import torch
import torch.distributed as dist
import torch.nn.functional as F

from course.measure.this_machine import NUM_REPEATS, large_sizes, reached
from course.sizing import Hardware, Plan
from course.sizing.roofline import operations
from course.sizing.shapes import query_size
from labkit.device import wait_for_gpu
from labkit.groups import local_device
from labkit.launch import launch
from labkit.tensor_parallel import ColumnParallelLinear, RowParallelLinear, vocab_parallel_cross_entropy
from labkit.tensor_parallel.blocks import ReplicatedLayerNorm, ReplicatedRMSNorm, activation


def measured_roofline(plan: Plan) -> tuple[Hardware, dict[str, float]]:
    """Return what one rank here reaches at most, and the seconds of each of `course.sizing.operations`, by name.

    The rank is alone and has the sizes that a GPU has under the plan, so no message is in these times; it computes in
    bfloat16 on a GPU, else in float32. The peak is that of the fastest product of all, its memory's rate that of a
    large copy. What fits into a CPU's cache can be faster than its memory, and above the roof.
    """
    [found] = launch(_on_a_rank, plan, world_size=1, timeout_seconds=300)
    return found


def _on_a_rank(plan: Plan) -> tuple[Hardware, dict[str, float]]:
    device, group = local_device(), dist.group.WORLD
    assert group is not None
    model, t, b, s = plan.model, plan.tp_size, plan.micro_batch_size, plan.model.seq_length // plan.cp_size
    h, q, kv, f, up = model.hidden_size, query_size(model), model.kv_size, model.mlp_width, 1 + (model.mlp == "swiglu")
    large = large_sizes(device)
    made: dict = dict(device=device, dtype=large.dtype)

    def numbers(*sizes: int) -> torch.Tensor:
        return torch.randn(*sizes, **made)

    def product(kind: type, inputs: int, outputs: int) -> Callable[[], object]:
        layer, x = kind(inputs, outputs, group, bias=False, **made), numbers(b, s, inputs)
        return lambda: layer(x)

    tokens, heads = b * s, (model.num_attention_heads or 1) // t
    own = tokens // t if plan.sequence_parallel else tokens
    between, other = numbers(own, h), numbers(own, h)
    norm = (ReplicatedLayerNorm if model.norm == "layernorm" else ReplicatedRMSNorm)(h, group, **made)
    head_size = q // t // heads
    queries, keys, values = (numbers(b, width // t // head_size, s, head_size) for width in (q, kv, kv))
    hidden, logits = numbers(b, s, up * f // t), numbers(tokens, plan.vocab_size // t)
    words = torch.zeros(tokens, dtype=torch.int64, device=device)
    approximate = "tanh" if model.mlp == "gelu_tanh" else "none"
    calls = {
        "norm": lambda: norm(between),
        "q, k and v: column-parallel": product(ColumnParallelLinear, h, (q + 2 * kv) // t),
        "attention": lambda: F.scaled_dot_product_attention(queries, keys, values, is_causal=True, enable_gqa=q > kv),
        "attention's output: row-parallel": product(RowParallelLinear, q // t, h),
        "residual": lambda: between + other,
        "MLP, up: column-parallel": product(ColumnParallelLinear, h, up * f // t),
        model.mlp: lambda: activation(hidden, model.mlp == "swiglu", approximate),
        "MLP, down: row-parallel": product(RowParallelLinear, f // t, h),
        "logits: column-parallel": product(ColumnParallelLinear, h, plan.vocab_size // t),
        "vocabulary-parallel loss": lambda: vocab_parallel_cross_entropy(logits, words, group),
    }
    square = numbers(large.width, large.width)
    source = numbers(large.num_copied)
    target = torch.empty_like(source)
    calls |= {"a product": lambda: square @ square, "a copy": lambda: target.copy_(source)}
    with torch.no_grad():
        seconds = _fastest(calls)
    speeds = [2 * large.width**3 / seconds.pop("a product")]
    of_plan = operations(plan, source.element_size())
    speeds += [each.flops / seconds[each.name] for each in of_plan if each.kind == "product"]
    copied_bytes = 2 * source.numel() * source.element_size()  # read and written
    return reached(max(speeds), copied_bytes / seconds.pop("a copy")), seconds


def _fastest(calls: Mapping[str, Callable[[], object]]) -> dict[str, float]:
    """Return the seconds of each call's fastest run. They take turns: what else the machine does slows all of them."""
    found = dict.fromkeys(calls, math.inf)
    for number in range(1 + NUM_REPEATS):
        for name, call in calls.items():
            wait_for_gpu()
            start = time.perf_counter()
            call()
            wait_for_gpu()
            if number:  # the first round warms up
                found[name] = min(found[name], time.perf_counter() - start)
    return found
