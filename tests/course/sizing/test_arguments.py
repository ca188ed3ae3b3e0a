"""Plans as options: labkit's parser reads ours, and theirs are among the options that these programs have.

The table of a program's defaults is walked: each is what a plan means, or is written, or is named as missing.
"""

import argparse
import csv
import re
import sys
from dataclasses import fields, replace
from pathlib import Path

import pytest

from course.sizing import Plan
from course.sizing.arguments import Arguments, arguments
from course.sizing.runs import MODELS
from course.sizing.shapes import (
    DEEPSEEK_V3,
    GPT_OSS_120B,
    KIMI_K2,
    LEFT_OUT,
    MIXTRAL_8X22B,
    QWEN3_30B_A3B,
    TODAY,
    AnyGPT,
    left_out,
    query_size,
)
from labkit.shape import GPT
from labtrain.__main__ import read_options
from labtrain.config import TrainConfig

GPT_3 = GPT(96, 12288, 2048, 51200, 96)
LLAMA = GPT(126, 16384, 8192, 128256, 128, 8, 53248, rotary_base=500_000.0, **TODAY)
LLAMA_8B = replace(LLAMA, num_layers=32, hidden_size=4096, num_attention_heads=32, ffn_hidden_size=14336)
LLAMA_70B = replace(LLAMA, num_layers=80, hidden_size=8192, num_attention_heads=64, ffn_hidden_size=28672)
QWEN3_32B = AnyGPT(
    64, 5120, 4096, 151936, 64, 8, 25600, head_size=128, attention_norms=256, rotary_base=1e6, **TODAY
)  # fmt: skip
FUSED = dict(fused_attention=True, recompute="none")
GATHERED = dict(context_parallel="all_gather", **FUSED)
FOLDED = dict(schedule="zero-bubble-v", precision="fp8", **FUSED)
LATENT = dict(stage_layers=(*[4] * 15, 1), ep_size=64, expert_tp_size=1, zero_stage=1, precision="fp8", **FUSED)
MODULES = dict(recompute="selective", recompute_modules=("mla_up_proj", "moe_act"), optimizer_bytes=8)
PLANS = {
    "gpt": Plan(GPT_3, 1024, 1536, tp_size=8, pp_size=16),
    "selective": Plan(GPT_3, 512, 1024, 4, 8, 2, num_chunks=6, recompute="selective", sequence_parallel=True),
    "odd words": Plan(replace(GPT_3, vocab_size=50257), 64, 64, 8),
    "padded": Plan(replace(GPT_3, vocab_size=50257), 64, 64, 8, pad_vocab_to=64, zero_stage=2, gradient_bytes=2),
    "small": Plan(replace(LLAMA_8B, seq_length=131072), 64, 64, cp_size=8, context_parallel="ulysses", **FUSED),
    "chunks": Plan(LLAMA_70B, 64, 128, 4, 4, num_chunks=5, sequence_parallel=True, **FUSED),
    "uneven": Plan(LLAMA, 2048, 4096, 8, 8, stage_layers=(15, *[16] * 6, 15), zero_stage=1, **FUSED),
    "context": Plan(LLAMA, 4096, 64, 8, 4, cp_size=16, stage_layers=(31, 32, 32, 31), **GATHERED),
    "sharded": Plan(replace(LLAMA, num_layers=80), 64, 128, cp_size=2, zero_stage=3, gradient_bytes=2, **FUSED),
    "experts": Plan(MIXTRAL_8X22B, 128, 256, 2, 8, ep_size=8, expert_tp_size=1, sequence_parallel=True, **FUSED),
    "heads": Plan(QWEN3_30B_A3B, 16, 64, ep_size=8, zero_stage=2, fused_attention=True),
    "late": Plan(replace(QWEN3_30B_A3B, num_dense_layers=3, num_shared_experts=1, top_k=1), 16, 64, 2, **FUSED),
    "latent": Plan(DEEPSEEK_V3, 2048, 15360, pp_size=16, **LATENT),
    "oss": Plan(GPT_OSS_120B, 64, 1280, ep_size=8, fused_experts=True, **FUSED),
    "qwen": Plan(QWEN3_32B, 64, 64, 8, sequence_parallel=True, zero_stage=2, **FUSED),
    "window": Plan(replace(QWEN3_30B_A3B, window=128, full_attention_freq=2), 64, 64, ep_size=16, **FUSED),
    "modules": Plan(DEEPSEEK_V3, 2048, 15360, pp_size=16, **LATENT | MODULES),
    "offloaded": Plan(LLAMA_70B, 64, 128, zero_stage=2, offload_layers=20, **FUSED),
    "kimi": Plan(KIMI_K2, 2048, 4096, pp_size=16, **LATENT | {"precision": "bf16"}),
    "some": Plan(LLAMA_70B, 64, 128, 4, 4, recompute_layers=3, fused_mlp=True, fused_attention=True),
    "folded": Plan(replace(LLAMA, num_layers=80), 64, 128, 4, 8, num_chunks=2, **FOLDED),
    "half": Plan(replace(LLAMA, num_layers=80), 64, 128, 4, 8, num_chunks=2, **FOLDED | {"schedule": "v-half"}),
    "jagged": Plan(replace(GPT_3, num_layers=10, mlp="gelu_tanh"), 8, 8, 1, 4, stage_layers=(1, 3, 4, 2)),
}  # fmt: skip


def read_table(name):
    """Read a table of defaults, without the comments at its top."""
    path = Path(sys.modules[Plan.__module__].__file__).with_name(name)
    lines = [line for line in path.read_text().splitlines() if not line.startswith("#")]
    return list(csv.DictReader(lines, delimiter="\t"))


TABLES = {"megatron-lm": read_table("megatron_defaults.tsv"), "torchtitan": read_table("torchtitan_defaults.tsv")}
AC = "activation-checkpoint"


def parse_as_labkit(words, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["labtrain", *words])
    return read_options()


@pytest.mark.parametrize("plan", PLANS.values(), ids=PLANS)
def test_labkit_reads_ours(plan, monkeypatch):
    """Its config has the same layout, schedule and shape, as far as nothing is said to be missing."""
    said = arguments(plan, "labkit")
    config = parse_as_labkit(said.words, monkeypatch)
    if any(each.startswith("It refuses this h and a") for each in said.missing):
        assert plan is PLANS["oss"] and "a head has 45" in config
        return
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
    """A parser with the names and choices of a program's table."""
    parser = argparse.ArgumentParser(allow_abbrev=False, exit_on_error=False)
    for row in {row["option"]: row for row in TABLES[framework]}.values():
        name, takes = row["option"], row["takes"]
        if name.startswith("--"):
            options = {"action": "store_true"} if takes == "flag" else {"choices": choices_of(takes)}
            options |= {"nargs": "+"} if takes == "values" else {}
            parser.add_argument(name, **options, dest=name)
    if framework == "torchtitan":
        configs = {row["config"] for row in TABLES[framework]} - {""}
        parser.add_argument("--module", choices=["llama3", "qwen3", "deepseek_v3", "gpt_oss"])
        parser.add_argument("--config", choices=sorted(configs))
    return parser


def choices_of(takes):
    return takes.split("|") if "|" in takes else None


@pytest.mark.parametrize("plan", PLANS.values(), ids=PLANS)
@pytest.mark.parametrize("framework", TABLES)
def test_the_others_know_theirs(plan, framework):
    words = arguments(plan, framework).words
    if framework == "torchtitan":
        *words, last = words  # what follows a subcommand belongs to it
        assert last in ("activation-checkpoint:full", "activation-checkpoint:none")
    parsed = vars(parser_of(framework).parse_args(words))
    if framework == "megatron-lm":
        assert layers_of_layout(parsed["--pipeline-model-parallel-layout"]) == plan.stage_layers
    else:
        both = [int(parsed[f"--parallelism.data-parallel-{way}-degree"]) for way in ("replicate", "shard")]
        assert both[0] * both[1] == plan.dp_size


def layers_of_layout(layout):
    """Read a layout as megatron-core does: t*3 is ttt, and | is between stages."""
    if layout is None:
        return None
    assert layout[0] + layout[-1] == "EL"
    return tuple(int(stage.strip("EL").removeprefix("t*")) for stage in layout.split("|"))


NOT_SAID = "not said"  # no value of the option is the plan's, so it must be named


def meant_of_megatron(plan):
    """What a plan means by the options that vary from plan to plan."""
    model, t, c, v = plan.model, plan.tp_size, plan.cp_size, plan.num_chunks
    latent, rope = getattr(model, "latent", None), model.positions == "rope"
    modules = plan.recompute_modules
    fsdp, full = plan.zero_stage >= 2, plan.recompute == "full"
    window, some = getattr(model, "window", None), plan.recompute_layers
    fits = plan.pad_vocab_to or model.vocab_size % (128 * t) == 0
    return meant_of_experts(plan) | {
        "--num-layers": model.num_layers, "--hidden-size": model.hidden_size, "--ffn-hidden-size": model.mlp_width,
        "--num-attention-heads": model.num_attention_heads, "--multi-latent-attention": latent is not None,
        "--kv-channels": None if latent else query_size(model) // model.num_attention_heads,
        "--group-query-attention": model.num_query_groups is not None,
        "--num-query-groups": model.num_query_groups or 1, "--qk-layernorm": getattr(model, "inner_norms", 0) > 0,
        **meant_of_latents(latent),
        "--seq-length": model.seq_length, "--max-position-embeddings": model.seq_length,
        "--position-embedding-type": "rope" if rope else "learned_absolute",
        "--rotary-base": int(model.rotary_base) if rope else 10000,
        "--normalization": "RMSNorm" if model.norm == "rmsnorm" else "LayerNorm", "--norm-epsilon": model.norm_eps,
        "--swiglu": model.mlp == "swiglu", "--no-bias-gelu-fusion": model.mlp == "gelu",
        "--disable-bias-linear": not model.bias, "--untie-embeddings-and-output-weights": not model.tied,
        "--make-vocab-size-divisible-by": (plan.pad_vocab_to or 128) if fits else NOT_SAID,
        "--no-bias-swiglu-fusion": NOT_SAID if model.mlp == "swiglu" and not plan.fused_mlp else False,
        "--window-size": f"{window - 1},0" if window else None,
        "--window-attn-skip-freq": getattr(model, "full_attention_freq", None),
        "--fp8-format": "hybrid" if plan.precision == "fp8" else None,
        "--grad-reduce-in-bf16": plan.gradient_bytes == 2,
        "--megatron-fsdp-main-grads-dtype": "fp32" if fsdp and plan.gradient_bytes == 4 else "auto",
        "--micro-batch-size": plan.micro_batch_size, "--global-batch-size": plan.batch_size,
        "--tensor-model-parallel-size": t, "--sequence-parallel": plan.sequence_parallel and t > 1,
        "--context-parallel-size": c, "--pipeline-model-parallel-size": plan.pp_size,
        "--cp-comm-type": {"ulysses": "a2a", "all_gather": "all_gather"}.get(plan.context_parallel, "p2p"),
        "--use-distributed-optimizer": plan.zero_stage > 0, "--use-megatron-fsdp": fsdp,
        "--data-parallel-sharding-strategy": "optim_grads" if plan.zero_stage == 2 else "optim_grads_params",
        "--ckpt-format": "fsdp_dtensor" if fsdp else "torch_dist", "--no-gradient-accumulation-fusion": fsdp,
        "--num-virtual-stages-per-pipeline-rank": v if v > 1 and not plan.stage_layers else None,
        "--pipeline-model-parallel-layout": layout_of_layers(plan.stage_layers),
        "--recompute-granularity": None if plan.recompute == "none" else plan.recompute,
        "--recompute-method": ("block" if some else "uniform") if full else None,
        "--recompute-num-layers": (some or 1) if full else None,
        "--recompute-modules": " ".join(modules) if modules else None,
        "--cpu-offloading-num-layers": plan.offload_layers,
        "--use-precision-aware-optimizer": plan.optimizer_bytes == 8,
        "--exp-avg-dtype": "bf16" if plan.optimizer_bytes == 8 else "fp32",
        "--exp-avg-sq-dtype": "bf16" if plan.optimizer_bytes == 8 else "fp32",
        "--attention-backend": ("fused" if latent else "flash") if plan.fused_attention else "unfused",
        "--overlap-grad-reduce": plan.dp_size * c > 1,
        "--overlap-param-gather": plan.dp_size * c > 1 and plan.zero_stage > 0,
    }  # fmt: skip


def meant_of_latents(latent):
    names = "q_lora_rank", "kv_lora_rank", "qk_head_dim", "qk_pos_emb_head_dim", "v_head_dim"
    return {f"--{name.replace('_', '-')}": getattr(latent, name, None) for name in names}


def layout_of_layers(layers):
    return layers and "E" + "|".join(f"t*{number}" for number in layers) + "L"


def meant_of_experts(plan):
    model, has = plan.model, bool(plan.model.num_experts)
    limited = NOT_SAID if getattr(model, "most_nodes", None) else None
    late = [int(model.has_experts(layer)) for layer in range(model.num_layers)]
    return {
        "--num-experts": model.num_experts, "--moe-router-topk": model.top_k, "--moe-grouped-gemm": True,
        "--moe-ffn-hidden-size": model.expert_width,
        "--moe-shared-expert-intermediate-size": model.num_shared_experts * model.expert_width or None,
        "--moe-layer-freq": model.moe_layer_freq if late[0] else str(late).replace(" ", ""),
        "--moe-router-score-function": model.router_scores, "--moe-router-pre-softmax": model.top_k == 1,
        "--moe-router-num-groups": limited, "--moe-router-group-topk": limited,
        "--moe-token-dispatcher-type": "alltoall",
        "--expert-model-parallel-size": plan.ep_size, "--expert-tensor-parallel-size": plan.etp_size if has else None,
    }  # fmt: skip


def meant_of_torchtitan(plan):
    model, p, t = plan.model, plan.pp_size, plan.tp_size
    stages = plan.stage_layers or [model.num_layers // (p * plan.num_chunks)] * (p * plan.num_chunks)
    most, in_turn = max(stages), "Interleaved1F1B" if plan.num_chunks > 1 else "1F1B"
    less = [most - stages[0], most - stages[-1]] if set(stages[1:-1]) <= {most} else [NOT_SAID] * 2
    schedules = {None: in_turn, "zero-bubble-v": "ZBVZeroBubble", "dualpipe-v": "DualPipeV"}
    experts_fit = plan.zero_stage or t * plan.cp_size % plan.ep_size == 0
    return {
        "--training.max-context-length": model.seq_length,
        "--training.num-tokens-per-microbatch-per-dp-rank": plan.micro_batch_size * model.seq_length,
        "--training.num-tokens-per-train-step": plan.batch_size * model.seq_length,
        "--training.mixed-precision-reduce": "float32" if plan.gradient_bytes == 4 else NOT_SAID,
        "--parallelism.data-parallel-replicate-degree": plan.dp_size if plan.zero_stage == 0 else 1,
        "--parallelism.data-parallel-shard-degree": [1, NOT_SAID, plan.dp_size, plan.dp_size][plan.zero_stage],
        "--parallelism.fsdp-reshard-after-forward": "always" if plan.zero_stage == 3 else "never",
        "--parallelism.tensor-parallel-degree": t,
        "--parallelism.no-enable-sequence-parallel": not plan.sequence_parallel,
        "--parallelism.context-parallel-degree": plan.cp_size, "--parallelism.pipeline-parallel-degree": p,
        "--parallelism.expert-parallel-degree": plan.ep_size if experts_fit else NOT_SAID,
        "--parallelism.num-pp-microbatches": plan.num_micro_batches if p > 1 else 1,
        "--parallelism.pipeline-parallel-schedule": schedules.get(plan.schedule, NOT_SAID),
        "--parallelism.pipeline-parallel-layers-per-stage": most if p > 1 and NOT_SAID not in less else NOT_SAID,
        "--parallelism.pipeline-parallel-first-stage-less-layers": less[0],
        "--parallelism.pipeline-parallel-last-stage-less-layers": less[1],
        AC: NOT_SAID if plan.recompute == "selective" or plan.recompute_layers else plan.recompute,
        "override.imports": NOT_SAID if plan.fused_mlp else None,
        "model.attention-window": getattr(model, "window", None),
        "model.attention": "flex" if plan.fused_attention else NOT_SAID, "model.norm.eps": model.norm_eps,
        "model.converters": "float8" if plan.precision == "fp8" else None,
        "model.moe.comm-backend": NOT_SAID if getattr(model, "most_nodes", None) else "standard",
    }  # fmt: skip


MEANT = {"megatron-lm": meant_of_megatron, "torchtitan": meant_of_torchtitan}
_ONLY_WITH_STAGES = re.compile(r"--parallelism\.pipeline-parallel-(schedule|layers|first|last)")


def acts(row, plan):
    """Whether an option does anything in this plan's model."""
    if plan.pp_size == 1 and _ONLY_WITH_STAGES.match(row["option"]):
        return False
    conditions = {
        "experts": bool(plan.model.num_experts),
        "latent attention": getattr(plan.model, "latent", None) is not None,
        "tensor parallel": plan.tp_size > 1,
        "fp8": plan.precision == "fp8",
    }
    return conditions.get(row["about"], True)


def as_word(value):
    if isinstance(value, bool):
        return "on" if value else "off"
    if isinstance(value, tuple):
        return " ".join(value)
    return "none" if value is None else str(value)


def strangers(plan, framework, said):
    """Return the options of a table by which this program would do something else than the plan, without a word."""
    written = {name: as_word(value) for name, value in said.options.items()}
    written[AC] = "".join(name.partition(":")[2] for name in said.options if name.startswith(AC))
    config = written.get("--config", "")
    defaults = {row["option"]: row for row in TABLES[framework] if row.get("config", "") in ("", config)}
    meant, named = MEANT[framework](plan), " ".join(said.missing)
    found = []
    for option, row in defaults.items():
        means = as_word(meant[option]) if row["plan"] == "varies" else row["plan"]
        does = written.get(option, row["default"])
        is_named = re.search(rf"(?<![\w-]){re.escape(option)}(?![\w-])", named)
        if acts(row, plan) and does != means and not is_named:
            found.append(f"{option}: a plan means {means}, it does {does}")
    return found


@pytest.mark.parametrize("plan", PLANS.values(), ids=PLANS)
@pytest.mark.parametrize("framework", TABLES)
def test_a_default_is_what_a_plan_means_or_is_said(plan, framework):
    """Nothing of the model, numbers, batch, layout or schedule is different without a word."""
    assert not strangers(plan, framework, arguments(plan, framework))


@pytest.mark.parametrize("framework", TABLES)
def test_a_table_has_what_is_written_and_meant(framework):
    known, meant = {row["option"] for row in TABLES[framework]}, MEANT[framework](PLANS["latent"])
    assert set(meant) == {row["option"] for row in TABLES[framework] if row["plan"] == "varies"}
    written = {name for plan in PLANS.values() for name in arguments(plan, framework).options}
    assert {name for name in written if not name.startswith(AC)} - {"--module", "--config"} <= known
    assert all(row["file"].endswith(".py") and row["about"] and row["default"] for row in TABLES[framework])


def test_plain_attention_in_place_of_latents_is_found():
    """The walk sees what is written for another model, and what is not written."""
    plan = PLANS["latent"]
    options, missing = (arguments(plan, "megatron-lm")[i] for i in (1, 2))
    of_latents = "--multi-latent-attention", "--kv-lora-rank"
    plain = {name: value for name, value in options.items() if name not in of_latents}
    said = Arguments("", plain | {"--kv-channels": 160}, missing[:2])  # the first sentences are of other things
    found = " ".join(strangers(plan, "megatron-lm", said))
    assert "--kv-channels: a plan means none, it does 160" in found
    assert all(name in found for name in ("--multi-latent-attention:", "--kv-lora-rank:", "--moe-router-group-topk:"))
    del options["--hidden-dropout"]
    said = Arguments("", options, missing)
    assert strangers(plan, "megatron-lm", said)[-1] == "--hidden-dropout: a plan means 0.0, it does 0.1"


@pytest.mark.parametrize("framework", ["megatron-lm", "torchtitan", "labkit"])
def test_a_deepseek_never_gets_plain_attention_without_a_word(framework):
    said = arguments(PLANS["latent"], framework)
    assert "--kv-channels" not in said.options
    latent = said.options.get("--multi-latent-attention") or said.options.get("--config") == "deepseek_v3_671b"
    assert latent or "It has no latent attention: this is plain attention." in said.missing


def test_what_cannot_be_said_is_said():
    def missing(name, framework):
        return " ".join(arguments(PLANS[name], framework).missing)

    assert "ZeRO-1 cannot be said" in missing("uneven", "torchtitan")
    assert "two ends only" in missing("jagged", "torchtitan") and "two ends" not in missing("uneven", "torchtitan")
    assert "in float32, not in 2 bytes" in missing("sharded", "torchtitan")
    assert "'all_gather'" in missing("context", "torchtitan")
    assert "with ep=1 and t=2 it is 2" not in missing("late", "torchtitan")
    assert "expert_tp_size=1 cannot" not in missing("experts", "torchtitan")
    assert "ep=8 must divide t c = 2" in missing("experts", "torchtitan")
    assert "Heads are h/a wide" in missing("heads", "labkit") and "Heads" not in missing("experts", "labkit")
    assert "no schedule in a V" in missing("folded", "megatron-lm") and "a V" not in missing("gpt", "megatron-lm")
    assert "no products in fp8" in missing("folded", "labkit") and "Float8 is" in missing("folded", "torchtitan")
    assert "no dense layers before" in missing("late", "labkit")
    assert "fused attention keeps no scores" in missing("selective", "labkit")
    assert "need sequence parallelism" in missing("late", "megatron-lm")
    assert "need sequence parallelism" not in missing("experts", "megatron-lm")
    assert "to 51,200 words" in missing("odd words", "megatron-lm")
    assert "It pads" not in missing("padded", "megatron-lm")


@pytest.mark.parametrize("framework", ["megatron-lm", "torchtitan", "labkit"])
def test_what_a_plan_does_not_know_of_a_model_is_said(framework):
    named = {name: arguments(PLANS[name], framework).missing[-1] for name in ("oss", "latent", "qwen")}
    assert named["oss"].startswith("GPT-OSS 120B has more than a plan says: the biases in attention")
    assert "predicts the token after next" in named["latent"] and "has more" not in named["qwen"]
    assert set(LEFT_OUT) == {name for name, model in MODELS.items() if left_out(model)}


def test_torchtitan_has_configurations_of_this_year():
    said = [arguments(PLANS[name], "torchtitan").options["--config"] for name in ("oss", "qwen", "latent", "heads")]
    assert said == ["gpt_oss_120b", "qwen3_32b", "deepseek_v3_671b", "qwen3_30b_a3b"]


def test_a_run_of_llama_3_in_the_words_of_each():
    uneven, late = PLANS["uneven"], arguments(PLANS["late"], "megatron-lm").options
    megatron, titan = (arguments(uneven, framework).options for framework in TABLES)
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
    assert len(comments) == 5


def test_on_one_node_it_stands_alone():
    assert "--standalone --nproc-per-node 8" in arguments(PLANS["jagged"], "labkit").command
