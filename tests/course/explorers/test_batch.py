"""The explorer of notebook 05: every control changes what is shown, and what does not fit gives way in place."""

import pytest

from course.explorers.batch import GRADIENT_BYTES, batch_explorer
from course.pictures.batch import BatchCut


@pytest.fixture
def explorer():
    return batch_explorer(128, 4, num_micro_batches=2)


def test_the_facts_are_rows_and_bytes(explorer):
    assert GRADIENT_BYTES == 16_793_600
    assert "Each of 4 ranks sees 32 rows of 128 in a step" in explorer.says
    facts = explorer.facts.html
    assert "2 backwards of 16 rows: activations of 16 rows at a time" in facts
    assert "1/16 in its micro-batch · 1/2 in its rank · 1/4 in the average = 1/128" in facts
    assert "all gradients once, 16.8 MB; on a ring each rank sends 25.2 MB (without no_sync 50.4 MB)" in facts
    explorer.choose(dp_size=1)
    assert "One rank sees 128 rows of 128" in explorer.says
    assert "<td>sent in a step</td><td>nothing</td>" in explorer.facts.html


def test_a_size_that_does_not_fit_goes_on_to_the_next_and_says_so(explorer):
    explorer.choose(dp_size=3)
    assert (explorer.choice.dp_size, explorer.shown.dp_size) == (2, 2)
    assert 'role="alert"' in explorer.says
    assert "replicas d is 2 now, not 3." in explorer.says
    assert "replicas d = 3 * micro-batches m = 2 = 6 does not divide batch B = 128." in explorer.says
    explorer.choose(batch_size=96)
    explorer.choose(dp_size=3)
    assert explorer.shown == BatchCut(96, 3, 2) and "alert" not in explorer.says
