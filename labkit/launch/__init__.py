"""Runs a function on real ranks from a notebook cell: on the CPU in about a tenth of a second,
after the first time.

`world` asks, through `client`, the `server` to fork processes. Each becomes a `rank`; the kernel
holds them as `ranks`. `call` follows one function call; if ranks fall silent, `watchdog` judges
what each one's `probe` sees. `report` and `output` show what came of it. `wire` carries messages,
`payload` the objects that they are about. faults.md is the table of what a learner sees when ranks
fail.
"""

from labkit.launch.probe import waiting_for
from labkit.launch.rank import progress
from labkit.launch.report import Deadlock, RankFailed
from labkit.launch.world import World, launch

__all__ = ["Deadlock", "RankFailed", "World", "launch", "progress", "waiting_for"]
