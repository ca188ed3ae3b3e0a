"""A small product in integers: what ranks compute is right, an element lights what makes it, parts fly together."""

import re

import numpy as np
import pytest

from course.pictures.small_product import BATCH, SIZE, A, X, product_steps, small_cut
from tests.support.pictures import faults, lit, marks

CASES = [("column", t, whole) for t in (1, 2, 4) for whole in (False, True)] + [("row", t, False) for t in (1, 2, 4)]


def values(scene, prefix):
    """The number in each mark, by the last two parts of its key: the row and the column."""
    found = np.zeros((BATCH, SIZE), int)
    for mark in marks(scene, prefix):
        row, column = map(int, mark.key.split(".")[-2:])
        found[row, column] += int(mark.text)
    return found


@pytest.mark.parametrize(("cut", "t", "whole"), CASES)
def test_what_ranks_compute_is_y_or_adds_up_to_it(cut, t, whole):
    steps, expected = product_steps(small_cut(cut, t), whole), np.array(X) @ np.array(A)
    assert [faults(scene) for scene in steps] == [[]] * len(steps)
    assert (values(steps[0], "result.") == expected).all()
    assert (values(steps[2], "Y.") == expected).all()
    assert len(steps) == 3 + (t > 1 and (whole or cut == "row"))
    if len(steps) == 4:
        assert (values(steps[3], "result.") == expected).all()


def test_an_element_lights_its_row_and_its_column_on_its_rank_and_says_its_terms():
    scene = product_steps(small_cut("row", 2))[2]
    assert scene.by_key["Y.1.1.2"].fact == "Rank 1, a part of Y[1, 2]: 3·1 + 2·1 = 5"
    assert lit(scene, "Y.1.1.2") == {"Y.1.1.2", "X.1.1.2", "X.1.1.3", "A.2.2", "A.3.2"}


def test_a_whole_element_lights_row_and_column_on_every_rank_and_their_parts():
    scene = product_steps(small_cut("row", 2))[3]
    assert scene.by_key["result.1.2"].fact == "Y[1, 2] = 0 + 5 = 5"
    factors = {"X.0.1.0", "X.0.1.1", "X.1.1.2", "X.1.1.3", "A.0.2", "A.1.2", "A.2.2", "A.3.2"}
    parts = {f"{what}.{rank}.1.2" for what in ("Y", "sent") for rank in (0, 1)}
    assert lit(scene, "result.1.2") == {"result.1.2", *factors, *parts}


@pytest.mark.parametrize("cut", ["column", "row"])
def test_parts_fly_from_where_they_were_computed_to_one_place(cut):
    *_, before, after = product_steps(small_cut(cut, 2), whole=True)
    for mark in marks(before, "sent."):
        computed = before.by_key[mark.key.replace("sent", "Y")]
        assert (mark.x, mark.y, mark.width) == (computed.x, computed.y, computed.width)
        row, column = re.findall(r"\d+", mark.key)[1:]
        whole, there = after.by_key[f"result.{row}.{column}"], after.by_key[mark.key]
        assert whole.x <= there.x and there.right <= whole.right + 1 and there.y >= whole.y
    assert len(marks(after, "sent.")) == BATCH * SIZE * (2 if cut == "row" else 1)


def test_shards_are_dealt_by_key_and_those_of_a_rank_have_its_tint():
    whole, dealt, *_ = product_steps(small_cut("row", 4))
    assert {mark.key for mark in marks(whole, "A.")} == {mark.key for mark in marks(dealt, "A.")}
    assert len({mark.fill for mark in marks(dealt, "A.")}) == 4
    assert dealt.by_key["X.2.0.2"].fill == dealt.by_key["A.2.0"].fill


def test_a_group_that_does_not_divide_the_matrices_is_refused():
    with pytest.raises(ValueError, match="tp_size=3 does not divide"):
        small_cut("row", 3)
