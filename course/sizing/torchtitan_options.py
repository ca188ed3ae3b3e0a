"""Writes a plan as options of torchtitan, whose models are Python: it has no options for a shape.

Source: torchtitan 0.3.0, torchtitan/config/configs.py, trainer.py and distributed/pipeline_parallel.py.
"""

from course.sizing.plan import Plan

_CONFIGS = {  # l, h, a, V and experts
    (32, 4096, 32, 128256, None): ("llama3", "llama3_8b"),
    (80, 8192, 64, 128256, None): ("llama3", "llama3_70b"),
    (126, 16384, 128, 128256, None): ("llama3", "llama3_405b"),
    (48, 2048, 32, 151936, 128): ("qwen3", "qwen3_30b_a3b"),
}

_V = {"zero-bubble-v": "ZBVZeroBubble", "dualpipe-v": "DualPipeV"}


def torchtitan_options(plan: Plan) -> tuple[dict[str, object], dict[str, bool]]:
    """Return the options of a plan, and sentences about what they do not say, each with whether that is so."""
    model, p, v, d, c = plan.model, plan.pp_size, plan.num_chunks, plan.dp_size, plan.cp_size
    shape = model.num_layers, model.hidden_size, model.num_attention_heads, model.vocab_size, model.num_experts
    module, config = _CONFIGS.get(shape, (None, None))
    stage, full, split = plan.zero_stage, plan.recompute == "full", _split(plan) if p > 1 else None
    options: dict[str, object] = {
        "--module": module, "--config": config,
        "--training.seq-len": model.seq_length, "--training.global-batch-size": plan.batch_size,
        "--training.local-batch-size": plan.batch_size // d if p > 1 else plan.micro_batch_size,
        "--training.mixed-precision-param": "bfloat16",
        "--training.disable-cuda-graphs": p > 1 or plan.ep_size > 1,  # it refuses them there
        "--parallelism.data-parallel-replicate-degree": d if stage == 0 else 1,
        "--parallelism.data-parallel-shard-degree": 1 if stage == 0 else d,
        "--parallelism.fsdp-reshard-after-forward": "always" if stage == 3 else "never",
        "--parallelism.tensor-parallel-degree": plan.tp_size,
        "--parallelism.no-enable-sequence-parallel": not plan.sequence_parallel,
        "--parallelism.context-parallel-degree": c,
        "--parallelism.expert-parallel-degree": plan.ep_size if model.num_experts else None,
        "--parallelism.pipeline-parallel-degree": p,
    }  # fmt: skip
    if p > 1:
        options |= {
            "--parallelism.pipeline-parallel-schedule": _V.get(
                plan.schedule or "", "Interleaved1F1B" if v > 1 else "1F1B"
            ),
            "--parallelism.pipeline-parallel-microbatch-size": plan.micro_batch_size,
        } | (split or {})
    options[f"activation-checkpoint:{'full' if full else 'none'}"] = True  # subcommands come last
    return options, {
        "No --config has this shape: write one, in the config_registry of a module.": module is None,
        "llama3_405b multiplies in float8: write a config without its converter for bfloat16.": config == "llama3_405b",
        "A plan has no data, learning rate and number of steps: they are those of the config.": True,
        "ZeRO-1 cannot be said: these options divide the gradients, too (ZeRO-2).": stage == 1,
        "With context parallelism, weights are divided over its ranks at every ZeRO stage.": c > 1 and stage < 2,
        f"How context ranks exchange ({plan.context_parallel!r}) cannot be said.": c > 1,
        "An expert cannot be divided: there, expert_tp_size is 1.": bool(model.num_experts) and plan.etp_size > 1,
        f"stage_layers={plan.stage_layers} cannot be said: only the first and the last stage may have fewer layers.":
            p > 1 and split is None,
        "Recomputing only attention's core cannot be said: fused attention does.": plan.recompute == "selective",
        "Attention that is not fused cannot be said.": not plan.fused_attention,
        "Float8 is a converter of its config, not an option.": plan.precision == "fp8",
        f"schedule={plan.schedule!r} cannot be said.": plan.schedule is not None and plan.schedule not in _V,
        "Gradients are reduced in float32, not in 2 bytes.": plan.gradient_bytes == 2,
    }  # fmt: skip


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
