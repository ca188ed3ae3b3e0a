"""How long a step of a 10-million-parameter GPT is held up by a checkpoint: in the background, against one that waits.

Both are of the same state and alternate in one world, into one folder; each result is the median of the slowest rank.
In the background it is the time until training goes on, which is that of the copy. The write then shares the cores with
training: on a machine with a core for each rank and no more, that takes most of the gain back.
"""

import statistics
import tempfile
import time
from collections.abc import Iterator

import torch
import torch.distributed as dist

from labkit.launch import launch
from labtrain import TrainConfig, checkpoint, training

CONFIG = TrainConfig(hidden_size=528, num_layers=3, batch_size=8, seq_length=16)
NUM_ROUNDS = 9


def rows() -> Iterator[tuple[str, float, float]]:
    with tempfile.TemporaryDirectory() as folder:
        background, waiting = launch(compare, folder, world_size=2, backend="gloo", timeout_seconds=300)[0]
    millions = f"{CONFIG.shape.num_parameters / 1e6:.0f}M"
    text = f"step held up by a background save, {millions} parameters, 2 ranks, by one that waits"
    yield text, background, waiting


def compare(folder: str) -> tuple[float, float]:
    """Return the median seconds that a save in the background and one that waits hold a step up, on any rank."""
    torch.set_num_threads(1)
    seconds = ([], [])
    with training(CONFIG) as trainer, checkpoint.InBackground() as background:
        for _ in range(1 + NUM_ROUNDS):
            for save, taken in zip((background.save, checkpoint.save), seconds):
                trainer.step()
                dist.barrier()
                start = time.perf_counter()
                save(folder, trainer._state, trainer.steps_done, trainer.samples_done, keep=1)
                taken.append(time.perf_counter() - start)
                background.wait()
    medians = torch.tensor([statistics.median(taken[1:]) for taken in seconds])  # without the first, which warms up
    dist.all_reduce(medians, dist.ReduceOp.MAX)
    return medians[0].item(), medians[1].item()
