"""Rows that need several ranks: collectives, sharded layers, schedules and training runs, compared with one process."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import torch
import torch.distributed as dist
from torch import nn

from course.measure.bandwidth import measure
from course.measure.operations import WITH_ROOT, WITHOUT_ROOT
from course.parity import Difference, compare, gradients
from labkit import pipeline, tensor_parallel
from labkit.context_parallel import positions
from labkit.groups import init_groups, local_device
from labkit.layout import ParallelLayout
from labkit.parallel_config import SCHEDULES
from labkit.placement import placements
from labkit.sizes import divisors
from labkit.tensor_parallel import ColumnParallelLinear, RowParallelLinear, VocabParallelEmbedding, shard_like
from labtrain import TrainConfig
from labtrain.model import CONTEXT_PARALLEL
from tools.gpu_rows.one_process import losses_of, resumed
from tools.gpu_rows.row import Found, Where, judged

OPERATIONS = WITH_ROOT | WITHOUT_ROOT
LAYERS = ("column", "row", "vocabulary and loss", "column and row, sequence parallel")
HYBRID = "ZeRO 3, hybrid shards"


def collective(name: str) -> list[Difference]:
    """On a rank: run one operation on one row of numbers per rank."""
    rank = dist.get_rank()
    n = dist.get_world_size()
    rows = torch.arange(4.0 * n * n, dtype=torch.float64).reshape(n, 4 * n)
    total = rows.sum(0)
    expected = {
        "broadcast": rows[0],
        "scatter": rows[0].chunk(n)[rank],
        "gather": rows.flatten() if rank == 0 else None,
        "reduce": total if rank == 0 else None,
        "all-gather": rows.flatten(),
        "reduce-scatter": total.chunk(n)[rank],
        "all-reduce": total,
        "all-to-all": torch.cat([row.chunk(n)[rank] for row in rows]),
        "send and receive": rows[rank - 1],
    }
    return compare({name: OPERATIONS[name](rows[rank].to(local_device()))}, expected)


def collectives() -> list[Difference]:
    """On a rank: run all operations."""
    return [difference for name in OPERATIONS for difference in collective(name)]


def layer(name: str) -> list[Difference]:
    """On a rank: run a layer, or two, forward and backward."""
    group = dist.group.WORLD
    device = local_device()
    n = group.size()
    rank = group.rank()
    width = 8 * n
    has_words = name == "vocabulary and loss"
    is_pair = name == "column and row, sequence parallel"
    options = {"device": device, "dtype": torch.float64}
    if is_pair:
        options["sequence_parallel"] = True
    column = partial(ColumnParallelLinear, width, width, group, **options)
    row = partial(RowParallelLinear, width, width, group, **options)
    torch.manual_seed(0)
    if has_words:
        sharded = [VocabParallelEmbedding(width, width, group, **options), column(gather_output=False)]
        dense = [nn.Embedding(width, width), nn.Linear(width, width)]
    elif is_pair:
        sharded = [column(gather_output=False), nn.GELU(), row(input_is_parallel=True)]
        dense = [nn.Linear(width, width), nn.GELU(), nn.Linear(width, width)]
    else:
        sharded = [column() if name == "column" else row()]
        dense = [nn.Linear(width, width)]
    one = nn.Sequential(*dense).double()
    many = nn.Sequential(*sharded)
    unsharded = dict(one.named_parameters())
    placed = placements(many)
    with torch.no_grad():
        for key, parameter in many.named_parameters():
            parameter.copy_(shard_like(unsharded[key], placed[key]))

    def local(tensor: torch.Tensor, dim: int | None) -> torch.Tensor:
        """Return this rank's part, where there are parts."""
        return tensor if dim is None else tensor.chunk(n, dim)[rank]

    sequence_dim = 1 if is_pair else None
    words, targets = torch.randint(width, (2, 2, 4 * n))
    vectors, grad = torch.randn(2, 2, 4 * n, width, dtype=torch.float64)
    x = words if has_words else vectors.requires_grad_()
    local_x = local(x.detach(), sequence_dim).to(device, copy=True).requires_grad_(x.requires_grad)
    got = local_x
    for each in many:
        got = each(got)
        if isinstance(got, tuple):  # layers also return a bias, here None
            got = got[0]
    expected = one(x)
    if has_words:
        tensor_parallel.vocab_parallel_cross_entropy(got, targets.to(device), group).backward()
        nn.functional.cross_entropy(expected.flatten(0, 1), targets.flatten()).backward()
    else:
        got.backward(local(grad, sequence_dim).to(device))
        expected.backward(grad)
    wanted = {key: shard_like(unsharded[key].grad, placement) for key, placement in placed.items()}
    wanted["output"] = local(local(expected, sequence_dim), -1 if has_words else None)
    wanted["gradient of the input"] = None if has_words else local(x.grad, sequence_dim)
    return compare({"output": got, "gradient of the input": local_x.grad, **gradients(many)}, wanted)


def attention(name: str, dtype: torch.dtype) -> list[Difference]:
    """On a rank: attend to a sequence that is cut across the ranks, forward and backward."""
    group = dist.group.WORLD
    device = local_device()
    n = group.size()
    torch.manual_seed(0)
    q, k, v, grad = (torch.randn(2, heads * n, 4 * n, 8, dtype=torch.float64) for heads in (2, 1, 1, 2))
    unsharded = [x.requires_grad_() for x in (q, k, v)]
    held = positions(4 * n, n, group.rank())
    local = [x.detach()[:, :, held].to(device, dtype).requires_grad_() for x in unsharded]
    expected = nn.functional.scaled_dot_product_attention(*unsharded, is_causal=True, enable_gqa=True)
    expected.backward(grad)
    got = CONTEXT_PARALLEL[name](*local, group)
    got.backward(grad[:, :, held].to(device, dtype))
    names = "output", "gradient of q", "gradient of k", "gradient of v"
    wanted = [expected, *(x.grad for x in unsharded)]
    found = [got, *(x.grad for x in local)]
    return compare(
        {name: x.double() for name, x in zip(names, found)}, {name: x[:, :, held] for name, x in zip(names, wanted)}
    )


def stages(count: int) -> nn.ModuleList:
    """Return the same stages on every rank: each gives what it takes, so nobody has to say what travels."""
    torch.default_generator.manual_seed(0)  # draws nothing on a GPU
    return nn.ModuleList(
        nn.Sequential(nn.Linear(6, 7), nn.GELU(), nn.LayerNorm(7), nn.Linear(7, 6)) for _ in range(count)
    ).double()


def mean_square(output: torch.Tensor, target: torch.Tensor | None) -> torch.Tensor:
    return output.square().mean()


def schedule(name: str) -> list[Difference]:
    """On a rank: run one step of a pipeline over all ranks."""
    p = dist.get_world_size()
    device = local_device()
    made = SCHEDULES[name](p, 2 * p, 2 if name == "interleaved" else 1)
    unsharded = stages(made.num_stages)
    copies = stages(made.num_stages)
    x = torch.randn(4 * p, 6, dtype=torch.float64)
    expected = mean_square(nn.Sequential(*unsharded)(x), None)
    expected.backward()
    with init_groups(ParallelLayout(p, pp_size=p)) as groups:
        numbers = [made.stage_of(groups.coords.pp, chunk) for chunk in range(made.num_chunks)]
        local = nn.ModuleDict({str(number): copies[number].to(device) for number in numbers})
        loss = pipeline.run(made, list(local.values()), groups, x.to(device).split(2), loss=mean_square)
    got = gradients(local)
    if loss is not None:
        got["loss"] = loss
    return compare(got, gradients(unsharded) | {"loss": expected})


def compared(where: Where, num_ranks: int, fn: Callable, *args) -> Found:
    return judged(where.run(num_ranks, fn, *args))


def rounded(where: Where, num_ranks: int) -> Found:
    """Attend in bfloat16, for which GPUs have flash kernels."""
    return judged(where.run(num_ranks, attention, "ring", torch.bfloat16), 2**-5)


def trained(where: Where, num_ranks: int, config: TrainConfig) -> Found:
    """Train on ranks and in one process on the same device: losses and gradient norms of each step."""
    sizes = dict.fromkeys(("tp_size", "cp_size", "pp_size", "ep_size"), 1)
    alone = replace(config, **sizes, schedule="1f1b", sequence_parallel=False, zero_stage=0, shard_size=None)
    if alone not in where.in_one_process:
        [where.in_one_process[alone]] = where.run(1, losses_of, alone)
    expected = where.in_one_process[alone]
    return judged([compare(found, expected) for found in where.run(num_ranks, losses_of, config)])


def trained_again(where: Where, num_ranks: int) -> Found:
    return resumed(where, layouts(num_ranks)[HYBRID], num_ranks)


def layouts(n: int) -> dict[str, TrainConfig]:
    """Return small runs for n ranks: along one axis each, in each ZeRO stage, and along as many axes as n allows."""
    tp_size = 2 if n % 4 == 0 else 1
    pp_size = 2 if n % 2 == 0 else n
    base = TrainConfig(
        steps=3, batch_size=4 * n, micro_batch_size=2, seq_length=4 * n, hidden_size=8 * n, num_attention_heads=n,
        num_layers=max(2, pp_size), precision="float64", warmup_steps=0,
    )  # fmt: skip
    made = {"dp": base}
    for stage in (1, 2, 3):
        made[f"ZeRO {stage}"] = replace(base, zero_stage=stage)
    made[HYBRID] = replace(base, zero_stage=3, shard_size=divisors(n)[-2:][0])
    made["tp, sequence parallel"] = replace(base, tp_size=n, sequence_parallel=True)
    today = dict(norm="rmsnorm", mlp="swiglu", positions="rope", bias=False, tied=False)
    made["cp"] = replace(base, cp_size=n, **today)
    made["tp, pp and dp"] = replace(base, tp_size=tp_size, pp_size=pp_size)
    balance = dict(aux_loss="sequence", aux_loss_coefficient=0.1, expert_bias_update_rate=0.01)
    folded = dict(pp_size=pp_size, schedule="zero-bubble-v", num_layers=2 * pp_size)
    made["ep, pp in a V"] = replace(base, **folded, ep_size=n // pp_size, zero_stage=1, num_experts=2 * n, **balance)
    return made


def bandwidth(where: Where, num_ranks: int) -> Found:
    """Time an all-reduce; nothing is right or wrong about it."""
    size = (1 << (28 if where.has_nccl(num_ranks) else 18)) // (4 * num_ranks) * 4 * num_ranks
    [measured], *_ = where.run(num_ranks, measure, "all_reduce", [size], 5)
    speed = f"{measured.algorithm_gb_per_second:.2f} GB/s, {measured.bus_gb_per_second:.2f} GB/s on each link"
    return Found(True, f"{size / 1e6:.1f} MB in {measured.seconds * 1e3:.2f} ms: {speed}", "only measured")
