"""Estimates a GPU's time for one layer and micro-batch, by what it does: compute, move memory, start kernels, wait.

FLOPs, bytes and messages are counted for the layer of `labtrain.model`; `Hardware` says how fast they go.
"""

from typing import NamedTuple

from course.sizing.context import attention_messages
from course.sizing.experts import (
    all_to_all_bytes,
    expert_gather_bytes,
    mlp_halves,
    nodes_of_a_token,
    ranks_of_a_token,
)
from course.sizing.hardware import Hardware
from course.sizing.plan import Plan
from course.sizing.remembered import remembered
from course.sizing.shapes import attention_layers, mlp_parameters, module_weights, once, query_size

# What kernels beside the matrix products read and write, in bytes: one bracket for each kernel.
NORM = 2 + 2
NORMS_AND_DROPOUTS = 2 * (NORM + (2 + 2 + 2 + 1))
"""Forward, for each number of [b, s, h]: norm; dropout plus residual, with a mask of 1 byte. Both twice in a layer."""
ACTIVATION = {"gelu": 2 + 2, "swiglu": (2 + 2) + (2 + 2 + 2)}
"""Forward, for each hidden unit of an MLP: GeLU; SiLU of the gate, then its product with the other factor."""
FUSED_ACTIVATION = {"gelu": 2 + 2, "swiglu": 2 + 2 + 2}
"""The same where one kernel reads both factors and writes the product."""
HEADS, ROPE = 2 + 2, 2 + 2
"""Forward: laying out q, k and v by heads, for each of their numbers, which fused attention reads as they lie; rotating
q and k, for each of theirs."""
SCORES = (2 + 2) + (2 + 2) + (2 + 2 + 1)
"""Forward, for each attention score: scale and mask; softmax; dropout with its mask. Fused, they stay in the GPU."""
ROWS_SENT, ROWS_RECEIVED = (2 + 2) + (2 + 2) + (2 + 2) + (2 + 2), (2 + 2) + (2 + 2)
"""Forward, for each number of a row that goes to an expert: picked out, put back, weighed, added up; and where it
arrives: sorted by expert, and back."""
ROWS_ON_THE_WAY = (2 + 2) + (2 + 2)
"""The same where messages sort rows on their way (`Hardware.once_to_a_node`): laid out for products, and weighed."""
LOSS = (2 + 4) + 4 + (4 + 4) + (4 + 2)
"""Forward and backward, for each logit: float32 copy; maximum; exponentials and their sum; gradient."""

PASSES = {"none": 3, "selective": 3, "full": 4}
"""How much a layer computes in a step, by what is recomputed: forward counts 1, backward 2, forward again 1."""
FUSED_BACKWARD = 2.5
"""The same for backward of fused attention: 5 matrix products instead of 4, since it computes the scores again.
Source: arXiv 2307.08691, section 4.1; it also says that a causal mask leaves half of the work."""
HALF_AT_TOKENS = 300
"""Fused attention reaches half of its rate in blocks of so many tokens, and in heads of 64 two thirds of that in heads
of 128. Both are read off figures 5 and 6 of arXiv 2407.08608 (H100; FlashAttention-2 and 3, and for heads cuDNN)."""
GATHERED_IN_FP8 = 3 / 4
"""What tensor-parallel messages send if products are in fp8: of an all-reduce, the half that gathers has 1 byte a
number, as in Transformer Engine, and the half that adds up 2."""
ALL_REDUCES = {"none": 4, "selective": 4, "full": 6}
"""How often a layer's activations are all-reduced: twice forward, twice backward, twice in forward again."""


def all_reduces(recompute: str, sequence_parallel: bool) -> int:
    """Return how many all-reduces of its activations a layer sends per micro-batch, or the equivalent.

    Sequence parallelism adds one: backward gathers two inputs again, and each gather is half an all-reduce.
    """
    return ALL_REDUCES[recompute] + (1 if sequence_parallel else 0)


class Again(NamedTuple):
    """What a layer computes once more in a micro-batch, because backward needs what was not kept."""

    weights: float = 0.0
    """That multiply each token; a rank has 1/t of them."""
    moved_bytes: float = 0.0
    all_reduces: float = 0.0
    of_experts: int = 0
    """1 if the experts compute again."""


NOTHING_AGAIN = Again()


def recomputed(plan: Plan, hardware: Hardware, has_experts: bool) -> Again:
    """Return the modules' work; that of the core of attention depends on its kernel (`layer_seconds`)."""
    model, t, tokens, moved = plan.model, plan.tp_size, num_tokens(plan), 0.0
    modules = once(plan.modules)
    weights = sum(module_weights(model, module, has_experts) for module in modules)
    widths = {"mla_up_proj": 0, "mlp": 0 if has_experts else model.mlp_width}
    if has_experts:
        chosen, shared = (number * model.expert_width for number in (model.top_k, model.num_shared_experts))
        widths |= {"moe": chosen + shared, "moe_act": chosen, "shared_experts": shared}
    for module in modules:
        moved += tokens / t * _activation_kernels(plan) * widths.get(module, 0)
    if "mla_up_proj" in modules:
        moved += tokens / t * ROPE * (query_size(model) + model.kv_size)
    if "layernorm" in modules:
        moved += tokens / (t if plan.sequence_parallel else 1) * 2 * NORM * model.hidden_size
    of_experts = int(has_experts and "moe" in modules)
    if of_experts:
        moved += grouped_bytes(plan) + row_bytes(plan, hardware)
    sent = mlp_halves(model, plan.sequence_parallel) if of_experts else 0
    sent += has_experts and "shared_experts" in modules
    sent += not has_experts and "mlp" in modules
    return Again(weights, moved, sent, of_experts)


@remembered(
    "model", "world_size", "tp_size", "cp_size", "ep_size", "expert_tp_size", "micro_batch_size", "recompute",
    "recompute_modules", "sequence_parallel", "fused_attention", "fused_mlp", "context_parallel", "precision",
)  # fmt: skip
def layer_seconds(plan: Plan, hardware: Hardware, has_experts: bool = False) -> dict[str, float]:
    """Return the seconds of one layer and one micro-batch on one GPU: forward, backward, and recomputation.

    Experts all get as many tokens.
    """
    model, t, passes, hidden = plan.model, plan.tp_size, PASSES[plan.recompute], hardware.hidden
    weights, halves = model.num_matrix_parameters, 2.0
    again = recomputed(plan, hardware, has_experts) if plan.recompute_modules else NOTHING_AGAIN
    bytes_moved = passes * kernel_bytes(plan, has_experts) + again.moved_bytes
    overhead = passes * hardware.layer_overhead_seconds
    if has_experts:
        used = model.top_k + model.num_shared_experts
        weights += used * model.num_expert_parameters + model.hidden_size * (model.num_experts or 0)
        weights -= mlp_parameters(model)
        halves = 1 + mlp_halves(model, plan.sequence_parallel)
        bytes_moved += passes * (grouped_bytes(plan) + row_bytes(plan, hardware))
        here = (model.num_experts or 0) / plan.ep_size
        overhead += (passes + again.of_experts) * here * hardware.expert_overhead_seconds
    core_passes = passes + 1 if "core_attn" in plan.modules else passes  # of the attention: products and scores
    if plan.fused_attention:
        core_passes = passes - 2 + FUSED_BACKWARD
    else:
        scores = (model.num_attention_heads or 0) / t * num_tokens(plan) * model.seq_length
        bytes_moved += core_passes * scores * SCORES
    linear = 2 * num_tokens(plan) * (passes * weights + again.weights) / t
    sent = halves / 2 * all_reduces(plan.recompute, plan.sequence_parallel) + again.all_reduces
    return {
        "products": linear / linear_rate(plan, hardware) + core_passes * core_seconds(plan, hardware),
        "memory_bound": bytes_moved / hardware.memory_rate,
        "overhead": overhead,
        "tensor_parallel": sent * all_reduce_seconds(plan, hardware),
        "context_parallel": (1 - hidden.context) * context_seconds(plan, hardware),
        "expert_parallel": (1 - hidden.expert) * expert_seconds(plan, hardware) if has_experts else 0.0,
    }


def kernel_bytes(plan: Plan, has_experts: bool) -> float:
    """Return the bytes that kernels beside the products and the scores move in a forward pass."""
    model, t = plan.model, plan.tp_size
    q, kv, width = query_size(model), model.kv_size, model.mlp_width
    if has_experts:
        width = (model.top_k + model.num_shared_experts) * model.expert_width
    divided = _activation_kernels(plan) * width
    divided += ROPE * (q + kv) if model.positions == "rope" else 0
    divided += 0 if plan.fused_attention else HEADS * (q + 2 * kv)
    whole = model.hidden_size * NORMS_AND_DROPOUTS / (t if plan.sequence_parallel else 1)
    return num_tokens(plan) * (whole + divided / t)


def _activation_kernels(plan: Plan) -> int:
    """Return the bytes that they move for each hidden unit of an MLP."""
    return (FUSED_ACTIVATION if plan.fused_mlp else ACTIVATION)[plan.model.mlp]


def row_bytes(plan: Plan, hardware: Hardware) -> float:
    """Return the bytes that sorting, weighing and adding up the experts' rows moves in a forward pass."""
    of_a_number = ROWS_SENT + ROWS_RECEIVED * plan.etp_size
    if hardware.once_to_a_node:
        of_a_number = ROWS_ON_THE_WAY
    return num_tokens(plan) / plan.tp_size * plan.model.top_k * plan.model.hidden_size * of_a_number


def all_reduce_seconds(plan: Plan, hardware: Hardware) -> float:
    """Return what an all-reduce of a layer's activations takes; where it leaves the node, no share of it hides."""
    t, rate = plan.tp_size, link_rate(plan, hardware, "tp")
    seconds = 2 * (t - 1) / t * activation_bytes(plan) / rate
    if plan.precision == "fp8":
        seconds *= GATHERED_IN_FP8
    if leaves_node(hardware, plan.world_size, t, 1):
        return seconds
    return (1 - hardware.hidden.tensor) * seconds


def linear_rate(plan: Plan, hardware: Hardware) -> float:
    """Return the FLOP/s that the products of linear layers reach in the plan's precision.

    Raises:
        ValueError: fp8 on a GPU that has none.
    """
    efficiency = hardware.product_efficiency if plan.precision == "bf16" else hardware.fp8_efficiency
    return hardware.peak_of(plan.precision) * efficiency


def grouped_bytes(plan: Plan) -> float:
    """Return the bytes that a GPU's experts read and write in a pass: their matrices, and what goes in and out.

    Each expert has few rows and narrow matrices, so this counts, unlike in the large products of other layers.
    """
    model, up = plan.model, 2 if plan.model.mlp == "swiglu" else 1
    rows = num_tokens(plan) / plan.tp_size * model.top_k * plan.etp_size
    read, width = 1 if plan.precision == "fp8" else 2, model.expert_width / plan.etp_size
    weights = (model.num_experts or 0) / plan.ep_size * model.num_expert_parameters / plan.etp_size
    h = model.hidden_size
    return read * weights + rows * (read * (h + width) + 2 * (up * width + h))


def expert_seconds(plan: Plan, hardware: Hardware) -> float:
    """Return the seconds in which a layer's tokens go to their experts and back, forward, backward, and once more.

    Pieces for the same node and those for others travel at the same time, each way at its own rate. Tokens that go to a
    node once (`Hardware.once_to_a_node`) go on from there, inside it, once to each GPU that has some of their experts.
    """
    token_bytes = activation_bytes(plan) / plan.tp_size
    ep, distance, node = plan.ep_size, plan.etp_size, hardware.node_size(plan.world_size)
    sent = all_to_all_bytes(plan.model, ep, token_bytes)
    if hardware.once_to_a_node:
        sent *= ranks_of_a_token(plan.model, ep) / plan.model.top_k
    here = max(1, min(ep, node // distance)) if leaves_node(hardware, plan.world_size, ep, distance) else ep
    to_one = sent / max(1, ep - 1)
    leaves, stays = (ep - here) * to_one, (here - 1) * to_one
    if hardware.once_to_a_node and leaves:
        num_nodes = ep / here
        leaves = 2 * token_bytes * nodes_of_a_token(plan.model, num_nodes) * (1 - 1 / num_nodes)
        stays *= num_nodes
    inside = stays / (hardware.node_bytes_per_second * hardware.node_efficiency)
    across = leaves / (hardware.network_bytes_per_second * hardware.network_efficiency)
    gathered = expert_gather_bytes(plan.model, plan.etp_size, token_bytes) / link_rate(plan, hardware, "expert_tp")
    return (3 if plan.recompute == "full" or "moe" in plan.modules else 2) * (max(inside, across) + gathered)


def core_flops(plan: Plan) -> float:
    """Return the FLOPs of the core of attention, forward: the products with k and v; fused, only those that are seen.

    It is the mean of the layers. In zigzag chunks all context ranks have the same (`course.sizing.attention_work`).
    """
    of_a_pair = 4 * num_tokens(plan) * query_size(plan.model) / plan.tp_size
    return sum(share * of_a_pair * keys for share, keys, _ in _kinds_of_attention(plan))


def core_seconds(plan: Plan, hardware: Hardware) -> float:
    """Return the seconds of the same."""
    of_a_pair = 4 * num_tokens(plan) * query_size(plan.model) / plan.tp_size
    return sum(
        share * of_a_pair * keys / attention_rate(plan, hardware, length)
        for share, keys, length in _kinds_of_attention(plan)
    )


def _kinds_of_attention(plan: Plan) -> list[tuple[float, float, float]]:
    """Return the share of each kind of layer, the keys that a query computes on average, and how long a block is.

    Around a ring, a rank computes blocks of s/c queries and as many keys.
    """
    s = plan.model.seq_length
    if not plan.fused_attention:
        return [(1.0, s, s)]
    block = s / plan.cp_size if plan.context_parallel == "ring" else s
    return [(each.share, each.keys, min(block, each.most_keys)) for each in attention_layers(plan.model)]


def attention_rate(plan: Plan, hardware: Hardware, length: float) -> float:
    """Return the FLOP/s of the core of attention in blocks of this length; unfused, those of other products."""
    if not plan.fused_attention:
        return hardware.product_rate
    head = query_size(plan.model) / (plan.model.num_attention_heads or 1)
    of_length, of_head = length / (length + HALF_AT_TOKENS), min(1.0, 2 * head / (head + 128))
    return hardware.peak_flops * hardware.attention_efficiency * of_length * of_head


def context_seconds(plan: Plan, hardware: Hardware) -> float:
    """Return the seconds in which attention of one layer and micro-batch waits for other context ranks.

    A ring's messages travel while the rank computes a block, one c-th of its work: only what takes longer counts, and
    the last message of backward, which brings the gradients home. Collectives count in full.
    """
    b, t, rate = plan.micro_batch_size, plan.tp_size, link_rate(plan, hardware, "cp")
    sent = attention_messages(plan.model, plan.context_parallel, plan.cp_size, t, b)
    forward, backward = ([each.sent_bytes / rate for each in way] for way in sent)
    if plan.context_parallel == "ring" and plan.cp_size > 1:
        block = core_seconds(plan, hardware) / plan.cp_size
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
    if not leaves_node(hardware, world_size, size, distance):
        return inside
    here = max(1, min(size, hardware.node_size(world_size) // distance)) if goes_around else 1
    return min(inside, here * hardware.network_bytes_per_second * hardware.network_efficiency)


def leaves_node(hardware: Hardware, world_size: int, size: int, distance: int) -> bool:
    """Return whether groups of ``size`` ranks that are ``distance`` apart span nodes: they do unless they tile one."""
    return world_size > hardware.gpus_per_node and hardware.node_size(world_size) % (size * distance) != 0
