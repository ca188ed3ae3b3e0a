"""The page "what is wrong here?": each flawed layer runs, and what gives it away is what differs when computed."""

import pytest
import torch

from course.exercises import flawed_layers
from course.exercises.flawed_layers import QUANTITIES, case_a, case_b, case_c, case_d, case_e, case_f
from labkit.launch import RankFailed, launch
from labkit.tensor_parallel import ColumnParallelLinear, RowParallelLinear
from tests.course.exercises.conftest import keep_ranks

CASES = [case_a, case_b, case_c, case_d, case_e, case_f]
EXPECTED = {  # what tells, and what of it was measured here, with the shapes of the course's notes
    "case_a": ({"weight shape": "[128, 1024]", "output shape": "[4, 256]"}, {"shards joined", "output error"}),
    "case_b": (
        {"weight shape": "[16384, 32]"},
        {"shards joined", "output shape", "output error", "output for x = 0"},
    ),
    "case_c": ({"weight spread": "nan", "output error": "nan"}, {"shards joined", "output for x = 0"}),
    "case_d": ({"shards joined": "not the master"}, {"output error"}),
    "case_e": ({"weight shape": "[128, 1024]"}, set()),
    "case_f": ({"output for x = 0": "4.0 to 4.0", "output error": "3.0"}, set()),
}
RIGHT_WEIGHT = {"case_a": 256, "case_b": 32, "case_c": 256, "case_d": 128, "case_e": 64}


@pytest.fixture(scope="module")
def measured(worlds):
    with pytest.MonkeyPatch.context() as patch:
        keep_ranks(worlds, patch)
        return {case.name: case.measure() for case in CASES}


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_these_quantities_tell_and_no_others(case, measured):
    values, others = EXPECTED[case.name]
    here, right = measured[case.name]
    assert {name: here[name] for name in values} == values
    assert {name for name in QUANTITIES if here[name] != right[name]} == set(values) | others


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_the_right_layer_is_right(case, measured):
    _, right = measured[case.name]
    shape = "[512, 256]" if case.name == "case_f" else f"[{RIGHT_WEIGHT[case.name]}, 1024]"
    assert right == {
        "weight shape": shape,
        "weight spread": "0.036",  # xavier normal: sqrt(2 / (1024 + 512))
        "shards joined": "the master",
        "output shape": "[4, 512]",
        "output error": "0.0",
        "output for x = 0": "1.0 to 1.0",
    }


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_every_quantity_gets_the_verdict_that_the_values_call_for(case, measured, monkeypatch):
    monkeypatch.setattr(type(case), "measure", lambda self: measured[self.name])
    here, right = measured[case.name]
    for name in QUANTITIES:
        verdict = case.verdict(name)
        assert verdict.status == ("passed" if here[name] != right[name] else "wrong")
        assert (case.what in " ".join(verdict.text.split())) == (verdict.status == "passed")


def test_an_answer_comes_soon(launches):
    case_a.check(found_by="weight shape")
    assert len(launches) == 2  # the faulty layer and the right one: about a second


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_code_and_solution_show_where_the_two_differ(case):
    shown, without = repr(case.code()), repr(case.solution())
    assert shown.startswith("# Asked for")
    assert without.startswith("# Without the fault")
    assert shown.splitlines()[2:] != without.splitlines()[2:]
    assert "Hint" in repr(case.hint())


def test_the_right_code_refuses_too_many_shards():
    with pytest.raises(RankFailed, match="tp_size=8 does not divide world_size=4: start 8 ranks"):
        launch(lambda: flawed_layers.cut_or_refuse(torch.zeros(512, 1024), 0, 8), world_size=4)


def shards_of_the_library():
    """Whether labkit.tensor_parallel cuts a master weight as the page's right code does, also fused (stride 2)."""
    world = torch.distributed.group.WORLD
    rank, tp_size = world.rank(), world.size()
    kept = dict(keep_master_weight_for_test=True)
    column = ColumnParallelLinear(8, 16, world, stride=2, **kept)
    row = RowParallelLinear(8, 16, world, **kept)
    return (
        torch.equal(column.weight, flawed_layers.cut_in_strides(column.master_weight, rank, tp_size, stride=2)),
        torch.equal(row.weight, flawed_layers.cut_row(row.master_weight, rank, tp_size)),
    )


def test_the_right_code_is_that_of_the_library():
    assert launch(shards_of_the_library, world_size=4) == [(True, True)] * 4
