"""Three faults of training with weights, gradients or optimizer states cut across ranks, and who met them."""

import torch
from torch import nn

from course.museum.faults import Fault
from labkit import gradients, pipeline
from labtrain import build


def replicas_counted_in_the_norm():
    gradients.copy_groups_of = lambda placement, _: placement.copy_groups  # as if every rank had a shard of its own


def sends_on_every_micro_batch():
    right = pipeline.run

    def run(*args, reduce_every_micro_batch, **options):
        return right(*args, reduce_every_micro_batch=True, **options)  # a backward in `no_sync` sends all the same

    pipeline.run = run


def optimizer_made_before_sharding():
    right = build.FullyShardedDataParallel

    def wrapped(model, *args, **options):
        before = [
            (f"module.{name}", nn.Parameter(torch.empty(parameter.shape, dtype=parameter.dtype)))
            for name, parameter in model.named_parameters()
        ]
        chunk = right(model, *args, **options)
        chunk.named_parameters = lambda *_, **__: iter(before)  # no longer the model's
        return chunk

    build.FullyShardedDataParallel = wrapped


SHARDING_FAULTS = [
    Fault(
        "replicas counted in the gradient norm",
        "With hybrid sharding the squares are added up over all ranks. But replicas have the same shards, so each "
        "square counts once for every replica.",
        "The gradients of step 1 would be right, and the norm √2 times too large, the same on all ranks: there are two "
        "replicas.",
        "ByteDance-Seed/VeOmni issue #184; a relative is pytorch/torchtitan issue #2318, where the norms with replicas "
        "and without differ by a factor of 8",
        replicas_counted_in_the_norm,
    ),
    Fault(
        "sends on every micro-batch",
        "Gradients add up over the micro-batches of a step, and the last backward could send the sum. But every "
        "backward sends its own.",
        "Losses, gradients and norms would be right. There would be m = 3 times as many reduce-scatters as needed.",
        "NVIDIA/cosmos-framework issue #161, where a step of four micro-batches took as long as four steps; "
        "mlfoundations/open_lm issue #48",
        sends_on_every_micro_batch,
    ),
    Fault(
        "optimizer made before sharding",
        "The optimizer has the whole parameters, as they were before the model was sharded. The model computes with "
        "different tensors, the shards: they get the gradients, and nobody updates them.",
        "The gradients of step 1 would be right. But the optimizer's tensors have none, so the norm would be 0, and "
        "the loss would not fall. The optimizer would hold all numbers, not its shard of them.",
        "huggingface/accelerate issue #3256; pytorch/pytorch issue #107843",
        optimizer_made_before_sharding,
    ),
]
