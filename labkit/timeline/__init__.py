"""Notes what a rank did from when to when: `spans` is plain data without torch, `trace` the
stopwatch on a rank.
"""
