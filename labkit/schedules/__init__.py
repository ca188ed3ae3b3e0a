"""Pipeline schedules as data: what each rank does, in which order.

No processes, no tensors, no times.
"""

from labkit.schedules.folded import dualpipe_v, v_half, v_min, zero_bubble_v
from labkit.schedules.greedy import greedy
from labkit.schedules.orders import gpipe, interleaved, one_f_one_b, zero_bubble
from labkit.schedules.schedule import (
    BACKWARD,
    FORWARD,
    WEIGHT_GRADIENT,
    Op,
    Schedule,
    ScheduleDeadlock,
    check,
)
from labkit.schedules.stages import round_robin, v_shape

__all__ = [
    "BACKWARD", "FORWARD", "WEIGHT_GRADIENT", "Op", "Schedule", "ScheduleDeadlock", "check",
    "dualpipe_v", "gpipe", "greedy", "round_robin", "interleaved", "one_f_one_b", "v_half", "v_min",
    "v_shape", "zero_bubble", "zero_bubble_v",
]  # fmt: skip
