"""How busy ranks are while a plan runs: steps on real ranks with a stopwatch, and what each did with its time."""

from labkit.utilisation.monitor import GpuMonitor
from labkit.utilisation.step import Shares, Step, measure_step, pace_here, predict_step, table
from labkit.utilisation.work import Pace

__all__ = ["GpuMonitor", "Pace", "Shares", "Step", "measure_step", "pace_here", "predict_step", "table"]
