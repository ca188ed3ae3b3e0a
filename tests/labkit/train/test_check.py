"""`--check` says what real ranks hold: their parameters, and what autograd keeps of a micro-batch."""

import re
from dataclasses import replace

import pytest
import torch.distributed as dist

from course.measure.saved import saved_for_backward
from labkit.groups import init_groups
from labkit.train import TrainConfig, Trainer
from labkit.train.check import check, what_a_rank_holds
from tests.labkit.train.tiny import TINY, TODAY

SMALL = replace(TINY, batch_size=4, micro_batch_size=1, precision="float32")
CASES = [
    dict(pp_size=2, tp_size=2),
    dict(pp_size=2, tp_size=2, sequence_parallel=True, recompute=True),
    dict(pp_size=2, tp_size=2, dropout=0.1),
    dict(cp_size=2, tp_size=2, context_parallel="ring"),
    dict(cp_size=2, tp_size=2, context_parallel="ulysses", **TODAY),
    dict(cp_size=2, pp_size=2, context_parallel="gathered", precision="bfloat16"),
    dict(pp_size=2, num_chunks=2, schedule="interleaved"),
    dict(pp_size=2, num_chunks=2, schedule="zero-bubble-v"),
    dict(pp_size=4, first_stage_layers=1, last_stage_layers=2, num_layers=6),
    dict(pp_size=2, schedule="v-half", stage_layers=(1, 3, 1, 2), num_layers=7),
]


def held_by_real_ranks(config):
    """On a rank: its place in the pipeline, its number of parameters, and the bytes that a step's forwards kept."""
    with init_groups(config.layout(dist.get_world_size())) as groups:
        trainer = Trainer(config, groups)
        batch = trainer.micro_batches(0)
        one = replace(config, batch_size=groups.layout.dp_size * config.micro_batch_size)
        schedule, inputs = one.make_schedule(groups.layout.world_size), tuple(each[:1] for each in batch)
        with saved_for_backward(trainer.parameters) as saved:
            trainer.run(schedule, inputs)
        return groups.coords.pp, sum(p.numel() for p in trainer.parameters), saved.total_bytes()


@pytest.mark.parametrize("options", CASES, ids=str)
def test_real_ranks_hold_as_much(on_ranks, options):
    config = replace(SMALL, **options)
    one = replace(config, batch_size=config.layout(4).dp_size)  # one micro-batch
    for pp_rank, num_parameters, kept in on_ranks(held_by_real_ranks, config, world_size=4):
        said, held = what_a_rank_holds(one, 4, pp_rank)
        assert said == num_parameters
        assert held.activations == pytest.approx(kept, rel=0.02)


def test_the_lines(capsys, monkeypatch):
    monkeypatch.setattr("labkit.train.check.node_memory_bytes", lambda: 60 << 20)
    config = TrainConfig(pp_size=4, tp_size=2, batch_size=16, zero_stage=1, num_layers=8)
    assert check(config, 16)
    first, *kinds, last = capsys.readouterr().out.splitlines()
    assert first == "16 ranks = tp 2 x dp 2 x pp 4, fastest axis first; 2 micro-batches per pipeline"
    for pp_ranks, line in zip(([0], [1, 2], [3]), kinds, strict=True):
        num_parameters, held = what_a_rank_holds(config, 16, pp_ranks[0])
        assert line == f"pipeline ranks {pp_ranks}: {num_parameters:,} parameters, {held}"
    assert re.fullmatch(r"This fits this machine, with all 16 ranks on it: [\d.]+ MiB of 60.0 MiB\.", last)
    monkeypatch.setattr("labkit.train.check.node_memory_bytes", lambda: 1 << 20)
    assert not check(config, 16)
    assert "This does not fit this machine" in capsys.readouterr().out


def test_a_large_run_needs_no_memory_and_no_processes():
    """GPT-3 on 1,024 GPUs: 34 s b h / t bytes of each layer, as in arXiv 2205.05198 without its attention scores."""
    shape = dict(num_layers=96, hidden_size=12288, num_attention_heads=96, seq_length=2048, sequence_parallel=True)
    config = TrainConfig(tp_size=8, pp_size=16, batch_size=1536, micro_batch_size=1, precision="bfloat16", **shape)
    _, held = what_a_rank_holds(config, 1024, 1)
    assert not dist.is_initialized()
    assert held.activations == pytest.approx(15 * 6 * 34 * 2048 * 12288 / 8, rel=0.1)
