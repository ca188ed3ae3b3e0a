"""The faults of the museum: what each does to labkit on a rank, how it shows, and who met it.

Each ``apply`` replaces something of labkit in the process that calls it. The museum calls it on ranks only, which are
processes that end with their run.
"""

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from unittest.mock import patch

import torch
import torch.nn.functional as F

from labkit import gradients, pipeline
from labkit.layout import ParallelLayout
from labkit.partition import rows_of_replica
from labkit.pipeline.worker import Stage
from labkit.tensor_parallel import RowParallelLinear, blocks, dropout, linear, shards, vocabulary
from labkit.tensor_parallel.operators import reduce_from_tp
from labtrain import Trainer, trainer


@dataclass(frozen=True)
class Fault:
    """What is wrong (``what``), how it ``shows`` in the museum's run, where it was seen (``seen_at``), and the code."""

    name: str
    what: str
    shows: str
    seen_at: str
    apply: Callable[[], None]


def row_bias_added_t_times():
    def forward(self, x):
        output = F.linear(x, self.weight, self.bias)  # the whole bias, on every rank
        return reduce_from_tp(output, self.group), None

    RowParallelLinear.forward = forward


def missing_backward_all_reduce():
    def column_linear(x, weight, bias, group, sequence_parallel=False):
        return F.linear(x, weight, bias)  # x is used as it is, without copy_to_tp

    linear.column_linear = vocabulary.column_linear = column_linear


def shards_with_one_seed():
    def local_shard(master, group, dim, stride=1):
        chunks = master.chunk(group.size() * stride, dim)
        return torch.cat(chunks[:: group.size()], dim)  # as if each rank had drawn its shard from the same seed

    right = linear.ParallelLinear.reset_parameters

    def reset_parameters(self):
        with patch.object(shards, "local_shard", local_shard):
            right(self)

    linear.ParallelLinear.reset_parameters = reset_parameters


def label_smoothing_over_the_local_shard():
    right = vocabulary.vocab_parallel_cross_entropy

    def cross_entropy(logits, target, group, label_smoothing=0.0, reduction="sum"):
        normaliser = reduce_from_tp(logits.exp().sum(-1), group).log()
        smooth = normaliser - logits.mean(-1)  # the mean over this rank's words
        plain = right(logits, target, group, reduction=reduction)
        return (1 - label_smoothing) * plain + label_smoothing * smooth.sum()

    vocabulary.vocab_parallel_cross_entropy = cross_entropy


def micro_batch_losses_not_averaged():
    right = pipeline.run

    def run(schedule, *args, loss, **options):
        m = schedule.num_micro_batches
        total = right(schedule, *args, loss=lambda *given: m * loss(*given), **options)  # undoes the division by m
        return None if total is None else total / m  # what is shown is the mean

    pipeline.run = run


def only_the_last_micro_batch_counts():
    right = Stage.backward

    def backward(self, op, grad):
        self.chunk.zero_grad()  # and with it the gradients of the micro-batches before
        return right(self, op, grad)

    Stage.backward = backward


def tied_embedding_not_reduced():
    right = pipeline.run
    pipeline.run = lambda *args, tied, **options: right(*args, tied=(), **options)  # each stage keeps its own gradients


def batch_split_along_the_wrong_axis():
    def rows(self):
        other_order = ParallelLayout(8, tp_size=2, pp_size=2, order="tp-pp-dp")
        dp_rank = other_order.coords(self.groups.rank).dp  # here: the pipeline rank
        return rows_of_replica(self.config.batch_size, other_order.dp_size, dp_rank)

    Trainer.rows = rows


def gradient_norm_per_stage():
    right = trainer.loss_and_grad_norm

    def loss_and_grad_norm(loss_share, parameters, groups, *more):
        stages, here = range(groups.layout.pp_size), groups.coords.pp
        of_stages = [right(loss_share, parameters if stage == here else {}, groups, *more) for stage in stages]
        return of_stages[here]  # the other stages' gradients are not in its norm

    trainer.loss_and_grad_norm = loss_and_grad_norm


def copies_counted_twice_in_the_norm():
    right = gradients.copy_groups_of
    gradients.copy_groups_of = lambda placement, groups: [
        group for group in right(placement, groups) if group is not groups.tp
    ]


def same_mask_on_every_shard():
    blocks.local_random_stream = dropout.local_random_stream = lambda group, device: nullcontext()


def same_mask_on_every_replica():
    trainer.seed_replicas = lambda seed, groups: torch.manual_seed(seed + 1 + groups.coords.pp)  # for every coords.dp


FAULTS = [
    Fault(
        "row bias added t times",
        "The row-parallel layer adds its bias before the all-reduce, so each of the t ranks adds it.",
        "Step 1 would be right in everything, because new biases are zero. From step 2 on, loss and norm drift away.",
        "awslabs/slapo issue #10; PaddlePaddle/Paddle pull request #35186; huggingface/text-generation-inference "
        "issue #1036",
        row_bias_added_t_times,
    ),
    Fault(
        "missing backward all-reduce",
        "The input of a column-parallel layer is used without copy_to_tp, so in backward nobody adds up the gradients "
        "that the tensor ranks have for it.",
        "The loss of step 1 would be right. The gradients would not, on any rank, and the two ranks of a tensor group "
        "would disagree about the gradients of what both hold whole.",
        "NVIDIA/Megatron-LM issue #5337, found in the code before a run met it: for strided tensors, the sum went into "
        "a temporary copy, and the tensor without the sum was returned",
        missing_backward_all_reduce,
    ),
    Fault(
        "shards with one seed",
        "Each rank draws its own shard, and all draw from the same seed: the shards are equal.",
        "The weights would differ from those of one process before the first step, and so would everything after it.",
        "modelscope/ms-swift pull request #7944",
        shards_with_one_seed,
    ),
    Fault(
        "label smoothing over the local shard",
        "The mean log-probability of label smoothing is taken over the words of each rank, not over all words.",
        "The two ranks of a tensor group would show two losses from step 1 on, although the weights are right.",
        "NVIDIA/Megatron-LM issue #737",
        label_smoothing_over_the_local_shard,
    ),
    Fault(
        "micro-batch losses not averaged",
        "Each micro-batch's loss goes into backward undivided, so the gradient is that of their sum.",
        "Every gradient would be m = 3 times what one process has, and so would the norm.",
        "deepspeedai/DeepSpeed issue #7773, found when somebody logged the gradient norm",
        micro_batch_losses_not_averaged,
    ),
    Fault(
        "only the last micro-batch counts",
        "The gradients of earlier micro-batches are thrown away before the last one is added.",
        "The loss of step 1 would be right. Every gradient would be wrong, by no common factor, and yet the ranks of a "
        "tensor group would agree with each other.",
        "NVIDIA-NeMo/Automodel pull request #3530",
        only_the_last_micro_batch_counts,
    ),
    Fault(
        "tied embedding not reduced",
        "First and last stage both hold the embedding, and do not add up their gradients of it.",
        "Only the gradient of embedding.weight would be wrong, on the first stage and on the last. The ratios of the "
        "two would add up to 1: each has its part of the sum.",
        "uw-syfi/piper issue #13; a related one is NVIDIA/Megatron-LM issue #844",
        tied_embedding_not_reduced,
    ),
    Fault(
        "batch split along the wrong axis",
        "Samples are dealt out by one order of the ranks, and groups are made by a different one. Stages of one "
        "pipeline see different samples, so the targets do not belong to the inputs.",
        "The weights would be right, and the loss of step 1 already wrong, the same on all ranks.",
        "facebookresearch/fairscale issue #1189: the groups that are made are not those that the comment lists",
        batch_split_along_the_wrong_axis,
    ),
    Fault(
        "gradient norm counted per stage",
        "The squares are added up within each stage only, so each stage clips by a norm of its own.",
        "The gradients of step 1 would be right, but the two stages would show two norms, both too small.",
        "pytorch/torchtitan issue #596",
        gradient_norm_per_stage,
    ),
    Fault(
        "replicated parameters counted twice",
        "What every tensor rank holds whole (norms, row biases) counts t times in the gradient norm.",
        "The gradients of step 1 would be right, and the norm too large, the same on all ranks.",
        "NVIDIA-NeMo/RL pull request #3788; ROCm/TransformerEngine pull request #715",
        copies_counted_twice_in_the_norm,
    ),
    Fault(
        "same dropout mask on every shard",
        "All ranks of a tensor group drop the same places in attention, although they hold different heads.",
        "Losses, norms and gradients would be right (that run has no dropout). The two ranks of a tensor group would "
        "have the same letter for the masks of their heads.",
        "tenstorrent/tt-metal issue #55947; ecmwf/anemoi-core issue #595",
        same_mask_on_every_shard,
    ),
    Fault(
        "same dropout mask on every replica",
        "All replicas use the same seed, so they drop the same places in different samples. Each gradient is still "
        "right, but the masks' noise is not averaged. (Megatron-LM does so unless told --data-parallel-random-init.)",
        "Losses, norms and gradients would be right (that run has no dropout). Both replicas would have the same "
        "letter for the masks of a stage.",
        "huggingface/transformers issue #31412",
        same_mask_on_every_replica,
    ),
]
