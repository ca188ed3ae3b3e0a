"""Writes a plan as options of Megatron-LM.

`megatron_defaults.tsv` says what Megatron-LM does where an option is not given. A test walks it: each default is what a
plan means, or the option is written, or a sentence names it. Source: github.com/NVIDIA/Megatron-LM at commit
d98e8a64ddf3, megatron/training/arguments.py and megatron/core/transformer.
"""

from course.sizing.plan import Plan
from course.sizing.shapes import AnyGPT, latent_of, query_size

_CONTEXT = {"ring": "p2p", "ulysses": "a2a", "all_gather": "all_gather"}


def megatron_options(plan: Plan) -> tuple[dict[str, object], dict[str, bool]]:
    """Return the options of a plan, and sentences about what they do not say, each with whether that is so."""
    options = _shape(plan) | _layout(plan) | _data_parallel(plan) | _computing(plan)
    missing = _missing(plan)
    if plan.model.num_experts:
        options |= _experts(plan)
        missing |= _missing_of_experts(plan)
    return options, missing


def _shape(plan: Plan) -> dict[str, object]:
    model = plan.model
    heads = _latents(plan) or {"--kv-channels": query_size(model) // (model.num_attention_heads or 1)}
    return {
        "--num-layers": model.num_layers,
        "--hidden-size": model.hidden_size,
        "--ffn-hidden-size": model.mlp_width,
        "--num-attention-heads": model.num_attention_heads,
        "--num-query-groups": model.num_query_groups,
        "--group-query-attention": model.num_query_groups is not None,
        **heads,
        "--qk-layernorm": isinstance(model, AnyGPT) and model.inner_norms > 0,
        **_window(plan),
        "--seq-length": model.seq_length,
        "--max-position-embeddings": model.seq_length,
        "--position-embedding-type": {"learned": "learned_absolute", "rope": "rope"}[model.positions],
        "--rotary-base": int(model.rotary_base) if model.positions == "rope" else None,
        "--normalization": {"layernorm": "LayerNorm", "rmsnorm": "RMSNorm"}[model.norm],
        "--norm-epsilon": model.norm_eps,
        "--swiglu": model.mlp == "swiglu",
        "--no-bias-gelu-fusion": model.mlp == "gelu",  # its fused one is tanh's
        "--disable-bias-linear": not model.bias,
        "--untie-embeddings-and-output-weights": not model.tied,
        "--make-vocab-size-divisible-by": plan.pad_vocab_to,
        "--hidden-dropout": "0.0",  # by default it drops a tenth, here and in attention
        "--attention-dropout": "0.0",
    }


def _latents(plan: Plan) -> dict[str, object]:
    latent = latent_of(plan.model)
    if latent is None:
        return {}
    return {
        "--multi-latent-attention": True,
        "--q-lora-rank": latent.q_lora_rank,
        "--kv-lora-rank": latent.kv_lora_rank,
        "--qk-head-dim": latent.qk_head_dim,
        "--qk-pos-emb-head-dim": latent.qk_pos_emb_head_dim,
        "--v-head-dim": latent.v_head_dim,
    }


def _window(plan: Plan) -> dict[str, object]:
    model = plan.model
    if not isinstance(model, AnyGPT) or model.window is None:
        return {}
    to_the_left = model.window - 1  # of a token itself
    return {"--window-size": f"{to_the_left},0", "--window-attn-skip-freq": model.full_attention_freq}


def _layout(plan: Plan) -> dict[str, object]:
    t, v = plan.tp_size, plan.num_chunks
    layers = plan.stage_layers
    return {
        "--tensor-model-parallel-size": t,
        "--sequence-parallel": plan.sequence_parallel and t > 1,
        "--context-parallel-size": plan.cp_size,
        "--cp-comm-type": _CONTEXT[plan.context_parallel] if plan.cp_size > 1 else None,
        "--pipeline-model-parallel-size": plan.pp_size,
        "--num-virtual-stages-per-pipeline-rank": v if v > 1 and layers is None else None,
        "--pipeline-model-parallel-layout": layers and f"E{'|'.join(f't*{number}' for number in layers)}L",
        "--micro-batch-size": plan.micro_batch_size,
        "--global-batch-size": plan.batch_size,
    }


def _data_parallel(plan: Plan) -> dict[str, object]:
    stage, has_replicas = plan.zero_stage, plan.dp_cp_size > 1
    is_fsdp = stage >= 2
    return {
        "--use-distributed-optimizer": stage > 0,
        "--overlap-grad-reduce": has_replicas,  # as in the runs to which the estimates of time were fitted
        "--overlap-param-gather": has_replicas and stage > 0,
        "--grad-reduce-in-bf16": plan.gradient_bytes == 2,
        "--use-megatron-fsdp": is_fsdp,
        "--data-parallel-sharding-strategy": {2: "optim_grads", 3: "optim_grads_params"}.get(stage),
        "--megatron-fsdp-main-grads-dtype": "fp32" if is_fsdp and plan.gradient_bytes == 4 else None,
        "--no-gradient-accumulation-fusion": is_fsdp,
        "--ckpt-format": "fsdp_dtensor" if is_fsdp else None,
    }


def _computing(plan: Plan) -> dict[str, object]:
    is_full, some = plan.recompute == "full", plan.recompute_layers
    fused = "fused" if latent_of(plan.model) else "flash"  # FlashAttention wants values as wide as keys
    has_small_moments = plan.optimizer_bytes == 8
    return {
        "--recompute-granularity": None if plan.recompute == "none" else plan.recompute,
        "--recompute-modules": plan.recompute_modules,
        "--recompute-method": ("block" if some else "uniform") if is_full else None,
        "--recompute-num-layers": some or 1 if is_full else None,
        "--cpu-offloading-num-layers": plan.offload_layers or None,
        "--use-precision-aware-optimizer": has_small_moments,
        "--exp-avg-dtype": "bf16" if has_small_moments else None,
        "--exp-avg-sq-dtype": "bf16" if has_small_moments else None,
        "--bf16": True,
        "--fp8-format": "hybrid" if plan.precision == "fp8" else None,
        "--attention-backend": fused if plan.fused_attention else "unfused",
    }


def _experts(plan: Plan) -> dict[str, object]:
    model = plan.model
    moe_layers = [int(model.has_experts(layer)) for layer in range(model.num_layers)]
    return {
        "--num-experts": model.num_experts,
        "--moe-layer-freq": str(moe_layers).replace(" ", "") if not moe_layers[0] else model.moe_layer_freq,
        "--moe-ffn-hidden-size": model.expert_width,
        "--moe-shared-expert-intermediate-size": model.num_shared_experts * model.expert_width or None,
        "--moe-router-topk": model.top_k,
        "--moe-router-score-function": model.router_scores,
        "--moe-router-pre-softmax": model.top_k == 1,
        "--moe-grouped-gemm": True,
        "--moe-token-dispatcher-type": "alltoall",
        "--expert-model-parallel-size": plan.ep_size,
        "--expert-tensor-parallel-size": plan.etp_size,
    }


def _missing(plan: Plan) -> dict[str, bool]:
    model, t = plan.model, plan.tp_size
    words = f"{model.vocab_size:,}"
    padded = -(-model.vocab_size // (128 * t)) * 128 * t
    return {
        f"Its tokenizer has the vocabulary (--tokenizer-type, --vocab-size): give one of {words} words.": True,
        f"It pads the vocabulary to {padded:,} words, a multiple of 128 t: a plan with pad_vocab_to=128 does, too "
        "(--make-vocab-size-divisible-by).": plan.pad_vocab_to is None and padded > model.vocab_size,
        "A plan has no data and no recipe: add --data-path, --lr, --train-iters.": True,
        "Its optimizer always has a copy of the weights in float32, or in 16 bits: 8 bytes for each parameter with "
        "moments in 16 bits (--exp-avg-dtype).": plan.optimizer_bytes == 4,
        f"It has no schedule in a V: its order is that of chunks in turn, not {plan.schedule!r}.": bool(plan.schedule),
        "Products hide tensor-parallel messages only with --tp-comm-overlap, which needs sequence parallelism and one "
        "NVLink domain.": t > 1,
        "A plan does not say how numbers are scaled for fp8: look at --fp8-recipe (delayed by default).":
            plan.precision == "fp8",
        "Its SwiGLU is fused, and keeps less for backward than planned, unless --no-bias-swiglu-fusion is given.":
            model.mlp == "swiglu" and not plan.fused_mlp,
        "GELU's approximation by tanh needs biases there.": model.mlp == "gelu_tanh" and not model.bias,
        "A fraction of --rotary-base is cut off.": model.positions == "rope" and model.rotary_base % 1 > 0,
    }  # fmt: skip


def _missing_of_experts(plan: Plan) -> dict[str, bool]:
    model, t = plan.model, plan.tp_size
    most = model.most_nodes if isinstance(model, AnyGPT) else None
    return {
        "A plan does not say how experts are balanced and weighed: look at --moe-router-load-balancing-type, "
        "--moe-aux-loss-coeff (0 by default), --moe-router-enable-expert-bias, --moe-router-topk-scaling-factor, "
        "--moe-router-dtype.": True,
        f"A token's experts are in at most {most} nodes: add --moe-router-num-groups and --moe-router-group-topk "
        f"{most}. It is sent once to a node only with --moe-token-dispatcher-type flex.": bool(most),
        "Its experts weigh rows before their last product, and keep less for backward than planned: use "
        "fused_experts=True.": not plan.fused_experts,
        "Experts have biases if linear layers have: use bias=False.": model.bias,
        "Experts with tensor parallelism need sequence parallelism there, or it refuses.":
            t > 1 and not plan.sequence_parallel,
    }  # fmt: skip
