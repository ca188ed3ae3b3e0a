"""Solutions of the four ways on: changes to one_file.py, to show that each test can pass."""

from course.project.parts import ONE_FILE, replaced

SEQUENCE_PARTS = {
    "CopyToTp": """
class CopyToTp(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return gather_tokens(x)

    @staticmethod
    def backward(ctx, grad):
        return scatter_tokens(grad)


class ScatterToTp(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return scatter_tokens(x)

    @staticmethod
    def backward(ctx, grad):
        return gather_tokens(grad)


def gather_tokens(x):
    if not args.sequence_parallel:
        return x.view_as(x)
    x = x.transpose(0, 1).contiguous()
    whole = x.new_empty(tp * x.shape[0], *x.shape[1:])
    dist.all_gather_into_tensor(whole, x, group=tp_group)
    return whole.transpose(0, 1).contiguous()


def scatter_tokens(x):
    if not args.sequence_parallel:
        return all_reduce_tp(x)
    x = x.transpose(0, 1).contiguous()
    shard = x.new_empty(x.shape[0] // tp, *x.shape[1:])
    dist.reduce_scatter_tensor(shard, x, group=tp_group)
    return shard.transpose(0, 1).contiguous()
""",
    "RowParallelLinear": """
class RowParallelLinear(nn.Module):
    def __init__(self, name, inputs, outputs):
        super().__init__()
        self.weight = parameter(f"{name}.weight", outputs, inputs, dim=1)
        self.bias = parameter(f"{name}.bias", outputs, std=0)

    def forward(self, x):
        return ScatterToTp.apply(F.linear(x, self.weight)) + self.bias
""",
}
SEQUENCE_LINES = [
    ('"tp": 1,', '"tp": 1,\n    "sequence_parallel": 0,'),
    ("batch, seq, _ = x.shape", "batch, seq = len(x), args.seq"),
    ("return reduce_from_tp(rows)", "return ScatterToTp.apply(rows)"),
    ("self.embedding) + self.positions", "self.embedding) + self.own_positions()"),
    (
        "    def forward(self, x, targets):",
        "    def own_positions(self):\n"
        "        return self.positions.chunk(tp)[tp_rank] if args.sequence_parallel else self.positions\n\n"
        "    def forward(self, x, targets):",
    ),
    (
        "torch.empty(args.micro_batch, args.seq, args.hidden",
        "torch.empty(args.micro_batch, args.seq // (tp if args.sequence_parallel else 1), args.hidden",
    ),
    (
        "    add_up_copies()\n    norm",
        "    for param in stage.parameters():\n"
        '        if args.sequence_parallel and not getattr(param, "is_sharded", False):\n'
        "            dist.all_reduce(param.grad, group=tp_group)\n"
        "    add_up_copies()\n    norm",
    ),
]
ZERO_LINES = [
    ('"tp": 1,', '"tp": 1,\n    "zero": 0,'),
    (
        "optimizer = torch.optim.AdamW(stage.parameters(),",
        "owners = {}\n"
        "loads = [0] * dp\n"
        "for param in sorted(stage.parameters(), key=torch.Tensor.numel, reverse=True):\n"
        "    owners[param] = loads.index(min(loads))\n"
        "    loads[owners[param]] += param.numel()\n"
        "own = [param for param in stage.parameters() if not args.zero or owners[param] == dp_rank]\n"
        "optimizer = torch.optim.AdamW(own,",
    ),
    (
        "    optimizer.step()\n",
        "    optimizer.step()\n"
        "    for param in stage.parameters() if args.zero else ():\n"
        "        dist.broadcast(param.data, group_src=owners[param], group=dp_group)\n",
    ),
]
INTERLEAVING_PARTS = {
    "one_f_one_b": """
def one_f_one_b():
    total = num_micro_batches * args.chunks
    num_ahead = min(2 * (pp - pp_rank - 1) + (args.chunks - 1) * pp, total)
    forwards = [("F", *place(index, False)) for index in range(total)]
    backwards = [("B", *place(index, True)) for index in range(total)]
    actions = forwards[:num_ahead]
    for index, backward in enumerate(backwards):
        actions += forwards[num_ahead + index : num_ahead + index + 1]
        actions.append(backward)
    return actions


def place(index, is_backward):
    chunk = index // pp % args.chunks
    if is_backward:
        chunk = args.chunks - 1 - chunk
    return chunk, index // (pp * args.chunks) * pp + index % pp
""",
    "forward_backward": """
def forward_backward(inputs, targets):
    loss = torch.zeros((), device=device, dtype=dtype)
    in_flight = {}
    sent = []
    ranks = dist.get_process_group_ranks(pp_group)
    before, after = ranks[(pp_rank - 1) % pp], ranks[(pp_rank + 1) % pp]

    def received(kind, number, index, peer):
        x = empty_activation()
        dist.recv(x, peer, tag=2 * (number * num_micro_batches + index) + (kind == "B"))
        return x

    def send(kind, number, index, peer, x):
        tag = 2 * (number * num_micro_batches + index) + (kind == "B")
        sent.append((dist.isend(x.contiguous(), peer, tag=tag), x))

    for kind, chunk, index in one_f_one_b():
        number = chunk * pp + pp_rank
        is_end = number == pp * args.chunks - 1
        if kind == "F":
            x = received("F", number, index, before).requires_grad_() if number else inputs[index]
            y = stages[chunk](x, targets[index])
            if is_end:
                y = y / (num_micro_batches * dp)
                loss += y.detach()
            else:
                send("F", number + 1, index, after, y.detach())
            in_flight[chunk, index] = x, y
        else:
            x, y = in_flight.pop((chunk, index))
            y.backward(None if is_end else received("B", number, index, after))
            if number:
                send("B", number - 1, index, before, x.grad)
    for work, _ in sent:
        work.wait()
    return loss
""",
}
INTERLEAVING_LINES = [
    ('"tp": 1,', '"tp": 1,\n    "chunks": 1,'),
    (
        "    def __init__(self):\n        super().__init__()\n        first",
        "    def __init__(self, number):\n"
        "        super().__init__()\n"
        "        self.is_first, self.is_last = number == 0, number == pp * args.chunks - 1\n"
        "        first",
    ),
    ("args.layers * pp_rank // pp\n", "args.layers * number // (pp * args.chunks)\n"),
    ("args.layers * (pp_rank + 1) // pp\n", "args.layers * (number + 1) // (pp * args.chunks)\n"),
    ("        if is_first:\n            self.embedding", "        if self.is_first:\n            self.embedding"),
    ("        if is_last:\n            self.norm", "        if self.is_last:\n            self.norm"),
    ("            if is_first and not args.untied", "            if self.is_first and not args.untied"),
    ("        if is_first:\n            x = vocab", "        if self.is_first:\n            x = vocab"),
    ("        if is_last:\n            logits", "        if self.is_last:\n            logits"),
    (
        "copy = stage.embedding if is_first else stage.head",
        "copy = stages[0].embedding if is_first else stages[-1].head",
    ),
    ("param is stage.head", "param is stages[-1].head"),
    (
        "stage = Stage()",
        "stages = [Stage(chunk * pp + pp_rank) for chunk in range(args.chunks)]\nstage = nn.ModuleList(stages)",
    ),
]
EXPERTS_PARTS = {
    "Block": '''
class Exchange(torch.autograd.Function):
    """Sends rows to the ranks of the data-parallel group, and in backward their gradients back."""

    @staticmethod
    def forward(ctx, rows, sent, received):
        ctx.sizes = received, sent
        result = rows.new_empty(sum(received), rows.shape[1])
        dist.all_to_all_single(result, rows.contiguous(), received, sent, group=dp_group)
        return result

    @staticmethod
    def backward(ctx, grad):
        return Exchange.apply(grad, *ctx.sizes), None, None


class Experts(nn.Module):
    def __init__(self, name):
        super().__init__()
        self.router = parameter(f"{name}.router", args.experts, args.hidden)
        self.num_local = args.experts // dp
        numbers = range(dp_rank * self.num_local, (dp_rank + 1) * self.num_local)
        self.experts = nn.ModuleList(MLP(f"{name}.expert {number}") for number in numbers)
        for param in self.experts.parameters():
            param.is_of_expert = True

    def forward(self, x):
        rows = x.flatten(0, 1)
        weights, chosen = F.linear(rows, self.router).softmax(-1).max(-1)
        order = chosen.argsort(stable=True)
        counts = torch.bincount(chosen, minlength=args.experts)
        their_counts = torch.empty_like(counts)
        dist.all_to_all_single(their_counts, counts, group=dp_group)
        sent = counts.view(dp, -1).sum(1).tolist()
        received = their_counts.view(dp, -1).sum(1).tolist()
        arrived = Exchange.apply(rows[order], sent, received)
        expert_of = torch.arange(self.num_local).repeat(dp).repeat_interleave(their_counts)
        done = torch.zeros_like(arrived)
        for number, expert in enumerate(self.experts):
            own = (expert_of == number).nonzero().flatten()
            done = done.index_add(0, own, expert(arrived[own]))
        back = Exchange.apply(done, received, sent)
        y = torch.empty_like(rows).index_copy(0, order, back)
        return (y * weights.unsqueeze(-1)).view_as(x)


class Block(nn.Module):
    def __init__(self, name):
        super().__init__()
        self.norm1 = layer_norm()
        self.attention = Attention(f"{name}.attention")
        self.norm2 = layer_norm()
        self.mlp = Experts(name) if args.experts else MLP(f"{name}.mlp")

    def forward(self, x):
        x = x + self.attention(self.norm1(x))
        return x + self.mlp(self.norm2(x))
''',
    "make_buckets": """
class LocalBucket(Bucket):
    def count(self, param):
        pass

    def finish(self):
        pass


def make_buckets(params):
    experts = [param for param in params if hasattr(param, "is_of_expert")]
    others = [param for param in params if not hasattr(param, "is_of_expert")]
    return [Bucket(others), *([LocalBucket(experts)] if experts else [])]
""",
    "grad_norm": """
def grad_norm():
    total = torch.zeros(2, device=device, dtype=dtype)
    for param in stage.parameters():
        is_copy = has_two_copies and is_last and param is stage.head
        if not is_copy and (tp_rank == 0 or getattr(param, "is_sharded", False)):
            total[int(hasattr(param, "is_of_expert"))] += param.grad.square().sum()
    dist.all_reduce(total[1], group=dp_group)
    total = total.sum()
    dist.all_reduce(total, group=tp_group)
    dist.all_reduce(total, group=pp_group)
    return total.sqrt()
""",
}
EXPERTS_LINES = [('"tp": 1,', '"tp": 1,\n    "experts": 0,')]
TAKEN = {
    "sequence_parallel": (SEQUENCE_PARTS, SEQUENCE_LINES),
    "zero_1": ({}, ZERO_LINES),
    "interleaving": (INTERLEAVING_PARTS, INTERLEAVING_LINES),
    "experts": (EXPERTS_PARTS, EXPERTS_LINES),
}


def taken(way):
    """Return our file with a way on."""
    parts, lines = TAKEN[way]
    return changed(replaced(ONE_FILE.read_text(), {name: text.strip() for name, text in parts.items()}), lines)


def changed(source, lines):
    """Return a file with some of its text replaced; each must stand there once."""
    for old, new in lines:
        assert source.count(old) == 1, (source.count(old), old)
        source = source.replace(old, new)
    return source
