"""A dry run of each rank says what real ranks have and send, byte for byte."""

import re
from collections import Counter
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist

from course.communication import communication_log
from course.measure.by_axis import sent_by_axis
from course.measure.dry_run import dry_run
from course.sizing import step_traffic
from labkit.groups import AXES_OF_GROUP, init_groups
from labtrain import TrainConfig, Trainer
from labtrain.build import build
from labtrain.estimate import what_a_rank_holds
from tests.labtrain.tiny import TINY, TODAY

SMALL = replace(TINY, eval_interval=0, batch_size=4)
CASES = [
    dict(num_layers=2, tp_size=2, pp_size=2),
    dict(num_layers=2, tp_size=2, pp_size=2, sequence_parallel=True, recompute="full", **TODAY),
    dict(num_layers=2, cp_size=2, pp_size=2, context_parallel="all_gather", precision="bfloat16"),
    dict(num_layers=2, cp_size=2, context_parallel="ulysses", zero_stage=3, shard_size=2),
    dict(pp_size=2, num_chunks=2, schedule="interleaved", zero_stage=2),
    dict(pp_size=2, schedule="zero-bubble-v", zero_stage=1),
    dict(num_layers=2, num_experts=4, ep_size=2, tp_size=2),
]


def counted(log, left_out=()):
    return Counter((r.operation, r.group, r.message_bytes) for r in log.records if r.operation not in left_out)


def real_ranks(configs):
    """On a rank: its groups, its parameters, and the messages of its second step, for each config."""
    runs = []
    for config in configs:
        with init_groups(config.layout(dist.get_world_size()), config.shard_size) as groups:
            trainer = Trainer(build(config, groups))
            trainer.step()
            with communication_log() as log:
                trainer.step()
            of_rank = {name: dist.get_process_group_ranks(getattr(groups, name)) for name in AXES_OF_GROUP}
            runs.append((of_rank, sum(p.numel() for p in trainer.parameters), log))
    return runs


def test_real_ranks_send_the_same(on_ranks):
    configs = [replace(SMALL, **options) for options in CASES]
    real = on_ranks(real_ranks, configs, world_size=4)
    for rank in (0, 3):  # they differ on every axis
        for config, (groups, num_parameters, log) in zip(configs, real[rank]):
            run = dry_run(config, 4, rank)
            left_out = ("all_to_all",) if config.num_experts else ()  # real routers choose
            assert counted(run.messages, left_out) == counted(log, left_out), (config, rank)
            assert len(run.messages) > len(left_out)
            assert (run.groups, run.num_parameters) == (groups, num_parameters)
            assert run.held == what_a_rank_holds(config, 4, config.layout(4).coords(rank).pp)[1]
    assert not dist.is_initialized()


@pytest.mark.parametrize(
    ("world_size", "num_micro_batches", "options"),
    [
        (4, 6, dict(num_layers=2, pp_size=2, tp_size=2)),
        (2, 6, dict(pp_size=2, num_chunks=2, schedule="interleaved")),
        (2, 8, dict(pp_size=2, schedule="v-min")),
        (4, 6, dict(num_layers=2, pp_size=2, zero_stage=3)),
        (2, 4, dict(num_layers=2, zero_stage=2)),
    ],
    ids=str,
)
def test_of_many_micro_batches_a_few_are_run(world_size, num_micro_batches, options, monkeypatch):
    """It must say the same as when it runs all of them."""
    config = replace(SMALL, micro_batch_size=1, batch_size=24, **options)
    config = replace(config, batch_size=num_micro_batches * config.layout(world_size).dp_size)
    run = dry_run(config, world_size, rank=1)
    monkeypatch.setattr("course.measure.dry_run._FEW", 100)
    assert counted(dry_run(config, world_size, rank=1).messages) == counted(run.messages)


def test_the_formulas_of_a_large_job_to_the_byte():
    """GPT-3's layers on 1,024 GPUs: the pipeline's messages are those of `step_traffic`, and so are the gradients."""
    shape = dict(num_layers=8, hidden_size=12288, num_attention_heads=96, seq_length=2048, sequence_parallel=True)
    config = TrainConfig(tp_size=8, pp_size=8, batch_size=1536, micro_batch_size=1, precision="bfloat16", **shape)
    layout, rank = config.layout(1024), 4 * 128 + 11  # a stage in the middle
    run = dry_run(config, 1024, rank)
    assert not dist.is_initialized()
    formula = step_traffic(config.shape, layout, gpus_per_node=8, batch_size=1536, sequence_parallel=True)
    sent = sent_by_axis([run.messages], layout)
    edges = 1024 // 8 * 7  # of all pipelines; a rank in the middle sends along two of them, once each
    assert sent["pp", "send"] == formula["pp"].total_bytes / edges
    in_layers = sent["tp", "all_gather"] + sent["tp", "reduce_scatter"]
    assert in_layers == formula["tp"].total_bytes / 1024
    replicas = tuple(layout.group_of(rank, "dp"))
    gradients = sum(each.message_bytes for each in run.messages.records if each.group == replicas)
    assert gradients == 4 * (run.num_parameters + 12)  # and for each of a layer's 12 tensors, whether it has one
    assert not run.fits(1e9) and run.fits(80e9)
    assert re.match(r"rank 523: [\d,]+ parameters; holds [\d.]+ GiB \(weights ", str(run))


def test_what_would_not_start():
    with pytest.raises(ValueError, match=r"tp_size=3 does not divide num_attention_heads=8"):
        dry_run(replace(SMALL, tp_size=3), 12)
    with pytest.raises(ValueError, match="rank=4 must be a whole number from 0 to 3: world_size is 4"):
        dry_run(SMALL, 4, 4)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        with pytest.raises(ValueError, match="this process is a rank of a running world"):
            dry_run(SMALL, 4)
    finally:
        dist.destroy_process_group()


def test_it_leaves_no_trace():
    """No random number is drawn, nothing is saved or read."""
    state = torch.random.get_rng_state()
    saving = dict(checkpoint_dir="nowhere", resume=True, save_interval=1, async_save=True)
    dry_run(replace(TINY, dropout=0.1, zero_stage=3, **saving), 4)
    assert torch.equal(state, torch.random.get_rng_state())
    assert torch.zeros(2).tolist() == [0.0, 0.0]
