"""The fault that only GPUs have: on CPU ranks nothing is wrong with it."""

from course.museum.faults import Fault
from labkit import groups


def both_directions_in_one_queue():
    groups._make_channels = lambda layout: {}  # no group of its own for each direction between two stages


GPU_FAULTS = [
    Fault(
        "both directions in one queue",
        "Two stages send each other outputs and gradients through one group. NCCL then has one queue for both "
        "directions, and runs it in the order of the calls. A receive that is posted early holds up the send behind "
        "it, for which the other stage waits. Mend it with a group for each direction, as labkit does on GPUs.",
        "Weights, losses, gradients and norms would be right on CPU ranks, where gloo pairs messages by their tags. By "
        "NCCL's rules no step would end: each stage waits to receive from the other, and neither has sent.",
        "NVIDIA/nccl issue #479, between two GPUs that both send first; pytorch/pytorch issue #108378, where it works "
        "with gloo and hangs with NCCL",
        both_directions_in_one_queue,
    ),
]
