"""Who did what when: predicted from a schedule, or measured on real ranks, in one form that is drawn alike."""

from labkit.timeline.simulated import simulate
from labkit.timeline.spans import Span, Timeline
from labkit.timeline.trace import Trace, measured

__all__ = ["Span", "Timeline", "Trace", "measured", "simulate"]
