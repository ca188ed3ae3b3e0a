"""Who did what when: predicted from a schedule or measured on real ranks, in one form, so that both are drawn alike.

No torch here; `labkit.timeline.trace` is the stopwatch on a rank.
"""

from labkit.timeline.spans import Span, Timeline, measured

__all__ = ["Span", "Timeline", "measured"]
