"""The explorer of notebook 14: every control changes what is shown, and the facts are those of `course.sizing`."""

import pytest

from course.explorers.fully_sharded import CLUSTERS, SLOW, stage_explorer
from course.sizing.fully_sharded import sharding


@pytest.fixture
def explorer():
    return stage_explorer(recompute="full")


def test_a_row_for_each_stage_and_one_for_hybrid_sharding(explorer):
    explorer.choose(cluster=SLOW.name)
    explorer.choose(num_micro_batches=8)
    rows = explorer.facts.html.split("<tr>")[2:]
    assert [row.split("</td>")[0] for row in rows] == [
        "<td>stage 0", "<td>stage 1", "<td>stage 2", "<td>stage 3", "<td>stage 3, shards of 8"
    ]  # fmt: skip
    flat, hybrid = (sharding(explorer.shown, CLUSTERS[SLOW.name], size) for size in (None, 8))
    assert f"<td>{flat.leaving_bytes / 1e9:.3g} GB" in rows[3] and f"<td>{hybrid.leaving_bytes / 1e9:.3g} GB" in rows[4]
    assert "<td>no</td>" in rows[3] and flat.waiting_seconds > 5 * hybrid.waiting_seconds


def test_what_cannot_fit_is_said(explorer):
    explorer.choose(model="GPT-3, 175 billion")
    explorer.choose(world_size=8)
    assert 'role="alert"' in explorer.says and "Nothing fits" in explorer.says
    assert "GB: too much" in str(explorer.steps[0])


def test_shards_larger_than_the_world_move_a_control(explorer):
    explorer.choose(shard_size=128)
    assert 'role="alert"' in explorer.says
    assert explorer.choice.world_size == explorer.choice.shard_size == 128
