"""The operations that are measured are those that are counted, and none computes faster than the roof."""

import pytest

from course.measure.roofline import measured_roofline
from course.sizing import Plan, operations
from labkit.shape import GPT

TODAY = dict(norm="rmsnorm", mlp="swiglu", positions="rope", bias=False, tied=False)


@pytest.mark.parametrize("model", [GPT(1, 64, 32, 128, 4), GPT(1, 64, 32, 128, 4, 2, 96, **TODAY)])
def test_each_operation_is_measured(model):
    plan = Plan(model, 2, 2, 2, sequence_parallel=True, fused_attention=True, recompute="none")
    here, seconds = measured_roofline(plan)
    counted = operations(plan, element_bytes=4)
    assert list(seconds) == [each.name for each in counted] and min(seconds.values()) > 0
    fastest = max(each.flops / seconds[each.name] for each in counted if each.kind == "product")
    assert here.peak_flops >= fastest * (1 - 1e-12) and here.name.startswith("this machine, 1 rank on ")
