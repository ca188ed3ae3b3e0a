"""The explorer of shards, driven as a reader drives it: by changing the values of its controls."""

import pytest

from course.explorers.sharding import shard_explorer


@pytest.fixture
def explorer():
    return shard_explorer("column", 1024, 512, tp_size=2)


def shown(explorer):
    return explorer.steps[0]


def test_the_facts_of_a_column_cut_are_its_messages(explorer):
    assert "<td>sent forward</td><td>nothing</td>" in explorer.facts.html
    assert "all-reduce of dX [256, 1024], 1.05 MB" in explorer.facts.html
    explorer.choose(whole=True)
    assert "all-gather of Y [256, 512], 524 kB; on a ring each rank sends 262 kB" in explorer.facts.html


def test_the_facts_of_a_row_cut_name_the_sum():
    explorer = shard_explorer("row", 1024, 512, tp_size=4)
    explorer.choose(whole=True)
    facts = explorer.facts.html
    assert "all-reduce of Y [256, 512], 524 kB; on a ring each rank sends 786 kB" in facts
    assert "all-gather of dX [256, 1024]" in facts
    assert "input_is_parallel=False" in facts


def test_the_sentence_counts_columns_or_rows_and_one_rank_is_not_each_of_1(explorer):
    assert "Each of 2 ranks has 256 columns of A" in explorer.says
    explorer.choose(cut="row")
    assert "Each of 2 ranks has 512 rows of A" in explorer.says
    explorer.choose(tp_size=1)
    assert "One rank has all 1024 rows of A" in explorer.says


def test_dealing_moves_the_shards(explorer):
    before = shown(explorer).by_key["A.1"]
    explorer.choose(dealt=True)
    after = shown(explorer).by_key["A.1"]
    assert (after.x, after.y) != (before.x, before.y)
    assert after.fill == before.fill


def test_a_choice_that_does_not_fit_moves_on_and_says_so(explorer):
    explorer.choose(tp_size=3)
    assert explorer.choice.tp_size == explorer.shown.tp_size == 4
    assert 'role="alert"' in explorer.says
    assert "tensor t is 4 now, not 3" in explorer.says
    assert "tensor t = 3 does not divide out = 512" in explorer.says


def test_a_cut_that_does_not_fit_says_before_the_click_what_it_would_change():
    explorer = shard_explorer("column", input_size=1000, output_size=512, tp_size=16)
    assert explorer.controls["cut"].hints == ["", "would set in to 512"]
    explorer.choose(cut="row")
    assert explorer.choice[:4] == ("row", 512, 512, 16)


def test_small_integers_are_multiplied_step_by_step(explorer):
    explorer.choose(numbers=True)
    assert len(explorer.steps) == 3 and "Nothing is sent" in explorer.steps[-1].says
    assert explorer.controls["input_size"].disabled and "[2, 4]" in explorer.facts.html
    explorer.choose(cut="row")
    assert len(explorer.steps) == 4 and "all-reduce" in explorer.steps[-1].says
    assert repr(explorer) == "shard_explorer('row', 1024, 512, 2, 256, False, False, True)"
    explorer.choose(tp_size=8)
    assert "tensor t = 8 does not divide" in explorer.says and not explorer.choice.numbers
