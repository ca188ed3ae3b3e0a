"""Faults of the bug museum (notebook 08), and two of the model itself, as they would stand in a my_megatron.py.

Each is planted into a learner's file: the part becomes ours with the fault. `parameter` and `batch` are given parts.
"""

from course.project.mistakes import Change

FAULTS = {
    "row bias added t times": Change(
        "RowParallelLinear",
        "return reduce_from_tp(F.linear(x, self.weight)) + self.bias",
        "return reduce_from_tp(F.linear(x, self.weight, self.bias))",
    ),
    "missing backward all-reduce": Change("ColumnParallelLinear", "copy_to_tp(x)", "x"),
    "shards with one seed": Change("parameter", "full.chunk(tp, dim)[tp_rank]", "full.chunk(tp, dim)[0]"),
    "micro-batch losses not averaged": Change("forward_backward", "y = y / (num_micro_batches * dp)", "pass"),
    "tied embedding not reduced": Change("add_up_copies", "dist.all_reduce(copy.grad, group=copies_group)", "pass"),
    "batch split along the wrong axis": Change("batch", "[:, dp_rank]", "[:, rank % dp]"),
    "gradient norm counted per stage": Change("grad_norm", "    dist.all_reduce(total, group=pp_group)\n", ""),
    "replicated parameters counted twice": Change(
        "grad_norm", '(tp_rank == 0 or getattr(param, "is_sharded", False))', "True"
    ),
    "both directions in one queue": Change(
        "exchange",
        "        for work in dist.batch_isend_irecv(ops):\n            work.wait()",
        "        works = [op.op(op.tensor, op.peer, group=op.group) for op in ops]\n"
        "        for work in works:\n            work.wait()",
    ),
    "attention looks ahead": Change("Attention", "is_causal=True", "is_causal=False"),
    "gradients not clipped": Change("train_step", "bucket.grads.mul_(clip)", "pass"),
}
"""The faults by name. All but the last two have the names that the museum gives them."""
