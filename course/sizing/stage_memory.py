"""Bytes that a GPU holds: weights, gradients, optimizer states, and the activations kept for backward.

Mixed precision with Adam: a parameter takes 2 bytes as a weight, 2 or 4 as a gradient, and 12 in the optimizer (a
float32 copy and two moments). Source: arXiv 1910.02054, section 3.1. An activation takes 2 bytes, as in arXiv
2205.05198, sections 4 and 5, whose formulas are those of GPT-2's form with attention scores that are kept.
"""

from typing import Any, NamedTuple

from course.sizing.experts import hidden_bytes, kept_bytes_per_token
from course.sizing.folded import folded
from course.sizing.plan import Plan
from course.sizing.remembered import remembered
from course.sizing.shapes import AnyGPT, query_size
from labkit.shape import GPT
from labtrain.memory_estimate import MemoryEstimate

WEIGHT_BYTES, OPTIMIZER_BYTES = 2, 12


def memory(plan: Plan, stage: int = 0) -> MemoryEstimate:
    """Return what a GPU of a pipeline stage holds; stage 0 is usually the fullest.

    Not counted: what libraries allocate for themselves, fragmentation, and message buffers.
    """
    return MemoryEstimate(*states(plan, stage), stage_activation_bytes(plan, stage))


def states(plan: Plan, stage: int) -> tuple[float, float, float]:
    """Return the bytes of a GPU's weights, gradients and optimizer states: micro-batches do not matter for them."""
    dense, experts = stage_kinds(plan, stage)
    optimizer, gradients, weights = [  # ZeRO divides experts over the ranks that have the same, all else over the d c
        dense / plan.dp_cp_size + experts / plan.expert_dp_size if plan.zero_stage >= level else dense + experts
        for level in (1, 2, 3)
    ]
    return weights * WEIGHT_BYTES, gradients * plan.gradient_bytes, optimizer * OPTIMIZER_BYTES


def fullest(plan: Plan) -> MemoryEstimate:
    """Return the memory of the fullest stage."""
    return max((memory(plan, stage) for stage in full_stages(plan)), key=lambda each: each.total)


def full_stages(plan: Plan) -> set[int]:
    """Return the stages of which one is the fullest: the first has the most micro-batches, the last has the logits.

    If stages differ in layers, any may be it; of those with the same layers, the first one has the most micro-batches.
    """
    found = {0, plan.pp_size - 1}
    if plan.stage_layers or plan.model.num_experts:
        found.update(same[0] for same in plan.ranks_by_layers)
    return found


def activation_bytes_per_layer(
    model: GPT,
    micro_batch_size: int,
    tp_size: int = 1,
    *,
    sequence_parallel: bool = False,
    recompute: str = "none",
    cp_size: int = 1,
    fused_attention: bool = False,
    fused_mlp: bool = False,
    precision: str = "bf16",
    expert_tp_size: int | None = None,
) -> float:
    """Return the bytes that one transformer layer keeps of one micro-batch.

    In GPT-2's form:

    - none: sbh(10 + 24/t + 5as/(ht)); with sequence parallelism the 10 is divided by t, too
    - selective: the same without 5as/(ht)
    - full: the layer's input, 2sbh; with sequence parallelism 2sbh/t

    Context parallelism: s/c tokens instead of s (each sees s keys). Fused attention keeps 4 bytes for each token and
    head, its log-sum-exp, instead of 5s: softmax, its dropout and the mask. The 24 are q, k, v and the output, 8, and
    what the MLP keeps of its 4h hidden units, 16: the GeLU's input and output. Query groups make k and v smaller.
    SwiGLU keeps 4 numbers for each hidden unit: gate, SiLU(gate), the other factor and the product; a fused kernel
    computes SiLU again. In fp8, the inputs of linear layers take 1 byte, but the attention's output is kept in 16 bits,
    too. The 10 are the inputs of two norms and two linear layers, and two dropout masks of 1 byte.
    Latent attention also keeps its latents, before their norms and after: all ranks have them whole.
    With ``expert_tp_size`` the layer has experts, which all get as many tokens (`kept_bytes_per_token`).

    Source: arXiv 2205.05198, table 2; arXiv 2307.08691, section 3.1, for what fused attention keeps.
    """
    h, tokens, t = model.hidden_size, model.seq_length / cp_size * micro_batch_size, tp_size
    of_tokens = t if sequence_parallel else 1
    if recompute == "full":
        return 2.0 * tokens * h / of_tokens
    assert model.num_attention_heads is not None
    of_a_head = 4 if fused_attention else 5 * model.seq_length if recompute == "none" else 0
    input_bytes, linear_inputs = 1 if precision == "fp8" else 2, 2
    mlp = hidden_bytes(model, fused_mlp, input_bytes) * model.mlp_width
    if expert_tp_size is not None:
        mlp = hidden_bytes(model, fused_mlp, input_bytes) * model.num_shared_experts * model.expert_width
        linear_inputs = 2 if model.num_shared_experts else 1
    latents = 2 * 2 * model.attention_norms if isinstance(model, AnyGPT) and model.latent_attention else 0
    of_attention = 2 * (2 * query_size(model) + 2 * model.kv_size) + (query_size(model) if precision == "fp8" else 0)
    divided_by_heads = of_attention + mlp + of_a_head * model.num_attention_heads
    if expert_tp_size is not None:
        divided_by_heads += kept_bytes_per_token(model, expert_tp_size, fused_mlp, input_bytes)
    return tokens * ((6 + input_bytes * linear_inputs) * h / of_tokens + latents + divided_by_heads / t)


@remembered(
    "model", "tp_size", "cp_size", "expert_tp_size", "micro_batch_size", "recompute", "sequence_parallel",
    "fused_attention", "fused_mlp", "precision",
)  # fmt: skip
def _layer_bytes(plan: Plan, has_experts: bool) -> tuple[float, float]:
    """Return what a layer keeps of a micro-batch, and what it has while backward goes through it."""
    ways: dict[str, Any] = dict(sequence_parallel=plan.sequence_parallel, fused_attention=plan.fused_attention)
    ways |= dict(
        fused_mlp=plan.fused_mlp,
        precision=plan.precision,
        cp_size=plan.cp_size,
        expert_tp_size=plan.etp_size if has_experts else None,
    )
    model, b, t = plan.model, plan.micro_batch_size, plan.tp_size
    kept = activation_bytes_per_layer(model, b, t, recompute=plan.recompute, **ways)
    return kept, activation_bytes_per_layer(model, b, t, **ways)


def in_flight(plan: Plan, stage: int) -> int:
    """Return the most passes through a chunk whose activations a GPU holds at once, with 1F1B or interleaved 1F1B.

    This is the formula for `labkit.schedules.Schedule.peak_in_flight`; a V's is that of the schedule itself.
    """
    p, m, v = plan.pp_size, plan.num_micro_batches, plan.num_chunks
    if plan.schedule:
        return folded(plan.schedule, p, m).held
    return min(p - stage, m) if v == 1 else min(v * m, 2 * (p - stage - 1) + (v - 1) * p + 1)


def stage_activation_bytes(plan: Plan, stage: int) -> float:
    """Return the bytes of activations on a GPU of this stage when it holds the most micro-batches.

    Of several chunks that differ in layers, each pass counts as their mean.
    """
    model, t, divided, (layer, largest) = plan.model, plan.tp_size, plan.sequence_parallel, _layer_bytes(plan, False)
    everything = largest
    if moe_layers := plan.num_moe_layers(stage):  # the mean of all layers, and the larger of both kinds
        share, (kept, whole) = moe_layers / plan.layers_of_rank(stage), _layer_bytes(plan, True)
        layer += share * (kept - layer)
        everything += share * (whole - everything)
        largest = whole if share == 1 else max(largest, whole)
    if plan.recompute_layers is not None:  # of each chunk; the others keep everything
        layer += (1 - plan.recomputed_share) * (everything - layer)
    total = in_flight(plan, stage) * plan.layers_of_rank(stage) / plan.num_chunks * layer
    if plan.recompute == "full":  # while backward goes through a layer, all of its activations are there
        total += largest
    tokens = model.seq_length / plan.cp_size * plan.micro_batch_size
    hidden = tokens * model.hidden_size / (t if divided else 1)
    if stage == 0:  # masks of the embedding's dropout: interleaving keeps two rounds of p micro-batches under way
        rounds = 1 if plan.num_chunks == 1 else 2
        total += min(rounds * plan.pp_size, plan.num_micro_batches) * hidden
    if stage == plan.loss_rank:
        total += 4 * hidden + 4 * tokens * plan.vocab_size / t  # last norm, logits in 16 and 32 bits
    return total


def stage_parameters(plan: Plan, stage: int) -> float:
    """Return the parameters on a GPU: those of its layers, the embedding's on the first stage, the logits' on the last.

    The first and the last stage both have a tied embedding, but in a V they are on one rank, which has it once;
    otherwise each has a matrix of its own.
    """
    model, h = plan.model, plan.model.hidden_size
    moe_layers, words = plan.num_moe_layers(stage), plan.vocab_size * h / plan.tp_size
    total = (plan.layers_of_rank(stage) - moe_layers) * layer_parameters(plan).dense
    total += moe_layers * sum(layer_parameters(plan, True))
    if stage == 0:
        total += words + (model.seq_length * h if model.positions == "learned" else 0)
    if stage == plan.loss_rank:
        total += _norm_parameters(model) + (words if stage > 0 or not model.tied else 0)
    return total


class Kinds(NamedTuple):
    """Parameters by how many ranks have the same: d c of them, but of experts expert_dp."""

    dense: float
    experts: float


@remembered("model", "tp_size", "ep_size", "expert_tp_size")
def layer_parameters(plan: Plan, has_experts: bool = False) -> Kinds:
    """Return a layer's parameters on a GPU: matrices and column biases are divided by t, norms and row biases whole.

    So are routers; latent attention's matrices are taken to be divided, too. A layer with experts has them, a router
    and shared experts in place of the MLP, all without biases: E/ep experts, and 1/etp of each.
    """
    model, t = plan.model, plan.tp_size
    h, up = model.hidden_size, 2 if model.mlp == "swiglu" else 1
    inner_norms = model.attention_norms if isinstance(model, AnyGPT) else 0
    biases = (query_size(model) + 2 * model.kv_size) / t + h if model.bias else 0
    mlp_biases = up * model.mlp_width / t + h if model.bias else 0
    dense = model.num_matrix_parameters / t + 2 * _norm_parameters(model) + inner_norms + biases
    if not has_experts:
        return Kinds(dense + mlp_biases, 0.0)
    experts = (model.num_experts or 0) * model.num_expert_parameters / (plan.ep_size * plan.etp_size)
    shared, mlp = model.num_shared_experts * model.num_expert_parameters, (up + 1) * h * model.mlp_width
    return Kinds(dense + (shared - mlp) / t + h * (model.num_experts or 0), experts)


def stage_kinds(plan: Plan, stage: int) -> Kinds:
    """Return `stage_parameters` by kind."""
    experts = expert_parameters(plan, stage)
    return Kinds(stage_parameters(plan, stage) - experts, experts)


def expert_parameters(plan: Plan, stage: int) -> float:
    """Return the parameters of experts on a GPU."""
    return plan.num_moe_layers(stage) * layer_parameters(plan, True).experts


def _norm_parameters(model: GPT) -> int:
    return (2 if model.norm == "layernorm" else 1) * model.hidden_size
