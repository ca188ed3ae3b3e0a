"""Pipeline schedules as data: what each rank does, in which order. No processes, no tensors, no times."""

from labkit.schedules.orders import gpipe, interleaved, one_f_one_b, zero_bubble
from labkit.schedules.schedule import BACKWARD, FORWARD, WEIGHT_GRADIENT, Op, Schedule, ScheduleDeadlock, check

__all__ = [
    "BACKWARD", "FORWARD", "WEIGHT_GRADIENT", "Op", "Schedule", "ScheduleDeadlock", "check",
    "gpipe", "interleaved", "one_f_one_b", "zero_bubble",
]  # fmt: skip
