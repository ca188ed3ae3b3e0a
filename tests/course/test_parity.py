"""The checker of parity finds what is wrong, where, and by which factor; and nothing where all is right."""

import math

import pytest
import torch
from torch import nn

from course.parity import Parity, compare, gradients, weights


def tensors(**values):
    return {name: torch.tensor(value, dtype=torch.float64) for name, value in values.items()}


EXPECTED = tensors(first=[3.0, 4.0], second=[[0.0, 2.0]], zeros=[0.0, 0.0])


def test_equal_tensors_have_no_error():
    for difference in compare(EXPECTED, EXPECTED):
        assert (difference.error, difference.ratio, difference.rest) == (0, 1, 0)


def test_the_error_is_relative_to_the_size_of_the_tensor():
    [difference] = compare(tensors(first=[3.0, 4.5]), EXPECTED)
    assert difference.error == pytest.approx(0.5 / 5)
    assert 1 < difference.ratio < 4.5 / 4
    assert 0 < difference.rest < difference.error


@pytest.mark.parametrize("factor", [4.0, 0.25, -1.0, 0.0])
def test_a_factor_is_found_and_explains_all(factor):
    [difference] = compare({"first": factor * EXPECTED["first"]}, EXPECTED)
    assert difference.ratio == pytest.approx(factor)
    assert difference.error == pytest.approx(abs(factor - 1))
    assert difference.rest == pytest.approx(0, abs=1e-12)


def test_a_missing_gradient_counts_as_zeros():
    [difference] = compare({"first": None}, EXPECTED)
    assert (difference.error, difference.ratio) == (1, 0)
    [difference] = compare({"first": None}, {"first": None})
    assert (difference.error, difference.ratio) == (0, 1)
    [difference] = compare(tensors(first=[1.0]), {"first": None})
    assert difference.error == math.inf


def test_something_instead_of_zeros_and_an_overflow_are_infinitely_wrong():
    [difference] = compare(tensors(zeros=[0.0, 1e-9]), EXPECTED)
    assert difference.error == math.inf
    for value in (math.nan, math.inf):
        [difference] = compare(tensors(first=[3.0, value]), EXPECTED)
        assert difference.error == difference.rest == math.inf


def test_types_are_compared_as_numbers():
    [difference] = compare({"first": EXPECTED["first"].float()}, EXPECTED)
    assert difference.error == 0


def test_another_shape_and_an_unknown_name_are_refused():
    with pytest.raises(ValueError, match=r"second is \[2, 1\] here and \[1, 2\] in one process: compare a shard with"):
        compare(tensors(second=[[0.0], [2.0]]), EXPECTED)
    with pytest.raises(ValueError, match="one process has no third: it has first, second, zeros"):
        compare(tensors(third=[0.0]), EXPECTED)


def test_the_worst_is_named_by_rank_and_parameter():
    right, off = compare(EXPECTED, EXPECTED), compare(EXPECTED | tensors(second=[[0.0, 5.0]]), EXPECTED)
    parity = Parity([right, off, right])
    assert (parity.worst(1).name, parity.error) == ("second", 1.5)
    assert parity.common_ratio is None
    assert str(parity).splitlines()[2] == "   1   1.5e+00   2.5000  second"
    assert "everything" not in str(parity)


def test_of_errors_that_differ_by_rounding_the_first_is_named():
    found = compare(tensors(first=[12.0, 16.0], second=[[0.0, 8.000001]]), EXPECTED)
    assert found[1].error > found[0].error
    assert Parity([found]).worst(0).name == "first"


def test_a_common_factor_is_said():
    summed = compare({name: 4 * EXPECTED[name] for name in ("first", "second")}, EXPECTED)
    assert Parity([summed, summed]).common_ratio == 4
    assert str(Parity([summed, summed])).endswith("everything is 4 times what one process has")
    other = compare({"first": 2 * EXPECTED["first"]}, EXPECTED)
    assert Parity([summed, other]).common_ratio is None


def test_a_common_factor_is_said_beside_tensors_that_are_zero():
    """A frozen parameter has no gradient, nor has one that nothing used."""
    expected = {**EXPECTED, "none": None}
    summed = compare({name: None if x is None else 4 * x for name, x in expected.items()}, expected)
    assert Parity([summed, summed]).common_ratio == 4
    right = compare({"first": EXPECTED["first"]}, EXPECTED)
    assert Parity([summed, right]).common_ratio is None
    assert Parity([compare({"zeros": EXPECTED["zeros"], "none": None}, expected)]).common_ratio == 1


def test_a_rank_without_parameters_has_no_error():
    summed = compare({"first": 4 * EXPECTED["first"]}, EXPECTED)
    parity = Parity([[], summed])
    assert (parity.error, parity.common_ratio) == (3, 4)
    assert str(parity).splitlines()[1] == "   0   0.0e+00   1.0000  (it has none)"
    assert Parity([[], []]).error == 0


def test_all_right_says_nothing_of_a_factor():
    differences = compare({name: EXPECTED[name] * (1 + 1e-13) for name in ("first", "second")}, EXPECTED)
    parity = Parity([differences] * 2)
    assert 0 < parity.error < 1e-12
    assert parity.common_ratio == pytest.approx(1)
    assert len(str(parity).splitlines()) == 3


def test_gradients_and_weights_are_copies_by_name():
    module = nn.Linear(3, 2)
    assert gradients(module) == {"weight": None, "bias": None}
    module(torch.ones(1, 3)).sum().backward()
    before, found = weights(module), gradients(module)
    with torch.no_grad():
        module.weight += 1
        module.weight.grad += 1
    assert torch.equal(before["weight"] + 1, module.weight)
    assert torch.equal(found["weight"], torch.ones(2, 3))
    assert torch.equal(found["bias"], torch.ones(2))
