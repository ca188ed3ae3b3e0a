"""What experts ask of a GPU, tried on the CPU: the rules of torch's grouped kernel, and how often the host waits."""

import pytest
import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from labkit.expert_parallel import MoELayer
from labkit.expert_parallel.layer import Experts
from labkit.groups import groups_of_one

HIDDEN, FFN, EXPERTS = 16, 24, 4


def kernel(calls):
    """torch.nn.functional.grouped_mm, with the rules of aten's GroupMMCommon.cuh and its groups without rows."""

    def grouped_mm(a, b, *, offs):
        assert a.numel() and b.numel(), "torch refuses empty operands"
        assert a.dtype == b.dtype == torch.bfloat16 and offs.dtype == torch.int32
        for x in (a, b):
            row, column = x.stride()[-2:]
            assert (column == 1 and row >= x.size(-1)) or (row == 1 and column >= x.size(-2)), "rows or columns"
            assert max(row, column) % 8 == 0, "multiples of 16 bytes"
        calls.append((tuple(a.shape), tuple(b.shape)))
        groups = [slice(*pair) for pair in zip([0, *offs.tolist()], offs.tolist())]
        if b.dim() == 3:
            assert a.stride(-1) == 1
            return torch.cat([a[rows] @ matrix for rows, matrix in zip(groups, b)])
        assert a.stride(-1) != 1 and b.stride(-1) == 1, "else each group must have a multiple of 8 rows, and not none"
        product = torch.full((len(offs), len(a), b.size(1)), float("nan"), dtype=a.dtype)  # so does Blackwell's
        for into, rows in zip(product, groups):
            if rows.start < rows.stop:
                into.copy_(a[:, rows] @ b[rows])
        return product

    return grouped_mm


def experts(dtype, sizes=(EXPERTS, HIDDEN, FFN)):
    torch.manual_seed(0)
    made = Experts(sizes, groups_of_one(), False, "none", [torch.nn.init.xavier_normal_] * 2)
    return made.to(dtype)


@pytest.mark.parametrize("num_rows", [(3, 5, 0, 8), (3, 4, 0, 8), (0, 0, 1, 0), (0, 0, 0, 0)])
@pytest.mark.parametrize("is_expanded", [False, True])
def test_any_numbers_of_rows_go_through_one_kernel(monkeypatch, num_rows, is_expanded):
    calls = []
    monkeypatch.setattr(F, "grouped_mm", kernel(calls), raising=False)
    ends = torch.tensor(num_rows).cumsum(0, dtype=torch.int32)
    x, grad = torch.randn(2, sum(num_rows), HIDDEN, generator=torch.Generator().manual_seed(1)).bfloat16()
    grad = torch.ones(()).expand(x.shape) if is_expanded else grad
    found = []
    for dtype in (torch.bfloat16, torch.float64):  # the second is a loop over experts
        layer, rows = experts(torch.bfloat16).to(dtype), x.to(dtype, copy=True).requires_grad_()
        output = layer(rows, ends)
        output.backward(grad.to(dtype).expand(x.shape))
        found.append([output.detach(), rows.grad, layer.up.grad, layer.down.grad])
    assert len(calls) == (6 if sum(num_rows) else 0)  # two forward, four backward
    for got, expected in zip(*found):
        torch.testing.assert_close(got.double(), expected, rtol=0.03, atol=0.03)
    assert [bool(grad.any()) for grad in found[0][2]] == [number > 0 for number in num_rows]


def test_sizes_that_the_kernel_does_not_take_are_computed_without_it(monkeypatch):
    calls = []
    monkeypatch.setattr(F, "grouped_mm", kernel(calls), raising=False)
    layer = experts(torch.bfloat16, (EXPERTS, HIDDEN, 12))
    x = torch.randn(8, HIDDEN).bfloat16().requires_grad_()
    layer(x, torch.tensor([2, 4, 6, 8], dtype=torch.int32)).sum().backward()
    assert calls == [] and x.grad.isfinite().all()


class Waits(TorchDispatchMode):
    """Counts the operations for whose result a GPU's host waits."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        needs_sizes = func is torch.ops.aten.repeat_interleave.Tensor and (kwargs or {}).get("output_size") is None
        if needs_sizes or func in (torch.ops.aten._local_scalar_dense.default, torch.ops.aten.nonzero.default):
            self.names.append(str(func))
        return func(*args, **(kwargs or {}))


def test_the_host_waits_once_in_a_layer(monkeypatch):
    """For the numbers of rows that come and go, and for nothing else."""
    waits, tolist = Waits(), torch.Tensor.tolist
    monkeypatch.setattr(F, "grouped_mm", uncounted(kernel([]), waits), raising=False)
    monkeypatch.setattr(torch.Tensor, "tolist", lambda self: (waits.names.append("tolist"), tolist(self))[1])
    layer = MoELayer(HIDDEN, FFN, EXPERTS, 2, groups_of_one(), num_shared_experts=1, dtype=torch.bfloat16)
    x = torch.randn(2, 5, HIDDEN).bfloat16().requires_grad_()
    with waits:
        output, load = layer(x)
        (output.float().square().mean() + layer.router.loss(load)).backward()
    assert waits.names == ["tolist"]


def uncounted(function, waits):
    def call(*args, **options):
        before = [*waits.names]
        result = function(*args, **options)
        waits.names[:] = before
        return result

    return call
