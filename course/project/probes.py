"""Runs a learner's parts on a rank, and returns what they did: values, gradients, messages.

Each probe yields pairs of what was looked at and what was seen. The same probe runs on our parts: a step is right if
both see the same on every rank.
"""

import os
import sys
from collections.abc import Iterator
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import nn

import labkit.grid
from course.communication import communication_log
from course.exercises.calling import limited
from course.exercises.values import plain
from course.project.parts import ONE_FILE, define, source_of

Seen = Iterator[tuple[str, Any]]
MOST_SECONDS = 5.0  # of computing on one rank: ten times what our parts take
SMALL = {
    "layers": 4,
    "hidden": 16,
    "heads": 4,
    "seq": 8,
    "global_batch": 8,
    "micro_batch": 1,
    "warmup": 1,
    "steps": 0,
    "dtype": "float64",
    "bucket": 500,
}


def observe(source: str, filename: str, names: list[str], step: int, options: dict[str, Any]) -> list[tuple[str, Any]]:
    """Define the learner's parts ``names`` on this rank, and return what the step's probe sees."""
    with limited(MOST_SECONDS):
        scope = defined(source, filename, names, options)
        return [(what, plain(seen)) for what, seen in PROBES[step](scope)]


def history(source: str, filename: str, options: dict[str, Any]) -> list[tuple[float, float]]:
    """Train with a learner's whole file, and return loss and gradient norm of each step."""
    with limited(MOST_SECONDS):
        return run_whole(source, filename, options)["history"]


def run_whole(source: str, filename: str, options: dict[str, Any]) -> dict[str, Any]:
    """Run a whole file on this rank, and return what it defines."""
    scope = prepared(filename, options)
    exec(compile(source, filename, "exec"), scope)
    return scope


def defined(source: str, filename: str, names: list[str], options: dict[str, Any]) -> dict[str, Any]:
    """Run one_file.py with the learner's parts on this rank, and return what it defines."""
    scope = prepared(filename, options)
    define(source, filename, names, scope)
    return scope


def prepared(filename: str, options: dict[str, Any]) -> dict[str, Any]:
    """Put this rank into the state in which torchrun starts a script, and return the script's globals."""
    os.environ["LOCAL_RANK"] = str(dist.get_rank())
    os.environ["LOCAL_WORLD_SIZE"] = str(dist.get_world_size())
    torch.set_num_threads(1)
    sys.argv = [filename]
    for name, value in (SMALL | {"text": labkit.grid.__file__} | options).items():
        sys.argv += [f"--{name}", str(value)]
    return {"__name__": "my_megatron"}


def _numbers(*shape: int, seed: int = 0) -> torch.Tensor:
    """Return small whole numbers, which add up without rounding."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-4, 5, shape, generator=generator).double()


def _sent(log) -> list[str]:
    return [f"{record.operation} of {record.message_bytes} bytes in {list(record.group)}" for record in log.records]


def _grads(module: nn.Module) -> Seen:
    for name, param in module.named_parameters():
        yield f"the gradient of {name}", param.grad


def _groups(scope: dict[str, Any]) -> Seen:
    tensor, data, pipelines = scope["rank_lists"]()
    yield "the tensor groups of rank_lists()", tensor
    yield "the data-parallel groups of rank_lists()", data
    yield "the pipelines of rank_lists()", pipelines
    for name in ("tp_group", "dp_group", "pp_group"):
        yield f"the ranks of {name}", dist.get_process_group_ranks(scope[name])
    with communication_log() as log:
        group = scope["own_group"]([[0, 1], [2, 3]])
    yield "the ranks of own_group([[0, 1], [2, 3]])", dist.get_process_group_ranks(group) if group else None
    yield "what own_group sends", [record.operation for record in log.records]


def _operators(scope: dict[str, Any]) -> Seen:
    rank = dist.get_rank()
    for name in ("copy_to_tp", "reduce_from_tp"):
        given = _numbers(2, 3, seed=rank)
        x = given.clone().requires_grad_()
        with communication_log() as log:
            y = scope[name](x)
        yield f"y = {name}(x)", y.detach().clone()
        yield f"what {name} sends forward", _sent(log)
        yield f"x after {name}(x)", x.detach().clone()
        grad = _numbers(2, 3, seed=10 + rank)
        sent_grad = grad.clone()
        with communication_log() as log:
            y.backward(sent_grad)
        yield f"the gradient of x in {name}", x.grad
        yield f"what {name} sends backward", _sent(log)
        yield f"the gradient that {name} got, afterwards", sent_grad
    x = _numbers(2, 3, seed=rank).T
    if rank % 2:  # then what lies where in memory differs among ranks
        x = x.contiguous()
    yield "all_reduce_tp of a tensor that is transposed on some ranks", scope["all_reduce_tp"](x)


def _layers(scope: dict[str, Any]) -> Seen:
    rank = dist.get_rank()
    tp = scope["tp"]
    x = _numbers(1, 2, 8)
    yield from _layer("ColumnParallelLinear", scope["ColumnParallelLinear"]("a", 8, 8), x)
    yield from _layer("ColumnParallelLinear of 3 parts", scope["ColumnParallelLinear"]("b", 8, 8, parts=3), x)
    shard = _numbers(1, 2, 8, seed=1).chunk(tp, -1)[rank % tp]
    yield from _layer("RowParallelLinear", scope["RowParallelLinear"]("c", 8, 8), shard)
    x = _numbers(2, scope["args"].seq, scope["args"].hidden, seed=2)
    yield from _layer("Attention", scope["Attention"]("d"), x)


def _layer(name: str, layer: nn.Module, x: torch.Tensor) -> Seen:
    for param_name, param in layer.named_parameters():
        yield f"the shape of {name}.{param_name}", list(param.shape)
        if param_name.endswith("weight"):
            yield f"{name}.{param_name}", param.detach().clone()
        yield f"{name}.{param_name}.is_sharded", getattr(param, "is_sharded", None)
        if param_name.endswith("bias"):
            param.data += 1  # so that it shows how often it is added
    x = x.clone().requires_grad_()
    with communication_log() as log:
        y = layer(x)
    yield f"what {name} returns", y.detach().clone()
    yield f"what {name} sends forward", _sent(log)
    with communication_log() as log:
        y.backward(torch.ones_like(y))
    yield f"the gradient of {name}'s input", x.grad
    yield f"what {name} sends backward", _sent(log)
    yield from _grads(layer)


def _vocabulary(scope: dict[str, Any]) -> Seen:
    vocabulary = scope["VOCABULARY"]
    tp = scope["tp"]
    num_rows = vocabulary // tp
    first = scope["tp_rank"] * num_rows
    ids = torch.tensor([[0, 1, num_rows - 1, num_rows], [vocabulary - 1, 100, 200, num_rows + 1]])
    local, is_elsewhere = scope["local_ids"](ids)
    yield "the mask of local_ids", is_elsewhere
    yield "the rows of local_ids", local
    is_outside = ((local < 0) | (local >= num_rows)).any().int()
    dist.all_reduce(is_outside, dist.ReduceOp.MAX)
    if is_outside:
        return  # on all ranks: a lookup would only say that an index is out of range
    table = _numbers(vocabulary, 3)
    weight = table[first : first + num_rows].clone().requires_grad_()
    with communication_log() as log:
        rows = scope["vocab_parallel_embedding"](ids, weight)
    yield "vocab_parallel_embedding(ids, weight)", rows.detach().clone()
    yield "what vocab_parallel_embedding sends", _sent(log)
    rows.backward(torch.ones_like(rows))
    yield "the gradient of the embedding's weight", weight.grad
    for scale in (1, 1000):
        whole = _numbers(2, 4, vocabulary, seed=scale) * scale
        logits = whole[..., first : first + num_rows].clone().requires_grad_()
        with communication_log() as log:
            loss = scope["vocab_parallel_loss"](logits, ids)
        about = f" of logits up to {4 * scale}"
        yield f"vocab_parallel_loss{about}", loss.detach().clone()
        loss.backward()
        yield f"the gradient{about}", logits.grad
        yield "the bytes that vocab_parallel_loss sends", log.total_bytes()


def _buckets(scope: dict[str, Any]) -> Seen:
    rank = dist.get_rank()
    num_micro_batches = scope["num_micro_batches"]
    model = nn.Sequential(nn.Linear(8, 40), nn.Linear(40, 8), nn.Linear(8, 8)).double()
    for number, param in enumerate(model.parameters()):
        param.data = _numbers(*param.shape, seed=number)
    params = list(model.parameters())
    buckets = scope["make_buckets"](params)
    yield "the elements of each bucket", [bucket.grads.numel() for bucket in buckets]
    for step in range(2):
        with communication_log() as log:
            for bucket in buckets:
                bucket.start()
            sent = []
            for index in range(num_micro_batches):
                x = _numbers(1, 8, seed=100 * step + 10 * rank + index)
                model(x).sum().backward()
                sent.append(len(log))
            yield "all-reduces sent after each micro-batch", sent
            waited = [record for record in log.records if record.seconds is not None]
            yield "all-reduces that were waited for before finish", len(waited)
            for bucket in buckets:
                bucket.finish()
        for name, param in model.named_parameters():
            yield f"the gradient of {name} in step {step}", param.grad
    yield "what all buckets hold", [bucket.grads for bucket in buckets]


def _pipeline(scope: dict[str, Any]) -> Seen:
    order = _order(scope)
    yield "one_f_one_b()", order
    ours = dict(scope)
    exec(source_of(ONE_FILE.read_text(), "one_f_one_b"), ours)
    is_different = torch.tensor(int(order != _order(ours)))
    dist.all_reduce(is_different, dist.ReduceOp.MAX)
    if is_different:
        return  # on all ranks: they would wait for each other
    for bucket in scope["buckets"]:
        bucket.start()
    batches = []
    batch_isend_irecv = dist.batch_isend_irecv

    def count(ops):
        batches.append(len(ops))
        return batch_isend_irecv(ops)

    with patch.object(dist, "batch_isend_irecv", count):
        loss = scope["forward_backward"](*scope["batch"](0))
    for bucket in scope["buckets"]:
        bucket.finish()
    yield "what forward_backward returns", loss
    yield from _grads(scope["stage"])
    yield "messages in each call of batch_isend_irecv", batches


def _order(scope: dict[str, Any]) -> list[str]:
    return [f"{kind}{index}" for kind, index in scope["one_f_one_b"]()]


def _training(scope: dict[str, Any]) -> Seen:
    stage = scope["stage"]
    for number, param in enumerate(stage.parameters()):
        param.grad.copy_(_numbers(*param.shape, seed=number))
    scope["add_up_copies"]()
    yield from _grads(stage)
    yield "grad_norm()", scope["grad_norm"]()
    scope["args"].steps = 4  # for the learning rate
    for step in range(3):
        loss, norm = scope["train_step"](step)
        yield f"the loss of step {step}", loss
        yield f"the norm of step {step}", norm
        if step == 0:  # AdamW's weights hardly show by what all gradients were multiplied
            for name, param in stage.named_parameters():
                yield f"the clipped gradient of {name} in step 0", param.grad.clone()
        for group in scope["optimizer"].param_groups:
            yield f"the learning rate of step {step}", group["lr"]
    for name, param in stage.named_parameters():
        yield f"{name} after three steps", param.detach().clone()


PROBES = {1: _groups, 2: _operators, 3: _layers, 4: _vocabulary, 5: _buckets, 6: _pipeline, 7: _training}
CASES: dict[int, list[tuple[int, dict[str, Any]]]] = {
    1: [(8, {"tp": 2, "pp": 2}), (8, {"tp": 4, "pp": 1}), (8, {"tp": 1, "pp": 4})],
    2: [(4, {"tp": 4}), (4, {"tp": 2})],
    3: [(4, {"tp": 4}), (4, {"tp": 2})],
    4: [(4, {"tp": 4}), (4, {"tp": 2})],
    5: [(4, {}), (2, {"global_batch": 2})],
    6: [(4, {"pp": 4}), (4, {"pp": 4, "global_batch": 2}), (4, {"pp": 2})],
    7: [(8, {"tp": 2, "pp": 2}), (4, {"tp": 2, "pp": 2, "untied": 1}), (2, {"tp": 2, "clip": 100})],
}
