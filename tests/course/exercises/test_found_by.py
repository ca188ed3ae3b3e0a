"""What is wrong here: what the check says of a choice, right, wrong, unknown or none."""

import pytest

from course.exercises.flawed_layers import QUANTITIES, case_a, case_b, case_f

pytestmark = pytest.mark.usefixtures("launches_on_kept_ranks")


def test_the_report_is_a_table_of_all_quantities_then_what_did_not_run():
    table = """
                       right          here
  * weight shape       [32, 1024]     [16384, 32]
    weight spread      0.036          0.036
  * shards joined      the master     8,388,608 weights, not 524,288
  * output shape       [4, 512]       does not run
  * output error       0.0            does not run
  * output for x = 0   1.0 to 1.0     does not run
"""
    text = case_b.verdict("weight shape").text
    assert table in text
    error = "does not run: mat1 and mat2 shapes cannot be multiplied (4x1024 and 32x16384)"
    assert " ".join(text.split()).count(error) == 1


def test_a_wrong_choice_does_not_betray_the_right_one():
    text = case_f.verdict("weight shape").text
    assert "is the same with and without the fault ([512, 256])" in text
    assert not any(name in text for name in QUANTITIES if name != "weight shape")


@pytest.mark.parametrize("found_by", [None, ...])
def test_no_choice_is_no_attempt(found_by):
    assert case_a.verdict(found_by).status == "not attempted"


def test_an_unknown_quantity_is_answered_with_the_list():
    verdict = case_a.verdict("weigth shape")
    text = " ".join(verdict.text.split())
    assert verdict.status == "wrong"
    assert "'weigth shape' is not computed here" in text
    assert ", ".join(QUANTITIES) in text
