"""What failures cost a long job: how often to save, and which share of its time is new work.

A job of N nodes, each failing r times a day, runs M = 1/(N r) between failures, on average. It saves every T seconds of
work, which takes w more; a failure costs a restart, u seconds, and the work since the last save, T/2 on average.
"""

import math
from numbers import Real
from typing import NamedTuple

from labkit.sizes import check_size

DAY = 86_400.0
_HOW_TO_FAIL_LESS = "use fewer GPUs, a shorter restart or nodes that fail less"


class Intervals(NamedTuple):
    """Seconds of work between two saves, by different rules; without a cost of saving, all are 0."""

    young: float
    """sqrt(2 w M). Source: Young, CACM 17 (1974)."""
    daly: float
    """Young's, less w. Source: Daly, FGCS 22 (2006), as the next one."""
    daly_higher_order: float
    """Young's times 1 + sqrt(w/2M)/3 + (w/2M)/9, less w; if a save takes 2 M or more, both of his are M."""
    best: float
    """The optimum of `goodput`'s formula, which also knows the restart: sqrt(w^2 + 2 w (M - u)) - w."""


class Goodput(NamedTuple):
    """Where the time of a job goes; the last four are shares, which add up to 1."""

    failure_seconds: float
    """M, the mean time between failures of the whole job."""
    interval_seconds: float
    """T, the work between two saves."""
    share: float
    """New work: what is left, less the saves. Meta calls it the effective training time ratio (ETTR)."""
    saving: float
    restarting: float
    repeating: float
    """Work done once more, because a failure came before it was saved."""

    @property
    def lost(self) -> float:
        """The share that is no new work."""
        return self.saving + self.restarting + self.repeating


def time_to_failure(
    num_gpus: int, failures_per_node_day: float, *, gpus_per_node: int = 8, other_failures_per_day: float = 0.0
) -> float:
    """Return the mean seconds between failures of a job that ends when any of its nodes fails.

    The trap: counted this way, only nodes fail. On Meta's RSC-1, 6.5e-3 a node and day, jobs of 1,024 GPUs should run
    28.8 hours and ran 7.9: they also end by their own faults and by what they share. ``other_failures_per_day`` adds
    those, which only a log of the jobs can tell. Source: arXiv 2410.21680.

    >>> round(time_to_failure(1024, 6.5e-3) / 3600, 1)
    28.8

    Raises:
        ValueError: a size or a rate that makes no sense, or nothing ever fails.
    """
    nodes = -(-check_size("num_gpus", num_gpus) // check_size("gpus_per_node", gpus_per_node))
    rates = {"failures_per_node_day": failures_per_node_day, "other_failures_per_day": other_failures_per_day}
    for name, rate in rates.items():
        _check(name, rate)
    if not (per_day := nodes * failures_per_node_day + other_failures_per_day):
        raise ValueError("failures_per_node_day=0 and other_failures_per_day=0 never fail: give a rate above 0")
    return DAY / per_day


def checkpoint_interval(failure_seconds: float, save_seconds: float, restart_seconds: float = 0.0) -> Intervals:
    """Return how many seconds of work to do between saves that stop the job for ``save_seconds`` each.

    The rules agree where saves and restarts are short against the time between failures.

    >>> intervals = checkpoint_interval(failure_seconds=11_100, save_seconds=60, restart_seconds=600)
    >>> [round(seconds) for seconds in intervals]
    [1154, 1094, 1114, 1064]

    Raises:
        ValueError: a time that makes no sense, or a restart that takes as long as the job then runs.
    """
    _check("save_seconds", save_seconds)
    _check_restart(restart_seconds, failure_seconds)
    m, w, ratio = failure_seconds, save_seconds, save_seconds / (2 * failure_seconds)
    young = math.sqrt(2 * w * m)
    first_order, higher_order = young - w, young * (1 + math.sqrt(ratio) / 3 + ratio / 9) - w
    best = math.sqrt(w * w + 2 * w * (m - restart_seconds)) - w
    return Intervals(young, *((first_order, higher_order) if ratio < 1 else (m, m)), best)


def goodput(
    num_gpus: int,
    failures_per_node_day: float,
    save_seconds: float,
    restart_seconds: float,
    *,
    interval_seconds: float | None = None,
    background: bool = False,
    gpus_per_node: int = 8,
    other_failures_per_day: float = 0.0,
) -> Goodput:
    """Return where the time of a job goes: (1 - (u + T/2)/M) / (1 + w/T) of it is new work.

    ``restart_seconds`` runs from the failure to the first new step: noticing it, waiting for a node, loading. The
    interval is the best one unless given. A save in the ``background`` stops nothing (w is 0), so the best is to start
    one as soon as the last is complete; but what it saves only counts then, so a failure repeats as much more work.

    Its source found it within 5 % of a simulation up to 8,000 GPUs. It is for small losses: it lets nothing fail during
    a restart or a repetition; see `exponential_share`. Source: arXiv 2410.21680;
    the background is ours.

    >>> round(goodput(16_000, 6.5e-3, 0, 300, interval_seconds=3600).share, 3)  # there: 0.7
    0.684

    Raises:
        ValueError: a size or time that makes no sense; or a restart takes as long as the job then runs.
    """
    m = time_to_failure(
        num_gpus,
        failures_per_node_day,
        gpus_per_node=gpus_per_node,
        other_failures_per_day=other_failures_per_day,
    )
    best = checkpoint_interval(m, save_seconds, restart_seconds).best
    t = (save_seconds if background else best) if interval_seconds is None else interval_seconds
    _check("interval_seconds", t)
    if t < save_seconds and background:
        fault = f"interval_seconds={t:g} is shorter than a save in the background, save_seconds={save_seconds:g}"
        raise ValueError(f"{fault}: use {save_seconds:g} or more")
    w, kept_waiting = (0.0, save_seconds) if background else (save_seconds, 0.0)
    restarting = restart_seconds / m
    repeating = min(1 - restarting, (t / 2 + kept_waiting) / m)
    left = 1 - restarting - repeating
    saving = left * w / (t + w) if w else 0.0
    return Goodput(m, t, left - saving, saving, restarting, repeating)


def exponential_share(
    failure_seconds: float, interval_seconds: float, save_seconds: float, restart_seconds: float
) -> float:
    """Return the share of new work if failures come at any time alike, also during saves, restarts and repetitions.

    T / (M e^(u/M) (e^((T+w)/M) - 1)), which no loss makes negative. Source: Daly, FGCS 22 (2006).
    """
    for name, seconds in (("interval_seconds", interval_seconds), ("save_seconds", save_seconds)):
        _check(name, seconds)
    _check("restart_seconds", restart_seconds)
    _check("failure_seconds", failure_seconds, above=True)
    restarts, tried = restart_seconds / failure_seconds, (interval_seconds + save_seconds) / failure_seconds
    if not tried:
        return math.exp(-restarts)
    return interval_seconds / failure_seconds * math.exp(-restarts - tried) / -math.expm1(-tried)


def _check(name: str, value: float, above: bool = False) -> None:
    if (
        isinstance(value, bool)
        or not isinstance(value, Real)
        or not 0 <= float(value) < math.inf
        or (above and not value)
    ):
        raise ValueError(f"{name}={value!r} must be a number {'above 0' if above else 'from 0 up'}")


def _check_restart(restart_seconds: float, failure_seconds: float) -> None:
    _check("restart_seconds", restart_seconds)
    _check("failure_seconds", failure_seconds, above=True)
    if restart_seconds >= failure_seconds:
        fault = f"restart_seconds={restart_seconds:g} is as long as the job runs, failure_seconds={failure_seconds:g}"
        raise ValueError(f"{fault}: {_HOW_TO_FAIL_LESS}")
