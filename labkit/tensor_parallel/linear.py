"""Linear layers with the weight cut across a tensor-parallel group: by its outputs, or by its inputs.

Y = X A + b with A: [in, out]; PyTorch stores the transpose, [out, in].

Column parallel cuts A by columns, A = [A_1 .. A_t]: each rank computes Y_i = X A_i, a slice of the outputs.
Row parallel cuts A by rows, and X by columns to fit: Y is the sum over ranks of X_i A_i.

Source: arXiv 1909.08053, section 3; argument names as in Megatron-LM.
"""

from collections.abc import Callable

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from labkit.cuts import check_divides
from labkit.tensor_parallel.operators import (
    SEQUENCE_DIM,
    all_gather,
    copy_to_tp,
    gather_from_tp,
    reduce_from_tp,
    reduce_scatter_to_sequence,
    scatter_to_tp,
    start_reduce_scatter,
)
from labkit.tensor_parallel.shards import (
    Shard,
    chunks_by_rank,
    chunks_in_order,
    draw_master_weight,
    mark_shard,
    own_shard,
)


class ColumnParallelLinear(nn.Module):
    """A linear layer whose outputs are divided among the ranks; weight [out/t, in], bias [out/t].

    ``forward(x)`` returns ``(output, output_bias)``, with x: [..., in] replicated, and output [..., out] with
    ``gather_output``, else this rank's [..., out/t].

    Args:
        gather_output: give every rank all outputs, at the price of an all-gather. A row-parallel layer behind
            this one takes the shards as they are: then leave it off.
        init_method: fills the master weight [out, in], the same on every rank and for every t.
        stride: how many matrices are fused in the weight, one below the other: see `own_shard`.
        keep_master_weight_for_test: keep the whole weight as ``master_weight``.
        skip_bias_add: leave the bias to the caller, who may fuse it with what follows; it is then ``output_bias``
            (else None).
        sequence_parallel: x is [..., seq/t, in], this rank's slice of the sequence, and is gathered here.

    Raises:
        ValueError: a size that t does not divide, options that do not go together, or, in ``forward``, another
            width of x: all before any communication. Seeds that differ between ranks, at construction.
    """

    def __init__(
        self,
        input_size: int,
        output_size: int,
        group: dist.ProcessGroup,
        *,
        bias: bool = True,
        gather_output: bool = True,
        init_method: Callable[[torch.Tensor], object] = nn.init.xavier_normal_,
        stride: int = 1,
        keep_master_weight_for_test: bool = False,
        skip_bias_add: bool = False,
        sequence_parallel: bool = False,
        device=None,
        dtype=None,
    ):
        super().__init__()
        check_divides(group.size(), "output_size", output_size, stride)
        if sequence_parallel and gather_output:
            raise ValueError("sequence_parallel=True gives each rank its own outputs: use gather_output=False with it")
        self.input_size, self.output_size, self.group = input_size, output_size, group
        self.gather_output, self.stride = gather_output, stride
        self.skip_bias_add, self.sequence_parallel = skip_bias_add, sequence_parallel
        master = draw_master_weight((output_size, input_size), init_method, group, dtype)
        self.master_weight = master if keep_master_weight_for_test else None
        weight, zeros = own_shard(master, group, 0, stride), torch.zeros(output_size // group.size(), dtype=dtype)
        shard = Shard(0, output_size, stride)
        self.weight = mark_shard(nn.Parameter(weight.to(device)), shard)
        self.bias = mark_shard(nn.Parameter(zeros.to(device)), shard) if bias else None

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        _check_width(x, self.input_size, "input_size")
        bias = None if self.skip_bias_add else self.bias
        output = column_linear(x, self.weight, bias, self.group, self.sequence_parallel)
        output_bias = self.bias if self.skip_bias_add else None
        if self.gather_output:
            output = self._gathered(output)
            output_bias = None if output_bias is None else self._gathered(output_bias)
        return output, output_bias

    def _gathered(self, shard: torch.Tensor) -> torch.Tensor:
        return chunks_in_order(gather_from_tp(shard, self.group), self.group.size(), self.stride)

    def extra_repr(self) -> str:
        return f"{self.input_size}, {self.output_size} / {self.group.size()} ranks, gather_output={self.gather_output}"


class RowParallelLinear(nn.Module):
    """A linear layer whose inputs are divided among the ranks; weight [out, in/t], bias [out].

    ``forward(x)`` returns ``(output, output_bias)``, with x: [..., in/t] if ``input_is_parallel``, else replicated
    [..., in], and output [..., out]: the ranks' partial products are added up, and the bias once, afterwards.

    Args:
        input_is_parallel: x is already divided, as a column-parallel layer leaves it.
        sequence_parallel: the sum is divided along the sequence: output is [..., seq/t, out].
        init_method, stride, keep_master_weight_for_test, skip_bias_add: as in `ColumnParallelLinear`; the stride
            applies to the input dim.

    Raises:
        ValueError: as in `ColumnParallelLinear`.
    """

    def __init__(
        self,
        input_size: int,
        output_size: int,
        group: dist.ProcessGroup,
        *,
        bias: bool = True,
        input_is_parallel: bool = False,
        init_method: Callable[[torch.Tensor], object] = nn.init.xavier_normal_,
        stride: int = 1,
        keep_master_weight_for_test: bool = False,
        skip_bias_add: bool = False,
        sequence_parallel: bool = False,
        device=None,
        dtype=None,
    ):
        super().__init__()
        check_divides(group.size(), "input_size", input_size, stride)
        if sequence_parallel and not input_is_parallel:
            raise ValueError("sequence_parallel=True starts from divided inputs: use input_is_parallel=True with it")
        self.input_size, self.output_size, self.group = input_size, output_size, group
        self.input_is_parallel, self.stride = input_is_parallel, stride
        self.skip_bias_add, self.sequence_parallel = skip_bias_add, sequence_parallel
        master = draw_master_weight((output_size, input_size), init_method, group, dtype)
        self.master_weight = master if keep_master_weight_for_test else None
        weight = own_shard(master, group, 1, stride)
        self.weight = mark_shard(nn.Parameter(weight.to(device)), Shard(1, input_size, stride))
        self.bias = nn.Parameter(torch.zeros(output_size, device=device, dtype=dtype)) if bias else None

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        tp_size = self.group.size()
        if self.input_is_parallel:
            _check_width(x, self.input_size // tp_size, f"input_size={self.input_size} / tp_size")
        else:
            _check_width(x, self.input_size, "input_size")
            x = scatter_to_tp(chunks_by_rank(x, tp_size, self.stride), self.group)
        partial = F.linear(x, self.weight)
        if self.sequence_parallel:
            output = reduce_scatter_to_sequence(partial, self.group)
            # Each rank adds the bias to its own slice, so the bias' gradient is partial: copy's backward adds it up.
            bias = None if self.bias is None else copy_to_tp(self.bias, self.group)
        else:
            output, bias = reduce_from_tp(partial, self.group), self.bias
        if self.skip_bias_add or bias is None:
            return output, bias
        return output + bias, None

    def extra_repr(self) -> str:
        sizes = f"{self.input_size} / {self.group.size()} ranks, {self.output_size}"
        return f"{sizes}, input_is_parallel={self.input_is_parallel}"


def column_linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    group: dist.ProcessGroup,
    sequence_parallel: bool = False,
) -> torch.Tensor:
    """This rank's outputs [..., out/t] from its weight [out/t, in]: for a weight that a layer shares with another."""
    if group.size() == 1:
        return F.linear(x, weight, bias)
    return _ColumnLinear.apply(x, weight, bias, group, sequence_parallel)  # pyright: ignore[reportReturnType]


class _ColumnLinear(torch.autograd.Function):
    """Y_i = X A_i + b_i. In backward dX, which is partial, travels while dA_i is computed."""

    @staticmethod
    def forward(ctx, x, weight, bias, group, sequence_parallel):
        ctx.save_for_backward(x, weight)  # of a divided sequence the own slice only: that saves the memory
        ctx.group, ctx.sequence_parallel = group, sequence_parallel
        whole_x = all_gather(x, group, SEQUENCE_DIM) if sequence_parallel else x
        return F.linear(whole_x, weight, bias)

    @staticmethod
    def backward(ctx, grad):  # pyright: ignore[reportIncompatibleMethodOverride]
        x, weight = ctx.saved_tensors
        need_x, need_weight, need_bias, *_ = _wanted(ctx)
        grad_x = grad_weight = grad_bias = travelling = None
        whole_x = all_gather(x, ctx.group, SEQUENCE_DIM) if need_weight and ctx.sequence_parallel else x
        if need_x:
            grad_x = grad @ weight
            if ctx.sequence_parallel:
                grad_x, travelling = start_reduce_scatter(grad_x, ctx.group, SEQUENCE_DIM)
            else:
                travelling = dist.all_reduce(grad_x, group=ctx.group, async_op=True)
        rows = grad.reshape(-1, grad.size(-1))
        if need_weight:
            grad_weight = rows.T @ whole_x.reshape(-1, whole_x.size(-1))
        if need_bias:
            grad_bias = rows.sum(0)
        if travelling is not None:
            travelling.wait()
        return grad_x, grad_weight, grad_bias, None, None


def _wanted(ctx) -> tuple[bool, ...]:
    """Of which inputs this pass of backward wants the gradient; ``ctx.needs_input_grad`` says of which any pass may.

    A pass for some inputs only is half of a split backward. The engine knows what it goes on to, and tells its own
    functions; to ask it from Python is private to torch, and a test holds that it works.
    """
    may = ctx.needs_input_grad
    try:
        return tuple(m and torch._C._will_engine_execute_node(ctx.next_functions[i][0]) for i, m in enumerate(may))
    except RuntimeError:  # in torch.autograd.grad() it does not tell about leaves
        return may


def _check_width(x: torch.Tensor, width: int, name: str) -> None:
    if x.size(-1) != width:
        raise ValueError(f"x of shape {list(x.shape)} has width {x.size(-1)}, this layer takes {name} = {width}")
