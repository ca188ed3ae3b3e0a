"""A model of 1 GB in Hugging Face's format: loaded on 4 ranks, and words written, against transformers in one process.

Each side runs in new processes, with the page cache warm. ``python -m benchmarks.bench_pretrained`` also prints the
peaks of memory: how far a process rises above what its imports take, pages of mapped files included. A model is loaded
when each weight has been read once, because transformers maps the files and leaves the reading to the first use.
"""

import math
import re
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from labkit.groups import groups_of_one, init_groups
from labkit.launch import launch
from labkit.layout import ParallelLayout
from labkit.shape import GPT
from labtrain import pretrained
from labtrain.generation import generate
from labtrain.model import ParallelGPT

TODAY: dict = dict(norm="rmsnorm", mlp="swiglu", positions="rope", bias=False, tied=False)
SHAPE = GPT(16, 1024, 1024, 32000, 16, 8, 2816, **TODAY)  # 0.25 billion parameters, 1.0 GB in float32
PROMPT, NUM_TOKENS, NUM_ROUNDS = 32, 32, 3


def rows() -> Iterator[tuple[str, float, float]]:
    with tempfile.TemporaryDirectory() as root:
        folder = make(f"{root}/model")
        (ours, _), (theirs, _) = loads(folder)
        gigabytes = sum(path.stat().st_size for path in Path(folder).iterdir()) / 1e9
        yield f"load of {gigabytes:.1f} GB on 4 ranks, by from_pretrained in 1 process", ours, theirs
        ours, theirs, again = words(folder)
    yield f"a word after {PROMPT}, 1 process, by transformers' generate", ours, theirs
    yield "the same, by computing the whole text again for each word", ours, again


def make(folder: str) -> str:
    """Write a model with weights that are drawn; return its folder."""
    model = empty_model(torch.device("cpu"), groups_of_one())
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.02)
    pretrained.save(folder, model, groups_of_one(), max_file_bytes=1 << 28)
    return folder


def empty_model(device: torch.device, groups) -> ParallelGPT:
    return ParallelGPT(SHAPE, groups.tp, device="meta").to_empty(device=device)


def loads(folder: str) -> tuple[tuple[float, float], tuple[float, float]]:
    """Return seconds and peak bytes to load with labkit, of the slowest and largest rank, and with transformers."""
    taken = ([], [])
    for _ in range(1 + NUM_ROUNDS):
        taken[0].append([max(values) for values in zip(*launch(load_ours, folder, world_size=4, backend="gloo"))])
        taken[1].append(launch(load_theirs, folder, world_size=1, backend="gloo")[0])
    ours, theirs = (tuple(map(statistics.median, zip(*each[1:]))) for each in taken)
    return ours, theirs


def load_ours(folder: str) -> tuple[float, float]:
    with init_groups(ParallelLayout(4, tp_size=4)) as groups:
        pretrained.check(folder, SHAPE)  # imports what it needs

        def load() -> ParallelGPT:
            model = empty_model(torch.device("cpu"), groups)
            pretrained.load(folder, model, groups)
            return model

        dist.barrier()
        return measured(load)


def load_theirs(folder: str) -> tuple[float, float]:
    from transformers import AutoConfig, AutoModelForCausalLM

    AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder, num_hidden_layers=1, vocab_size=8))
    return measured(lambda: AutoModelForCausalLM.from_pretrained(folder))


def measured(load: Callable[[], torch.nn.Module]) -> tuple[float, float]:
    """Return the seconds until a model is loaded and each weight was read once, and how far memory rose for it."""

    def status(name: str) -> int:
        found = re.search(rf"{name}:\s+(\d+)", Path("/proc/self/status").read_text())
        assert found is not None
        return 1024 * int(found[1])

    Path("/proc/self/clear_refs").write_text("5")  # the peak is what there is now
    start, before = time.perf_counter(), status("VmRSS")
    with torch.no_grad():
        for parameter in load().parameters():  # transformers maps the file: the values come when they are read
            parameter.sum()
    return time.perf_counter() - start, status("VmHWM") - before


def words(folder: str) -> tuple[float, float, float]:
    """Return the seconds that a word takes with labkit, with transformers, and without kept keys and values."""
    return launch(write, folder, world_size=1, backend="gloo", timeout_seconds=600)[0]


@torch.no_grad()
def write(folder: str) -> tuple[float, float, float]:
    from transformers import AutoModelForCausalLM

    theirs: Any = AutoModelForCausalLM.from_pretrained(folder)
    groups = groups_of_one()
    ours = empty_model(torch.device("cpu"), groups)
    pretrained.load(folder, ours, groups)
    start = torch.randint(SHAPE.vocab_size, (1, PROMPT), generator=torch.Generator().manual_seed(0))

    def mine(num: int) -> torch.Tensor:
        return generate(ours, start, groups, num, temperature=0, seed=0)

    def of_transformers(num: int) -> torch.Tensor:
        options = dict(max_new_tokens=num, min_new_tokens=num, do_sample=False, pad_token_id=0)
        return theirs.generate(start, attention_mask=torch.ones_like(start), **options)

    def again(num: int) -> torch.Tensor:
        text = start
        for _ in range(num):
            text = torch.cat([text, ours(text)[:, -1:].argmax(-1)], 1)
        return text

    ways, seconds = (mine, of_transformers, again), ([], [], [])
    for _ in range(1 + NUM_ROUNDS):
        texts = []
        for way, taken in zip(ways, seconds):
            before = time.perf_counter()
            texts.append(way(NUM_TOKENS))
            taken.append((time.perf_counter() - before) / NUM_TOKENS)
        assert torch.equal(texts[0], texts[1]) and torch.equal(texts[0], texts[2])
    one, other, last = (statistics.median(taken[1:]) for taken in seconds)
    return one, other, last


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as root:
        model_folder = make(f"{root}/model")
        largest = max(math.prod(size) for size in pretrained.unsharded_sizes(SHAPE).values()) * 4
        for who, (taken, peak) in zip(("labkit, the largest of 4 ranks", "transformers"), loads(model_folder)):
            print(f"{who}: {taken:.2f} s, {peak / 1e6:,.0f} MB")
        print(
            f"a quarter of the model: {SHAPE.num_parameters / 1e6:,.0f} MB; its largest tensor: {largest / 1e6:,.0f} MB"
        )
