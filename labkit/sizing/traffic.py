"""The bytes that a layout moves in a training step, by axis, and how many of them leave a node.

The volumes follow arXiv 2104.04473, section 3, with every collective a ring over the group's ranks in ascending
order: each of its n edges carries 2(n-1)/n of the message.
"""

from typing import NamedTuple

import numpy as np

from labkit.layout import ParallelLayout
from labkit.sizing.shape import GPT


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
    gradient_bytes_per_element: int = 4,
) -> dict[str, Traffic]:
    """What tensor, data and pipeline parallelism each send in one step of ``batch_size`` sequences, by axis.

    With B/d sequences a replica, l/p layers a stage, s/c tokens a sequence (whatever the micro-batch: m of size b
    move what one of size m*b moves; what does not divide is averaged):

    - tp: 4 all-reduces a layer, 2 forward and 2 backward, of the activations, B/d * s/c * h elements;
    - dp: one all-reduce of a rank's gradients, P/(t*p) elements, over the ranks that share its weights (dp and cp);
    - pp: the activations to the next stage and as many gradients back, from each rank of a stage.

    Not counted: attention over context shards (cp), and the tied embedding's gradient.

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
    gradient_bytes = model.num_parameters / (layout.tp_size * layout.pp_size) * gradient_bytes_per_element
    return {
        "tp": _ring_all_reduce(layout.groups("tp"), 4 * stage_layers * activation_bytes, gpus_per_node),
        "dp": _ring_all_reduce(layout.groups("dp", "cp"), gradient_bytes, gpus_per_node),
        "pp": _between_neighbours(layout.groups("pp"), 2 * activation_bytes, gpus_per_node),
    }


def _ring_all_reduce(groups: list[list[int]], message_bytes: float, gpus_per_node: int) -> Traffic:
    """Each rank sends 2(n-1)/n of the message to the next one in its group, the last to the first."""
    nodes = np.asarray(groups) // gpus_per_node
    size = nodes.shape[1]
    edge_bytes = 2 * (size - 1) / size * message_bytes
    crossing = int(np.count_nonzero(nodes != np.roll(nodes, -1, axis=1)))
    return Traffic(nodes.size * edge_bytes, crossing * edge_bytes)


def _between_neighbours(groups: list[list[int]], edge_bytes: float, gpus_per_node: int) -> Traffic:
    """Each rank exchanges with the next one in its group; the last has no next."""
    nodes = np.asarray(groups) // gpus_per_node
    crossing = int(np.count_nonzero(nodes[:, 1:] != nodes[:, :-1]))
    return Traffic(nodes[:, 1:].size * edge_bytes, crossing * edge_bytes)
