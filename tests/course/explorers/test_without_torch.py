"""The explorers that only calculate, and labkit's plain files, load no torch: a cell that draws is up at once."""

import subprocess
import sys

PLAIN = [
    *(
        f"course.explorers.{name}"
        for name in (
            "batch",
            "context",
            "fully_sharded",
            "layout",
            "routing",
            "schedule",
            "schedule_builder",
            "sharding",
            "sizing",
        )
    ),
    *(f"labkit.{name}" for name in ("partition", "data", "layout", "schedules", "shape", "sizes", "timeline")),
    "course.sizing",
]


def test_they_load_no_torch():
    """One process imports them in turn, and says after which one torch is there."""
    look = "import importlib, sys\nfor name in sys.argv[1:]:\n    importlib.import_module(name)\n"
    look += "    if 'torch' in sys.modules: print(name, 'loads torch'); break"
    ran = subprocess.run([sys.executable, "-c", look, *PLAIN], capture_output=True, text=True, check=True)
    assert ran.stdout == ""
