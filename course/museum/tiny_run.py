"""One tiny training run of the museum, in one process or on eight ranks, and what can be seen of it from outside.

Nothing here knows a fault. A fault changes labkit on the rank that runs it, before the run starts. That rank is a
process of its own and ends with the run, so nothing of it stays.
"""

import hashlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from labkit import pipeline
from labkit.data import InventedText
from labkit.data_parallel import DataParallel
from labkit.groups import ProcessGroups, init_groups, local_device
from labkit.layout import ParallelLayout
from labkit.model import ParallelGPT
from labkit.parity import Difference, compare, gradients, weights
from labkit.schedules import one_f_one_b
from labkit.shape import GPT
from labkit.tensor_parallel import cut_like, dropout, shard_of, vocabulary
from labkit.train import gradients as norms

LAYOUT = ParallelLayout(8, tp_size=2, pp_size=2)
SHAPE = GPT(num_layers=2, hidden_size=16, seq_length=8, vocab_size=28, num_attention_heads=2)
NUM_STEPS, BATCH_SIZE, MICRO_BATCH_SIZE = 3, 12, 2
NUM_MICRO_BATCHES = BATCH_SIZE // LAYOUT.dp_size // MICRO_BATCH_SIZE  # 3: neither t, nor p, nor d
LABEL_SMOOTHING, CLIP_NORM, LEARNING_RATE = 0.1, 0.2, 0.5


@dataclass(frozen=True)
class Run:
    """Losses and gradient norms of the steps, and the weights before step 1 and the gradients in it, by name."""

    losses: list[float]
    norms: list[float]
    weights: dict[str, torch.Tensor]
    gradients: dict[str, torch.Tensor]


@dataclass(frozen=True)
class Seen:
    """What one rank shows: its run, held against one process, and fingerprints that are alike where tensors are.

    ``copies`` is of the gradients of what every tensor rank holds whole; ``hidden`` and ``heads`` of the dropout masks
    on hidden states and in attention.
    """

    losses: list[float]
    norms: list[float]
    weights: list[Difference]
    gradients: list[Difference]
    copies: str
    hidden: str
    heads: str


def in_one_process() -> Run:
    """The run of a process that holds the whole model; to be called in a world of one rank."""
    with init_groups(ParallelLayout(1)) as groups:
        return train(make_stage(groups), groups)


def on_rank(apply: Callable[[], None], expected: Run) -> Seen:
    """The run of one of eight ranks, on which ``apply`` has put a fault; held against that of one process."""
    apply()
    with init_groups(LAYOUT) as groups:
        stage = make_stage(groups)
        run = train(stage, groups)
        parameters = dict(stage.named_parameters())
        copies = [run.gradients[name] for name, parameter in parameters.items() if shard_of(parameter) is None]
        hidden, heads = dropout_masks(groups)

        def held_against(found: dict, whole: dict) -> list[Difference]:
            return compare(found, {name: cut_like(whole[name], p, groups.tp) for name, p in parameters.items()})

        return Seen(
            run.losses,
            run.norms,
            held_against(run.weights, expected.weights),
            held_against(run.gradients, expected.gradients),
            *map(fingerprint, (copies, hidden, heads)),
        )


def make_stage(groups: ProcessGroups, dropout: float = 0.0) -> ParallelGPT:
    """This rank's part of the model."""
    stage, num_stages = groups.coords.pp, groups.layout.pp_size
    place = {"dtype": torch.float64, "device": local_device()}
    return ParallelGPT(SHAPE, groups.tp, stage=stage, num_stages=num_stages, dropout=dropout, **place)


def train(stage: ParallelGPT, groups: ProcessGroups) -> Run:
    """All steps on this rank: what `labkit.train` does, without its options."""
    replica, parameters = DataParallel(stage, groups.dp), list(stage.parameters())
    tied = [stage.embedding.weight] if stage.is_first != stage.is_last else []
    run = Run([], [], weights(stage), {})
    for step in range(NUM_STEPS):
        replica.zero_grad()
        run.losses.append(forward_and_backward(replica, tied, step, groups))
        replica.sync_gradients()
        run.norms.append(norms.global_grad_norm(parameters, tied if stage.is_last else [], groups))
        if step == 0:
            run.gradients.update({name: grad for name, grad in gradients(stage).items() if grad is not None})
        norms.clip_gradients(parameters, run.norms[-1], CLIP_NORM)
        with torch.no_grad():  # plain gradient descent: AdamW would hide a gradient that is too large as a whole
            for parameter in parameters:
                if parameter.grad is not None:
                    parameter -= LEARNING_RATE * parameter.grad
    return run


def forward_and_backward(replica: DataParallel, tied: list[nn.Parameter], step: int, groups: ProcessGroups) -> float:
    """The gradients of this replica's rows; returns the loss, averaged over replicas, on every rank."""
    num_micro_batches = BATCH_SIZE // groups.layout.dp_size // MICRO_BATCH_SIZE
    text = InventedText()
    samples = [text.sample(number, SHAPE.seq_length + 1) for number in my_samples(step, groups)]
    tokens = torch.stack([torch.from_numpy(sample) for sample in samples]).to(local_device())
    inputs, targets = (part.split(MICRO_BATCH_SIZE) for part in (tokens[:, :-1], tokens[:, 1:]))
    with replica.no_sync():
        loss = pipeline.run(
            one_f_one_b(groups.layout.pp_size, num_micro_batches),
            [replica],
            groups,
            inputs,
            targets=targets,
            loss=lambda logits, words: smoothed_loss(logits, words, groups),
            tied=tied,
        )
    total = torch.zeros((), dtype=torch.float64, device=local_device())
    if loss is not None:  # on the last stage only
        dist.all_reduce(total.add_(loss), group=groups.dp)
    dist.all_reduce(total, group=groups.pp)
    return total.item() / groups.layout.dp_size


def smoothed_loss(logits: torch.Tensor, words: torch.Tensor | None, groups: ProcessGroups) -> torch.Tensor:
    """The mean cross-entropy of a micro-batch, with label smoothing."""
    assert words is not None
    return vocabulary.vocab_parallel_cross_entropy(logits, words, groups.tp, LABEL_SMOOTHING)


def my_samples(step: int, groups: ProcessGroups) -> range:
    """The numbers of the samples that this rank's replica sees in a step."""
    rows = BATCH_SIZE // groups.layout.dp_size
    first = step * BATCH_SIZE + groups.coords.dp * rows
    return range(first, first + rows)


def dropout_masks(groups: ProcessGroups) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """What a forward pass of this stage keeps: of its hidden states, and of the weights in its attention heads."""
    stage, hidden, heads = make_stage(groups, dropout=0.5), [], []
    for module in stage.modules():
        if isinstance(module, nn.Dropout):
            module.register_forward_hook(lambda module, inputs, output: hidden.append(output != 0))
    dropout.seed_replicas(0, groups)
    words = torch.zeros(1, SHAPE.seq_length, dtype=torch.long, device=local_device())
    states = torch.linspace(-1, 1, SHAPE.seq_length * SHAPE.hidden_size, dtype=torch.float64, device=local_device())
    states = states.square().reshape(1, SHAPE.seq_length, SHAPE.hidden_size)  # no tensor of zeros comes of these
    with _watched_attention(heads):
        stage(words if stage.is_first else states)
    return hidden, heads


@contextmanager
def _watched_attention(masks: list[torch.Tensor]) -> Iterator[None]:
    """Inside the block each attention also notes its mask: what the same draw keeps where all values are 1."""
    attention = F.scaled_dot_product_attention

    def watch(q, k, v, **options):
        with torch.random.fork_rng(devices=[]):
            each_word = torch.eye(k.size(-2), dtype=v.dtype, device=v.device).expand(*k.shape[:-1], -1)
            masks.append(attention(torch.zeros_like(q), torch.zeros_like(k), each_word, **options) != 0)
        return attention(q, k, v, **options)

    F.scaled_dot_product_attention = watch
    try:
        yield
    finally:
        F.scaled_dot_product_attention = attention


def fingerprint(tensors: Iterable[torch.Tensor]) -> str:
    """The same text for the same tensors."""
    found = hashlib.blake2b(digest_size=8)
    for tensor in tensors:
        found.update(tensor.cpu().contiguous().numpy().tobytes())
    return found.hexdigest()
