"""What a rank tells about itself when it is asked."""

from labkit.launch import waiting_for
from labkit.launch.probe import Probe


def test_a_snapshot_has_what_the_innermost_wait_is_for():
    def purpose() -> str:
        return Probe().snapshot().purpose

    with waiting_for("F3"):
        with waiting_for("B1"):
            assert purpose() == "B1"
        assert purpose() == "F3"
    assert purpose() == ""
