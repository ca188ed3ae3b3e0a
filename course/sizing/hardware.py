"""Describes what a cluster can do: the numbers in data sheets, and how much of them training reaches."""

from dataclasses import dataclass, replace
from typing import NamedTuple


class Hidden(NamedTuple):
    """The share of each axis's messages that travels while the GPU computes; nobody waits for those."""

    tensor: float = 0.0
    context: float = 0.0
    """On top of what a ring's messages hide behind its blocks."""
    expert: float = 0.0
    pipeline: float = 0.0
    """Where a rank has another chunk to compute meanwhile."""
    data: float = 0.0
    """Of what finds work to hide behind (`course.sizing.step_seconds.update_seconds`)."""


NOTHING_HIDDEN = Hidden()


@dataclass(frozen=True)
class Hardware:
    """A GPU, its node and its network; all numbers are per GPU and per direction, as in data sheets.

    The five fields from ``product_efficiency`` on say how much of that a training step reaches. The first and the last
    of them were fitted to table 1 of arXiv 2104.04473 (`course.sizing.fitted`). The three shares of bandwidth are round
    numbers: the ten rows of that table only show that they are high. `FITTED` has those of newer runs.
    """

    name: str
    peak_flops: float
    memory_bytes: float
    memory_bytes_per_second: float
    node_bytes_per_second: float
    """To a GPU in the same node."""
    network_bytes_per_second: float
    """To a different node, through the GPU's own network card."""
    gpus_per_node: int = 8
    """In one NVLink domain, which may be larger than a server: as many of them as a job uses."""
    product_efficiency: float = 0.75
    """The share of the peak that large matrix products reach."""
    memory_efficiency: float = 0.9
    """The share of the memory's bandwidth that everything else reaches."""
    node_efficiency: float = 0.8
    """The share of the bandwidth inside a node that collectives and messages reach."""
    network_efficiency: float = 0.8
    """The same for the network, where they leave the node."""
    layer_overhead_seconds: float = 800e-6
    """What each pass through a layer takes on top of its work: starting kernels, and waiting for the slowest rank."""
    hidden: Hidden = NOTHING_HIDDEN
    """What of the messages is hidden behind computation: nothing, unless it is said."""
    once_to_a_node: bool = False
    """Whether a token with several experts in a node goes there once, and is passed on inside it, as DeepEP does; else
    each expert gets a message of its own."""
    fp8_peak_flops: float | None = None
    fp8_efficiency: float = 0.75
    """The share of the fp8 peak that the products of linear layers reach, casts included."""

    @property
    def product_rate(self) -> float:
        """The FLOP/s that matrix products reach."""
        return self.peak_flops * self.product_efficiency

    @property
    def memory_rate(self) -> float:
        """The bytes per second that everything else reads or writes."""
        return self.memory_bytes_per_second * self.memory_efficiency


DGX_A100 = Hardware("DGX A100 80GB", 312e12, 80e9, 2.039e12, 300e9, 25e9)
"""Source: NVIDIA's data sheets of A100 80GB SXM (NVLink 600 GB/s both ways) and DGX A100 (8 x 200 Gb/s for compute)."""
DGX_H100 = Hardware("DGX H100", 989e12, 80e9, 3.35e12, 450e9, 50e9)
"""Source: NVIDIA's data sheets of H100 SXM (NVLink 900 GB/s both ways) and DGX H100 (8 x 400 Gb/s). Its last five
numbers are those of the A100; no training step on an H100 was used to check them."""

_A100 = replace(DGX_A100, product_efficiency=0.75, layer_overhead_seconds=370e-6)
_H100 = replace(
    DGX_H100, product_efficiency=0.62, layer_overhead_seconds=45e-6, hidden=Hidden(tensor=0.86),
    fp8_peak_flops=1979e12, fp8_efficiency=0.52,
)  # fmt: skip
_GB200 = replace(
    _H100, name="GB200 NVL72", peak_flops=2450e12, fp8_peak_flops=4900e12, memory_bytes=186e9,
    memory_bytes_per_second=8e12, node_bytes_per_second=900e9, gpus_per_node=64,
)  # fmt: skip
FITTED = {
    "A100": _A100,
    "A100 40GB": replace(_A100, name="A100 40GB", memory_bytes=40e9, memory_bytes_per_second=1.555e12),
    "H100": _H100,
    "H100 DeepEP": replace(_H100, name="DGX H100 with DeepEP", once_to_a_node=True),
    "GB200": _GB200,
}
"""Kinds of GPU with the constants that `course.sizing.fit` finds from published runs, rounded to two digits.

Runs on the H100 are of 2023 to 2025, and hide most of their tensor-parallel messages. None of the rows shows that
messages of the pipeline or of the gradients hide: the fit finds a share of 0 for both, and for all three on the A100.
Nothing was fitted to the GB200: it has its data sheet's numbers and the H100's shares. Jobs use 64 of the 72 GPUs in
its NVLink domain. Source: NVIDIA's dgxc-benchmarking, README.
"""
