"""Training a GPT: 8 ranks in five layouts against one process with two threads; how soon a run starts; and a GPU.

On one machine 8 ranks share the cores that the one process has to itself. Communication, which takes the cores' time
too, pulls a ratio below 1.0; above 1.0, ranks of one thread use the cores better than one process with two. Each row
says what share of a traced step the ranks spend waiting for messages, which includes waiting for others to compute.

A start lasts from the launch to the first step's result. On a GPU, the model has 121 million parameters: 17 layers of
GPT-2's width instead of 12, because letters need none of the 39 million parameters that GPT-2 gives to its words.
"""

import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from math import nan

import torch

from course.sizing.flops import flops_per_step
from course.stream import stream
from labkit.launch import World
from labtrain import TrainConfig, steps, training

ON_CPU = TrainConfig(
    batch_size=16, micro_batch_size=2, seq_length=128, num_layers=8, hidden_size=256, num_attention_heads=8
)
LAYOUTS = {
    "dp 8": {},
    "tp 8": {"tp_size": 8},
    "pp 8": {"pp_size": 8},
    "tp 2, pp 2, dp 2": {"tp_size": 2, "pp_size": 2},
    "pp 2 x 2, dp 4, ZeRO-1": {
        "pp_size": 2, "num_chunks": 2, "schedule": "interleaved", "zero_stage": 1,
    },
}  # fmt: skip
ON_GPU = TrainConfig(
    batch_size=64, micro_batch_size=16, seq_length=1024, num_layers=17, hidden_size=768, num_attention_heads=12,
    precision="bfloat16",
)  # fmt: skip
NUM_STEPS = 5
PEAK_FLOPS = {"V100": 125e12, "A100": 312e12, "H100": 989e12, "H200": 989e12}
"""FLOP/s of dense 16-bit matrix products on SXM models. Source: NVIDIA's data sheets."""


def rows() -> Iterator[tuple[str, float, float]]:
    tokens = ON_CPU.batch_size * ON_CPU.seq_length
    with World(1, backend="gloo") as world:
        alone, _ = world.run(measure, ON_CPU, 2)[0]
    with World(8, backend="gloo", timeout_seconds=300) as world:
        for name, options in LAYOUTS.items():
            ranks = world.run(measure, replace(ON_CPU, **options), 1)
            seconds, waiting = (statistics.mean(values) for values in zip(*ranks))
            text = f"train, {name}: {tokens / seconds:,.0f} tokens/s, {waiting:.0%} waiting; one process"
            yield text, seconds, alone
    yield "first step of 8 ranks from a new kernel", in_new_kernel(), nan
    yield "first step of 8 ranks, launched again", first_step_seconds(), nan
    if torch.cuda.is_available():
        with World(1, backend="nccl") as world:
            seconds, _ = world.run(measure, ON_GPU, None)[0]
        size, name = ON_GPU.shape, torch.cuda.get_device_name()
        achieved = flops_per_step(size, ON_GPU.batch_size, "none") / seconds
        peak = next((flops for model, flops in PEAK_FLOPS.items() if model in name), None)
        share = f", {achieved / peak:.0%} of {name}'s peak" if peak else ""
        tokens_per_second = ON_GPU.batch_size * ON_GPU.seq_length / seconds
        text = f"{size.num_parameters / 1e6:.0f} million parameters, bf16: {tokens_per_second:,.0f} tokens/s{share}"
        yield text, seconds, nan


def measure(config: TrainConfig, num_threads: int | None) -> tuple[float, float]:
    """Return a rank's median seconds per step, and the share of one more step that it spent waiting."""
    from labkit.collectives import trace_communication
    from labkit.groups import local_device
    from labkit.timeline.spans import WAIT, covered_seconds
    from labkit.timeline.trace import Trace

    if num_threads:
        torch.set_num_threads(num_threads)
    with training(replace(config, steps=NUM_STEPS + 3)) as trainer:
        taken = [trainer.step().seconds for _ in range(NUM_STEPS + 2)]
        trace = Trace(trainer.groups.rank, local_device())
        with trace_communication(trace):
            traced = trainer.step()
    return statistics.median(taken[2:]), covered_seconds(trace.spans(), WAIT) / traced.seconds


def first_step_seconds() -> float:
    """Return the seconds from `World` to the first step's result, in the kernel."""
    start = time.perf_counter()
    with World(8, backend="gloo") as world:
        next(stream(world, steps, replace(ON_CPU, tp_size=2, pp_size=2)))
        return time.perf_counter() - start


def in_new_kernel() -> float:
    """Return the same, in an interpreter that has yet to start the launcher."""
    command = [sys.executable, "-m", "benchmarks.bench_train"]
    run = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, check=True)
    return float(run.stdout.splitlines()[-1])


if __name__ == "__main__":
    print(first_step_seconds())
