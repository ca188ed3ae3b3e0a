"""Runs a function on real ranks from a notebook cell, in about a tenth of a second.

Users need only the names in this file; each of the other files does one step of a call. `world` asks the server through
`client`; `server`, which has imported torch once, forks processes; each becomes a rank in `rank`, and the kernel holds
them as `ranks`. `call` follows one function call; when ranks fall silent, it asks each for a snapshot (`probe`, which
reads `linux`), and `watchdog` tells slow from stuck. `report` puts faults into words, with the learner's own lines
(`frames`), and `output` brings what ranks print into the cell. `wire` carries messages, `payload` what they are about.
"""

from labkit.launch.probe import waiting_for
from labkit.launch.rank import progress
from labkit.launch.report import Deadlock, RankFailed
from labkit.launch.world import World, launch

__all__ = ["Deadlock", "RankFailed", "World", "launch", "progress", "waiting_for"]
