"""Published runs of 2023 to 2026 as plans: what was measured, and what the sources do not say.

Every row stands as its source has it, and what had to be assumed is said.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

from course.sizing.hardware import FITTED, Hardware
from course.sizing.plan import Plan
from course.sizing.shapes import DEEPSEEK_V3, MIXTRAL_8X22B, QWEN3_30B_A3B, TODAY
from course.sizing.step_seconds import step_time
from course.table import Table
from labkit.partition import split_layers
from labkit.shape import GPT


class Run(NamedTuple):
    """A published run: its name, what it trained on what, the seconds of a step, and who says so."""

    name: str
    model: str
    gpu: str
    plan: Plan
    seconds: float
    source: str
    assumed: str = ""
    fits: bool = True
    """Whether constants are fitted to it (`course.sizing.fit`); not if what is assumed could explain any error."""

    @property
    def group(self) -> str:
        """Which runs share their constants: those on a kind of GPU, in a precision."""
        return f"{self.gpu.split()[0]} {self.plan.precision}"

    @property
    def hardware(self) -> Hardware:
        return FITTED[self.gpu]

    @property
    def estimate(self) -> float:
        """The seconds of a step by `course.sizing.step_time`."""
        return step_time(self.plan, self.hardware).total

    @property
    def error(self) -> float:
        """The relative error of the estimate."""
        return self.estimate / self.seconds - 1

    def __str__(self) -> str:
        return f"{self.name} {self.model}, {self.plan.world_size} {self.gpu}"


def published(runs: Sequence[Run] = ()) -> Table:
    """Return each run, of all or of these, with its estimate from the constants that `course.sizing.fit` finds."""
    rows = [
        (run.name, f"{run.model}, {run.plan.precision}", f"{run.plan.world_size} {run.gpu}", f"{run.seconds:.3g}",
         f"{run.estimate:.3g}", f"{run.error:+.1%}", run.source, run.assumed)
        for run in runs or RUNS
    ]  # fmt: skip
    heads = "row", "model", "GPUs", "measured, s", "estimated, s", "error", "source", "assumed"
    return Table(heads, rows)


DGXC = "github.com/NVIDIA/dgxc-benchmarking at 741c886"
DGXC_LATER = "github.com/NVIDIA/dgxc-benchmarking at 60d6fd3"
MEGATRON = "github.com/NVIDIA/Megatron-LM README.md"
MEGASCALE = "arXiv 2402.15627, table 2"
FOLDING = "arXiv 2504.14960, table 4"
FOUNDRY = "github.com/mosaicml/llm-foundry, benchmarking/README.md"
AUTOMODEL = "github.com/NVIDIA-NeMo/Automodel, performance-summary.mdx"
BRIDGE = "github.com/NVIDIA-NeMo/Megatron-Bridge, performance-summary.md"

GPT_3 = GPT(96, 12288, 2048, 50688, 96)
LLAMA_8B = GPT(32, 4096, 8192, 128256, 32, 8, 14336, rotary_base=500_000.0, **TODAY)
LLAMA_70B = replace(LLAMA_8B, num_layers=80, hidden_size=8192, num_attention_heads=64, ffn_hidden_size=28672)
LLAMA_405B = replace(LLAMA_70B, num_layers=126, hidden_size=16384, num_attention_heads=128, ffn_hidden_size=53248)
NEMOTRON = GPT(32, 6144, 4096, 256000, 48, 8, 24576, norm="layernorm", positions="rope", bias=False, tied=False)
"""Its MLPs square a ReLU, which moves as many bytes as a GeLU, and it rotates only half of each head."""
MEGASCALE_175B = GPT(96, 12288, 2048, 64000, 128)
MPT = {  # l, h, a
    name: GPT(layers, hidden, 2048, 50368, heads)
    for name, layers, hidden, heads in (("7B", 32, 4096, 32), ("13B", 40, 5120, 40), ("30B", 48, 7168, 56))
}
NVIDIA: dict = dict(recompute="none", zero_stage=1, gradient_bytes=2, fused_attention=True, pad_vocab_to=128)
DIVIDED: dict = NVIDIA | dict(sequence_parallel=True)


def _dense() -> list[Run]:
    """D1 to D18: n, B and the seconds in bf16, then those in fp8."""
    gpt, eight = dict(tp_size=4, pp_size=8, num_chunks=6, **DIVIDED), dict(cp_size=2, **NVIDIA)
    seventy = dict(tp_size=4, pp_size=4, num_chunks=5, cp_size=2, **DIVIDED)
    seventy_fp8 = seventy | dict(pp_size=8, cp_size=1)
    fifteen = dict(tp_size=2, micro_batch_size=2, **DIVIDED)
    models: list = [
        ("GPT-3 175B", GPT_3, gpt, [(128, 256, 8.309), (256, 512, 8.408), (512, 1024, 8.42), (1024, 2048, 8.453),
                                    (2048, 4096, 8.49)]),
        ("Llama 3.1 8B", LLAMA_8B, eight, [(8, 128, 12.27), (32, 512, 12.32), (128, 2048, 12.33)]),
        ("Llama 3.1 70B", LLAMA_70B, seventy, [(64, 128, 14.66), (256, 512, 14.68), (2048, 4096, 14.66)]),
        ("Nemotron-4 15B", NEMOTRON, fifteen, [(16, 64, 2.66), (256, 1024, 2.68), (2048, 8192, 2.78)]),
    ]  # fmt: skip
    fp8: list = [
        ("GPT-3 175B", GPT_3, gpt, [(128, 256, 5.626), (2048, 4096, 5.96)]),
        ("Llama 3.1 8B", LLAMA_8B, eight, [(8, 128, 9.33), (128, 2048, 9.54)]),
        ("Llama 3.1 70B", LLAMA_70B, seventy_fp8, [(64, 128, 9.86), (2048, 4096, 10.15)]),
        ("Nemotron-4 15B", NEMOTRON, fifteen, [(16, 64, 1.98), (2048, 8192, 2.09)]),
    ]
    found = [
        Run(f"D{number}", name, "H100", Plan(model, n, batch, **options), seconds, DGXC)
        for number, (name, model, options, (n, batch, seconds)) in enumerate(
            ((*each[:3], row) for each in models for row in each[3]), start=1
        )
    ]
    return found + [
        Run(f"D{number}{'ab'[which]}", name, "H100", Plan(model, n, batch, precision="fp8", **options), seconds, DGXC)
        for number, (name, model, options, rows) in enumerate(fp8, start=15)
        for which, (n, batch, seconds) in enumerate(rows)
    ]


def _megatron() -> list[Run]:
    """D19 to D27: P/1e9, a, h, l, t, p, n, B, and teraFLOP/s a GPU, which count whole attention and all logits."""
    rows = [
        (1.7, 16, 2048, 24, 1, 1, 48, 192, 408.8), (7.1, 32, 4096, 30, 2, 1, 96, 192, 465.9),
        (16, 48, 6144, 32, 4, 1, 192, 192, 489.1), (32, 56, 7168, 48, 8, 1, 384, 192, 459.6),
        (70, 64, 8192, 84, 8, 2, 768, 384, 419.7), (119, 80, 10240, 92, 8, 4, 1536, 768, 420.5),
        (177, 96, 12288, 96, 8, 6, 2304, 1152, 432.8), (314, 128, 16384, 96, 8, 8, 3072, 1536, 474.4),
        (462, 144, 18432, 112, 8, 16, 6144, 3072, 459.9),
    ]  # fmt: skip
    found = []
    for number, (billions, a, h, layers, t, p, n, batch, teraflops) in enumerate(rows, start=19):
        model = GPT(layers, h, 4096, 131072, a, tied=False)
        seconds = batch * model.seq_length * model.flops_per_token / (n * teraflops * 1e12)
        plan = Plan(model, n, batch, t, p, **NVIDIA | dict(sequence_parallel=t > 1))
        assumed = "b 1, v 1, no recomputation, ZeRO-1"
        found.append(Run(f"D{number}", f"GPT {billions:g}B", "H100", plan, seconds, MEGATRON, assumed, fits=False))
    return found


def _megascale() -> list[Run]:
    """D28 to D35: n, B, and the seconds of Megatron-LM, whose gradients are float32."""
    rows = [(256, 768, 40.0), (512, 768, 21.2), (768, 768, 15.2), (1024, 768, 11.9),
            (3072, 6144, 29.02), (6144, 6144, 14.78), (8192, 6144, 12.24), (12288, 6144, 8.57)]  # fmt: skip
    options: dict = dict(recompute="selective", sequence_parallel=True, zero_stage=1, pad_vocab_to=128)
    plans = [Plan(MEGASCALE_175B, n, batch, 8, 8, 1, 6, **options) for n, batch, _ in rows]
    return [
        Run(f"D{number}", "GPT 175B", "A100", plan, seconds, MEGASCALE, "selective recomputation, ZeRO-1")
        for number, (plan, (*_, seconds)) in enumerate(zip(plans, rows), start=28)
    ]


def _fully_sharded() -> list[Run]:
    """D49 to D56: ZeRO-3 over all GPUs; model, n, b, micro-batches, recomputation and seconds."""
    rows = [
        ("13B", "A100 40GB", 16, 10, 1, "full", 10.28), ("13B", "A100 40GB", 128, 16, 1, "full", 16.62),
        ("7B", "A100 40GB", 128, 18, 1, "full", 10.17), ("30B", "A100 40GB", 128, 6, 1, "full", 14.21),
        ("7B", "H100", 8, 6, 1, "none", 1.15), ("13B", "H100", 8, 2, 1, "none", 0.855),
        ("13B", "H100", 64, 2, 1, "none", 0.853), ("30B", "H100", 32, 14, 3, "full", 37.27),
    ]  # fmt: skip
    options: dict = dict(fused_attention=True, gradient_bytes=2, zero_stage=3)
    found = []
    for number, (size, gpu, n, b, k, how, seconds) in enumerate(rows, start=49):
        plan = Plan(MPT[size], n, n * b * k, micro_batch_size=b, recompute=how, **options)
        assumed = "400 Gb/s a GPU" if gpu == "H100" and n > 8 else ""
        found.append(Run(f"D{number}", f"MPT {size}", gpu, plan, seconds, FOUNDRY, assumed))
    return found


def _experts() -> list[Run]:
    """D36 to D38: Mixtral 8x22B, folded or not: n, B, p, t, ep, etp; the seconds follow from the MFU."""
    gpus, folded, not_folded = (128, 256, 512, 1024), (15.90, 8.19, 4.24, 2.31), (16.80, 8.65, 4.56, 2.45)
    rows = [(f"D36{letter}", n, 1024, 8, 2, 8, 1, each) for letter, n, each in zip("abcd", gpus, folded)]
    rows += [(f"D37{letter}", n, 1024, 8, 2, 4, 2, each) for letter, n, each in zip("abcd", gpus, not_folded)]
    rows += [
        ("D38a", 128, 256, 8, 2, 8, 1, 4.21),
        ("D38b", 128, 256, 8, 2, 4, 2, 4.48),
        ("D38c", 128, 256, 1, 4, 8, 4, 5.67),
    ]
    found = []
    for name, n, batch, p, t, ep, etp, seconds in rows:
        v, assumed = (7, "b 1, v 7") if p > 1 else (1, "b 1")
        plan = Plan(MIXTRAL_8X22B, n, batch, t, p, 1, v, ep_size=ep, expert_tp_size=etp, **DIVIDED)
        model = f"Mixtral 8x22B, {'folded' if etp == 1 else 'not folded'}"
        found.append(Run(name, model, "H100", plan, seconds, FOLDING, assumed, fits=False))
    flat = replace(found[-1].plan, zero_stage=3)
    fsdp = replace(flat, tp_size=2, expert_tp_size=1), replace(flat, tp_size=8, expert_tp_size=8, ep_size=1)
    for name, plan, seconds in zip(("D38d", "D38e"), fsdp, (8.87, 48.3)):
        assumed = f"b 1, experts divided by {plan.etp_size}; none of ZeRO-3's messages is hidden"
        found.append(Run(name, "Mixtral 8x22B, fully sharded", "H100", plan, seconds, FOLDING, assumed, fits=False))
    return found


def _newer() -> list[Run]:
    """D39 to D48: what these sources leave open, above all recomputation, decides as much as the constants.

    D39 to D41 say that they send tokens with DeepEP; of the others nobody says how, and each expert gets a message. It
    overlaps with computing in newer software, which no dense run could tell, so no share of it is taken to be hidden.
    """
    seventy: dict = dict(tp_size=4, pp_size=8, num_chunks=5, precision="fp8", **DIVIDED)
    wide: dict = seventy | dict(tp_size=2, pp_size=4)
    qwen: dict = NVIDIA | dict(pad_vocab_to=None)
    qwen_sharded: dict = qwen | dict(recompute="full", zero_stage=3, micro_batch_size=4, ep_size=8)
    qwen_fp8: dict = qwen | dict(precision="fp8", ep_size=16)

    def deepseek(n: int, batch_size: int, p: int, v: int, ep: int, **options) -> Plan:
        split = split_layers(61, p * v)
        all_options: dict = NVIDIA | dict(pad_vocab_to=None, ep_size=ep, expert_tp_size=1, stage_layers=split) | options
        return Plan(DEEPSEEK_V3, n, batch_size, pp_size=p, num_chunks=v, **all_options)

    divided = dict(tp_size=2, sequence_parallel=True, recompute="full")
    none, whole = "no recomputation", "full recomputation: some is needed to fit, how much is not said; ZeRO-"
    hidden = f"{none}; of the experts' messages none is hidden"
    parts = "whole layers are computed again, not only MLA's up-projection, MLP and experts"
    older = f"{parts}; with newer software, D41 made the same step in 38 s"
    oldest = f"v 1; {parts}; with newer software, D48 took less than a third as long for a token"
    deepep = "H100 DeepEP"
    racks = [("a", 128, 32, 34.168), ("b", 256, 64, 34.194), ("c", 512, 64, 34.274)]
    rows: list[tuple[str, str, str, Plan, float, str, str]] = [
        ("D39", "Qwen3-30B-A3B", deepep, Plan(QWEN3_30B_A3B, 8, 512, **qwen_sharded), 21.773, AUTOMODEL, f"{whole}3"),
        ("D40", "DeepSeek-V3", deepep, deepseek(256, 512, 4, 8, 64, recompute="full"), 8.18, AUTOMODEL, f"{whole}1"),
        ("D41", "DeepSeek-V3", deepep, deepseek(1024, 8192, 4, 8, 64, recompute="full"), 37.87, AUTOMODEL, f"{whole}1"),
        ("D42", "DeepSeek-V3", "H100", deepseek(1024, 8192, 16, 1, 64, **divided), 52.04, DGXC_LATER, older),
        *((f"D43{letter}", "DeepSeek-V3", "GB200", deepseek(n, 8 * n, 4, 1, ep, **divided), seconds, DGXC_LATER,
           oldest) for letter, n, ep, seconds in racks),
        ("D44", "Llama 3 70B", "H100", Plan(LLAMA_70B, 64, 256, **seventy), 19.7, BRIDGE, none),
        ("D45", "Llama 3 70B", "GB200", Plan(LLAMA_70B, 64, 256, **wide), 8.83, BRIDGE, none),
        ("D46", "Qwen3-30B-A3B", "H100", Plan(QWEN3_30B_A3B, 16, 1024, **qwen_fp8), 29.3, BRIDGE, hidden),
        ("D47", "DeepSeek-V3", "GB200", deepseek(256, 4096, 4, 4, 64, precision="fp8"), 13.2, BRIDGE, hidden),
        ("D48", "DeepSeek-V3", "GB200", deepseek(256, 4096, 4, 4, 64), 20.9, BRIDGE, hidden),
    ]  # fmt: skip
    return [Run(*row, fits=False) for row in rows]


RUNS = [*_dense(), *_megatron(), *_megascale(), *_experts(), *_newer(), *_fully_sharded()]
