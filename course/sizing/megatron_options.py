"""Writes a plan as options of Megatron-LM.

Sources: megatron/training/arguments.py of github.com/NVIDIA/Megatron-LM at commit 000c4ac24f61; the meaning of layouts,
patterns of layers and ways of context parallelism: megatron-core 0.16.1, megatron/core/transformer.
"""

from course.sizing.plan import Plan
from course.sizing.shapes import AnyGPT, query_size

_CONTEXT = {"ring": "p2p", "ulysses": "a2a", "all_gather": "all_gather"}


def megatron_options(plan: Plan) -> tuple[dict[str, object], dict[str, bool]]:
    """Return the options of a plan, and sentences about what they do not say, each with whether that is so."""
    model, t, p, v, stage = plan.model, plan.tp_size, plan.pp_size, plan.num_chunks, plan.zero_stage
    is_fsdp, full, shared = stage >= 2, plan.recompute == "full", model.num_shared_experts * model.expert_width
    moe_layers = [int(model.has_experts(layer)) for layer in range(model.num_layers)]
    norms = model.attention_norms if isinstance(model, AnyGPT) else 0
    options: dict[str, object] = {
        "--num-layers": model.num_layers, "--hidden-size": model.hidden_size, "--ffn-hidden-size": model.mlp_width,
        "--num-attention-heads": model.num_attention_heads, "--num-query-groups": model.num_query_groups,
        "--group-query-attention": model.num_query_groups is not None, "--seq-length": model.seq_length,
        "--kv-channels": query_size(model) // (model.num_attention_heads or 1), "--qk-layernorm": norms > 0,
        "--max-position-embeddings": model.seq_length, "--norm-epsilon": model.norm_eps,
        "--normalization": {"layernorm": "LayerNorm", "rmsnorm": "RMSNorm"}[model.norm],
        "--position-embedding-type": {"learned": "learned_absolute", "rope": "rope"}[model.positions],
        "--rotary-base": int(model.rotary_base) if model.positions == "rope" else None,
        "--swiglu": model.mlp == "swiglu", "--no-bias-gelu-fusion": model.mlp == "gelu",  # its fused one is tanh's
        "--disable-bias-linear": not model.bias, "--untie-embeddings-and-output-weights": not model.tied,
        "--tensor-model-parallel-size": t, "--sequence-parallel": plan.sequence_parallel and t > 1,
        "--context-parallel-size": plan.cp_size, "--pipeline-model-parallel-size": p,
        "--cp-comm-type": _CONTEXT[plan.context_parallel] if plan.cp_size > 1 else None,
        "--num-virtual-stages-per-pipeline-rank": v if v > 1 and plan.stage_layers is None else None,
        "--pipeline-model-parallel-layout": plan.stage_layers and f"E{'|'.join(f't*{n}' for n in plan.stage_layers)}L",
        "--micro-batch-size": plan.micro_batch_size, "--global-batch-size": plan.batch_size,
        "--recompute-granularity": None if plan.recompute == "none" else plan.recompute,
        "--recompute-method": "uniform" if full else None, "--recompute-num-layers": 1 if full else None,
        "--use-distributed-optimizer": stage > 0, "--use-megatron-fsdp": is_fsdp,
        "--data-parallel-sharding-strategy": {2: "optim_grads", 3: "optim_grads_params"}.get(stage),
        "--ckpt-format": "fsdp_dtensor" if is_fsdp else None, "--no-gradient-accumulation-fusion": is_fsdp,
        "--bf16": True, "--fp8-format": "hybrid" if plan.precision == "fp8" else None,
        "--make-vocab-size-divisible-by": plan.pad_vocab_to, "--grad-reduce-in-bf16": plan.gradient_bytes == 2,
        "--attention-backend": "flash" if plan.fused_attention else "unfused",
    }  # fmt: skip
    if model.num_experts:
        options |= {
            "--num-experts": model.num_experts, "--moe-router-topk": model.top_k, "--moe-grouped-gemm": True,
            "--moe-ffn-hidden-size": model.expert_width, "--moe-router-score-function": model.router_scores,
            "--moe-router-pre-softmax": model.top_k == 1, "--moe-shared-expert-intermediate-size": shared or None,
            "--moe-layer-freq": str(moe_layers).replace(" ", "") if not moe_layers[0] else model.moe_layer_freq,
            "--expert-model-parallel-size": plan.ep_size, "--expert-tensor-parallel-size": plan.etp_size,
            "--moe-token-dispatcher-type": "alltoall",
        }  # fmt: skip
    return options, {
        f"The vocabulary ({model.vocab_size:,}) is its tokenizer's, padded to 128 t unless told.": True,
        f"It has no schedule in a V: its order is that of chunks in turn, not {plan.schedule!r}.": bool(plan.schedule),
        "A plan has no data, learning rate and steps: add --data-path, --tokenizer-type, --lr, --train-iters.": True,
        "Experts have biases if linear layers have: use bias=False.": bool(model.num_experts and model.bias),
        "Experts with tensor parallelism need sequence parallelism there, or it refuses.":
            bool(model.num_experts) and t > 1 and not plan.sequence_parallel,
        "GELU's approximation by tanh needs biases there.": model.mlp == "gelu_tanh" and not model.bias,
        "A fraction of --rotary-base is cut off.": model.positions == "rope" and model.rotary_base % 1 > 0,
    }  # fmt: skip
