"""Writes a plan as options of torchtitan, whose models are Python: it has no options for a shape.

`torchtitan_defaults.tsv` says what it and its configurations do where an option is not given. A test walks it: each
default is what a plan means, or the option is written, or a sentence names it. Source: github.com/pytorch/torchtitan at
commit b5bcd76c66d0: torchtitan/config/configs.py, trainer.py, models and distributed/pipeline_parallel.py.
"""

from dataclasses import replace
from typing import NamedTuple

from course.sizing.plan import Plan
from course.sizing.shapes import DEEPSEEK_V3, GPT_OSS_120B, QWEN3_30B_A3B, TODAY, AnyGPT
from labkit.shape import GPT

_V = {"zero-bubble-v": "ZBVZeroBubble", "dualpipe-v": "DualPipeV"}
_LLAMA: dict = TODAY | {"rotary_base": 500_000.0}
_QWEN: dict = TODAY | {"rotary_base": 1e6, "head_size": 128, "attention_norms": 2 * 128}


class _Config(NamedTuple):
    """One of its configurations: the shape that it has, whatever the sequences, and what else its Python says."""

    module: str
    shape: GPT
    norm_eps: float = 1e-5
    scaling: str | None = None
    compiles: bool = False
    fp8: bool = False


_CONFIGS = {
    "llama3_8b": _Config("llama3", GPT(32, 4096, 8192, 128256, 32, 8, 14336, **_LLAMA), scaling="llama"),
    "llama3_70b": _Config("llama3", GPT(80, 8192, 8192, 128256, 64, 8, 28672, **_LLAMA), scaling="llama"),
    "llama3_405b": _Config(
        "llama3", GPT(126, 16384, 8192, 128256, 128, 8, 53248, **_LLAMA), scaling="llama", compiles=True, fp8=True
    ),
    "qwen3_14b": _Config("qwen3", AnyGPT(40, 5120, 4096, 151936, 40, 8, 17408, **_QWEN), norm_eps=1e-6),
    "qwen3_32b": _Config("qwen3", AnyGPT(64, 5120, 4096, 151936, 64, 8, 25600, **_QWEN), norm_eps=1e-6),
    "qwen3_30b_a3b": _Config("qwen3", QWEN3_30B_A3B, norm_eps=1e-6),
    "gpt_oss_120b": _Config("gpt_oss", GPT_OSS_120B, scaling="yarn"),
    "deepseek_v3_671b": _Config("deepseek_v3", DEEPSEEK_V3, scaling="yarn", compiles=True),
}


def torchtitan_options(plan: Plan) -> tuple[dict[str, object], dict[str, bool]]:
    """Return the options of a plan, and sentences about what they do not say, each with whether that is so."""
    name = next((name for name, config in _CONFIGS.items() if _is_shape(config.shape, plan.model)), None)
    config = _CONFIGS[name] if name else None
    window = getattr(plan.model, "window", None)
    options: dict[str, object] = {"--module": config and config.module, "--config": name}
    options |= _training(plan) | _layout(plan) | (_pipeline(plan) if plan.pp_size > 1 else {})
    options[f"activation-checkpoint:{'full' if plan.recompute == 'full' else 'none'}"] = True  # subcommands come last
    missing = {
        "No --config has this shape: write one, in the config_registry of a module.": config is None,
        f"Attention must have a window of {window} tokens there (model.attention-window).": not config and bool(window),
        "A plan has no data, learning rate and number of steps: they are those of the config.": True,
        "It cuts the logits into pieces (loss.num-chunks), and attention stays inside a document "
        "(model.attention-mask): both take less than planned.": True,
    }  # fmt: skip
    missing |= _missing_of_config(plan, name, config) if config else {}
    missing |= _missing_of_layout(plan) | (_missing_of_experts(plan) if plan.model.num_experts else {})
    return options, missing


def _is_shape(shape: GPT, model: GPT) -> bool:
    return replace(shape, seq_length=model.seq_length, norm_eps=model.norm_eps) == model


def _training(plan: Plan) -> dict[str, object]:
    s = plan.model.seq_length
    return {
        "--training.max-context-length": s,
        "--training.num-tokens-per-microbatch-per-dp-rank": plan.micro_batch_size * s,
        "--training.num-tokens-per-train-step": plan.batch_size * s,
        "--training.mixed-precision-param": "bfloat16",
        "--training.disable-cuda-graphs": True,  # refused with a pipeline or experts, and in no estimate
    }


def _layout(plan: Plan) -> dict[str, object]:
    d, divides_states = plan.dp_size, plan.zero_stage > 0
    return {
        "--parallelism.data-parallel-replicate-degree": 1 if divides_states else d,
        "--parallelism.data-parallel-shard-degree": d if divides_states else 1,
        "--parallelism.fsdp-reshard-after-forward": "always" if plan.zero_stage == 3 else "never",
        "--parallelism.tensor-parallel-degree": plan.tp_size,
        "--parallelism.no-enable-sequence-parallel": not plan.sequence_parallel,
        "--parallelism.context-parallel-degree": plan.cp_size,
        "--parallelism.expert-parallel-degree": plan.ep_size if plan.model.num_experts else None,
        "--parallelism.pipeline-parallel-degree": plan.pp_size,
    }


def _pipeline(plan: Plan) -> dict[str, object]:
    in_turn = "Interleaved1F1B" if plan.num_chunks > 1 else "1F1B"
    return {
        "--parallelism.pipeline-parallel-schedule": _V.get(plan.schedule or "", in_turn),
        "--parallelism.num-pp-microbatches": plan.num_micro_batches,
    } | (_split(plan) or {})


def _split(plan: Plan) -> dict[str, object] | None:
    """Return the options that give each stage its layers: all have as many, or the two ends fewer."""
    num_stages = plan.pp_size * plan.num_chunks
    first, *middle, last = plan.stage_layers or [plan.model.num_layers // num_stages] * num_stages
    most = max(first, *middle, last)
    if set(middle) - {most}:
        return None
    return {
        "--parallelism.pipeline-parallel-layers-per-stage": most,
        "--parallelism.pipeline-parallel-first-stage-less-layers": most - first,
        "--parallelism.pipeline-parallel-last-stage-less-layers": most - last,
    }


def _missing_of_config(plan: Plan, name: str | None, config: _Config) -> dict[str, bool]:
    eps = plan.model.norm_eps
    return {
        f"{name} stretches rotary positions for long texts (model.rope.scaling={config.scaling!r}).":
            config.scaling is not None,
        f"{name} adds {config.norm_eps} in its norms, not {eps} (model.norm.eps).": config.norm_eps != eps,
        f"{name} compiles (--compile.enable), so some kernels are fused that a plan counts one by one.":
            config.compiles,
        f"{name} multiplies in float8: write a config without model.converters for bfloat16.":
            config.fp8 and plan.precision == "bf16",
    }  # fmt: skip


def _missing_of_layout(plan: Plan) -> dict[str, bool]:
    t, c, stage = plan.tp_size, plan.cp_size, plan.zero_stage
    return {
        "ZeRO-1 cannot be said: --parallelism.data-parallel-shard-degree divides the gradients, too (ZeRO-2).":
            stage == 1,
        "With context parallelism, weights are divided over its ranks at every ZeRO stage.": c > 1 and stage < 2,
        f"How context ranks exchange ({plan.context_parallel!r}) cannot be said.": c > 1,
        "Products hide tensor-parallel messages only with --compile.enable-async-tensor-parallel.": t > 1,
        f"stage_layers={plan.stage_layers} cannot be said: --parallelism.pipeline-parallel-layers-per-stage, "
        "--parallelism.pipeline-parallel-first-stage-less-layers and "
        "--parallelism.pipeline-parallel-last-stage-less-layers leave fewer to the two ends only.":
            plan.pp_size > 1 and _split(plan) is None,
        f"schedule={plan.schedule!r} cannot be said by --parallelism.pipeline-parallel-schedule.":
            plan.schedule is not None and plan.schedule not in _V,
        "Recomputing only attention's core is no activation-checkpoint of its own: fused attention does it anyway.":
            "core_attn" in plan.modules,
        f"Recomputing {', '.join(plan.recompute_modules or ())} cannot be said: activation-checkpoint:selective has "
        "choices of its own.": plan.recompute_modules is not None,
        "Activations cannot go to the CPU layer by layer (--training.enable-cpu-offload moves weights, gradients and "
        "optimizer).": plan.offload_layers > 0,
        "Weights are in float32 (--training.dtype), and so are Adam's moments: 12 bytes for each parameter.":
            plan.optimizer_bytes != 12,
        "Recomputing some layers of a chunk cannot be said: activation-checkpoint:full is all of them.":
            plan.recompute_layers is not None,
        "A fused SwiGLU is an override (override.imports), not an option.": plan.fused_mlp,
        "Attention that is not fused cannot be said (model.attention).": not plan.fused_attention,
        "Float8 is a converter of its config (model.converters), not an option.": plan.precision == "fp8",
        "Gradients are reduced in float32, not in 2 bytes (--training.mixed-precision-reduce).":
            plan.gradient_bytes == 2,
    }  # fmt: skip


def _missing_of_experts(plan: Plan) -> dict[str, bool]:
    t, c, ep = plan.tp_size, plan.cp_size, plan.ep_size
    divided = 1 if ep > 1 else t
    return {
        "How experts are balanced and weighed is its model's (model.moe.load-balance-coeff, model.moe.route-scale).":
            True,
        f"expert_tp_size={plan.etp_size} cannot be said: with ep={ep} and t={t} it is {divided}.":
            plan.etp_size != divided,
        f"Experts lie on the ranks that divide weights: without ZeRO, ep={ep} must divide t c = {t * c} "
        "(--parallelism.expert-parallel-degree).": plan.zero_stage == 0 and t * c % ep > 0,
        "A token is sent once to each of its experts, not to a node (model.moe.comm-backend).":
            getattr(plan.model, "most_nodes", None) is not None,
    }  # fmt: skip
