"""`--check` says what real ranks hold: their parameters, and what autograd keeps of a micro-batch."""

import re
from dataclasses import astuple, replace
from unittest.mock import patch

import pytest
import torch.distributed as dist
import torch.utils.checkpoint

from course.measure.saved import saved_for_backward
from course.sizing import Plan, memory
from labkit.groups import init_groups
from labkit.parallel_config import V_SHAPED
from labtrain import TrainConfig, Trainer
from labtrain.build import build
from labtrain.estimate import estimate, what_a_rank_holds
from labtrain.memory_estimate import gib
from tests.labtrain.tiny import MOE, TINY, TODAY

SMALL = replace(TINY, batch_size=4, micro_batch_size=1, precision="float32")
CASES = [
    dict(pp_size=2, tp_size=2, dropout=0.1),
    dict(pp_size=2, tp_size=2, sequence_parallel=True, recompute="full"),
    dict(pp_size=2, num_chunks=2, schedule="interleaved", recompute="full", **TODAY),
    dict(cp_size=2, tp_size=2, context_parallel="ring"),
    dict(cp_size=2, tp_size=2, context_parallel="ulysses", **TODAY),
    dict(cp_size=2, pp_size=2, context_parallel="all_gather", precision="bfloat16"),
    dict(pp_size=2, num_chunks=2, schedule="zero-bubble-v"),
    dict(pp_size=4, first_stage_layers=1, last_stage_layers=2, num_layers=6),
    dict(pp_size=2, schedule="v-half", stage_layers=(1, 3, 1, 2), num_layers=7),
]


def recomputed_by_layer(weights):
    """Return a patch of torch that notes what each layer saves while it is computed again, and these notes."""
    own, layers = {weight.untyped_storage().data_ptr() for weight in weights}, []

    class Noting(torch.utils.checkpoint._recomputation_hook):
        def __init__(self, *args):
            super().__init__(*args)
            layers.append(saved := {})
            pack = self.pack_hook

            def note(tensor):
                memory = tensor.untyped_storage()
                if memory.data_ptr() not in own:
                    saved[memory.data_ptr()] = memory.nbytes()
                return pack(tensor)

            self.pack_hook = note

    return patch("torch.utils.checkpoint._recomputation_hook", Noting), layers


def held_by_real_ranks(config):
    """On a rank: its place in the pipeline, its number of parameters, and the most bytes that a step kept.

    These are what its forwards kept, and what the largest layer saved when it was computed again.
    """
    with init_groups(config.layout(dist.get_world_size())) as groups:
        trainer = Trainer(build(config, groups))
        batch = trainer.micro_batches(0)
        one = replace(config, batch_size=groups.layout.dp_size * config.micro_batch_size)
        schedule, inputs = one.make_schedule(groups.layout.world_size), tuple(each[:1] for each in batch)
        noting, layers = recomputed_by_layer(trainer.parameters)
        with saved_for_backward(trainer.parameters) as saved, noting:
            trainer.run(schedule, inputs)
        most = saved.total_bytes() + max((sum(layer.values()) for layer in layers), default=0)
        return groups.coords.pp, sum(p.numel() for p in trainer.parameters), most


@pytest.mark.parametrize("options", CASES, ids=str)
def test_real_ranks_hold_as_much(on_ranks, options):
    config = replace(SMALL, **options)
    one = replace(config, batch_size=config.layout(4).dp_size)  # one micro-batch
    for pp_rank, num_parameters, kept in on_ranks(held_by_real_ranks, config, world_size=4):
        said, held = what_a_rank_holds(one, 4, pp_rank)
        assert said == num_parameters
        assert held.activations == pytest.approx(kept, rel=0.02)


GPT_2 = dict(num_layers=8, hidden_size=256, num_attention_heads=8, seq_length=512, dropout=0.1)
MANY_WORDS = dict(tokens="{tokens}", vocab_size=4096)
CP = dict(cp_size=2, dropout=0.0)
PLANS = [
    dict(),
    dict(micro_batch_size=2, tp_size=2),
    dict(tp_size=2, sequence_parallel=True, recompute="full"),
    dict(tp_size=4, recompute="full", **MANY_WORDS),
    dict(pp_size=4, **MANY_WORDS),
    dict(pp_size=2, num_chunks=2, schedule="interleaved", recompute="full"),
    dict(pp_size=2, schedule="zero-bubble-v", **MANY_WORDS),
    dict(pp_size=2, schedule="v-half", recompute="full"),
    CP,
    dict(**CP, context_parallel="ulysses", recompute="full"),
    dict(num_experts=8, ep_size=4),
    dict(num_experts=8, ep_size=2, moe_layer_freq=2, recompute="full"),
    dict(**TODAY),
    dict(**TODAY, recompute="full", tp_size=2),
]


@pytest.mark.parametrize("options", PLANS, ids=str)
def test_the_estimate_is_that_of_the_formulas(options, tmp_path):
    """Of a GPU, in bfloat16: what counts with fake tensors and what computes with formulas agree within 5 %."""
    if "tokens" in options:
        options = options | {"tokens": tmp_path / "tokens.bin"}
        options["tokens"].write_bytes(bytes(8192))
    config = TrainConfig(**{"batch_size": 8, "micro_batch_size": 1, "precision": "bfloat16"} | GPT_2 | options)
    same = ("tp_size", "cp_size", "pp_size", "ep_size", "micro_batch_size", "context_parallel", "sequence_parallel")
    given = {name: getattr(config, name) for name in same} | {"fused_attention": True, "pad_vocab_to": 1}
    given["recompute"] = config.recompute
    if config.schedule in V_SHAPED:
        given["schedule"] = config.schedule
    given["num_chunks"] = 2 if config.schedule in V_SHAPED else config.num_chunks
    plan = Plan(config.shape, 4, config.batch_size, **given)
    for pp_rank in range(config.pp_size):
        _, held = what_a_rank_holds(config, 4, pp_rank, on_gpu=True)
        expected = memory(plan, pp_rank)
        assert (held.weights, held.gradients) == pytest.approx((expected.weights, expected.gradients))
        assert held.optimizer == pytest.approx(expected.optimizer)
        kept = expected.activations + left_out_by_the_formulas(config)
        assert held.activations == pytest.approx(kept, rel=0.05), f"pipeline rank {pp_rank}"


def left_out_by_the_formulas(config):
    """Rotary positions leave v a part of what the linear layer computed, and attention's output in a second layout."""
    if config.positions == "learned":
        return 0
    h, kv, tokens = config.hidden_size, config.shape.kv_size, config.micro_batch_size * config.seq_length
    layers = 1 if config.recompute == "full" else config.num_layers
    return layers * 2 * tokens * (h + kv + h) / config.tp_size


@pytest.mark.parametrize("options", [{}, {"tp_size": 2, "pp_size": 2, "expert_tp_size": 1}], ids=str)
def test_real_ranks_have_as_many_experts(on_ranks, options):
    config = replace(MOE, num_shared_experts=1, ep_size=2, **options)
    for pp_rank, num_parameters, _ in on_ranks(held_by_real_ranks, config, world_size=4):
        assert what_a_rank_holds(config, 4, pp_rank)[0] == num_parameters


def test_up_to_a_quarter_of_a_gib_memory_is_said_in_mib():
    assert [gib(2**28), gib(2**28 + 1)] == ["256.0 MiB", "0.3 GiB"]


def test_the_lines(capsys, monkeypatch):
    monkeypatch.setattr("labtrain.estimate.node_memory_bytes", lambda: 60 << 20)
    config = TrainConfig(pp_size=4, tp_size=2, batch_size=16, zero_stage=1, num_layers=8)
    assert estimate(config, 16)
    first, *kinds, last = capsys.readouterr().out.splitlines()
    assert first == "16 ranks = tp 2 x dp 2 x pp 4, fastest axis first; 2 micro-batches per pipeline"
    for pp_ranks, line in zip(([0], [1, 2], [3]), kinds, strict=True):
        num_parameters, held = what_a_rank_holds(config, 16, pp_ranks[0])
        assert line == f"pipeline ranks {pp_ranks}: {num_parameters:,} parameters, {held}"
    fits = r"This fits this machine, with all 16 ranks on it: [\d.]+ MiB of 60.0 MiB\. "
    assert re.fullmatch(fits + r"To compare with a GPU, say how much memory it has: gpu_memory_gib=80\.", last)
    monkeypatch.setattr("labtrain.estimate.node_memory_bytes", lambda: 1 << 20)
    assert not estimate(config, 16)
    assert "This does not fit this machine" in capsys.readouterr().out


def test_a_gpu_that_this_machine_has_not(capsys):
    """A rank has it for itself, so the fullest one must fit; a CPU's memory is shared by all."""
    config = TrainConfig(pp_size=4, batch_size=16, num_layers=8, check=16, gpu_memory_gib=0.01)
    fullest = max(sum(astuple(what_a_rank_holds(config, 16, pp_rank, on_gpu=True)[1])) for pp_rank in range(4))
    assert estimate(config, 16) == (fullest <= 0.01 * 2**30) is True
    last = capsys.readouterr().out.splitlines()[-1]
    assert last == f"This fits a GPU of 0.01 GiB: {fullest / 2**20:.1f} MiB of 10.2 MiB."
    assert not estimate(replace(config, gpu_memory_gib=0.001), 16)


def test_a_large_run_needs_no_memory_and_no_processes():
    """GPT-3 on 1,024 GPUs: 34 s b h / t bytes of each layer, as in arXiv 2205.05198 without its attention scores."""
    shape = dict(num_layers=96, hidden_size=12288, num_attention_heads=96, seq_length=2048, sequence_parallel=True)
    config = TrainConfig(tp_size=8, pp_size=16, batch_size=1536, micro_batch_size=1, precision="bfloat16", **shape)
    _, held = what_a_rank_holds(config, 1024, 1)
    assert not dist.is_initialized()
    assert held.activations == pytest.approx(15 * 6 * 34 * 2048 * 12288 / 8, rel=0.1)
