"""Failures against published runs, against a simulation, and the intervals against a search.

Sources: arXiv 2410.21680 (Meta's RSC-1), 2407.21783 (Llama 3), 2602.00277 (FT-HSDP), and BLOOM's chronicles, in
bigscience-workshop/bigscience, train/tr11-176B-ml/chronicles.md.
"""

import random

import pytest

from course.sizing.failures import checkpoint_interval, exponential_share, goodput, time_to_failure

HOUR, RSC_1 = 3600.0, 6.5e-3


def test_the_published_share_of_the_whole_of_rsc_1():
    """16,000 GPUs, saved each hour at no cost, back in 5 minutes: printed is 0.7, and the two formulas enclose it."""
    lost = goodput(16_000, RSC_1, 0, 300, interval_seconds=HOUR)
    assert lost.share == pytest.approx(0.684, abs=5e-4)
    assert lost.share < 0.7 < exponential_share(lost.failure_seconds, HOUR, 0, 300)


@pytest.mark.parametrize(("num_gpus", "printed_hours", "digits"), [(16_384, 1.8, 1), (131_072, 0.23, 2)])
def test_hours_between_failures_as_projected(num_gpus, printed_hours, digits):
    assert time_to_failure(num_gpus, RSC_1) / HOUR == pytest.approx(printed_hours, abs=0.6 * 10**-digits)


def test_the_trap_small_jobs_die_of_other_causes_than_nodes():
    """1,024 GPUs ran 7.9 hours, and 8 of them 47.7 days: a node's rate alone says three times as much and more."""
    for num_gpus, measured in ((1024, 7.9 * HOUR), (8, 47.7 * 24 * HOUR)):
        of_nodes = time_to_failure(num_gpus, RSC_1)
        assert of_nodes > 3 * measured
        others = 86_400 / measured - 86_400 / of_nodes
        assert time_to_failure(num_gpus, RSC_1, other_failures_per_day=others) == pytest.approx(measured)
    assert time_to_failure(1024, RSC_1) / HOUR == pytest.approx(28.8, abs=0.05)


def test_llama_3():
    """419 unexpected interruptions of 2,048 nodes in 54 days; above 90 % effective, so at most 18 minutes for each."""
    rate = 419 / (2048 * 54)
    assert time_to_failure(16_384, rate) / HOUR == pytest.approx(3.09, abs=0.005)
    assert goodput(16_384, rate, 60, 600, background=True).share > 0.9
    assert goodput(16_384, rate, 60, 600, background=True, interval_seconds=HOUR).share < 0.9


def test_bloom():
    """A GPU of 384 a week; saves take 40 s. 250 steps once were 7.3 hours; every 100 steps is near the best."""
    step, rate = 7.3 * HOUR / 250, 1 / (7 * 48)
    best, every_100, every_250 = (
        goodput(384, rate, 40, 600, interval_seconds=steps and steps * step) for steps in (None, 100, 250)
    )
    assert 50 < best.interval_seconds / step < 100
    assert best.share - every_100.share < 0.002
    assert best.repeating + best.saving < 0.6 * (every_250.repeating + every_250.saving)


def test_stalls_at_a_hundred_thousand_gpus():
    """A failure every 18 minutes: stalls of 10 minutes leave 44 % of the time; of 3 minutes, 80 % were reached."""
    rate = 80 / 12_500  # failures each day on so many nodes
    lost = goodput(100_000, rate, 0, 600)
    assert (lost.failure_seconds, lost.share) == (18 * 60, pytest.approx(0.44, abs=0.005))
    assert goodput(100_000, rate, 0, 180).share == pytest.approx(0.8, abs=0.04)


@pytest.mark.parametrize(("m", "w", "u"), [(11_100, 60, 600), (6_600, 300, 0), (86_400, 40, 1_200)])
def test_the_best_interval_is_better_than_its_neighbours(m, w, u):
    young, daly, higher_order, best = checkpoint_interval(m, w, u)
    at = {t: goodput(8, 86_400 / m, w, u, interval_seconds=t).share for t in (best, 0.97 * best, 1.03 * best)}
    assert max(at, key=at.__getitem__) == best
    assert goodput(8, 86_400 / m, w, u).share == at[best]
    assert daly == young - w
    shares = {t: exponential_share(m, t, w, u) for t in (higher_order, 0.97 * higher_order, 1.03 * higher_order)}
    assert max(shares, key=shares.__getitem__) == higher_order  # Daly's rule is the optimum of his formula


def test_the_intervals_by_hand():
    """sqrt(2 * 64 * 50) = 80, and w/2M = 0.64, so 80 * (1 + 0.8/3 + 0.64/9) - 64; sqrt(64^2 + 6400) is 102.45."""
    assert checkpoint_interval(50, 64) == pytest.approx((80, 16, 43.0222, 38.4500), abs=1e-4)


def test_a_save_that_takes_twice_the_time_between_failures():
    assert checkpoint_interval(100, 200)[1:3] == (100, 100)


def simulated_share(m, t, w, u, rounds=20_000):
    """Work, save, fail at any time, restart: return the share of new work, failures during a restart included."""
    rng, now, done, state = random.Random(0), 0.0, 0.0, "work"
    fails_at = rng.expovariate(1 / m)
    while done < rounds * t:
        takes = u if state == "restart" else t + w
        if now + takes > fails_at:
            now, state = fails_at, "restart"
            fails_at = now + rng.expovariate(1 / m)
            continue
        now += takes
        done += t if state == "work" else 0
        state = "work"
    return done / now


def test_against_a_simulation():
    """With failures at any time Daly's formula is exact; the one for small losses is below, by less than 5 %."""
    m, t, w, u = 11_100, 1_800, 60, 300
    simulated = simulated_share(m, t, w, u)
    assert exponential_share(m, t, w, u) == pytest.approx(simulated, rel=0.01)
    assert 0.95 * simulated < goodput(8, 86_400 / m, w, u, interval_seconds=t).share < simulated


def test_shares_add_up():
    for lost in (
        goodput(16_384, 4e-3, 60, 600),
        goodput(16_384, 4e-3, 60, 600, background=True),
        goodput(131_072, RSC_1, 60, 600, interval_seconds=HOUR),  # nothing is left
    ):
        assert lost.share + lost.lost == pytest.approx(1)
        assert min(lost[2:]) >= 0
    assert lost.share == lost.saving == 0
    assert exponential_share(lost.failure_seconds, HOUR, 60, 600) > 0
    assert exponential_share(1, 1e6, 0, 0) == 0


def test_saving_in_the_background():
    """It stops nothing; each failure repeats half an interval, and the save that was under way."""
    lost = goodput(16_384, 4e-3, 120, 600, background=True)
    assert (lost.interval_seconds, lost.saving) == (120, 0)
    assert lost.repeating == pytest.approx(180 / lost.failure_seconds)
    assert lost.share > goodput(16_384, 4e-3, 120, 600).share
