"""A layer with experts, forward and backward, on ranks that share the experts: against one process, and megatron-core.

One process has as many threads as there are ranks. It loops over the experts, each of which computes the tokens that
chose it. Megatron-core's `MoELayer` with its all-to-all dispatcher takes turns with ours in one world, if the package
is installed; on the CPU it needs stand-ins for CUDA's streams, and splits as lists. The rows say how much a rank hands
to its four all-to-alls of tokens, and how long they take: waiting for the slowest rank included. One thread per rank.

One row has paced links: two nodes of two ranks, ep inside a node in one order of the axes and across them in another.
The messages are real; each then sleeps as long as its bytes take on the slowest link that they use, with an H100's
NVLink and network slowed down alike. Beside it stands what `course.sizing`'s formula predicts for even loads.
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
from course.sizing import DGX_H100
from course.sizing.experts import all_to_all_bytes
from labkit.expert_parallel import MoELayer
from labkit.groups import groups_of_one, init_groups
from labkit.launch import launch
from labkit.layout import ParallelLayout
from labkit.shape import GPT

TOKENS, HIDDEN, FFN, EXPERTS, TOP_K = 1024, 256, 512, 8, 2
NUM_ROUNDS = 15
SLOWED_DOWN = 2e4  # paced links, against an H100's
ORDERS = {"inside a node": "tp-cp-ep-dp-pp", "across nodes": "tp-cp-dp-ep-pp"}
RANKS_PER_NODE = 2


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
    steps, texts = [], []
    for place, order in ORDERS.items():
        seconds = map(max, zip(*launch(on_paced_links, order, world_size=4, backend="gloo", timeout_seconds=300)))
        step_seconds, measured = seconds
        steps.append(step_seconds)
        texts.append(f"{place} {measured * 1e3:.0f} ms of all-to-all (formula {predicted(order) * 1e3:.0f} ms)")
    yield f"paced links, ep = 2 of 4 ranks: {', '.join(texts)}; against across nodes", *steps


# -- paced links ----------------------------------------------------------------------------------------------------


def link_bytes_per_second(rank: int, peer: int) -> float:
    same_node = rank // RANKS_PER_NODE == peer // RANKS_PER_NODE
    return (DGX_H100.node_bytes_per_second if same_node else DGX_H100.network_bytes_per_second) / SLOWED_DOWN


def predicted(order: str) -> float:
    """Return the seconds of a layer's all-to-alls, forward and backward, if all experts are chosen equally often."""
    model = GPT(1, HIDDEN, TOKENS, 32, num_experts=EXPERTS, top_k=TOP_K)
    first, second = ParallelLayout(4, order=order, ep_size=2).groups("ep")[0]
    one_way = all_to_all_bytes(model, 2, token_bytes=TOKENS // 4 * HIDDEN * 4)
    return 2 * one_way / link_bytes_per_second(first, second)


def on_paced_links(order: str) -> tuple[float, float]:
    """Return the median seconds of a step, and those that its all-to-alls of tokens took."""
    torch.set_num_threads(1)
    groups = init_groups(ParallelLayout(4, order=order, ep_size=2))
    layer = MoELayer(HIDDEN, FFN, EXPERTS, TOP_K, groups, gated=True)
    x, send = tokens().view(4, -1, HIDDEN)[dist.get_rank()], dist.all_to_all_single
    in_messages: list[float] = []

    def paced(output, rows, recv_splits, send_splits, group):
        start = time.perf_counter()
        send(output, rows, recv_splits, send_splits, group=group)
        if send_splits is not None:  # of tokens
            peers = dist.get_process_group_ranks(group)
            most = [max(pair) for pair in zip(send_splits, recv_splits)]  # both ways at once
            row_bytes = rows.element_size() * rows[0].numel() if len(rows) else 0
            speeds = [link_bytes_per_second(dist.get_rank(), peer) for peer in peers]
            own = peers.index(dist.get_rank())
            taken = [row_bytes * n / speed for at, (n, speed) in enumerate(zip(most, speeds)) if at != own]
            time.sleep(max(0.0, start + max(taken) - time.perf_counter()))
            in_messages.append(time.perf_counter() - start)

    with patch.object(dist, "all_to_all_single", paced):
        seconds = measure([lambda: step(lambda x: layer(x)[0], x, layer)])[0]
    num_messages = len(in_messages) // (3 + NUM_ROUNDS)
    sums = [sum(in_messages[at : at + num_messages]) for at in range(0, len(in_messages), num_messages)]
    return seconds, statistics.median(sums[3:])


# -- computing ------------------------------------------------------------------------------------------------------


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
