"""What a step does with all gradients at once, counted in messages."""

import sys
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from unittest.mock import patch

import pytest
import torch

from course.communication import communication_log
from labtrain import training
from tests.labtrain.tiny import TINY, TODAY


def small_sums(config):
    """How many small tensors this rank adds up with its tensor group in a step, and how many layers it has."""
    with training(config) as trainer:
        with communication_log() as log:
            trainer.compute_gradients()
        group = tuple(trainer.groups.layout.group_of(trainer.groups.rank, "tp"))
        tokens = config.micro_batch_size * config.seq_length * 8  # bytes; the loss sends so much, and three times that
        sums = [record for record in log.records if record.operation == "all_reduce" and record.group == group]
        at_the_end = 32  # two losses, the norm, and whether a rank wants to end
        return len([record for record in sums if record.message_bytes not in (at_the_end, tokens, 3 * tokens)])


@pytest.mark.parametrize("micro_batch_size", [1, 4])
@pytest.mark.parametrize("form", [{}, TODAY], ids=["GPT-2", "today"])
def test_sequence_parallelism_adds_up_small_gradients_once_a_step(on_ranks, form, micro_batch_size):
    """Not once for each norm and bias of each layer and micro-batch."""
    config = replace(TINY, tp_size=2, sequence_parallel=True, micro_batch_size=micro_batch_size, **form)
    assert on_ranks(small_sums, config, world_size=2) == [1, 1]


def gradient_messages(config):
    with training(config) as trainer:
        with communication_log() as log:
            trainer.compute_gradients()
        dp_ranks = tuple(trainer.groups.layout.group_of(trainer.groups.rank, "dp"))
        sent = [record for record in log.records if record.group == dp_ranks and record.message_bytes > 1000]
        operations = [record.operation for record in sent]
        return {name: operations.count(name) for name in ("all_gather", "reduce_scatter")}


@pytest.mark.parametrize(("zero_stage", "gathers", "scatters"), [(1, 1, 1), (2, 1, 2), (3, 4, 2)])
def test_what_a_stage_sends_for_each_unit(on_ranks, zero_stage, gathers, scatters):
    """Two micro-batches; of stage 3 each gathers twice: for forward, and for backward."""
    config = replace(TINY, batch_size=8, micro_batch_size=2, zero_stage=zero_stage)
    units = config.num_layers
    for sent in on_ranks(gradient_messages, config, world_size=2):
        # The root (a tied embedding, positions and the last norm) stays whole for a micro-batch.
        assert sent == {"all_gather": units * gathers + min(gathers, 2), "reduce_scatter": (units + 1) * scatters}


def waits_for_the_device(config):
    """On a rank: the lines of labkit at which the host asks for a tensor's numbers in the second step."""
    asked = []

    def asking(method):
        def ask(tensor, *args):
            frame = sys._getframe(1)
            asked.append(f"{Path(frame.f_code.co_filename).name}: {frame.f_code.co_name}")
            return method(tensor, *args)

        return ask

    with training(config) as trainer:
        trainer.step()
        with ExitStack() as stack:
            for name in ("tolist", "item", "__float__", "__int__"):
                stack.enter_context(patch.object(torch.Tensor, name, asking(getattr(torch.Tensor, name))))
            trainer.step()
    return asked


@pytest.mark.parametrize(
    "options",
    [
        {"pp_size": 2, "tp_size": 2, "sequence_parallel": True},
        {"pp_size": 2, "schedule": "interleaved", "num_chunks": 2, "zero_stage": 1},
        {"cp_size": 2, "zero_stage": 3, "precision": "bfloat16"},
    ],
    ids=str,
)
def test_the_host_waits_once_in_a_step(on_ranks, options):
    config = replace(TINY, micro_batch_size=1, eval_interval=0, clip_norm=0.01, **options)
    for asked in on_ranks(waits_for_the_device, config, world_size=4):
        assert asked == ["gradients.py: loss_and_grad_norm"]
