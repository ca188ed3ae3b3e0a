"""The bytes that a layout moves in a training step, by axis, and how many of them leave a node.

The volumes follow arXiv 2104.04473, section 3, with every collective a ring over the group's ranks in ascending
order: each of its n edges carries 2(n-1)/n of the message.
"""

from typing import NamedTuple

import numpy as np

from course.sizing.plan import Plan
from course.sizing.step_seconds import all_reduces, check_is_modelled
from labkit.layout import ParallelLayout
from labkit.shape import GPT


class Traffic(NamedTuple):
    """Bytes that one axis moves in a training step, over all ranks; ``crossing_bytes`` of them leave a node."""

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
) -> dict[str, Traffic]:
    """What tensor, data and pipeline parallelism each send in one step of ``batch_size`` sequences, by axis.

    With B/d sequences a replica, l/p layers a stage, s/c tokens a sequence (whatever the micro-batch: m of size b
    move what one of size m*b moves; what does not divide is averaged):

    - tp: 4 all-reduces a layer, 2 forward and 2 backward, of the activations, B/d * s/c * h elements; with full
      recomputation 2 more (`labkit.model` sends 1 more: torch stops before the last message, which no gradient needs);
      with sequence parallelism 1 more, or rather two halves: backward gathers two inputs again;
    - dp: one all-reduce of a rank's gradients, P/(t*p) elements, over the ranks that share its weights (dp and cp);
    - pp: the activations to the next stage and as many gradients back, from each rank of a stage, whole or, with
      sequence parallelism, 1/t of them; with v chunks a rank v times, and v - 1 times from the last stage to the first.

    Not counted: attention over context shards (cp), the tied embedding's gradient, and what tensor groups send for the
    embedding, the output layer, the loss and, with sequence parallelism, the gradients of norms and biases.

    >>> gpt = GPT(num_layers=24, hidden_size=2304, seq_length=2048, vocab_size=51200)
    >>> step_traffic(gpt, ParallelLayout(16, tp_size=2, pp_size=4), gpus_per_node=8, batch_size=512)["tp"]
    Traffic(total_bytes=927712935936.0, crossing_bytes=0.0)

    Source: arXiv 2104.04473, sections 3.2 (8bsh(t-1)/t a layer and bsh a stage) and 3.3 ((d-1)/d).
    """
    for name, value in (("gpus_per_node", gpus_per_node), ("batch_size", batch_size)):
        if value < 1:
            raise ValueError(f"{name}={value} is not a number of {name.split('_')[0]}: use 1 or more")
    tokens = batch_size / layout.dp_size * model.seq_length / layout.cp_size
    activation_bytes = tokens * model.hidden_size * bytes_per_element
    stage_layers = model.num_layers / layout.pp_size
    handed_over = activation_bytes / (layout.tp_size if sequence_parallel else 1)
    gradient_bytes = model.num_parameters / (layout.tp_size * layout.pp_size) * gradient_bytes_per_element
    return {
        "tp": _ring_all_reduce(
            layout.groups("tp"),
            all_reduces(recompute, sequence_parallel) * stage_layers * activation_bytes,
            gpus_per_node,
        ),
        "dp": _ring_all_reduce(layout.groups("dp", "cp"), gradient_bytes, gpus_per_node),
        "pp": _along_pipelines(layout.groups("pp"), 2 * handed_over, gpus_per_node, num_chunks),
    }


def plan_traffic(plan: Plan, gpus_per_node: int) -> dict[str, Traffic]:
    """The same of a plan, with what it recomputes, interleaves and, by ZeRO-1, gathers again.

    The pipeline's messages are those that `labkit.pipeline` sends. Where they are whole, without sequence parallelism,
    Megatron-LM can let each GPU of a tensor group send 1/t and gather, which is what `step_time` reckons with.

    Raises:
        ValueError: ZeRO stages 2 and 3, as in `step_time`.
    """
    check_is_modelled(plan)
    gathered = 2 if plan.zero_stage else plan.gradient_bytes  # the second half of an all-reduce, or weights
    return step_traffic(
        plan.model,
        plan.layout,
        gpus_per_node=gpus_per_node,
        batch_size=plan.batch_size,
        gradient_bytes_per_element=(plan.gradient_bytes + gathered) / 2,
        recompute=plan.recompute,
        sequence_parallel=plan.sequence_parallel,
        num_chunks=plan.num_chunks,
    )


def _ring_all_reduce(groups: list[list[int]], message_bytes: float, gpus_per_node: int) -> Traffic:
    """Each rank sends 2(n-1)/n of the message to the next one in its group, the last to the first."""
    nodes = np.asarray(groups) // gpus_per_node
    size = nodes.shape[1]
    edge_bytes = 2 * (size - 1) / size * message_bytes
    crossing = int(np.count_nonzero(nodes != np.roll(nodes, -1, axis=1)))
    return Traffic(nodes.size * edge_bytes, crossing * edge_bytes)


def _along_pipelines(groups: list[list[int]], edge_bytes: float, gpus_per_node: int, num_chunks: int) -> Traffic:
    """Each rank exchanges with the next one in its group, for each chunk; between chunks the last with the first."""
    nodes = np.asarray(groups) // gpus_per_node
    times = np.full(nodes.shape[1], num_chunks)
    times[-1] = num_chunks - 1 if nodes.shape[1] > 1 else 0
    crossing = int(((nodes != np.roll(nodes, -1, axis=1)) * times).sum())
    return Traffic(len(nodes) * int(times.sum()) * edge_bytes, crossing * edge_bytes)
