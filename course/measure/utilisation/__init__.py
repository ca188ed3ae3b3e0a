"""Measures how busy ranks are while a plan runs: steps on real ranks, and what each did with its time."""

from course.measure.utilisation.monitor import GpuMonitor
from course.measure.utilisation.step import Shares, TimedStep, measure_step, pace_here, predict_step, table
from course.measure.utilisation.work import Pace

__all__ = ["GpuMonitor", "Pace", "Shares", "TimedStep", "measure_step", "pace_here", "predict_step", "table"]
