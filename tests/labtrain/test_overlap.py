"""The trace of a step shows that gradients travel while its last backward still computes."""

from dataclasses import replace

import pytest

from labkit.collectives import trace_communication
from labkit.data_parallel import DataParallel
from labkit.timeline.spans import COMMUNICATION
from labkit.timeline.trace import Trace
from labtrain import training
from tests.labtrain.tiny import TINY

CONFIG = replace(TINY, num_layers=2, batch_size=8, micro_batch_size=2)  # two ranks have two micro-batches each


def when_gradients_leave(zero_stage):
    """How many messages start in each backward; and how many in the last before the first layer's has begun."""
    operation, begun = "reduce_scatter" if zero_stage else "all_reduce", []
    with training(replace(CONFIG, zero_stage=zero_stage)) as trainer:
        if zero_stage == 0:  # the model is so small that one bucket would have all of it
            trainer.chunks.clear()  # a parameter has one wrapper
            trainer.chunks = [DataParallel(model, trainer.groups.dp_cp, bucket_bytes=0) for model in trainer.models]
        trainer.trace = trace = Trace(trainer.groups.rank)
        first_layer = trainer.models[0].layers["0"]
        first_layer.register_full_backward_pre_hook(lambda *_: begun.append(trace.now()))
        with trace_communication(trace):
            trainer.compute_gradients()
    spans = trace.spans()
    starts = [span.start for span in spans if (span.kind, span.label) == (COMMUNICATION, operation)]
    backwards = sorted((span for span in spans if span.kind == "backward"), key=lambda span: span.start)
    within = [[start for start in starts if span.start < start < span.end] for span in backwards]
    return [len(each) for each in within], len([start for start in within[-1] if start < begun[-1]])


@pytest.mark.parametrize(
    ("zero_stage", "in_each", "early"), [(0, [0, 28], 14), (1, [0, 3], 1), (2, [3, 3], 1), (3, [3, 3], 1)]
)
def test_gradients_leave_while_the_last_backward_computes(on_ranks, zero_stage, in_each, early):
    """At stage 0 each parameter in a bucket of its own; at the others two layers and the root."""
    assert on_ranks(when_gradients_leave, zero_stage) == [(in_each, early)] * 2


def sent_in_a_step(config):
    """How many reduce-scatters there are, and how many there should be."""
    with training(config) as trainer:
        trace = Trace(trainer.groups.rank)
        with trace_communication(trace):
            trainer.compute_gradients()
    sent = [span for span in trace.spans() if (span.kind, span.label) == (COMMUNICATION, "reduce_scatter")]
    return len(sent), sum(len(chunk._flats) for chunk in trainer.chunks)


@pytest.mark.parametrize("schedule", ["1f1b", "zero-bubble", "zero-bubble-v"])
def test_each_unit_is_reduced_once_also_if_its_weights_have_ops_of_their_own(on_ranks, schedule):
    config = replace(TINY, pp_size=2, schedule=schedule, zero_stage=1, tied=False)
    for num_sent, num_units in on_ranks(sent_in_a_step, config, world_size=4):
        assert num_sent == num_units
