"""What a cluster can do: the numbers of data sheets, and the shares of them that training reaches."""

from dataclasses import dataclass

PEAK_FLOPS = {"V100": 125e12, "A100": 312e12, "H100": 989e12, "H200": 989e12}
"""FLOP/s of 16-bit matrix products without sparsity, SXM models. Source: NVIDIA's data sheets."""


def peak_flops(device_name: str) -> float | None:
    """The peak of the GPU that calls itself so; None for one that is not in `PEAK_FLOPS`.

    >>> peak_flops("NVIDIA A100-SXM4-80GB")
    312000000000000.0
    """
    return next((peak for name, peak in PEAK_FLOPS.items() if name in device_name), None)


@dataclass(frozen=True)
class Hardware:
    """A GPU, its node and its network; all per GPU and per direction, as data sheets state them.

    The last five say what a training step reaches of that. Of these, the first and the last were fitted, once for all,
    to table 1 of arXiv 2104.04473 (`course.sizing.fitted`). The three shares of bandwidths are round numbers: the ten
    rows of that table do not decide them, only that they are high.
    """

    name: str
    peak_flops: float
    memory_bytes: float
    memory_bytes_per_second: float
    node_bytes_per_second: float
    """To another GPU in the node."""
    network_bytes_per_second: float
    """To another node, by the GPU's own network card."""
    gpus_per_node: int = 8
    product_efficiency: float = 0.75
    """Of the peak, by large matrix products."""
    memory_efficiency: float = 0.9
    """Of the memory's bandwidth, by what is not a matrix product."""
    node_efficiency: float = 0.8
    """Of the bandwidth inside a node, by collectives and messages."""
    network_efficiency: float = 0.8
    """Of the network's bandwidth, by collectives and messages that leave the node."""
    layer_overhead_seconds: float = 800e-6
    """What each pass through a layer takes on top of the work: kernels are started, collectives wait for the last."""


DGX_A100 = Hardware("DGX A100 80GB", 312e12, 80e9, 2.039e12, 300e9, 25e9)
"""Source: NVIDIA's data sheets of A100 80GB SXM (NVLink 600 GB/s both ways) and DGX A100 (8 x 200 Gb/s for compute)."""
DGX_H100 = Hardware("DGX H100", 989e12, 80e9, 3.35e12, 450e9, 50e9)
"""Source: NVIDIA's data sheets of H100 SXM (NVLink 900 GB/s both ways) and DGX H100 (8 x 400 Gb/s). Its last five
numbers are the A100's: no step of an H100 was used to check them."""
