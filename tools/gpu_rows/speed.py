"""Rows that say how fast training is, beside what course/sizing says; and notebooks that are run as they stand."""

import json
import os
from dataclasses import replace
from pathlib import Path

from course.sizing import DGX_H100, Plan, flops_per_step, step_time
from labkit.groups import local_device
from labtrain import TrainConfig, training
from labtrain.console import PEAK_FLOPS
from tools.gpu_rows.row import Found, LeftOut, Where

CORE_NOTEBOOKS = (
    "01_group_layout", "02_collectives", "03_column_parallel", "04_row_parallel", "05_data_parallel",
    "06_tensor_parallel", "07_pipeline_parallel", "08_3d_parallel",
)  # fmt: skip


def speed_config(is_gpu: bool, num_ranks: int, tp_size: int) -> TrainConfig:
    sizes = dict(hidden_size=4096, num_layers=8, num_attention_heads=32, seq_length=2048, batch_size=2 * num_ranks)
    if not is_gpu:
        sizes = dict(hidden_size=32, num_layers=2, num_attention_heads=4, seq_length=16, batch_size=2 * num_ranks)
    options = dict(precision="bfloat16", tied=False, zero_stage=0 if tp_size > 1 else 1)
    return TrainConfig(
        steps=5, micro_batch_size=2 if tp_size == 1 else 1, tp_size=tp_size, sequence_parallel=tp_size > 1,
        **sizes, **options,
    )  # fmt: skip


def seconds_of_steps(config: TrainConfig) -> tuple[list[float], str]:
    """On a rank: return the seconds of each step, and the GPU's name."""
    import torch

    with training(config) as trainer:
        seconds = [step.seconds for step in trainer.steps()]
    device = local_device()
    return seconds, torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"


def speed(where: Where, num_ranks: int, is_tensor_parallel: bool) -> Found:
    """Train, and compare tokens per second and MFU with the estimate; nothing is right or wrong about them."""
    config = speed_config(where.is_gpu, num_ranks, num_ranks if is_tensor_parallel else 1)
    found = where.run(num_ranks, seconds_of_steps, config)
    seconds = max(min(of_rank[2:]) for of_rank, _ in found)  # the first steps warm up
    name = found[0][1]
    peak = next((flops for kind, flops in PEAK_FLOPS.items() if kind in name), DGX_H100.peak_flops)
    hardware = replace(DGX_H100, peak_flops=peak)
    plan = Plan(
        config.shape, num_ranks, config.batch_size, config.tp_size, micro_batch_size=config.micro_batch_size,
        recompute="none", sequence_parallel=config.sequence_parallel, zero_stage=config.zero_stage,
        fused_attention=True,
    )  # fmt: skip
    tokens = config.batch_size * config.seq_length
    needed_flops = flops_per_step(config.shape, config.batch_size, "none")
    said = step_time(plan, hardware)
    measured = f"{tokens / seconds:,.0f} tokens/s"
    if where.is_gpu:
        measured += f", MFU {needed_flops / (seconds * num_ranks * peak):.1%} of {peak / 1e12:,.0f} TFLOP/s ({name})"
    estimate = f"{tokens / said.total:,.0f} tokens/s, MFU {said.model_flops_utilisation:.1%}, estimated for a DGX"
    return Found(True, measured, estimate)


def notebook(where: Where, path: str | Path) -> Found:
    """Run the cells of a notebook as they stand, on the GPUs that launch finds."""
    try:
        import ipywidgets  # noqa: F401
        import matplotlib
        from IPython.core.interactiveshell import InteractiveShell
    except ImportError as error:
        raise LeftOut(f"{error.name} is not installed: run it by `make gpu-check`") from None
    path = Path(path).resolve()
    cells = json.loads(path.read_text())["cells"]
    matplotlib.use("agg")
    shell = InteractiveShell.instance()
    before = os.getcwd()
    os.chdir(path.parent)
    num_run = 0
    try:
        for cell in cells:
            if cell["cell_type"] != "code":
                continue
            result = shell.run_cell("".join(cell["source"]), store_history=True)
            num_run += 1
            may_raise = "raises-exception" in cell["metadata"].get("tags", ())
            if not result.success and not may_raise:
                error = result.error_before_exec or result.error_in_exec
                return Found(False, f"cell {cell['id']}: {type(error).__name__}: {error}", "no cell fails")
    finally:
        os.chdir(before)
    return Found(True, f"{num_run} cells ran", "no cell fails")
