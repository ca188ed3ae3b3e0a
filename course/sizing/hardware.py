"""Describes what a cluster can do: the numbers in data sheets, and how much of them training reaches."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Hardware:
    """A GPU, its node and its network; all numbers are per GPU and per direction, as in data sheets.

    The last five fields say how much of that a training step reaches. The first and the last of the five were fitted
    to table 1 of arXiv 2104.04473 (`course.sizing.fitted`). The three shares of bandwidth are round numbers: the ten
    rows of that table only show that they are high.
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
