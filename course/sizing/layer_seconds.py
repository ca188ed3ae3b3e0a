"""Estimates a GPU's time for one layer and micro-batch, by what it does: compute, move memory, start kernels, wait.

FLOPs, bytes and messages are counted for the layer of `labtrain.model`; `Hardware` says how fast they go.
"""

from course.sizing.context import attention_messages
from course.sizing.experts import all_to_all_bytes, expert_gather_bytes, mlp_halves, nodes_of_a_token
from course.sizing.hardware import Hardware
from course.sizing.plan import Plan
from course.sizing.remembered import remembered
from course.sizing.shapes import query_size
from labkit.shape import GPT

# What kernels beside the matrix products read and write, in bytes: one bracket for each kernel.
NORMS_AND_DROPOUTS = 2 * ((2 + 2) + (2 + 2 + 2 + 1))
"""Forward, for each number of [b, s, h]: norm; dropout plus residual, with a mask of 1 byte. Both twice in a layer."""
ACTIVATION = {"gelu": 2 + 2, "swiglu": (2 + 2) + (2 + 2 + 2)}
"""Forward, for each hidden unit of an MLP: GeLU; SiLU of the gate, then its product with the other factor."""
HEADS, ROPE = 2 + 2, 2 + 2
"""Forward: laying out q, k and v by heads, for each of their numbers; rotating q and k, for each of theirs."""
SCORES = (2 + 2) + (2 + 2) + (2 + 2 + 1)
"""Forward, for each attention score: scale and mask; softmax; dropout with its mask. Fused, they stay in the GPU."""
ROWS_SENT, ROWS_RECEIVED = (2 + 2) + (2 + 2) + (2 + 2) + (2 + 2), (2 + 2) + (2 + 2)
"""Forward, for each number of a row that goes to an expert: picked out, put back, weighed, added up; and where it
arrives: sorted by expert, and back."""
LOSS = (2 + 4) + 4 + (4 + 4) + (4 + 2)
"""Forward and backward, for each logit: float32 copy; maximum; exponentials and their sum; gradient."""

PASSES = {"none": 3, "selective": 3, "full": 4}
"""How much a layer computes in a step, by what is recomputed: forward counts 1, backward 2, forward again 1."""
FUSED_BACKWARD = 2.5
"""The same for backward of fused attention: 5 matrix products instead of 4, since it computes the scores again.
Source: arXiv 2307.08691, section 4.1; it also says that a causal mask leaves half of the work."""
ALL_REDUCES = {"none": 4, "selective": 4, "full": 6}
"""How often a layer's activations are all-reduced: twice forward, twice backward, twice in forward again."""


def all_reduces(recompute: str, sequence_parallel: bool) -> int:
    """Return how many all-reduces of its activations a layer sends per micro-batch, or the equivalent.

    Sequence parallelism adds one: backward gathers two inputs again, and each gather is half an all-reduce.
    """
    return ALL_REDUCES[recompute] + (1 if sequence_parallel else 0)


@remembered(
    "model", "world_size", "tp_size", "cp_size", "ep_size", "expert_tp_size", "micro_batch_size", "recompute",
    "sequence_parallel", "fused_attention", "context_parallel", "precision",
)  # fmt: skip
def layer_seconds(plan: Plan, hardware: Hardware, has_experts: bool = False) -> dict[str, float]:
    """Return the seconds of one layer and one micro-batch on one GPU: forward, backward, and recomputation.

    Experts all get as many tokens.
    """
    model, t, passes = plan.model, plan.tp_size, PASSES[plan.recompute]
    h, q, kv, a, tokens = (
        model.hidden_size, query_size(model), model.kv_size, model.num_attention_heads, num_tokens(plan),
    )  # fmt: skip
    assert a is not None
    weights, width, halves, rows = model.num_matrix_parameters, model.mlp_width, 2.0, 0.0
    if has_experts:
        used = model.top_k + model.num_shared_experts
        weights += used * model.num_expert_parameters + h * (model.num_experts or 0) - mlp_parameters(model)
        width, halves = used * model.expert_width, 1 + mlp_halves(model, plan.sequence_parallel)
        rows = model.top_k * h * (ROWS_SENT + ROWS_RECEIVED * plan.etp_size)
    core_passes = passes + 1 if plan.recompute == "selective" else passes  # of the attention: products and scores
    if plan.fused_attention:
        core_passes = passes - 2 + FUSED_BACKWARD
    linear, core = passes * 2 * tokens * weights / t, core_passes * core_flops(plan)
    divided = ACTIVATION[model.mlp] * width + HEADS * (q + 2 * kv) + rows
    divided += ROPE * (q + kv) if model.positions == "rope" else 0
    bytes_moved = passes * tokens * (h * NORMS_AND_DROPOUTS / (t if plan.sequence_parallel else 1) + divided / t)
    if not plan.fused_attention:
        bytes_moved += core_passes * a * tokens * model.seq_length * SCORES / t
    all_reduce = 2 * (t - 1) / t * activation_bytes(plan) / link_rate(plan, hardware, "tp")
    sent = halves / 2 * all_reduces(plan.recompute, plan.sequence_parallel)
    hidden = hardware.hidden
    return {
        "products": linear / linear_rate(plan, hardware) + core / hardware.product_rate,
        "memory_bound": bytes_moved / hardware.memory_rate,
        "overhead": passes * hardware.layer_overhead_seconds,
        "tensor_parallel": (1 - hidden.tensor) * sent * all_reduce,
        "context_parallel": (1 - hidden.context) * context_seconds(plan, hardware),
        "expert_parallel": (1 - hidden.expert) * expert_seconds(plan, hardware) if has_experts else 0.0,
    }


def linear_rate(plan: Plan, hardware: Hardware) -> float:
    """Return the FLOP/s that the products of linear layers reach in the plan's precision.

    Raises:
        ValueError: fp8 on a GPU that has none.
    """
    if plan.precision == "bf16":
        return hardware.product_rate
    if hardware.fp8_peak_flops is None:
        raise ValueError(f"precision='fp8', but {hardware.name} says no fp8_peak_flops: use precision='bf16'")
    return hardware.fp8_peak_flops * hardware.fp8_efficiency


def mlp_parameters(model: GPT) -> int:
    """Return the weights in the matrices of an MLP."""
    return (3 if model.mlp == "swiglu" else 2) * model.hidden_size * model.mlp_width


def expert_seconds(plan: Plan, hardware: Hardware) -> float:
    """Return the seconds in which a layer's tokens go to their experts and back, forward, backward, and once more.

    Pieces for the same node and those for others travel at the same time, each way at its own rate. Tokens that go to a
    node once (`Hardware.once_to_a_node`) go to their experts from there, inside it.
    """
    token_bytes = activation_bytes(plan) / plan.tp_size
    ep, distance, node = plan.ep_size, plan.etp_size, hardware.gpus_per_node
    sent = all_to_all_bytes(plan.model, ep, token_bytes)
    here = ep if plan.world_size <= node or node % (ep * distance) == 0 else max(1, min(ep, node // distance))
    to_one = sent / max(1, ep - 1)
    leaves, stays = (ep - here) * to_one, (here - 1) * to_one
    if hardware.once_to_a_node and leaves:
        num_nodes = ep / here
        leaves = 2 * token_bytes * nodes_of_a_token(plan.model, num_nodes) * (1 - 1 / num_nodes)
        stays *= num_nodes
    inside = stays / (hardware.node_bytes_per_second * hardware.node_efficiency)
    across = leaves / (hardware.network_bytes_per_second * hardware.network_efficiency)
    gathered = expert_gather_bytes(plan.model, plan.etp_size, token_bytes) / link_rate(plan, hardware, "expert_tp")
    return (3 if plan.recompute == "full" else 2) * (max(inside, across) + gathered)


def core_flops(plan: Plan) -> float:
    """Return the FLOPs of the core of attention, forward: the products with k and v; fused, only the causal half.

    In zigzag chunks all context ranks have the same (`course.sizing.attention_work`).
    """
    whole = 4 * num_tokens(plan) * plan.model.seq_length * query_size(plan.model) / plan.tp_size
    return whole / 2 if plan.fused_attention else whole


def context_seconds(plan: Plan, hardware: Hardware) -> float:
    """Return the seconds in which attention of one layer and micro-batch waits for other context ranks.

    A ring's messages travel while the rank computes a block, one c-th of its work: only what takes longer counts, and
    the last message of backward, which brings the gradients home. Collectives count in full.
    """
    b, t, rate = plan.micro_batch_size, plan.tp_size, link_rate(plan, hardware, "cp")
    sent = attention_messages(plan.model, plan.context_parallel, plan.cp_size, t, b)
    forward, backward = ([each.sent_bytes / rate for each in way] for way in sent)
    if plan.context_parallel == "ring" and plan.cp_size > 1:
        block = core_flops(plan) / plan.cp_size / hardware.product_rate
        around, home = len(forward), backward[-1]
        steps = [*backward[:around], 0.0], [0.0, *backward[around:-1]]  # at each: keys and values, and gradients
        forward = [max(0.0, seconds - block) for seconds in forward]
        backward = [max(0.0, sum(both) - FUSED_BACKWARD * block) for both in zip(*steps)] + [home]
    return (2 if plan.recompute == "full" else 1) * sum(forward) + sum(backward)


@remembered("model", "tp_size", "cp_size", "micro_batch_size", "pad_vocab_to")
def logits_seconds(plan: Plan, hardware: Hardware) -> dict[str, float]:
    """Return the seconds of the output layer and the loss for one micro-batch, forward and backward."""
    logits = num_tokens(plan) * plan.vocab_size / plan.tp_size
    return {
        "products": 6 * logits * plan.model.hidden_size / hardware.product_rate,
        "memory_bound": LOSS * logits / hardware.memory_rate,
    }


def activation_bytes(plan: Plan) -> float:
    """Return the bytes of a layer's output for one micro-batch: 2 for each of b (s/c) h numbers."""
    return 2.0 * num_tokens(plan) * plan.model.hidden_size


def num_tokens(plan: Plan) -> float:
    """Return how many tokens of a micro-batch a rank has: b s/c."""
    return plan.micro_batch_size * plan.model.seq_length / plan.cp_size


def link_rate(plan: Plan, hardware: Hardware, axis: str) -> float:
    """Return the bytes per second that a GPU can send in a group of an axis, inside a node or over the network.

    Groups stay in a node if their ranks tile it. A group with k GPUs in each node has k network cards for a collective
    that goes around it. A message of the pipeline or of ring attention goes from one GPU to one other, and so do the
    pieces of an all-to-all. "dp" is the group of the gradients, over context ranks, too; "expert_dp" of the experts'.
    """
    t, sharing, etp, ep = plan.tp_size, plan.dp_cp_size, plan.etp_size, plan.ep_size
    size = {"tp": t, "cp": plan.cp_size, "dp": sharing, "pp": plan.pp_size}
    size |= {"expert_tp": etp, "expert_dp": plan.expert_dp_size}
    distance = {"tp": 1, "cp": t, "dp": t, "pp": t * sharing, "expert_tp": 1, "expert_dp": etp * ep}  # of neighbours
    size, distance = size[axis], distance[axis]
    goes_around = axis in ("tp", "dp", "expert_tp", "expert_dp")
    goes_around |= axis == "cp" and plan.context_parallel == "all_gather"
    return group_rate(hardware, plan.world_size, size, distance, goes_around)


def group_rate(hardware: Hardware, world_size: int, size: int, distance: int, goes_around: bool = True) -> float:
    """Return the same as `link_rate` for a group of ``size`` ranks that are ``distance`` apart."""
    inside = hardware.node_bytes_per_second * hardware.node_efficiency
    if world_size <= hardware.gpus_per_node or hardware.gpus_per_node % (size * distance) == 0:
        return inside
    here = max(1, min(size, hardware.gpus_per_node // distance)) if goes_around else 1
    return min(inside, here * hardware.network_bytes_per_second * hardware.network_efficiency)
