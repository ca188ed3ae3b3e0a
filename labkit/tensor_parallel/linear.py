"""Divides linear layers among the ranks of a tensor-parallel group, by their outputs or by their
inputs.

Y = X A + b with A: [in, out]. PyTorch stores the transpose, [out, in]: columns of A are rows of the
weight.
Source: arXiv 1909.08053, section 3; argument names as in Megatron-LM, where ``gather_output`` is
False by default.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from labkit.autograd import first_derivative_only, refuse_autocast
from labkit.partition import check_divides
from labkit.placement import Placement
from labkit.sizes import check_size
from labkit.tensor_parallel.operators import (
    SEQUENCE_DIM,
    copy_to_tp,
    gather_from_sequence,
    gather_from_tp,
    reduce_from_tp,
    reduce_scatter_to_sequence,
    scatter_to_tp,
    start_all_gather,
    start_reduce_scatter,
)
from labkit.tensor_parallel.shards import ShardedWeight, transpose_chunks


class ParallelLinear(ShardedWeight):
    """The base class of both layers: this rank's shard of the weight, and a bias with one number
    for each row of that shard. The subclasses say what is sent, and when.
    """

    partition_dim: int  # of the weight [out, in]: 0 divides the outputs, 1 the inputs

    def __init__(
        self,
        input_size: int,
        output_size: int,
        group: dist.ProcessGroup,
        *,
        bias: bool = True,
        init_method: Callable[[torch.Tensor], object] = nn.init.xavier_normal_,
        stride: int = 1,  # how many matrices are stacked in the weight, as Q, K and V
        skip_bias_add: bool = False,
        sequence_parallel: bool = False,
        defer_grad_reduce: bool = False,
        **options,  # of ShardedWeight: keep_master_weight_for_test, dtype, device
    ):
        output_size = check_size("output_size", output_size)
        input_size = check_size("input_size", input_size)
        if self.partition_dim == 0:
            check_divides(group.size(), "output_size", output_size, stride)
        else:
            check_divides(group.size(), "input_size", input_size, stride)
        sizes = (output_size, input_size)
        super().__init__(sizes, self.partition_dim, group, init_method, stride, **options)
        self.output_size = output_size
        self.input_size = input_size
        self.skip_bias_add = skip_bias_add
        self.sequence_parallel = sequence_parallel
        # Without sequence_parallel no gradient is partial.
        self.defer_grad_reduce = defer_grad_reduce and sequence_parallel
        self.bias = nn.Parameter(torch.empty_like(self.weight[:, 0])) if bias else None
        if bias:
            # For data parallelism, the gradient norm and checkpoints (labkit.placement): the bias
            # is cut like the weight's rows, or whole on each rank.
            replicated = Placement(copy_groups=(group,), defer_grad_reduce=self.defer_grad_reduce)
            like_weight = self.placements["weight"]
            self.placements["bias"] = like_weight if self.partition_dim == 0 else replicated
        self.reset_parameters()

    def reset_parameters(self) -> None:
        super().reset_parameters()
        if self.bias is not None:
            nn.init.zeros_(self.bias)


class ColumnParallelLinear(ParallelLinear):
    """A linear layer whose outputs are divided among the ranks; weight [out/t, in], bias [out/t].

        X [ A_1 | A_2 ]  =  [ X A_1 | X A_2 ]  =  [ Y_1 | Y_2 ]          rank i computes Y_i = X A_i

    Communication in a group of t ranks, if x [..., in] of the whole sequence has n bytes:

    - forward: with ``gather_output``, the default, the outputs are all-gathered: of m bytes in all,
      each rank sends (t - 1)/t m. Without it nothing is sent.
    - backward: the gradients of x are all-reduced while the rank computes that of its weight; each
      rank sends 2 (t - 1)/t n.
    - with ``sequence_parallel``: forward all-gathers x; backward does that again, and
      reduce-scatters its gradients. Each of these sends (t - 1)/t n.

    ``forward(x)`` returns ``(output, output_bias)``. x: [..., in], replicated. Output: [..., out],
    or [..., out/t] without ``gather_output``.

    Args:
        gather_output: give every rank all outputs, [..., out]. A row-parallel layer takes the
            shards as they are.
        init_method: fills the *master weight*, the whole [out, in] before it is cut, which is the
            same on every rank and for every t. (It is no float32 copy.)
        stride: how many matrices are stacked in a fused weight: see `chunks_of_rank`.
        keep_master_weight_for_test: keep the master weight as ``master_weight``.
        skip_bias_add: return the bias as ``output_bias`` (otherwise None), for a caller that fuses
            it with the next op.
        sequence_parallel: x is this rank's slice of the sequence, [..., seq/t, in], and is gathered
            here.

    Raises:
        ValueError: a size, an option or x does not fit (nothing was sent), or the ranks drew
            different weights.
    """

    partition_dim = 0

    def __init__(
        self,
        input_size: int,
        output_size: int,
        group: dist.ProcessGroup,
        *,
        gather_output: bool = True,
        **options,
    ):
        if gather_output and options.get("sequence_parallel"):
            fault = "sequence_parallel=True leaves each rank its own outputs"
            raise ValueError(f"{fault}: use gather_output=False with it")
        super().__init__(input_size, output_size, group, **options)
        self.gather_output = gather_output

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        _check_width(x, self.input_size, "input_size")
        bias = None if self.skip_bias_add else self.bias
        output_bias = self.bias if self.skip_bias_add else None
        output = column_linear(x, self.weight, bias, self.group, self.sequence_parallel)
        if self.gather_output:
            output = self._gather_output(output)
            if output_bias is not None:
                output_bias = self._gather_output(output_bias)
        return output, output_bias

    def _gather_output(self, shard: torch.Tensor) -> torch.Tensor:
        gathered = gather_from_tp(shard, self.group)
        # From all matrices of rank 0, of rank 1, ... to matrix 0 of all ranks, matrix 1, ...
        return transpose_chunks(gathered, self.group.size(), self.stride)


class RowParallelLinear(ParallelLinear):
    """A linear layer whose inputs are divided among the ranks; weight [out, in/t], bias [out].

                      [ A_1 ]
        [ X_1 | X_2 ] [-----]  =  X_1 A_1 + X_2 A_2  =  Y        rank i computes X_i A_i,
                      [ A_2 ]                                    then all-reduce

    Communication in a group of t ranks, if the whole output [..., out] has n bytes:

    - forward: the ranks' products are all-reduced; each rank sends 2 (t - 1)/t n.
    - backward: with ``input_is_parallel`` nothing is sent, because each rank has the gradient of
      the sum. Without it, the default, each rank took its slice of x, and the gradients of these
      slices are all-gathered: each rank sends (t - 1)/t of x's bytes.
    - with ``sequence_parallel``: a reduce-scatter in forward, and an all-gather of the gradient in
      backward; each sends (t - 1)/t n. Backward also all-reduces the bias's gradient, unless
      ``defer_grad_reduce`` leaves that to the end of the step.

    ``forward(x)`` returns ``(output, output_bias)``. x: [..., in/t] with ``input_is_parallel``,
    otherwise [..., in], replicated. Output: [..., out]. The bias is added once, after the sum.

    Args:
        input_is_parallel: x is already sharded, as a column-parallel layer returns it.
        sequence_parallel: reduce-scatter the sum along the sequence: the output is
            [..., seq/t, out].
        defer_grad_reduce: leave the bias's gradient partial, for
            `labkit.gradients.all_reduce_grads`.

    The other options and errors are those of `ColumnParallelLinear`, with the stride along the
    input dim.
    """

    partition_dim = 1

    def __init__(
        self,
        input_size: int,
        output_size: int,
        group: dist.ProcessGroup,
        *,
        input_is_parallel: bool = False,
        **options,
    ):
        if not input_is_parallel and options.get("sequence_parallel"):
            fault = "sequence_parallel=True starts from divided inputs"
            raise ValueError(f"{fault}: use input_is_parallel=True with it")
        super().__init__(input_size, output_size, group, **options)
        self.input_is_parallel = input_is_parallel

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        refuse_autocast("RowParallelLinear", x.device)
        tp_size = self.group.size()
        if self.input_is_parallel:
            _check_width(x, self.input_size // tp_size, f"input_size={self.input_size} / tp_size")
        else:
            _check_width(x, self.input_size, "input_size")
            x = transpose_chunks(x, self.stride, tp_size)  # so that each rank's part is consecutive
            x = scatter_to_tp(x, self.group)
        reduce = reduce_scatter_to_sequence if self.sequence_parallel else reduce_from_tp
        output = reduce(F.linear(x, self.weight), self.group)  # the sum of X_i A_i
        bias = self.bias
        if bias is not None and self.sequence_parallel and not self.defer_grad_reduce:
            # Each rank adds it to its own slice of the sequence, so its gradient is partial.
            bias = copy_to_tp(bias, self.group)
        if self.skip_bias_add or bias is None:
            return output, bias
        return output + bias, None


def column_linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    group: dist.ProcessGroup,
    sequence_parallel=False,
) -> torch.Tensor:
    """Return this rank's outputs [..., out/t] for its weight [out/t, in], which may also be an
    embedding's (tied).
    """
    refuse_autocast("a column-parallel layer", x.device)
    if group.size() == 1:
        return F.linear(x, weight, bias)
    output: Any = _ColumnLinear.apply(x, weight, bias, group, sequence_parallel)
    return output


class _ColumnLinear(torch.autograd.Function):
    """Y_i = X A_i + b_i: the same as copy_to_tp or gather_from_sequence, then F.linear, but in one
    function, so that backward can send while it computes.

    Backward gathers a sharded X while it computes dX, and reduces dX while it computes dA_i. This
    is Megatron-LM's ``LinearWithGradAccumulationAndAsyncCommunication`` without its fusion, which
    adds dA_i to a float32 ``main_grad`` inside the product: here dA_i is rounded to the weight's
    type first. In a split backward nothing hides the gather of X.
    """

    @staticmethod
    def forward(ctx, x, weight, bias, group, sequence_parallel):
        # With sequence_parallel only this rank's slice of x is saved, as in Megatron-LM: backward
        # gathers it again.
        ctx.save_for_backward(x, weight)
        ctx.group = group
        ctx.sequence_parallel = sequence_parallel
        if sequence_parallel:
            x = gather_from_sequence(x, group)
        return F.linear(x, weight, bias)

    @staticmethod
    @first_derivative_only
    def backward(ctx, grad):  # pyright: ignore[reportIncompatibleMethodOverride]
        x, weight = ctx.saved_tensors
        need_x, need_weight, need_bias, *_ = needed_gradients(ctx)
        rows = grad.reshape(-1, grad.size(-1))  # [tokens, out/t]
        grad_x = grad_weight = grad_bias = None
        shards = gather_work = reduce_work = None
        # Start each message before the product that hides it: x is gathered during grad @ weight,
        # and grad_x is reduced while grad_weight is computed.
        if need_weight and ctx.sequence_parallel:
            shards, gather_work = start_all_gather(x, ctx.group)
        if need_x:
            grad_x = grad @ weight
            if ctx.sequence_parallel:
                grad_x, reduce_work = start_reduce_scatter(grad_x, ctx.group, SEQUENCE_DIM)
            else:
                reduce_work = dist.all_reduce(grad_x, group=ctx.group, async_op=True)
        if need_weight:
            if shards is not None and gather_work is not None:
                gather_work.wait()
                x = torch.cat(shards.unbind(), SEQUENCE_DIM)
            grad_weight = rows.T @ x.reshape(-1, x.size(-1))
        if need_bias:
            grad_bias = rows.sum(0)  # this, too, while grad_x travels
        if reduce_work is not None:
            reduce_work.wait()
        return grad_x, grad_weight, grad_bias, None, None


def needed_gradients(ctx) -> tuple[bool, ...]:
    """Return, for each input of an autograd function (tensors first), whether this backward pass
    needs its gradient.

    A zero-bubble pipeline runs backward twice, for inputs and for weights
    (`labkit.pipeline.split_backward`). ``ctx.needs_input_grad`` is the same in both, so ask
    autograd's engine which nodes this pass visits. Inside `torch.autograd.grad` the engine cannot
    answer for leaves: then fall back to ``ctx.needs_input_grad``.
    """
    # Of tensors only: the other inputs come after them, and never need a gradient.
    nodes = [node for node, _ in ctx.next_functions]
    needed = []
    for index, may_be_needed in enumerate(ctx.needs_input_grad):
        try:
            needed.append(may_be_needed and torch._C._will_engine_execute_node(nodes[index]))
        except RuntimeError:
            return ctx.needs_input_grad
    return tuple(needed)


def _check_width(x: torch.Tensor, width: int, name: str) -> None:
    if x.size(-1) != width:
        raise ValueError(
            f"x of shape {list(x.shape)} has width {x.size(-1)}, this layer takes {name} = {width}"
        )
