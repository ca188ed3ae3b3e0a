"""Trains a GPT with tensor, pipeline and data parallelism: the whole idea of Megatron-LM in one file.

    torchrun --nproc-per-node 8 course/project/one_file.py --tp 2 --pp 2 --text README.md

cuts every layer over 2 ranks and the list of layers into 2 stages. The 8 ranks then hold 2 copies of the model, and
each copy trains on half of every batch. However the ranks are split, losses and gradient norms are those of one rank,
up to rounding:

    torchrun --nproc-per-node 1 course/project/one_file.py --text README.md

It needs nothing but PyTorch, and runs on CPUs (gloo), or on a GPU for each rank (NCCL), always under torchrun. Left
out: dropout, mixed precision, recomputation, sequence parallelism, evaluation, checkpoints. Read it from top to bottom.
"""

import argparse
import math
import os
import time
import zlib
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

# ----------------------------------------------------------------------------------------------------------------------
# Options, and their defaults.

options = {
    # how the ranks are split: what --tp and --pp leave over is data parallel
    "tp": 1,
    "pp": 1,
    # the model
    "layers": 8,
    "hidden": 64,
    "heads": 8,
    "seq": 64,
    "untied": 0,  # 1: the logits have weights of their own, and do not share the embedding's
    # the batch: a pipeline stage works on one micro-batch at a time
    "global_batch": 32,
    "micro_batch": 2,
    # the optimizer
    "steps": 50,
    "warmup": 10,
    "lr": 3e-3,
    "weight_decay": 0.1,
    "clip": 1.0,
    # everything else
    "text": "README.md",
    "dtype": "float32",  # of everything, the optimizer's state too: float32 or float64
    "seed": 1,
    "bucket": 100_000,  # elements in one all-reduce of gradients
}
parser = argparse.ArgumentParser()
for name, default in options.items():
    parser.add_argument(f"--{name}", type=type(default), default=default)
args = parser.parse_args()

# ----------------------------------------------------------------------------------------------------------------------
# Process groups. The ranks lie in a grid [pp, dp, tp]. Neighbours in the last axis have consecutive ranks, and so share
# a node: they exchange most. Every rank calls new_group for all groups, also for those it is not in, in the same order.

has_gpus = torch.cuda.device_count() >= int(os.environ["LOCAL_WORLD_SIZE"])
device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if has_gpus else torch.device("cpu")
if has_gpus:
    torch.cuda.set_device(device)
if not dist.is_initialized():  # a check of the project brings its own
    dist.init_process_group("nccl" if has_gpus else "gloo")

rank = dist.get_rank()
world_size = dist.get_world_size()
tp, pp = args.tp, args.pp
assert world_size % (tp * pp) == 0, "--tp times --pp must divide the number of ranks"
VOCABULARY = 256  # tokens are bytes
assert args.hidden % args.heads == 0, "--heads must divide --hidden"
assert args.heads % tp == VOCABULARY % tp == 0, f"--tp must divide --heads and {VOCABULARY}"
assert args.layers >= pp, "each stage needs a layer: --layers must be --pp or more"
dp = world_size // (tp * pp)
num_micro_batches = args.global_batch // (dp * args.micro_batch)
assert num_micro_batches * dp * args.micro_batch == args.global_batch, "micro_batch times dp must divide global_batch"
dtype = getattr(torch, args.dtype)
grid = torch.arange(world_size).view(pp, dp, tp)
pp_rank, dp_rank, tp_rank = (index.item() for index in (grid == rank).nonzero()[0])
is_first = pp_rank == 0
is_last = pp_rank == pp - 1
previous_stage = rank - dp * tp
next_stage = rank + dp * tp


def rank_lists():
    """Return three lists of lists of ranks: of all tensor groups, all data-parallel groups and all pipelines."""
    tensor = grid.reshape(-1, tp)
    data = grid.transpose(1, 2).reshape(-1, dp)
    pipelines = grid.permute(1, 2, 0).reshape(-1, pp)
    return tensor.tolist(), data.tolist(), pipelines.tolist()


def own_group(lists):
    """Create a group of each list of ranks, and return the one that this rank is in, or None."""
    own = None
    for ranks in lists:
        group = dist.new_group(ranks)
        if rank in ranks:
            own = group
    if own is not None:
        # NCCL connects the ranks of a group at their first message, and expects all of them then. Without this line
        # the first message of a pipeline would be one between two ranks.
        dist.all_reduce(torch.zeros(1, device=device), group=own)
    return own


tp_group, dp_group, pp_group = map(own_group, rank_lists())
# The first stage looks up rows of a tied embedding, the last makes logits with it. Their gradients must be added up.
has_two_copies = pp > 1 and not args.untied
if has_two_copies:
    copies_group = own_group([[ranks[0], ranks[-1]] for ranks in rank_lists()[2]])

# ----------------------------------------------------------------------------------------------------------------------
# f and g, a conjugate pair (Megatron-LM, arXiv 1909.08053, section 3): what one does forward, the other does backward.


class CopyToTp(torch.autograd.Function):
    """f: every rank uses the same x with its own shard, so each has a part of x's gradient. Backward adds them up."""

    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        return all_reduce_tp(grad)


class ReduceFromTp(torch.autograd.Function):
    """g: forward adds up the ranks' parts. The gradient of a sum is that of each part: backward passes it on."""

    @staticmethod
    def forward(ctx, x):
        return all_reduce_tp(x)

    @staticmethod
    def backward(ctx, grad):
        return grad


def all_reduce_tp(x):
    """Return the sum of x over the tensor group. The operand may still be in use, so it is copied."""
    if tp == 1:
        return x
    x = x.clone(memory_format=torch.contiguous_format)
    dist.all_reduce(x, group=tp_group)
    return x


copy_to_tp = CopyToTp.apply
reduce_from_tp = ReduceFromTp.apply

# ----------------------------------------------------------------------------------------------------------------------
# Sharded layers. A name seeds a parameter's first values: they are those of the whole model, however it is split.


def parameter(name, *shape, dim=None, std=0.02):
    """Return a parameter of the whole model, or this rank's shard of it along ``dim``."""
    # Every rank draws the whole parameter on its CPU, and keeps its shard.
    generator = torch.Generator().manual_seed(zlib.crc32(f"{args.seed} {name}".encode()))
    full = torch.randn(shape, generator=generator, dtype=torch.float64) * std
    local = full if dim is None else full.chunk(tp, dim)[tp_rank].clone()
    param = nn.Parameter(local.to(device, dtype))  # .to of a Parameter is a plain tensor: so it comes first
    param.is_sharded = dim is not None
    return param


def layer_norm():
    return nn.LayerNorm(args.hidden, device=device, dtype=dtype)


class ColumnParallelLinear(nn.Module):
    """Holds some of the outputs: x [.., inputs] is the same on all ranks, y [.., parts * outputs / tp] is not.

    Query, key and value are three parts of ``outputs`` each, cut one by one: a rank gets the same heads of all three.
    Forward sends nothing. Backward adds up the gradient of x: one all-reduce of its size.
    """

    def __init__(self, name, inputs, outputs, parts=1):
        super().__init__()
        self.weight = parameter(f"{name}.weight", parts, outputs, inputs, dim=1)
        self.bias = parameter(f"{name}.bias", parts, outputs, dim=1, std=0)

    def forward(self, x):
        return F.linear(copy_to_tp(x), self.weight.flatten(0, 1), self.bias.flatten())


class RowParallelLinear(nn.Module):
    """Holds the weights of some inputs: x [.., inputs / tp] is this rank's, y [.., outputs] is the same on all.

    Forward adds up y: one all-reduce of its size. Backward sends nothing. The bias is added once, after the sum.
    """

    def __init__(self, name, inputs, outputs):
        super().__init__()
        self.weight = parameter(f"{name}.weight", outputs, inputs, dim=1)
        self.bias = parameter(f"{name}.bias", outputs, std=0)

    def forward(self, x):
        return reduce_from_tp(F.linear(x, self.weight)) + self.bias


class Attention(nn.Module):
    """Each rank has heads / tp heads: softmax needs one head at a time, so nothing is sent between the two layers."""

    def __init__(self, name):
        super().__init__()
        self.qkv = ColumnParallelLinear(f"{name}.qkv", args.hidden, args.hidden, parts=3)
        self.out = RowParallelLinear(f"{name}.out", args.hidden, args.hidden)

    def forward(self, x):
        batch, seq, _ = x.shape
        qkv = self.qkv(x).view(batch, seq, 3, args.heads // tp, args.hidden // args.heads)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)  # each [batch, heads / tp, seq, hidden / heads]
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(y.transpose(1, 2).reshape(batch, seq, -1))


class MLP(nn.Module):
    """Each rank has 4 * hidden / tp of the inner features: GELU works on one at a time."""

    def __init__(self, name):
        super().__init__()
        self.up = ColumnParallelLinear(f"{name}.up", args.hidden, 4 * args.hidden)
        self.down = RowParallelLinear(f"{name}.down", 4 * args.hidden, args.hidden)

    def forward(self, x):
        return self.down(F.gelu(self.up(x)))


class Block(nn.Module):
    """Makes two all-reduces of [batch, seq, hidden] forward, and two backward."""

    def __init__(self, name):
        super().__init__()
        self.norm1 = layer_norm()
        self.attention = Attention(f"{name}.attention")
        self.norm2 = layer_norm()
        self.mlp = MLP(f"{name}.mlp")

    def forward(self, x):
        x = x + self.attention(self.norm1(x))
        return x + self.mlp(self.norm2(x))


def local_ids(ids):
    """Return where ``ids`` are in this rank's shard of the vocabulary, and a mask: True where one is in another's."""
    ids = ids - tp_rank * (VOCABULARY // tp)
    is_elsewhere = (ids < 0) | (ids >= VOCABULARY // tp)
    return ids.masked_fill(is_elsewhere, 0), is_elsewhere


def vocab_parallel_embedding(ids, weight):
    """Look up ``ids`` [batch, seq]. All ranks but one give zeros for an id, so the sum over them is its row."""
    ids, is_elsewhere = local_ids(ids)
    rows = F.embedding(ids, weight).masked_fill(is_elsewhere.unsqueeze(-1), 0)
    return reduce_from_tp(rows)


def vocab_parallel_loss(logits, targets):
    """Return the mean cross-entropy of ``logits`` [batch, seq, vocabulary / tp].

    All-reduces three numbers for each token, and not its logits: their maximum, the sum of their exponentials, and the
    target's.
    """
    highest = logits.detach().amax(-1)
    dist.all_reduce(highest, dist.ReduceOp.MAX, group=tp_group)
    logits = logits - highest.unsqueeze(-1)
    total = reduce_from_tp(logits.exp().sum(-1))
    ids, is_elsewhere = local_ids(targets)
    target = logits.gather(-1, ids.unsqueeze(-1)).squeeze(-1).masked_fill(is_elsewhere, 0)
    return (total.log() - reduce_from_tp(target)).mean()


# ----------------------------------------------------------------------------------------------------------------------
# A pipeline stage: layers / pp blocks, before the first the embedding, after the last the loss.


class Stage(nn.Module):
    def __init__(self):
        super().__init__()
        first = args.layers * pp_rank // pp
        end = args.layers * (pp_rank + 1) // pp
        if is_first:
            self.embedding = parameter("embedding", VOCABULARY, args.hidden, dim=0)
            self.positions = parameter("positions", args.seq, args.hidden)
        self.blocks = nn.Sequential()
        for number in range(first, end):
            self.blocks.append(Block(f"block {number}"))
        if is_last:
            self.norm = layer_norm()
            if is_first and not args.untied:
                self.head = self.embedding
            else:
                self.head = parameter("head" if args.untied else "embedding", VOCABULARY, args.hidden, dim=0)

    def forward(self, x, targets):
        """Return the loss in the last stage; elsewhere, what the next stage gets: [batch, seq, hidden]."""
        if is_first:
            x = vocab_parallel_embedding(x, self.embedding) + self.positions
        x = self.blocks(x)
        if is_last:
            logits = F.linear(copy_to_tp(self.norm(x)), self.head)
            return vocab_parallel_loss(logits, targets)
        return x


# ----------------------------------------------------------------------------------------------------------------------
# Data parallel: gradients are added up in buckets, each as soon as backward has made all of it.


class Bucket:
    """Holds the gradients of some parameters in one tensor, and all-reduces it over the data-parallel group.

    It counts: one contribution for each parameter and micro-batch. When none is missing, all gradients are complete.
    """

    def __init__(self, params):
        self.params = params
        sizes = [param.numel() for param in params]
        self.grads = torch.zeros(sum(sizes), device=device, dtype=dtype)
        for param, grad in zip(params, self.grads.split(sizes)):
            param.grad = grad.view_as(param)  # backward adds to it in place
            param.register_post_accumulate_grad_hook(self.count)

    def start(self):
        """Begin a step."""
        self.grads.zero_()
        self.num_missing = len(self.params) * num_micro_batches

    def count(self, param):
        """Note that backward has added to the gradient of ``param``; send the bucket after the last contribution."""
        self.num_missing -= 1
        if self.num_missing == 0:
            self.work = dist.all_reduce(self.grads, group=dp_group, async_op=True)

    def finish(self):
        """Wait for the sum. It is not divided: forward_backward has divided the loss."""
        self.work.wait()


def make_buckets(params):
    """Put ``params`` into buckets, the last layer's first: about in the order in which backward makes their gradients.

    (Only the head comes late: it is a parameter of the stage itself, and these stand before those of its layers.)
    """
    lists = [[]]
    num_elements = 0
    for param in reversed(params):
        if num_elements >= args.bucket:
            lists.append([])
            num_elements = 0
        lists[-1].append(param)
        num_elements += param.numel()
    return [Bucket(params) for params in lists]


# ----------------------------------------------------------------------------------------------------------------------
# The pipeline: as many forwards as there are stages after this one, then a forward and a backward in turn (1F1B), then
# the backwards that are left.


def one_f_one_b():
    """Return this stage's actions in order: of the last stage but one, with 3 micro-batches, F0 F1 B0 F2 B1 B2."""
    num_warmup = min(pp - 1 - pp_rank, num_micro_batches)
    actions = [("F", index) for index in range(num_warmup)]
    for index in range(num_micro_batches):
        if num_warmup + index < num_micro_batches:
            actions.append(("F", num_warmup + index))
        actions.append(("B", index))
    return actions


def empty_activation():
    return torch.empty(args.micro_batch, args.seq, args.hidden, device=device, dtype=dtype)


def exchange(done, made, to_do):
    """Send what the action ``done`` has ``made``; receive and return what ``to_do`` needs.

    All messages of one call are one batch. With isend and irecv alone, NCCL runs the messages between two ranks in the
    order of their calls: two stages that both send first wait for each other for ever. In a batch the two directions
    start together.
    """
    ops = []
    received = None
    if done == "F" and not is_last:
        ops.append(dist.P2POp(dist.isend, made, next_stage, pp_group))
    if done == "B" and not is_first:
        ops.append(dist.P2POp(dist.isend, made, previous_stage, pp_group))
    if to_do == "F" and not is_first:
        received = empty_activation()
        ops.append(dist.P2POp(dist.irecv, received, previous_stage, pp_group))
    if to_do == "B" and not is_last:
        received = empty_activation()
        ops.append(dist.P2POp(dist.irecv, received, next_stage, pp_group))
    if ops:
        for work in dist.batch_isend_irecv(ops):
            work.wait()
    return received


def forward_backward(inputs, targets):
    """Run one step's micro-batches, [num_micro_batches, micro_batch, seq]; return this rank's part of the mean loss."""
    loss = torch.zeros((), device=device, dtype=dtype)
    in_flight = {}  # what backward needs of each micro-batch: its input and its output
    done = made = None
    for kind, index in one_f_one_b():
        received = exchange(done, made, kind)
        if kind == "F":
            x = inputs[index] if is_first else received.requires_grad_()
            y = stage(x, targets[index])
            if is_last:
                y = y / (num_micro_batches * dp)  # a sum over micro-batches and replicas is then the mean
                loss += y.detach()
            in_flight[index] = x, y
            made = y.detach()
        else:
            x, y = in_flight.pop(index)
            y.backward(received)  # None in the last stage, where y is the loss
            made = x.grad  # None in the first stage, which sends nothing back
        done = kind
    exchange(done, made, None)
    return loss


# ----------------------------------------------------------------------------------------------------------------------
# The optimizer. A rank updates its own shards, so only the norm and a tied embedding need the others.


def add_up_copies():
    """Add up the gradients of the embedding's two copies, so that both remain equal."""
    if has_two_copies and (is_first or is_last):
        copy = stage.embedding if is_first else stage.head
        dist.all_reduce(copy.grad, group=copies_group)


def grad_norm():
    """Return the norm of the whole model's gradient. What several ranks have is counted by one of them."""
    total = torch.zeros((), device=device, dtype=dtype)
    for param in stage.parameters():
        is_copy = has_two_copies and is_last and param is stage.head
        if not is_copy and (tp_rank == 0 or getattr(param, "is_sharded", False)):  # nn.LayerNorm's have no such mark
            total += param.grad.square().sum()
    dist.all_reduce(total, group=tp_group)
    dist.all_reduce(total, group=pp_group)
    return total.sqrt()


def learning_rate(step):
    """Return the rate of ``step``: a linear warm-up, then half a cosine down to zero."""
    if step < args.warmup:
        return args.lr * (step + 1) / args.warmup
    progress = (step - args.warmup) / (args.steps - args.warmup)
    return args.lr * (1 + math.cos(math.pi * progress)) / 2


# ----------------------------------------------------------------------------------------------------------------------
# Training.

text = torch.frombuffer(bytearray(Path(args.text).read_bytes()), dtype=torch.uint8)


def batch(step):
    """Return this replica's inputs and targets, both [num_micro_batches, micro_batch, seq]."""
    generator = torch.Generator().manual_seed(args.seed + step)
    starts = torch.randint(len(text) - args.seq, (args.global_batch, 1), generator=generator)
    rows = text[starts + torch.arange(args.seq + 1)].long().to(device)
    rows = rows.view(num_micro_batches, dp, args.micro_batch, args.seq + 1)[:, dp_rank]
    return rows[..., :-1], rows[..., 1:]


stage = Stage()
buckets = make_buckets(list(stage.parameters()))
optimizer = torch.optim.AdamW(stage.parameters(), betas=(0.9, 0.95), weight_decay=args.weight_decay)


def train_step(step):
    """Train on one batch; return its loss and its gradient's norm, the same on every rank."""
    for bucket in buckets:
        bucket.start()
    loss = forward_backward(*batch(step))
    for bucket in buckets:
        bucket.finish()
    add_up_copies()
    norm = grad_norm()
    clip = (args.clip / (norm + 1e-6)).clamp(max=1)  # 1e-6: as in PyTorch's clip_grad_norm_
    for bucket in buckets:
        bucket.grads.mul_(clip)
    for group in optimizer.param_groups:
        group["lr"] = learning_rate(step)
    optimizer.step()
    dist.all_reduce(loss, group=dp_group)
    dist.all_reduce(loss, group=pp_group)
    return loss.item(), norm.item()


history = []  # loss and norm of each step
for step in range(args.steps):
    start = time.perf_counter()
    loss, norm = train_step(step)
    history.append((loss, norm))
    if rank == 0:
        tokens = args.global_batch * args.seq / (time.perf_counter() - start)
        print(f"step {step:4}  loss {loss:.4f}  norm {norm:.4f}  {tokens:,.0f} tokens/s on {device.type}", flush=True)

if __name__ == "__main__":
    dist.destroy_process_group()
