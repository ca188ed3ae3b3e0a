"""Bytes that a GPU holds: weights, gradients, optimizer states, and the activations kept for backward.

Mixed precision with Adam: a parameter takes 2 bytes as a weight, 2 or 4 as a gradient, and 12 in the optimizer (a
float32 copy and two moments; `Plan.optimizer_bytes` may say less). Source: arXiv 1910.02054, section 3.1. An activation
takes 2 bytes, as in arXiv 2205.05198, sections 4 and 5, whose formulas are those of GPT-2's form with attention scores
that are kept.
"""

from collections.abc import Sequence
from typing import NamedTuple

from course.sizing.experts import hidden_bytes, kept_of_experts
from course.sizing.folded import folded
from course.sizing.plan import Plan
from course.sizing.remembered import remembered
from course.sizing.shapes import AnyGPT, attention_widths, latent_of, query_size
from labkit.shape import GPT
from labtrain.memory_estimate import MemoryEstimate

WEIGHT_BYTES = 2


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
    return weights * WEIGHT_BYTES, gradients * plan.gradient_bytes, optimizer * plan.optimizer_bytes


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
    With ``expert_tp_size`` the layer has experts, which all get as many tokens (`kept_of_experts`).

    Source: arXiv 2205.05198, table 2; arXiv 2307.08691, section 3.1, for what fused attention keeps.
    """
    if recompute == "full":
        tokens = model.seq_length / cp_size * micro_batch_size
        return 2.0 * tokens * model.hidden_size / (tp_size if sequence_parallel else 1)
    pieces = activation_pieces(
        model,
        micro_batch_size,
        tp_size,
        sequence_parallel=sequence_parallel,
        cp_size=cp_size,
        fused_attention=fused_attention,
        fused_mlp=fused_mlp,
        precision=precision,
        expert_tp_size=expert_tp_size,
    )
    return kept_of(pieces, ("core_attn",) if recompute == "selective" and not fused_attention else ())


def activation_pieces(
    model: GPT,
    micro_batch_size: int,
    tp_size: int = 1,
    *,
    sequence_parallel: bool = False,
    cp_size: int = 1,
    fused_attention: bool = False,
    fused_mlp: bool = False,
    fused_experts: bool = False,
    dropout: bool = True,
    precision: str = "bf16",
    expert_tp_size: int | None = None,
) -> dict[str, float]:
    """Return the same for a layer that computes nothing again, by the module (`MODULES`) that would save each piece.

    What no module saves is under "". Norms save their results, which linear layers keep; "mlp" and "moe" all that lies
    between their inputs and their outputs; "moe_act" and "shared_experts" parts of that which "moe" does not name.
    """
    assert model.num_attention_heads is not None
    h, t, tokens = model.hidden_size, tp_size, model.seq_length / cp_size * micro_batch_size
    whole = 1 / (t if sequence_parallel else 1)
    input_bytes, widths, latent = 1 if precision == "fp8" else 2, attention_widths(model), latent_of(model)
    of_output = (3 if precision == "fp8" else 2) * widths.outputs
    of_a_head = 4 if fused_attention else 5 * model.seq_length
    hidden = hidden_bytes(model, fused_mlp, input_bytes)
    pieces = {
        "": (6 if dropout else 4) * h * whole + of_output / t + (2 * 2 * latent.latent_size if latent else 0),
        "core_attn": of_a_head * model.num_attention_heads / t,
        "mla_up_proj": 2 * (widths.queries + widths.keys + widths.values) / t,
    }
    if expert_tp_size is None:
        pieces["layernorm"] = 2 * input_bytes * h * whole
        pieces["mlp"] = hidden * model.mlp_width / t
    else:
        kept = kept_of_experts(model, expert_tp_size, fused_mlp, input_bytes, fused_experts)
        pieces["layernorm"] = (2 if model.num_shared_experts else 1) * input_bytes * h * whole
        pieces["moe_act"], pieces["moe"] = kept.activation / t, kept.others / t
        pieces["shared_experts"] = hidden * model.num_shared_experts * model.expert_width / t
    return {name: tokens * each for name, each in pieces.items()}


def kept_of(pieces: dict[str, float], modules: Sequence[str]) -> float:
    """Return what is kept of `activation_pieces` if these modules are computed again; "moe" has parts of its own."""
    again = {*modules, "moe_act", "shared_experts"} if "moe" in modules else modules
    return sum(each for name, each in pieces.items() if name not in again)


@remembered(
    "model", "tp_size", "cp_size", "expert_tp_size", "micro_batch_size", "recompute", "recompute_modules",
    "sequence_parallel", "fused_attention", "fused_mlp", "fused_experts", "dropout", "precision",
)  # fmt: skip
def _layer_bytes(plan: Plan, has_experts: bool) -> tuple[float, float]:
    """Return what a layer keeps of a micro-batch, and what it has while backward goes through it."""
    model, b, t = plan.model, plan.micro_batch_size, plan.tp_size
    pieces = activation_pieces(
        model,
        b,
        t,
        sequence_parallel=plan.sequence_parallel,
        fused_attention=plan.fused_attention,
        fused_mlp=plan.fused_mlp,
        fused_experts=plan.fused_experts,
        dropout=plan.dropout,
        precision=plan.precision,
        cp_size=plan.cp_size,
        expert_tp_size=plan.etp_size if has_experts else None,
    )
    everything = sum(pieces.values())
    if plan.recompute == "full":
        layer_input = activation_bytes_per_layer(
            model, b, t, sequence_parallel=plan.sequence_parallel, cp_size=plan.cp_size, recompute="full"
        )
        return layer_input, everything
    return kept_of(pieces, plan.modules), everything


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
    total = in_flight(plan, stage) * plan.layers_of_rank(stage) / plan.num_chunks * layer - plan.offload_layers * layer
    if plan.recompute == "full":  # while backward goes through a layer, all of its activations are there
        total += largest
    elif plan.recompute_modules:  # or those of its modules
        total += everything - layer
    if plan.offload_layers:  # one layer computes while another one's activations travel
        total += 2 * largest
    tokens = model.seq_length / plan.cp_size * plan.micro_batch_size
    hidden = tokens * model.hidden_size / (t if divided else 1)
    if stage == 0 and plan.dropout:  # masks of the embedding's: chunks keep two rounds of p micro-batches under way
        rounds = 1 if plan.num_chunks == 1 else 2
        total += min(rounds * plan.pp_size, plan.num_micro_batches) * hidden
    if stage == plan.loss_rank:
        total += 4 * hidden + 4 * tokens * plan.vocab_size / t  # last norm, logits in 16 and 32 bits
    return total


def offloaded_bytes(plan: Plan) -> float:
    """Return the bytes of a micro-batch that go to the CPU's memory; layers of both kinds count as their mean."""
    share = plan.model.num_moe_layers / plan.model.num_layers
    layer = (1 - share) * _layer_bytes(plan, False)[0] + (share * _layer_bytes(plan, True)[0] if share else 0.0)
    return plan.offload_layers * layer


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

    So are routers, and the matrices that make latents, which all tensor ranks need. A layer with experts has them, a
    router and shared experts in place of the MLP, all without biases: E/ep experts, and 1/etp of each.
    """
    model, t = plan.model, plan.tp_size
    h, up = model.hidden_size, 2 if model.mlp == "swiglu" else 1
    inner_norms = model.inner_norms if isinstance(model, AnyGPT) else 0
    latent = latent_of(model)
    copied = latent.down_weights(h) * (1 - 1 / t) if latent else 0
    biases = (query_size(model) + 2 * model.kv_size) / t + h if model.bias else 0
    mlp_biases = up * model.mlp_width / t + h if model.bias else 0
    dense = model.num_matrix_parameters / t + copied + 2 * _norm_parameters(model) + inner_norms + biases
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
