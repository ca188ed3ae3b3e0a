"""Describes what a cluster can do: the numbers in data sheets, and how much of them training reaches."""

from dataclasses import dataclass, replace
from functools import cache
from typing import NamedTuple

from labkit.sizes import divisors


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
    host_bytes_per_second: float = 64e9
    """To the CPU's memory and back: of PCIe 5, if nothing is said."""
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
    expert_overhead_seconds: float = 0.0
    """What each pass through a layer's experts takes on top of that: sorting rows, and waiting for their numbers."""
    hidden: Hidden = NOTHING_HIDDEN
    """What of the messages is hidden behind computation: nothing, unless it is said."""
    once_to_a_node: bool = False
    """Whether a token with several experts in a node goes there once, and is passed on inside it, as DeepEP does; else
    each expert gets a message of its own."""
    attention_efficiency: float = 0.6
    """The share of the peak that fused attention reaches, forward and backward, in long sequences."""
    fp8_peak_flops: float | None = None
    fp8_efficiency: float = 0.75
    """The share of the fp8 peak that the products of linear layers reach, casts included."""

    fitted_to: str = ""
    """The published runs to which its constants were fitted (`course.sizing.runs`); none if empty."""

    def __hash__(self) -> int:  # of all fields it takes long, and `course.sizing.search` asks often
        return hash((self.name, self.product_efficiency))

    def node_size(self, world_size: int) -> int:
        """Return how many GPUs a job uses of each node: all, or of a large one as many as divide the job.

        >>> FITTED["GB200"].node_size(256), DGX_A100.node_size(1024)
        (64, 8)
        """
        return _node_size(self.gpus_per_node, world_size)

    def peak_of(self, precision: str) -> float:
        """Return the peak in "bf16" or "fp8".

        Raises:
            ValueError: fp8 on a GPU that has none.
        """
        if precision == "bf16":
            return self.peak_flops
        if self.fp8_peak_flops is None:
            raise ValueError(f"precision='fp8', but {self.name} says no fp8_peak_flops: use precision='bf16'")
        return self.fp8_peak_flops

    @property
    def product_rate(self) -> float:
        """The FLOP/s that matrix products reach."""
        return self.peak_flops * self.product_efficiency

    @property
    def memory_rate(self) -> float:
        """The bytes per second that everything else reads or writes."""
        return self.memory_bytes_per_second * self.memory_efficiency


@cache
def _node_size(gpus_per_node: int, world_size: int) -> int:
    if world_size <= gpus_per_node:
        return gpus_per_node
    return max(size for size in divisors(world_size) if size <= gpus_per_node)


DGX_A100 = Hardware(
    "DGX A100 80GB", 312e12, 80e9, 2.039e12, 300e9, 25e9, host_bytes_per_second=32e9,
    fitted_to="table 1 of arXiv 2104.04473",
)  # fmt: skip
"""Source: NVIDIA's data sheets of A100 80GB SXM (NVLink 600 GB/s both ways, PCIe 4 64 GB/s) and DGX A100 (8 x 200 Gb/s
for compute)."""
DGX_H100 = Hardware("DGX H100", 989e12, 80e9, 3.35e12, 450e9, 50e9)
"""Source: NVIDIA's data sheets of H100 SXM (NVLink 900 GB/s both ways) and DGX H100 (8 x 400 Gb/s). Its last five
numbers are those of the A100; no training step on an H100 was used to check them."""


class HardwareByName(dict[str, Hardware]):
    """Kinds of GPU by name; an unknown name is a ValueError that lists them."""

    def __missing__(self, name: str) -> Hardware:
        raise ValueError(f"{name!r} is not a kind of GPU: use one of {', '.join(self)}")


_A100 = replace(
    DGX_A100, product_efficiency=0.71, layer_overhead_seconds=140e-6, fitted_to="D28 to D35 and D49 to D52",
)  # fmt: skip
_H100 = replace(
    DGX_H100, product_efficiency=0.67, layer_overhead_seconds=200e-6, attention_efficiency=0.53,
    fp8_peak_flops=1979e12, fp8_efficiency=0.56, expert_overhead_seconds=140e-6,
    hidden=Hidden(tensor=0.24, expert=0.3, pipeline=1.0, data=1.0),
    fitted_to="D1 to D18, D44, D66, D67, D76; with experts D36 to D38c, D40, D41, D46, D62 to D64, D68",
)  # fmt: skip
_B200 = replace(
    _H100, name="DGX B200", peak_flops=2250e12, fp8_peak_flops=4500e12, memory_bytes=180e9,
    memory_bytes_per_second=7.7e12, node_bytes_per_second=900e9, product_efficiency=0.54, fp8_efficiency=0.5,
    attention_efficiency=0.42, expert_overhead_seconds=97e-6,
    fitted_to="D72, D73c and D75e, in fp8; with experts D77f, D79c and D80e",
)  # fmt: skip
_GB200 = replace(
    _B200, name="GB200 NVL72", peak_flops=2450e12, fp8_peak_flops=4900e12, memory_bytes=186e9,
    memory_bytes_per_second=8e12, gpus_per_node=72, fp8_efficiency=0.47, expert_overhead_seconds=64e-6,
    host_bytes_per_second=225e9,
    once_to_a_node=True, hidden=_H100.hidden._replace(expert=0.0),
    fitted_to="D45, D61, D65, D71 and D73 to D75; with experts D48, D69, D70, D77, D79 and D80",
)  # fmt: skip
_GB300 = replace(
    _GB200, name="GB300 NVL72", memory_bytes=279e9, network_bytes_per_second=100e9, product_efficiency=0.67,
    fp8_efficiency=0.63, fitted_to="D73 to D75, in fp8; with experts D77, D79 and D80",
)  # fmt: skip
_OF_2026: dict = dict(expert_overhead_seconds=0.0, hidden=_H100.hidden._replace(expert=0.8))
_FLASH_2 = 0.33
FITTED = HardwareByName({
    "H100": _H100,
    "H100 DeepEP": replace(_H100, name="DGX H100 with DeepEP", once_to_a_node=True),
    "H100 FlashAttention-2": replace(
        _H100, name="DGX H100 with FlashAttention-2", attention_efficiency=_FLASH_2,
        fitted_to=f"{_H100.fitted_to}; none that has its attention",
    ),
    "H100 FSDP of 2023": replace(
        _H100, name="DGX H100 with FSDP of 2023", attention_efficiency=_FLASH_2, product_efficiency=0.64,
        layer_overhead_seconds=2.2e-3, fitted_to="D53 to D56",
    ),
    "H100 500 W": replace(
        _H100, name="H100 of 500 W, Grand Teton", memory_bytes=96e9, memory_bytes_per_second=2.4e12,
        attention_efficiency=0.2, fitted_to="D60 and D83, in fp8",
    ),
    "H200": replace(_H100, name="DGX H200", memory_bytes=141e9, memory_bytes_per_second=4.8e12, fitted_to=""),
    "H800": replace(_H100, name="H800", node_bytes_per_second=200e9, fitted_to=""),
    "A100": _A100,
    "A100 40GB": replace(_A100, name="A100 40GB", memory_bytes=40e9, memory_bytes_per_second=1.555e12),
    "B200": _B200,
    "B200 HybridEP": replace(_B200, name="DGX B200 with HybridEP", once_to_a_node=True),
    "GB200": _GB200,
    "GB200 of 2026": replace(
        _GB200, name="GB200 NVL72, software of 2026", fitted_to="D47 and D77h; without experts as GB200", **_OF_2026
    ),
    "GB300": _GB300,
    "GB300 of 2026": replace(
        _GB300, name="GB300 NVL72, software of 2026", fitted_to="D77g; without experts as GB300", **_OF_2026
    ),
})  # fmt: skip
"""Kinds of GPU by data sheet, with the constants that `course.sizing.fit` finds from published runs, rounded to two
digits; ``fitted_to`` says from which.

- H100: runs of 2024 to 2026 by Megatron-LM. Gradients and messages between chunks hide, as their sources say.
- Attention: on the H100, what cuDNN reaches forward and backward in figures 5 and 6 of arXiv 2407.08608. There
  FlashAttention-2 reaches 335 teraFLOP/s forward; both ways 328 in the README of github.com/Dao-AILab/flash-attention
  at 0251105a (causal, heads of 128, 16k tokens). On the A100, a round number from arXiv 2307.08691, section 4.1.
- B200: what its products reach in bf16 is the GB200's. GB300: in bf16, the H100's.
- H200 and H800: nothing was fitted to them; the H100's constants.
- GB200 and GB300: two GPUs share the CPU's 900 GB/s both ways.
- Software of 2026 sends experts' messages behind other work, and starts all their products at once.

Sources: NVIDIA's data sheets; for B200, GB200 and GB300, and jobs that use 64 of 72 GPUs in an NVLink domain, NVIDIA's
dgxc-benchmarking, README; H800: arXiv 2412.19437, section 3.1; 500 W: torchtitan's llama3_h100_202412.
"""
