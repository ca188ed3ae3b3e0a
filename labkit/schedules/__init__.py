"""Pipeline schedules as data: what each rank does, in which order.

No processes, no tensors, no times.
"""

from labkit.schedules.check import check, check_messages
from labkit.schedules.folded import dualpipe_v, v_half, v_min, zero_bubble_v
from labkit.schedules.greedy import greedy
from labkit.schedules.lowered import RECV, SEND, Message, lowered
from labkit.schedules.orders import gpipe, interleaved, one_f_one_b, zero_bubble
from labkit.schedules.schedule import (
    BACKWARD,
    FORWARD,
    WEIGHT_GRADIENT,
    Op,
    Schedule,
    ScheduleDeadlock,
)
from labkit.schedules.stages import round_robin, v_shape

__all__ = [
    "BACKWARD", "FORWARD", "WEIGHT_GRADIENT", "RECV", "SEND", "Message", "Op", "Schedule",
    "ScheduleDeadlock", "check", "check_messages", "dualpipe_v", "gpipe", "greedy", "interleaved",
    "lowered", "one_f_one_b", "round_robin", "v_half", "v_min", "v_shape", "zero_bubble",
    "zero_bubble_v",
]  # fmt: skip
