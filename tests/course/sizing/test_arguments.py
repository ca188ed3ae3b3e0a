"""Plans as options: labkit's parser reads ours, and theirs are among the options that their releases have."""

import argparse
import json
import sys
from dataclasses import fields, replace
from pathlib import Path

import pytest

from course.sizing import Plan
from course.sizing.arguments import arguments
from course.sizing.shapes import MIXTRAL_8X22B, QWEN3_30B_A3B, TODAY
from labkit.shape import GPT
from labtrain.__main__ import read_options
from labtrain.config import TrainConfig

KNOWN = json.loads((Path(__file__).parent / "framework_options.json").read_text())
GPT_3 = GPT(96, 12288, 2048, 51200, 96)
LLAMA = GPT(126, 16384, 8192, 128256, 128, 8, 53248, rotary_base=500_000.0, **TODAY)
FUSED = dict(fused_attention=True, recompute="none")
GATHERED = dict(context_parallel="all_gather", **FUSED)
FOLDED = dict(schedule="zero-bubble-v", precision="fp8", **FUSED)
PLANS = {
    "gpt": Plan(GPT_3, 1024, 1536, tp_size=8, pp_size=16),
    "selective": Plan(GPT_3, 512, 1024, 4, 8, 2, num_chunks=6, recompute="selective", sequence_parallel=True),
    "uneven": Plan(LLAMA, 2048, 4096, 8, 8, stage_layers=(15, *[16] * 6, 15), zero_stage=1, **FUSED),
    "context": Plan(LLAMA, 4096, 64, 8, 4, cp_size=16, stage_layers=(31, 32, 32, 31), **GATHERED),
    "sharded": Plan(replace(LLAMA, num_layers=80), 64, 128, cp_size=2, zero_stage=3, gradient_bytes=2, **FUSED),
    "experts": Plan(MIXTRAL_8X22B, 128, 256, 2, 8, ep_size=8, expert_tp_size=1, sequence_parallel=True, **FUSED),
    "heads": Plan(QWEN3_30B_A3B, 16, 64, ep_size=8, zero_stage=2, fused_attention=True),
    "late": Plan(replace(QWEN3_30B_A3B, num_dense_layers=3, num_shared_experts=1, top_k=1), 16, 64, 2, **FUSED),
    "folded": Plan(replace(LLAMA, num_layers=80), 64, 128, 4, 8, num_chunks=2, **FOLDED),
    "jagged": Plan(replace(GPT_3, num_layers=10, mlp="gelu_tanh"), 8, 8, 1, 4, stage_layers=(1, 3, 4, 2)),
}  # fmt: skip


def parse_as_labkit(words, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["labtrain", *words])
    return read_options()


@pytest.mark.parametrize("plan", PLANS.values(), ids=PLANS)
def test_labkit_reads_ours(plan, monkeypatch):
    """Its config has the same layout, schedule and shape, as far as nothing is said to be missing."""
    said = arguments(plan, "labkit")
    config = parse_as_labkit(said.words, monkeypatch)
    assert isinstance(config, TrainConfig), config
    layout = config.layout(plan.world_size)
    assert [layout.groups(axis) for axis in ("dp", "pp")] == [plan.layout.groups(axis) for axis in ("dp", "pp")]
    assert config.num_micro_batches(plan.world_size) == plan.num_micro_batches
    stages = plan.pp_size * plan.num_chunks
    assert config.layers_per_stage(plan.model.num_layers) == (
        plan.stage_layers or (plan.model.num_layers // stages,) * stages
    )
    for name in ("micro_batch_size", "cp_size", "tp_size", "num_chunks", "sequence_parallel", "zero_stage"):
        assert getattr(config, name) == getattr(plan, name)
    assert config.context_parallel == plan.context_parallel
    assert config.schedule == (plan.schedule or ("interleaved" if plan.num_chunks > 1 else "1f1b"))
    assert config.recompute == ("full" if plan.recompute == "full" else "none")
    if plan.model.num_experts:
        assert (layout.ep_size, layout.expert_tp_size) == (plan.ep_size, plan.etp_size)
    shape = {f.name: getattr(plan.model, f.name) for f in fields(GPT) if f.name != "vocab_size"}
    assert {name: getattr(config.shape, name) for name in shape} == shape
    assert f"--vocab-size {plan.model.vocab_size}." in said.missing[0]


def parser_of(framework):
    """A parser with the names and choices of a release."""
    parser = argparse.ArgumentParser(allow_abbrev=False, exit_on_error=False)
    for name, kind in KNOWN[framework]["options"].items():
        if kind == "subcommand":
            continue
        options = {"action": "store_true"} if kind == "flag" else {"choices": kind if isinstance(kind, list) else None}
        parser.add_argument(name, **options, dest=name)
    return parser


@pytest.mark.parametrize("plan", PLANS.values(), ids=PLANS)
@pytest.mark.parametrize("framework", KNOWN)
def test_the_others_know_theirs(plan, framework):
    words = arguments(plan, framework).words
    if framework == "torchtitan":
        *words, last = words
        assert KNOWN[framework]["options"][last] == "subcommand"  # what follows it belongs to it
    parsed = vars(parser_of(framework).parse_args(words))
    t, c, p, d = plan.tp_size, plan.cp_size, plan.pp_size, plan.dp_size
    if framework == "megatron-lm":
        names = [f"--{axis}-parallel-size" for axis in ("tensor-model", "context", "pipeline-model")]
        assert [int(parsed[name]) for name in names] == [t, c, p]
        assert layers_of_layout(parsed["--pipeline-model-parallel-layout"]) == plan.stage_layers
    else:
        degrees = [parsed[f"--parallelism.{axis}-parallel-degree"] for axis in ("tensor", "context", "pipeline")]
        both = [int(parsed[f"--parallelism.data-parallel-{way}-degree"]) for way in ("replicate", "shard")]
        assert [*map(int, degrees), both[0] * both[1]] == [t, c, p, d]
        rows = int(parsed["--training.local-batch-size"])
        of_pipeline = int(parsed["--parallelism.pipeline-parallel-microbatch-size"] or rows)
        assert (of_pipeline, rows) == (plan.micro_batch_size, plan.batch_size // d if p > 1 else plan.micro_batch_size)


def layers_of_layout(layout):
    """Read a layout as megatron-core 0.16.1 does: t*3 is ttt, and | is between stages."""
    if layout is None:
        return None
    assert layout[0] + layout[-1] == "EL"
    return tuple(int(stage.strip("EL").removeprefix("t*")) for stage in layout.split("|"))


def test_what_cannot_be_said_is_said():
    def missing(name, framework):
        return " ".join(arguments(PLANS[name], framework).missing)

    assert "ZeRO-1 cannot be said" in missing("uneven", "torchtitan")
    assert "fewer layers" in missing("jagged", "torchtitan") and "fewer layers" not in missing("uneven", "torchtitan")
    assert "in float32, not in 2 bytes" in missing("sharded", "torchtitan")
    assert "'all_gather'" in missing("context", "torchtitan")
    assert "Heads are h/a wide" in missing("heads", "labkit") and "Heads" not in missing("experts", "labkit")
    assert "no schedule in a V" in missing("folded", "megatron-lm") and "a V" not in missing("gpt", "megatron-lm")
    assert "no products in fp8" in missing("folded", "labkit") and "Float8 is" in missing("folded", "torchtitan")
    assert "no dense layers before" in missing("late", "labkit")
    assert "fused attention keeps no scores" in missing("selective", "labkit")
    assert "need sequence parallelism" in missing("late", "megatron-lm")
    assert "need sequence parallelism" not in missing("experts", "megatron-lm")


def test_a_run_of_llama_3_in_the_words_of_each():
    uneven, late = PLANS["uneven"], arguments(PLANS["late"], "megatron-lm").options
    megatron, titan = (arguments(uneven, framework).options for framework in KNOWN)
    assert (
        megatron["--pipeline-model-parallel-layout"].startswith("Et*15|t*16|") and "--use-megatron-fsdp" not in megatron
    )
    ends = {name: value for name, value in titan.items() if name.endswith(("less-layers", "per-stage"))}
    assert [*ends.values()] == [16, 1, 1]
    assert titan["--config"] == "llama3_405b"
    assert late["--moe-layer-freq"] == str([0] * 3 + [1] * 45).replace(" ", "")
    assert "--moe-router-pre-softmax" in late


def test_as_text_it_is_a_command_with_comments():
    text = str(arguments(PLANS["uneven"], "megatron-lm"))
    command, *comments = text.split("\n# ")
    assert command.startswith("CUDA_DEVICE_MAX_CONNECTIONS=1 torchrun --nnodes 256 ")
    assert " pretrain_gpt.py \\\n  --num-layers 126 \\\n" in command
    assert "--pipeline-model-parallel-layout 'Et*15|t*16|" in command  # quoted: a shell would make pipes of it
    assert len(comments) == 2


def test_on_one_node_it_stands_alone():
    assert "--standalone --nproc-per-node 8" in arguments(PLANS["jagged"], "labkit").command
