"""The bytes that a layout moves in a training step, by axis, and how many of them leave a node.

The volumes are those of arXiv 2104.04473, section 3, and for attention over context ranks those of
`course.sizing.attention_messages`. Every collective is a ring over the group's ranks in ascending order, and each of
its n edges carries 2(n-1)/n of an all-reduce's message. An all-to-all sends each piece straight to its rank.
"""

from collections import Counter
from typing import NamedTuple

from course.sizing.context import attention_messages
from course.sizing.experts import all_to_all_bytes, expert_gather_bytes, mlp_halves
from course.sizing.layer_seconds import all_reduces
from course.sizing.plan import Plan
from course.sizing.ring import bus_factor
from labkit.layout import ParallelLayout
from labkit.shape import GPT
from labkit.sizes import check_size


class Traffic(NamedTuple):
    """Bytes that one axis moves in a training step, summed over all ranks; ``crossing_bytes`` of them leave a node."""

    total_bytes: float
    crossing_bytes: float


def step_traffic(
    model: GPT,
    layout: ParallelLayout,
    *,
    gpus_per_node: int,
    batch_size: int,
    bytes_per_element: int = 2,
    gradient_bytes_per_element: float = 4,
    recompute: str = "none",
    sequence_parallel: bool = False,
    num_chunks: int = 1,
    folds: bool = False,
    context_parallel: str = "ring",
) -> dict[str, Traffic]:
    """Return what each kind of parallelism sends in one step of ``batch_size`` sequences, by axis.

    A replica has B/d sequences of s/c tokens on each context rank, and a stage has l/p layers; fractions are averages.
    The micro-batch size does not matter: m micro-batches of b sequences move as much as one of m*b.

    - tp: 4 all-reduces per layer, 2 forward and 2 backward, of the activations: B/d * s/c * h elements. Full
      recomputation adds 2 (`labtrain.model` sends only 1 of them: torch stops before the last message, which no
      gradient needs). Sequence parallelism adds the equivalent of 1: backward gathers two inputs again.
    - dp: one all-reduce of a rank's gradients, P/(t*p) elements, over the ranks that share its weights (dp and cp).
    - pp: each rank of a stage sends the activations to the next stage and gets as many gradients back, or 1/t of both
      with sequence parallelism. With v chunks per rank that happens v times, and v - 1 times from last stage to first;
      stages that fold into a V turn around on the last rank instead, without a message.
    - cp, if there are context ranks: the messages of each layer's attention, in zigzag chunks. Full recomputation
      repeats those of forward.

    - ep and expert_tp, if the model has experts: per layer with experts and rank, T tokens go to k experts and their
      outputs come back, forward and backward, 4 T k h elements, of which 1/ep stay at home. Each also goes to all ranks
      of an expert_tp group (`course.sizing.experts`). Tokens are taken to choose all experts equally often.
    - expert_dp: an all-reduce of the gradients of a rank's experts. The others are dp's.

    Not counted: the tied embedding's gradient, and what tensor groups send for the embedding, the output layer, the
    loss and, with sequence parallelism, the gradients of norms and biases.

    >>> gpt = GPT(num_layers=24, hidden_size=2304, seq_length=2048, vocab_size=51200)
    >>> step_traffic(gpt, ParallelLayout(16, tp_size=2, pp_size=4), gpus_per_node=8, batch_size=512)["tp"]
    Traffic(total_bytes=927712935936.0, crossing_bytes=0.0)

    Source: arXiv 2104.04473, sections 3.2 (8bsh(t-1)/t per layer and bsh per stage) and 3.3 ((d-1)/d).
    """
    gpus_per_node, batch_size = check_size("gpus_per_node", gpus_per_node), check_size("batch_size", batch_size)
    tokens = batch_size / layout.dp_size * model.seq_length / layout.cp_size
    activation_bytes = tokens * model.hidden_size * bytes_per_element
    stage_layers = model.num_layers / layout.pp_size
    handed_over = activation_bytes / (layout.tp_size if sequence_parallel else 1)
    of_experts = model.num_moe_layers * (model.num_experts or 0) * model.num_expert_parameters
    dense_parameters = model.num_parameters - of_experts
    gradient_bytes = dense_parameters / (layout.tp_size * layout.pp_size) * gradient_bytes_per_element
    layer_bytes = all_reduces(recompute, sequence_parallel) * stage_layers * activation_bytes
    if moe_layers := model.num_moe_layers / layout.pp_size:
        halves = mlp_halves(model, sequence_parallel) - 1  # of a layer: what experts in place of an MLP add
        layer_bytes += halves / 2 * all_reduces(recompute, sequence_parallel) * moe_layers * activation_bytes
    t, replicas, dp_groups = layout.tp_size, layout.dp_size * layout.cp_size, layout.groups("dp", "cp")
    first_again = num_chunks - 1 if layout.pp_size > 1 and not folds else 0
    traffic = {
        "tp": _to_the_next(layout.groups("tp"), gpus_per_node, bus_factor("all_reduce", t) * layer_bytes),
        "dp": _to_the_next(dp_groups, gpus_per_node, bus_factor("all_reduce", replicas) * gradient_bytes),
        "pp": _to_the_next(layout.groups("pp"), gpus_per_node, 2 * handed_over, num_chunks, first_again),
    }
    if model.num_experts:
        passes = 3 if recompute == "full" else 2  # forward and backward, and forward again
        token_bytes = passes * moe_layers * tokens / t * model.hidden_size * bytes_per_element  # of a rank's own tokens
        etp, ep, copies = layout.expert_tp_size, layout.ep_size, layout.expert_dp_size
        expert_bytes = of_experts / (etp * ep * layout.pp_size) * gradient_bytes_per_element
        sent, gathered = all_to_all_bytes(model, ep, token_bytes), expert_gather_bytes(model, etp, token_bytes)
        traffic["expert_tp"] = _to_the_next(layout.groups("expert_tp"), gpus_per_node, gathered)
        traffic["ep"] = _to_all(layout.groups("ep"), gpus_per_node, sent)
        reduced = bus_factor("all_reduce", copies) * expert_bytes
        traffic["expert_dp"] = _to_the_next(layout.groups("expert_dp"), gpus_per_node, reduced)
    if layout.cp_size > 1:
        context = layout.cp_size, t, batch_size / layout.dp_size, bytes_per_element
        forward, backward = attention_messages(model, context_parallel, *context)
        messages = forward * (2 if recompute == "full" else 1) + backward
        sends = _to_all if context_parallel == "ulysses" else _to_the_next
        sent_bytes = stage_layers * sum(message.sent_bytes for message in messages)
        traffic["cp"] = sends(layout.groups("cp"), gpus_per_node, sent_bytes)
    return traffic


def plan_traffic(plan: Plan, gpus_per_node: int) -> dict[str, Traffic]:
    """Return the same for a plan, with what it recomputes, interleaves and, by ZeRO-1, gathers again.

    The pipeline's messages are those that `labkit.pipeline` sends. Without sequence parallelism they are whole.
    Megatron-LM can instead let each GPU of a tensor group send 1/t and then gather, which is what `step_time` assumes.

    Raises:
        ValueError: ZeRO stages 2 and 3, and modules that send again, whose messages are in none of these formulas.
    """
    if again := {"mlp", "moe", "shared_experts"} & {*plan.modules}:
        fault = f"recompute_modules: what {sorted(again)} send again is not counted here"
        raise ValueError(f"{fault}, use modules without messages, or recompute='full'")
    if plan.zero_stage > 1:
        raise ValueError(f"zero_stage={plan.zero_stage}: what it sends in a step is not counted here, use 0 or 1")
    gathered = 2 if plan.zero_stage else plan.gradient_bytes  # ZeRO-1 gathers weights instead
    return step_traffic(
        plan.model,
        plan.layout,
        gpus_per_node=gpus_per_node,
        batch_size=plan.batch_size,
        gradient_bytes_per_element=(plan.gradient_bytes + gathered) / 2,
        recompute=plan.recompute,
        sequence_parallel=plan.sequence_parallel,
        num_chunks=plan.num_chunks,
        folds=plan.schedule is not None,
        context_parallel=plan.context_parallel,
    )


def _to_the_next(
    groups: list[list[int]], gpus_per_node: int, edge_bytes: float, times: int = 1, last_times: int = 1
) -> Traffic:
    """Let each rank send ``edge_bytes`` to the next one, ``times`` times; the last to the first ``last_times``."""
    sends = times * (len(groups[0]) - 1) + last_times
    crossing = 0
    for group in groups:
        if group[0] // gpus_per_node != group[-1] // gpus_per_node:  # ranks ascend: from node to node, and back
            crossing += times * (len({rank // gpus_per_node for rank in group}) - 1) + last_times
    return Traffic(len(groups) * sends * edge_bytes, crossing * edge_bytes)


def _to_all(groups: list[list[int]], gpus_per_node: int, sent_bytes: float) -> Traffic:
    """Let each rank send ``sent_bytes``, in equal pieces straight to all others in its group."""
    size, num_crossing = len(groups[0]), 0
    for group in groups:
        ranks_of_nodes = Counter(rank // gpus_per_node for rank in group).values()
        num_crossing += sum(ranks * (size - ranks) for ranks in ranks_of_nodes)
    return Traffic(len(groups) * size * sent_bytes, num_crossing * sent_bytes / max(1, size - 1))
