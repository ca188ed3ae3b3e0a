"""All rows of the check, for a machine with so many GPUs."""

from collections.abc import Iterator
from functools import partial

import torch

from labkit.parallel_config import SCHEDULES
from labtrain.model import CONTEXT_PARALLEL
from tools.gpu_rows import faults, on_ranks, one_process, speed
from tools.gpu_rows.row import A_GPU, SEVERAL_GPUS, Row

CELLS_OF_LAYERS = {
    "column": ("03_column_parallel", "compare-run"),
    "row": ("04_row_parallel", "real-run"),
    "vocabulary and loss": ("09_vocabulary_parallel", "vocabulary-loss-run"),
    "column and row, sequence parallel": ("04_row_parallel", "sequence-run"),
}
CELLS_OF_LAYOUTS = {
    "dp": ("05_data_parallel", "parity-run"),
    "ZeRO 1": ("05_data_parallel", "zero-run"),
    "ZeRO 2": ("14_fully_sharded", "train-run"),
    "ZeRO 3": ("14_fully_sharded", "train-run"),
    on_ranks.HYBRID: ("14_fully_sharded", "hybrid-run"),
    "tp, sequence parallel": ("10_parallel_gpt", "train-float64"),
    "cp": ("13_context_parallel", "train-run"),
    "tp, pp and dp": ("08_3d_parallel", "layouts-run"),
    "ep, pp in a V": ("15_experts", "train-run"),
}


def rows_of_one_process() -> Iterator[Row]:
    for dtype in one_process.LARGEST_ERRORS:
        check = partial(one_process.product, name=dtype)
        yield Row(f"product in {dtype}", "12_utilisation", "roofline-here", check)
    yield Row("attention in bfloat16", "13_context_parallel", "exact-run", one_process.attention)
    yield Row("experts in bfloat16, one kernel", "15_experts", "most-rows-run", one_process.experts)
    yield Row("experts: waits of the host", "15_experts", "count-run", one_process.waits, needs=A_GPU)
    yield Row("events and the clock", "05_data_parallel", "timeline-run", one_process.events, needs=A_GPU)
    yield Row("torch.profiler", "05_data_parallel", "timeline-save", one_process.profiler)
    yield Row("memory against the estimate", "11_dropout_and_memory", "memory-run", one_process.memory, needs=A_GPU)
    for in_background in (False, True):
        name = f"checkpoint saved{' in the background' if in_background else ''} and loaded"
        check = partial(one_process.checkpoint, in_background=in_background)
        yield Row(name, "08_3d_parallel", "resume-second", check)
    yield Row("generation", "10_parallel_gpt", "writes-run", one_process.generation)
    yield Row("an assertion in a kernel of a rank", "02_collectives", "stay-error", one_process.device_assert)


def rows_of_ranks(n: int) -> Iterator[Row]:
    def row(name: str, notebook: str, cell: str, check, *args) -> Row:
        return Row(f"{n} ranks: {name}", notebook, cell, partial(_call, check, (n, *args)))

    yield row("collectives", "02_collectives", "after-deadlock", on_ranks.compared, on_ranks.collectives)
    for name, place in CELLS_OF_LAYERS.items():
        yield row(f"layer, {name}", *place, on_ranks.compared, on_ranks.layer, name)
    for name in CONTEXT_PARALLEL:
        place = "13_context_parallel", "exact-run"
        yield row(f"attention, {name}", *place, on_ranks.compared, on_ranks.attention, name, torch.float64)
    yield row("attention, ring in bfloat16", "13_context_parallel", "ring-count", on_ranks.rounded)
    for name in SCHEDULES:
        place = "07_pipeline_parallel", "fold-run" if "v" in name.split("-") else "gpt-pipeline"
        yield row(f"schedule, {name}", *place, on_ranks.compared, on_ranks.schedule, name)
    for name, config in on_ranks.layouts(n).items():
        yield row(f"training, {name}", *CELLS_OF_LAYOUTS[name], on_ranks.trained, config)
    yield row("training, resumed", "14_fully_sharded", "dies-end", on_ranks.trained_again)
    yield row("all-reduce, speed", "02_collectives", "measure", on_ranks.bandwidth)


def rows_of_faults(n: int) -> Iterator[Row]:
    for name in faults.FAULTS:
        check = partial(_call, faults.fault, (n, name))
        cell = "stay-error" if name == "a rank raises" else "deadlock"
        yield Row(f"{n} ranks: {name}", "02_collectives", cell, check, limit_seconds=150)
    check = partial(_call, faults.stopped, (n,))
    yield Row(f"{n} ranks: the stop button", "02_collectives", "deadlock", check)


def rows_of_speed(n: int) -> Iterator[Row]:
    for is_tensor_parallel in (False, True):
        name = f"{n} ranks: tokens per second, {'tp' if is_tensor_parallel else 'dp with ZeRO 1'}"
        check = partial(_call, speed.speed, (n, is_tensor_parallel))
        yield Row(name, "12_utilisation", "split-run", check, needs=SEVERAL_GPUS, limit_seconds=120)


def rows_of_notebooks() -> Iterator[Row]:
    for name in speed.CORE_NOTEBOOKS:
        check = partial(_call, speed.notebook, (f"notebooks/{name}.ipynb",))
        yield Row(f"notebook {name}", name, "setup", check, SEVERAL_GPUS, limit_seconds=150, is_alone=True)


def _call(check, args, where):
    return check(where, *args)


def all_rows(num_gpus: int, numbers_of_ranks: tuple[int, ...] | None = None) -> list[Row]:
    """Return the rows in the order in which they run, those that say most first.

    With one GPU, or none, 2, 4 and 8 ranks share it; with several, each rank has a GPU of its own.
    """
    if numbers_of_ranks is None:
        numbers_of_ranks = (num_gpus,) if num_gpus > 1 else (2, 4, 8)
    most = max(numbers_of_ranks)
    rows = list(rows_of_one_process())
    for n in numbers_of_ranks:
        rows += rows_of_ranks(n)
    if num_gpus != 1:  # ranks that share a GPU know nothing of NCCL's faults
        rows += rows_of_faults(min(most, num_gpus) if num_gpus else 2)
    rows += rows_of_speed(most)
    rows.append(Row("out of memory", "12_utilisation", "naive-run", one_process.out_of_memory, is_alone=True))
    rows += rows_of_notebooks()
    return rows
