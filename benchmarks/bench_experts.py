"""A layer with experts, forward and backward, on ranks that share the experts: against one process, and megatron-core.

One process has as many threads as there are ranks. It loops over the experts, each of which computes the tokens that
chose it. Megatron-core's `MoELayer` with its all-to-all dispatcher takes turns with ours in one world, if the package
is installed; on the CPU it needs stand-ins for CUDA's streams, and splits as lists. The rows say how much a rank hands
to its four all-to-alls of tokens, and how long they take: waiting for the slowest rank included. One thread per rank.
"""

import contextlib
import importlib.util
import statistics
import time
from collections.abc import Callable, Iterator
from unittest.mock import patch

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from course.communication import communication_log
from labkit.expert_parallel import MoELayer
from labkit.groups import groups_of_one, init_groups
from labkit.launch import launch
from labkit.layout import ParallelLayout

TOKENS, HIDDEN, FFN, EXPERTS, TOP_K = 1024, 256, 512, 8, 2
NUM_ROUNDS = 15


def rows() -> Iterator[tuple[str, float, float]]:
    for world_size in (2, 4):
        options: dict = dict(backend="gloo", timeout_seconds=300)
        ours, theirs, sent_bytes, seconds = map(max, zip(*launch(on_ranks, world_size=world_size, **options)))
        alone = launch(on_one_process, world_size, world_size=1, **options)[0]
        sent = f"all-to-all {sent_bytes / 1e6:.1f} MB in {seconds * 1e3:.0f} ms, {sent_bytes / seconds / 1e6:.0f} MB/s"
        name = f"{EXPERTS} experts, {world_size} ranks"
        yield f"{name}, {sent}; against one process", ours, alone
        if theirs:
            yield f"{name}, against megatron-core", ours, theirs


def on_ranks() -> tuple[float, float, int, float]:
    """Return the median seconds of ours and of megatron-core's (0 without it), and ours' all-to-alls of tokens."""
    torch.set_num_threads(1)
    size = dist.get_world_size()
    layer = MoELayer(HIDDEN, FFN, EXPERTS, TOP_K, init_groups(ParallelLayout(size, ep_size=size)), gated=True)
    x = tokens().view(size, -1, HIDDEN)[dist.get_rank()]
    steps: list[Callable[[], object]] = [lambda: step(lambda x: layer(x)[0], x, layer)]
    if importlib.util.find_spec("megatron"):
        other = megatron_layer(size)
        steps.append(lambda: on_cpu(lambda: step(lambda x: other(x)[0], x.unsqueeze(1), other)))
    taken = measure(steps)
    with communication_log() as log:
        steps[0]()
    sent = [record for record in log.records if record.operation == "all_to_all"][1:]  # the first is of counts
    return taken[0], sum(taken[1:]), sum(each.message_bytes for each in sent), sum(each.seconds or 0 for each in sent)


def on_one_process(num_threads: int) -> float:
    torch.set_num_threads(num_threads)
    layer = MoELayer(HIDDEN, FFN, EXPERTS, TOP_K, groups_of_one(), gated=True)

    def loop(x: torch.Tensor) -> torch.Tensor:
        (chosen, probs), _ = layer.router(x.unsqueeze(0), len(x))
        output = torch.zeros_like(x)
        for expert, (up, down) in enumerate(zip(layer.experts.up, layer.experts.down)):
            at, choice = (chosen[0] == expert).nonzero(as_tuple=True)
            gate, hidden = F.linear(x[at], up).chunk(2, -1)
            output = output.index_add(0, at, F.linear(F.silu(gate) * hidden, down) * probs[0, at, choice].unsqueeze(-1))
        return output

    x = tokens()
    with torch.no_grad():  # the same numbers as the layer
        torch.testing.assert_close(loop(x), layer(x)[0], rtol=1e-4, atol=1e-4)
    return measure([lambda: step(loop, x, layer)])[0]


def tokens() -> torch.Tensor:
    torch.manual_seed(0)
    return torch.randn(TOKENS, HIDDEN)


def step(forward: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor, module: nn.Module) -> None:
    module.zero_grad()
    forward(x.clone().requires_grad_()).sum().backward()


def measure(steps: list[Callable[[], object]]) -> list[float]:
    """Return the median seconds of each step; they take turns."""
    seconds: list[list[float]] = [[] for _ in steps]
    for number in range(3 + NUM_ROUNDS):
        for run, taken in zip(steps, seconds):
            dist.barrier()
            start = time.perf_counter()
            run()
            if number >= 3:  # warm
                taken.append(time.perf_counter() - start)
    return [statistics.median(taken) for taken in seconds]


# -- megatron-core --------------------------------------------------------------------------------------------------


class NoStream:
    def wait_stream(self, stream) -> None: ...
    def synchronize(self) -> None: ...


def on_cpu(run: Callable):
    """Run megatron-core where there is no CUDA."""
    send = dist.all_to_all_single

    def with_lists(output, rows, output_split_sizes=None, input_split_sizes=None, group=None):
        splits = (each.tolist() if torch.is_tensor(each) else each for each in (output_split_sizes, input_split_sizes))
        return send(output, rows, *splits, group=group)

    with contextlib.ExitStack() as stack:
        for name, value in {
            "Stream": NoStream, "current_stream": NoStream, "stream": lambda stream: contextlib.nullcontext(),
            "current_device": lambda: torch.device("cpu"),
        }.items():  # fmt: skip
            stack.enter_context(patch.object(torch.cuda, name, value))
        stack.enter_context(patch.object(dist, "all_to_all_single", with_lists))
        return run()


def megatron_layer(ep_size: int) -> nn.Module:
    from megatron.core import parallel_state  # pyright: ignore[reportMissingImports]
    from megatron.core.tensor_parallel.layers import (  # pyright: ignore[reportMissingImports]
        ColumnParallelLinear,
        RowParallelLinear,
    )
    from megatron.core.transformer.mlp import MLPSubmodules  # pyright: ignore[reportMissingImports]
    from megatron.core.transformer.moe.experts import SequentialMLP  # pyright: ignore[reportMissingImports]
    from megatron.core.transformer.moe.moe_layer import MoELayer as TheirLayer  # pyright: ignore[reportMissingImports]
    from megatron.core.transformer.moe.moe_layer import MoESubmodules  # pyright: ignore[reportMissingImports]
    from megatron.core.transformer.spec_utils import ModuleSpec  # pyright: ignore[reportMissingImports]
    from megatron.core.transformer.transformer_config import TransformerConfig  # pyright: ignore[reportMissingImports]

    parallel_state.initialize_model_parallel(expert_model_parallel_size=ep_size)
    config = TransformerConfig(
        num_layers=1, hidden_size=HIDDEN, num_attention_heads=4, ffn_hidden_size=FFN, moe_ffn_hidden_size=FFN,
        num_moe_experts=EXPERTS, moe_router_topk=TOP_K, moe_token_dispatcher_type="alltoall",
        moe_router_load_balancing_type="none", expert_model_parallel_size=ep_size, use_cpu_initialization=True,
        add_bias_linear=False, gated_linear_unit=True, activation_func=F.silu, bias_activation_fusion=False,
        moe_router_dtype="fp32",
    )  # fmt: skip
    parts = MLPSubmodules(linear_fc1=ColumnParallelLinear, linear_fc2=RowParallelLinear)
    experts = MoESubmodules(experts=ModuleSpec(module=SequentialMLP, submodules=parts))
    return on_cpu(lambda: TheirLayer(config, experts))
