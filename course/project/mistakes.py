"""Lists what people get wrong in each part: a change to ours that makes the same mistake, and the advice."""

from dataclasses import dataclass

from course.project.parts import ONE_FILE, source_of, steps


@dataclass(frozen=True)
class Change:
    """A part in which ``old`` stands as ``new``."""

    part: str
    old: str
    new: str

    def source(self) -> str:
        """Return our part with the change."""
        right = source_of(ONE_FILE.read_text(), self.part)
        if right.count(self.old) != 1:
            raise ValueError(f"{self.old!r} must stand once in {self.part} of one_file.py")
        return right.replace(self.old, self.new)


@dataclass(frozen=True)
class Mistake(Change):
    """A change that makes a part wrong, and what to say to somebody whose part does the same."""

    advice: str

    @property
    def step(self) -> int:
        return steps()[self.part]


MISTAKES = [
    # -- step 1
    Mistake(
        "rank_lists",
        "tensor = grid.reshape(-1, tp)",
        "tensor = grid.permute(1, 2, 0).reshape(-1, tp)",
        "A tensor group is made of neighbours: the last axis of the grid. Ranks that follow each other share a node.",
    ),
    Mistake(
        "rank_lists",
        "grid.transpose(1, 2).reshape(-1, dp)",
        "grid.reshape(-1, dp)",
        "You cut the ranks in their order into groups of dp. A data-parallel group has the same pp_rank and tp_rank: "
        "bring its axis to the end first (`transpose`), then `reshape`.",
    ),
    Mistake(
        "rank_lists",
        "grid.permute(1, 2, 0).reshape(-1, pp)",
        "grid.reshape(-1, pp)",
        "You cut the ranks in their order into groups of pp. A pipeline has one rank of each stage, and the stage is "
        "the first axis: bring it to the end (`permute`), then `reshape`.",
    ),
    Mistake(
        "rank_lists",
        "return tensor.tolist(), data.tolist(), pipelines.tolist()",
        "return tensor.tolist(), pipelines.tolist(), data.tolist()",
        "The order of the three is tensor, data, pipelines.",
    ),
    Mistake(
        "own_group",
        "        group = dist.new_group(ranks)\n        if rank in ranks:\n            own = group",
        "        if rank in ranks:\n            own = dist.new_group(ranks)",
        "`dist.new_group` is called by every rank of the job, also by those that are not in the group, in the same "
        "order. On gloo it may work without them; torch counts groups to name them, and NCCL can wait for ever.",
    ),
    Mistake(
        "own_group",
        "        if rank in ranks:\n            own = group",
        "        own = group",
        "You returned the last group that was created. Keep the one whose list has this rank.",
    ),
    Mistake(
        "own_group",
        "dist.all_reduce(torch.zeros(1, device=device), group=own)",
        "pass",
        "The first message is missing: an all-reduce among the members. Without it, the first message of a pipeline "
        "goes between two ranks, while NCCL expects all ranks of the group.",
    ),
    # -- step 2
    Mistake(
        "CopyToTp",
        "return all_reduce_tp(grad)",
        "return grad",
        "Backward of f is a sum. Every rank has the gradient of its own shard's use of x, and x needs all of them.",
    ),
    Mistake(
        "CopyToTp",
        "return x.view_as(x)",
        "return all_reduce_tp(x)",
        "Forward of f sends nothing: every rank has x already. The sum is in backward.",
    ),
    Mistake(
        "ReduceFromTp",
        "return grad",
        "return all_reduce_tp(grad)",
        "Backward of g sends nothing. All ranks already have the same gradient of the sum; adding them up makes it tp "
        "times too large.",
    ),
    Mistake(
        "ReduceFromTp",
        "return all_reduce_tp(x)",
        "return x.view_as(x)",
        "Forward of g is the sum: each rank has only a part of it.",
    ),
    Mistake(
        "ReduceFromTp",
        "return grad",
        "return grad / tp",
        "The gradient of a sum is the same for each of its terms: do not divide by tp.",
    ),
    Mistake(
        "all_reduce_tp",
        "x = x.clone(memory_format=torch.contiguous_format)",
        "x = x.detach()",
        "`dist.all_reduce` writes the sum into its argument, and that is x itself, which the caller still needs. Sum a "
        "copy.",
    ),
    Mistake(
        "all_reduce_tp",
        "x = x.clone(memory_format=torch.contiguous_format)",
        "x = x.clone()",
        "A clone of a transposed tensor is transposed, too, and gloo adds such tensors up wrongly: "
        "`clone(memory_format=torch.contiguous_format)`.",
    ),
    Mistake(
        "all_reduce_tp",
        "group=tp_group",
        "group=None",
        "You summed over all ranks of the job. Only those of `tp_group` have a part of this sum.",
    ),
    # -- step 3
    Mistake(
        "ColumnParallelLinear",
        "copy_to_tp(x)",
        "x",
        "x is used by all ranks, each for its own outputs. Without `copy_to_tp` the gradient of x lacks what the other "
        "ranks' outputs send back.",
    ),
    Mistake(
        "ColumnParallelLinear",
        'f"{name}.weight", parts, outputs, inputs, dim=1',
        'f"{name}.weight", parts, outputs, inputs, dim=2',
        "You cut the inputs (the last dim). A column-parallel layer cuts its outputs: dim=1 of [parts, outputs, "
        "inputs].",
    ),
    Mistake(
        "ColumnParallelLinear",
        'self.bias = parameter(f"{name}.bias", parts, outputs, dim=1, std=0)',
        'self.bias = parameter(f"{name}.bias", parts, outputs // tp, std=0)',
        "The bias belongs to the outputs, which differ from rank to rank. It needs dim=1 as the weight does, or it "
        "counts as one that all ranks share.",
    ),
    Mistake(
        "RowParallelLinear",
        "return reduce_from_tp(F.linear(x, self.weight)) + self.bias",
        "return reduce_from_tp(F.linear(x, self.weight, self.bias))",
        "The bias went into the sum, so it is added tp times. Add it after `reduce_from_tp`.",
    ),
    Mistake(
        "RowParallelLinear",
        "return reduce_from_tp(F.linear(x, self.weight)) + self.bias",
        "return F.linear(x, self.weight) + self.bias",
        "Each rank has only its inputs' part of the product: add the parts up with `reduce_from_tp`.",
    ),
    Mistake(
        "RowParallelLinear",
        "outputs, inputs, dim=1",
        "outputs, inputs, dim=0",
        "You cut the outputs (the first dim). A row-parallel layer cuts its inputs: dim=1 of [outputs, inputs].",
    ),
    Mistake(
        "Attention",
        "qkv.permute(2, 0, 3, 1, 4)",
        "qkv.permute(2, 0, 1, 3, 4)",
        "The heads and the sequence have changed places: `scaled_dot_product_attention` takes [batch, heads, seq, "
        "head size], and attends along the last dim but one.",
    ),
    Mistake(
        "Attention",
        "is_causal=True",
        "is_causal=False",
        "A token may look only at those before it: is_causal=True.",
    ),
    Mistake(
        "Attention",
        "y.transpose(1, 2).reshape(batch, seq, -1)",
        "y.reshape(batch, seq, -1)",
        "Before you join the heads of a token, bring the sequence before the heads: `transpose(1, 2)`.",
    ),
    Mistake(
        "Attention",
        "q, k, v = qkv.permute(2, 0, 3, 1, 4)  # each [batch, heads / tp, seq, hidden / heads]",
        "q, k, v = (part.reshape(batch, args.heads // tp, seq, -1) for part in qkv.unbind(2))",
        "`reshape` to [batch, heads, seq, head size] cuts the numbers in their order, and mixes tokens. Keep the order "
        "[batch, seq, heads, head size], then swap two dims: `transpose(1, 2)`.",
    ),
    Mistake(
        "Attention",
        "        q, k, v = qkv.permute(2, 0, 3, 1, 4)  # each [batch, heads / tp, seq, hidden / heads]\n"
        "        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)\n"
        "        return self.out(y.transpose(1, 2).reshape(batch, seq, -1))",
        "        q, k, v = (part.reshape(batch, args.heads // tp, seq, -1) for part in qkv.unbind(2))\n"
        "        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)\n"
        "        return self.out(y.reshape(batch, seq, -1))",
        "`reshape` cuts the numbers in their order: it does not swap the heads and the sequence. Use `transpose(1, 2)` "
        "twice, before the attention and after it.",
    ),
    # -- step 4
    Mistake(
        "local_ids",
        "(ids < 0) | (ids >= VOCABULARY // tp)",
        "ids >= VOCABULARY // tp",
        "What is below this rank's first row is elsewhere, too, and has a negative place here. Python's indexing would "
        "take it from the end.",
    ),
    Mistake(
        "local_ids",
        "(ids < 0) | (ids >= VOCABULARY // tp)",
        "(ids < 0) | (ids > VOCABULARY // tp)",
        "The rows here are numbered from 0 to VOCABULARY / tp - 1: `>=`.",
    ),
    Mistake(
        "vocab_parallel_embedding",
        ".masked_fill(is_elsewhere.unsqueeze(-1), 0)",
        "",
        "Rows of ids that lie elsewhere must be zeros, or row 0 of every other rank is added to the sum.",
    ),
    Mistake(
        "vocab_parallel_embedding",
        "return reduce_from_tp(rows)",
        "return rows",
        "Only one rank has the row of an id; the others have zeros. `reduce_from_tp` gives it to all.",
    ),
    Mistake(
        "vocab_parallel_loss",
        "    dist.all_reduce(highest, dist.ReduceOp.MAX, group=tp_group)\n",
        "",
        "Every rank subtracts its own highest logit. The sum of exponentials adds up only if all subtract the same: "
        "all-reduce it with `ReduceOp.MAX`.",
    ),
    Mistake(
        "vocab_parallel_loss",
        "total = reduce_from_tp(logits.exp().sum(-1))",
        "total = logits.exp().sum(-1)",
        "The sum of exponentials runs over the whole vocabulary: `reduce_from_tp` adds up the ranks' parts.",
    ),
    Mistake(
        "vocab_parallel_loss",
        "reduce_from_tp(target)",
        "target",
        "Only one rank has the logit of a target. Without `reduce_from_tp` the others take it for 0.",
    ),
    Mistake(
        "vocab_parallel_loss",
        ".mean()",
        ".sum()",
        "The loss is the mean over the tokens.",
    ),
    Mistake(
        "vocab_parallel_embedding",
        "return reduce_from_tp(rows)",
        "return copy_to_tp(reduce_from_tp(rows))",
        "The gradient is tp times too large: backward sums over the ranks once more, as that of "
        "`dist.nn.functional.all_reduce` does. `reduce_from_tp` sums forward only.",
    ),
    Mistake(
        "vocab_parallel_loss",
        "    total = reduce_from_tp(logits.exp().sum(-1))\n"
        "    ids, is_elsewhere = local_ids(targets)\n"
        "    target = logits.gather(-1, ids.unsqueeze(-1)).squeeze(-1).masked_fill(is_elsewhere, 0)\n"
        "    return (total.log() - reduce_from_tp(target)).mean()",
        "    total = copy_to_tp(reduce_from_tp(logits.exp().sum(-1)))\n"
        "    ids, is_elsewhere = local_ids(targets)\n"
        "    target = logits.gather(-1, ids.unsqueeze(-1)).squeeze(-1).masked_fill(is_elsewhere, 0)\n"
        "    return (total.log() - copy_to_tp(reduce_from_tp(target))).mean()",
        "The loss is right, and its gradient tp times too large: backward sums over the ranks, too. Every rank has the "
        "same loss already. `dist.nn.functional.all_reduce` has such a backward; `reduce_from_tp` has not.",
    ),
    # -- step 5
    Mistake(
        "Bucket",
        "len(self.params) * num_micro_batches",
        "len(self.params)",
        "The bucket left after the first micro-batch. Every parameter contributes once in each micro-batch, so "
        "len(params) * num_micro_batches contributions are missing at the start.",
    ),
    Mistake(
        "Bucket",
        "        self.grads.zero_()\n",
        "",
        "The gradients of the step before are still there: `start` sets the bucket to zeros.",
    ),
    Mistake(
        "Bucket",
        "group=dp_group, async_op=True)",
        "group=dp_group, op=dist.ReduceOp.MAX, async_op=True)",
        "Gradients of replicas are added up.",
    ),
    Mistake(
        "Bucket",
        "param.grad = grad.view_as(param)",
        "param.grad = grad.view_as(param).clone()",
        "`param.grad` must be a view of the bucket. A copy keeps the gradient, and the bucket sends zeros.",
    ),
    Mistake(
        "Bucket",
        "self.work = dist.all_reduce(self.grads, group=dp_group, async_op=True)",
        "self.grads /= dp\n            self.work = dist.all_reduce(self.grads, group=dp_group, async_op=True)",
        "You divided by dp. Here the loss is divided already (step 6), so a bucket only adds up.",
    ),
    Mistake(
        "Bucket",
        "self.work = dist.all_reduce(self.grads, group=dp_group, async_op=True)",
        "self.work = dist.all_reduce(self.grads, group=dp_group, async_op=True)\n            self.work.wait()",
        "The sum is right, but backward stands still until it has come. Start the all-reduce in `count` with "
        "async_op=True, keep the handle that it returns, and call its `wait()` in `finish`.",
    ),
    Mistake(
        "make_buckets",
        "for param in reversed(params):",
        "for param in params:",
        "Backward begins with the last layer. Put the last parameters into the first bucket, or all buckets wait for "
        "the first layer.",
    ),
    # -- step 6
    Mistake(
        "one_f_one_b",
        "min(pp - 1 - pp_rank, num_micro_batches)",
        "min(pp - pp_rank, num_micro_batches)",
        "One forward too many at the start: the last stage begins with F0 B0, and each stage before it has one more.",
    ),
    Mistake(
        "one_f_one_b",
        "min(pp - 1 - pp_rank, num_micro_batches)",
        "min(pp_rank, num_micro_batches)",
        "It is the first stage that does most forwards ahead: as many as stages follow it.",
    ),
    Mistake(
        "one_f_one_b",
        "min(pp - 1 - pp_rank, num_micro_batches)",
        "num_micro_batches",
        "This is GPipe: all forwards, then all backwards. 1F1B does only as many ahead as stages follow.",
    ),
    Mistake(
        "exchange",
        "        for work in dist.batch_isend_irecv(ops):\n            work.wait()",
        "        for op in ops:\n            op.op(op.tensor, op.peer, group=op.group).wait()",
        "The messages go one by one. On NCCL two stages that both send first wait for each other for ever: put all "
        "messages of a call into one `batch_isend_irecv`.",
    ),
    Mistake(
        "forward_backward",
        "y = y / (num_micro_batches * dp)",
        "y = y / num_micro_batches",
        "The gradients of dp replicas are added up, so a micro-batch counts 1 / (num_micro_batches * dp).",
    ),
    Mistake(
        "forward_backward",
        "y = y / (num_micro_batches * dp)",
        "pass",
        "The gradients of all micro-batches are added up, so each counts 1 / (num_micro_batches * dp).",
    ),
    Mistake(
        "forward_backward",
        "received.requires_grad_()",
        "received",
        "What is received is a new tensor, and autograd does not follow it. Without `requires_grad_()` the stage "
        "before gets no gradient.",
    ),
    Mistake(
        "forward_backward",
        "    exchange(done, made, None)\n",
        "",
        "A rank that has returned owes a message: what its last action has made. Call `exchange` once more after the "
        "loop. If you do, look whether `exchange` also sends after a backward.",
    ),
    Mistake(
        "forward_backward",
        "loss += y.detach()",
        "loss = y.detach()",
        "You returned the last micro-batch's share of the loss. Add them up.",
    ),
    Mistake(
        "forward_backward",
        "in_flight.pop(index)",
        "in_flight.popitem()[1]",
        'A backward took the micro-batch that came last. ("B", 0) belongs to ("F", 0), the oldest: keep x '
        "and y of each micro-batch under its number.",
    ),
    # -- step 7
    Mistake(
        "add_up_copies",
        "dist.all_reduce(copy.grad, group=copies_group)",
        "pass",
        "The two copies of a tied embedding get different gradients, so they drift apart: add them up.",
    ),
    Mistake(
        "grad_norm",
        'not is_copy and (tp_rank == 0 or getattr(param, "is_sharded", False))',
        'tp_rank == 0 or getattr(param, "is_sharded", False)',
        "The tied embedding is counted twice: on the first and on the last stage.",
    ),
    Mistake(
        "grad_norm",
        'not is_copy and (tp_rank == 0 or getattr(param, "is_sharded", False))',
        "not is_copy",
        "Parameters that all tensor ranks share (norms, biases of row-parallel layers) are counted tp times.",
    ),
    Mistake(
        "grad_norm",
        'not is_copy and (tp_rank == 0 or getattr(param, "is_sharded", False))',
        "not is_copy and tp_rank == 0",
        "The shards of the other tensor ranks are not counted.",
    ),
    Mistake(
        "grad_norm",
        "    dist.all_reduce(total, group=pp_group)\n",
        "",
        "The other stages' parameters are not in it: sum over `pp_group`, too.",
    ),
    Mistake(
        "grad_norm",
        "    dist.all_reduce(total, group=pp_group)\n    return total.sqrt()",
        "    total = total.sqrt()\n    dist.all_reduce(total, group=pp_group)\n    return total",
        "The root comes last: norms do not add up, their squares do.",
    ),
    Mistake(
        "grad_norm",
        "is_copy = has_two_copies and is_last and param is stage.head",
        "is_copy = not args.untied and is_last and param is stage.head",
        "With pp = 1 there is only one copy of a tied embedding, and you left it out. Leave out the last stage's only "
        "where `has_two_copies`.",
    ),
    Mistake(
        "grad_norm",
        "is_copy = has_two_copies and is_last and param is stage.head",
        "is_copy = pp > 1 and is_last and param is stage.head",
        "With --untied 1 the head is a weight of its own, and no other stage counts it. Leave it out only where "
        "`has_two_copies`.",
    ),
    Mistake(
        "train_step",
        "    add_up_copies()\n    norm = grad_norm()",
        "    norm = grad_norm()\n    add_up_copies()",
        "The norm is computed before the embedding's copies are added up.",
    ),
    Mistake(
        "train_step",
        "        bucket.grads.mul_(clip)",
        "        pass",
        "The gradients are not clipped.",
    ),
    Mistake(
        "train_step",
        "    dist.all_reduce(loss, group=pp_group)\n",
        "",
        "Only the last stage knows the loss: sum it over `pp_group`, where the others have 0.",
    ),
    Mistake(
        "train_step",
        ".clamp(max=1)",
        "",
        "Clipping never makes a gradient larger: where the norm is below args.clip, the factor is 1. `clamp(max=1)`.",
    ),
    Mistake(
        "train_step",
        "    for bucket in buckets:\n        bucket.grads.mul_(clip)",
        "    nn.utils.clip_grad_norm_(stage.parameters(), args.clip)",
        "The norm is right, and the gradients are not scaled by it: `clip_grad_norm_` takes the norm of this rank's "
        "gradients alone. Multiply all by args.clip / (norm + 1e-6), at most 1, with the norm of the whole model.",
    ),
    Mistake(
        "train_step",
        '    for group in optimizer.param_groups:\n        group["lr"] = learning_rate(step)\n    optimizer.step()',
        '    optimizer.step()\n    for group in optimizer.param_groups:\n        group["lr"] = learning_rate(step)',
        "The learning rate is set after `optimizer.step()`, so each step takes that of the step before. Set it first.",
    ),
]
