"""The parts of a Megatron that a learner writes, as typed stubs: each says what it gets, returns and sends.

They go into my_megatron.py in place of one_file.py's own (`course.project.parts`). They can use whatever stands there
before them, such as ``rank``, ``tp``, ``tp_rank`` and ``tp_group``.
"""

import torch
import torch.distributed as dist
from torch import nn

# -- step 1: groups


def rank_lists() -> tuple[list[list[int]], list[list[int]], list[list[int]]]:
    """Return three lists of lists of ranks: all tensor groups, all data-parallel groups, all pipelines.

    The ranks lie in a grid [pp, dp, tp], the last axis fastest. With 8 ranks, tp = 2 and pp = 2, the first tensor group
    is [0, 1], the first data-parallel group [0, 2] and the first pipeline [0, 4]. Each list is sorted by first ranks.
    """
    raise NotImplementedError("step 1: rank_lists")


def own_group(lists: list[list[int]]) -> dist.ProcessGroup | None:
    """Create a group of each list of ranks, and return the one that this rank is in, or None.

    Every rank calls `dist.new_group` for all lists, in the same order. Then the members all-reduce one zero on
    ``device``: NCCL expects all ranks of a group at its first message.
    """
    raise NotImplementedError("step 1: own_group")


# -- step 2: f and g


class CopyToTp(torch.autograd.Function):
    """f: every rank has the same x. Each uses it with its own shard, so the gradients are parts of a sum."""

    @staticmethod
    def forward(ctx, x: torch.Tensor) -> torch.Tensor:
        raise NotImplementedError("step 2: CopyToTp")

    @staticmethod
    def backward(ctx, grad: torch.Tensor) -> torch.Tensor:
        raise NotImplementedError("step 2: CopyToTp")


class ReduceFromTp(torch.autograd.Function):
    """g: every rank has a part of a sum. All get the sum, and its gradient is that of each part."""

    @staticmethod
    def forward(ctx, x: torch.Tensor) -> torch.Tensor:
        raise NotImplementedError("step 2: ReduceFromTp")

    @staticmethod
    def backward(ctx, grad: torch.Tensor) -> torch.Tensor:
        raise NotImplementedError("step 2: ReduceFromTp")


def all_reduce_tp(x: torch.Tensor) -> torch.Tensor:
    """Return the sum of x over ``tp_group``; x itself stays as it is, and need not be contiguous."""
    raise NotImplementedError("step 2: all_reduce_tp")


# -- step 3: the pair, then attention


class ColumnParallelLinear(nn.Module):
    """Holds some of the outputs: x [.., inputs] is the same on all ranks, y [.., parts * outputs / tp] is not.

    ``weight``: [parts, outputs / tp, inputs], ``bias``: [parts, outputs / tp], both from `parameter`, which takes
    the whole shape and the ``dim`` to cut. Their names are f"{name}.weight" and f"{name}.bias"; the bias starts at 0.
    ``outputs`` counts for one part: there are parts * outputs in all, and each part is cut by itself.
    """

    def __init__(self, name: str, inputs: int, outputs: int, parts: int = 1):
        super().__init__()
        raise NotImplementedError("step 3: ColumnParallelLinear")

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        raise NotImplementedError("step 3: ColumnParallelLinear")


class RowParallelLinear(nn.Module):
    """Holds the weights of some inputs: x [.., inputs / tp] is this rank's, y [.., outputs] is the same on all.

    ``weight``: [outputs, inputs / tp], ``bias``: [outputs], both from `parameter`, with names as above; the bias starts
    at 0, and is added once.
    """

    def __init__(self, name: str, inputs: int, outputs: int):
        super().__init__()
        raise NotImplementedError("step 3: RowParallelLinear")

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        raise NotImplementedError("step 3: RowParallelLinear")


class Attention(nn.Module):
    """Causal attention: each rank has heads / tp of the heads.

    ``qkv`` is a column-parallel layer of three parts (query, key, value), ``out`` a row-parallel one, with the names
    f"{name}.qkv" and f"{name}.out". The features of head 0 come first, then those of head 1, and so on.
    """

    def __init__(self, name: str):
        super().__init__()
        raise NotImplementedError("step 3: Attention")

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x, and what is returned: [batch, seq, hidden], the same on all ranks."""
        raise NotImplementedError("step 3: Attention")


# -- step 4: vocabulary and loss


def local_ids(ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return where ``ids`` are in this rank's shard of the vocabulary, and a mask: True where one is in another's.

    Rank i holds the rows from i * VOCABULARY / tp on. What is in another shard becomes row 0.
    """
    raise NotImplementedError("step 4: local_ids")


def vocab_parallel_embedding(ids: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Return the rows of ``ids`` [batch, seq], the same on all ranks; ``weight``: [VOCABULARY / tp, hidden]."""
    raise NotImplementedError("step 4: vocab_parallel_embedding")


def vocab_parallel_loss(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Return the mean cross-entropy of ``logits`` [batch, seq, VOCABULARY / tp], without gathering them.

    ``targets``: [batch, seq]. It must not overflow: subtract the highest logit of all ranks first, which needs no
    gradient. Three numbers for each token are sent: the highest logit, the sum of exponentials, the target's logit.
    """
    raise NotImplementedError("step 4: vocab_parallel_loss")


# -- step 5: data parallel


class Bucket:
    """Holds the gradients of some parameters in one tensor, ``grads``, and all-reduces it over ``dp_group``.

    Each ``param.grad`` is a view of ``grads``. A hook (`register_post_accumulate_grad_hook`) calls `count`. The
    all-reduce is a plain sum: `forward_backward` has divided the loss.
    """

    def __init__(self, params: list[nn.Parameter]):
        raise NotImplementedError("step 5: Bucket")

    def start(self) -> None:
        """Begin a step: zeros, and ``num_micro_batches`` contributions of each parameter are missing."""
        raise NotImplementedError("step 5: Bucket")

    def count(self, param: nn.Parameter) -> None:
        """Note one contribution. With the last one, start the all-reduce; do not wait for it."""
        raise NotImplementedError("step 5: Bucket")

    def finish(self) -> None:
        """Wait for the sum."""
        raise NotImplementedError("step 5: Bucket")


def make_buckets(params: list[nn.Parameter]) -> "list[Bucket]":
    """Put ``params`` into buckets, the last one first; a bucket ends when it has ``args.bucket`` elements or more."""
    raise NotImplementedError("step 5: make_buckets")


# -- step 6: pipeline


def one_f_one_b() -> list[tuple[str, int]]:
    """Return this stage's actions in order: ("F", 0) is the forward of micro-batch 0, ("B", 0) its backward.

    First a forward for each stage that follows (but not more than there are micro-batches), then a forward and a
    backward in turn.
    """
    raise NotImplementedError("step 6: one_f_one_b")


def exchange(done: str | None, made: torch.Tensor | None, to_do: str | None) -> torch.Tensor | None:
    """Send what the action ``done`` has ``made``; receive and return what ``to_do`` needs.

    Both are "F", "B" or None. A forward sends to ``next_stage``, a backward to ``previous_stage``, if there is one.
    All messages of a call go into one `dist.batch_isend_irecv` of `dist.P2POp(way, tensor, peer, pp_group)`, where
    ``peer`` is a global rank, as ``next_stage`` is; wait for all. `empty_activation` makes what is received into.
    Return None if nothing is received.
    """
    raise NotImplementedError("step 6: exchange")


def forward_backward(inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Run all actions of a step, with an `exchange` before each and one after the last.

    ``inputs``, ``targets``: [num_micro_batches, micro_batch, seq]. ``stage(x, targets[i])`` is the loss in the last
    stage, and counts there 1 / (num_micro_batches * dp): a sum over micro-batches and replicas is then the mean. A
    received x needs `requires_grad_()`; its ``grad`` is what a backward has made. Return the sum of this rank's
    losses, divided in the same way, a tensor on ``device``: 0 in the other stages.
    """
    raise NotImplementedError("step 6: forward_backward")


# -- step 7: put together


def add_up_copies() -> None:
    """Add up the gradients of the embedding's two copies over ``copies_group``, if ``has_two_copies``.

    They are ``stage.embedding`` in the first stage, and ``stage.head`` in the last.
    """
    raise NotImplementedError("step 7: add_up_copies")


def grad_norm() -> torch.Tensor:
    """Return the norm of the whole model's gradient, the same on all ranks.

    Count every number once: of a parameter that is not sharded all tensor ranks have the same gradient, and of a tied
    embedding the first and the last stage (with pp = 1 there is only one copy of it). Sharded ones have ``is_sharded``;
    those of nn.LayerNorm have no such mark: ask by `getattr`. Then sum over ``tp_group`` and ``pp_group``.
    """
    raise NotImplementedError("step 7: grad_norm")


def train_step(step: int) -> tuple[float, float]:
    """Train on `batch(step)`; return the loss over the whole batch and the gradient's norm, the same on every rank.

    In order: start all buckets; `forward_backward`; finish all buckets; copies; norm; clip all gradients to
    ``args.clip`` (as `clip_grad_norm_` does); `learning_rate`; the optimizer; sums of the loss over ``dp_group`` and
    ``pp_group``. No `zero_grad`: it would take the gradients out of their buckets.
    """
    raise NotImplementedError("step 7: train_step")
