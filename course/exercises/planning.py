"""The exercises of notebook 16: bytes of a GPU, GPUs for a deadline, and how much a failure costs."""

import math
from collections.abc import Callable

from course.exercises.base import Exercise

# -- bytes of a GPU -------------------------------------------------------------------------------------------------


def my_state_bytes(num_parameters, t, p, d, sharded_optimizer):
    mine = num_parameters / (t * p)
    weights, gradients, optimizer = 2, 4, 12
    if sharded_optimizer:
        optimizer /= d
    return mine * (weights + gradients + optimizer)


state_bytes = Exercise(
    "state_bytes",
    my_state_bytes,
    notebook="16",
    cases=[(1000, 1, 1, 1, False), (1000, 2, 1, 1, False), (9600, 2, 4, 5, False), (9600, 2, 4, 5, True)],
    hints=[
        "How many parameters has one GPU? Tensor and pipeline parallelism divide the model, data parallelism copies.",
        "A parameter takes 2 bytes as a weight, 4 as a gradient, and 12 in the optimizer.",
        "The sharded optimizer divides the 12 among the d replicas: 6 + 12/d.",
    ],
)


def held_bytes(num_parameters, t, p, d, sharded_optimizer, each: Callable) -> float:
    """Return the bytes of a GPU if a parameter takes ``each(d, z)``; z is d if the optimizer is sharded, or else 1."""
    return num_parameters / (t * p) * each(d, d if sharded_optimizer else 1)


state_bytes.mistakes_of(
    held_bytes,
    (
        dict(each=lambda d, z: (6 + 12 / z) / d),
        "You divided by d as well. Each replica holds the whole model, unless the optimizer is sharded.",
    ),
    (
        dict(each=lambda d, z: 18 / d),
        "You divided everything by d, sharded or not. Each replica holds weights and gradients of the whole model; "
        "only a sharded optimizer is divided among them.",
    ),
    (dict(each=lambda d, z: 18), "With sharded_optimizer the optimizer's 12 bytes are divided by d: you left it out."),
    (
        dict(each=lambda d, z: 16),
        "You counted 2 bytes for a gradient; here, as in Megatron-LM, gradients are added up in 4. And with "
        "sharded_optimizer the optimizer's 12 bytes are divided by d.",
    ),
    (dict(each=lambda d, z: 6 + 8 / z), "You counted 8 bytes in the optimizer, two moments. Its weight takes 4."),
    (dict(each=lambda d, z: 6), "These are weights and gradients. Adam adds 12 bytes: two moments, a float32 weight."),
    (
        dict(each=lambda d, z: 4 + 12 / z),
        "You counted 2 bytes for a gradient, as the ZeRO paper does. Here, as in Megatron-LM, it is 4.",
    ),
    (dict(each=lambda d, z: 6 + 12 / d), "You divided the optimizer's bytes by d although it is not sharded."),
    (dict(each=lambda d, z: 18 / z), "You divided all of it by d. ZeRO-1 divides the optimizer's 12 bytes only."),
    (dict(each=lambda d, z: 6 + 12 * z / d), "The wrong way round: divide by d where sharded_optimizer is True."),
    (
        dict(each=lambda d, z: (6 + 12 / z) / 1e9),
        "These are gigabytes, 1e9 bytes. Return bytes.",
    ),
    (
        dict(each=lambda d, z: (6 + 12 / z) / 2**30),
        "These are gibibytes, 2**30 bytes. Return bytes.",
    ),
    (dict(each=lambda d, z: 2 + 16 / z), "You divided the gradients, too. ZeRO-1 divides the optimizer's bytes only."),
)


@state_bytes.mistake(
    "With sharded_optimizer you divided the optimizer's bytes of the whole model by d. A replica's ranks have 1/(t p) "
    "of the model each: divide by t p, too."
)
def of_the_whole_model(num_parameters, t, p, d, sharded_optimizer):
    optimizer = num_parameters / d if sharded_optimizer else num_parameters / (t * p)
    return 6 * num_parameters / (t * p) + 12 * optimizer


@state_bytes.mistake("You divided the optimizer by p. Stages have different layers: it is shared by the d replicas.")
def among_stages(num_parameters, t, p, d, sharded_optimizer):
    return my_state_bytes(num_parameters, t, p, p, sharded_optimizer)


@state_bytes.mistake(
    "You divided the optimizer's bytes by all t · p · d ranks, after t and p had divided the parameters already. They "
    "are shared by the d replicas: divide by d."
)
def among_all_ranks(num_parameters, t, p, d, sharded_optimizer):
    return my_state_bytes(num_parameters, t, p, t * p * d, sharded_optimizer)


state_bytes.mistakes_of(
    lambda n, t, p, d, sharded, scale: scale(t, p, d) * my_state_bytes(n, t, p, d, sharded),
    (dict(scale=lambda t, p, d: p / d), "You divided by t d. Replicas have the whole model: it is cut by t and p."),
    (dict(scale=lambda t, p, d: t * p), "That is the whole model. A GPU has 1/(t p) of its parameters."),
    (dict(scale=lambda t, p, d: t * p * d), "These are the bytes of all GPUs together. Divide by t p, too."),
    (dict(scale=lambda t, p, d: p), "p is missing: each stage of the pipeline has 1/p of the layers."),
)


# -- GPUs for a deadline --------------------------------------------------------------------------------------------


def my_gpus_needed(billion_tokens, billion_parameters, days, teraflops):
    flops = 8 * billion_tokens * 1e9 * billion_parameters * 1e9  # 2 forward, 4 backward, 2 for forward again
    return math.ceil(flops / (days * 86400 * teraflops * 1e12))


gpus_needed = Exercise(
    "gpus_needed",
    my_gpus_needed,
    notebook="16",
    cases=[(300, 175, 34, 140), (450, 1000, 84, 163), (10.5, 7.5, 1.5, 42.4), (864, 1, 1, 100)],
    hints=[
        "Each parameter costs a token 2 FLOPs forward, 4 backward, and 2 more to compute forward again.",
        "All GPUs together do n · X FLOP/s; the run has days · 86400 seconds.",
        "Solve 8TP / (n X) = seconds for n, and round up: `math.ceil`.",
    ],
)


def gpus(
    billion_tokens, billion_parameters, days, teraflops, flops_each=8, seconds=86400, units=1e6, rounded=math.ceil
):
    """Do what `my_gpus_needed` does, with one thing wrong."""
    return rounded(flops_each * billion_tokens * billion_parameters * units / (days * seconds * teraflops))


gpus_needed.mistakes_of(
    gpus,
    (dict(flops_each=2), "That is the forward pass. Backward takes twice as much, recomputing as much again."),
    (dict(flops_each=6), "You counted 6 FLOPs per token and parameter. With full recomputation forward runs twice: 8."),
    (dict(rounded=int), "Rounded down, the run ends a little late. Round up."),
    (dict(rounded=round), "Rounded to the nearest number, the run can end a little late. Round up."),
    (
        dict(rounded=lambda n: 8 * math.ceil(n / 8)),
        "You rounded up to whole nodes of 8. That is how they are rented; what is asked is the number of GPUs.",
    ),
    (dict(rounded=lambda n: math.ceil(n) + 1), "This is one too many: `math.ceil` has rounded up already."),
    (dict(rounded=lambda n: int(n) + 1), "One more than rounded down is one too many where n is whole: `math.ceil`."),
    (dict(rounded=float), "There are no fractions of GPUs: round up to a whole number."),
    (dict(seconds=1), "FLOP/s are per second, and a day has 86400 seconds."),
    (
        dict(seconds=1, units=1, rounded=float),
        "The units are missing: T and P are in billions (1e9), X in tera (1e12), a day has 86400 s.",
    ),
    (dict(units=1), "T and P are in billions, and X in tera: 1e9 each above the line, 1e12 below."),
    (dict(seconds=1440), "A day has 1440 minutes, but FLOP/s are per second: 86400."),
    (dict(units=1e9), "X is in tera, 1e12; you took 1e9, giga."),
    (dict(seconds=3600), "A day has 86400 seconds; 3600 is an hour."),
)


@gpus_needed.mistake("More days need fewer GPUs: the days belong below the line.")
def days_above_the_line(billion_tokens, billion_parameters, days, teraflops):
    return gpus(billion_tokens, billion_parameters, 1 / days, teraflops)


@gpus_needed.mistake("You took the peak of an A100. A GPU achieves about half of that in training: use the argument.")
def at_the_peak(billion_tokens, billion_parameters, days, teraflops):
    return gpus(billion_tokens, billion_parameters, days, 312)


# -- what failures cost ---------------------------------------------------------------------------------------------


def my_new_work(failure_hours, interval_minutes, save_minutes, restart_minutes):
    lost_minutes = restart_minutes + interval_minutes / 2  # at each failure
    left = 1 - lost_minutes / (60 * failure_hours)
    return left * interval_minutes / (interval_minutes + save_minutes)


new_work = Exercise(
    "new_work",
    my_new_work,
    notebook="16",
    cases=[(10, 60, 0, 0), (10, 60, 0, 6), (10, 60, 15, 0), (3, 20, 2, 10), (2.5, 45, 10.5, 7.25)],
    hints=[
        "Each failure costs the restart, and the work since the last save: on average half an interval.",
        "That is lost once in every `60 * failure_hours` minutes. What is left of the time is 1 minus that share.",
        "Of what is left, `interval_minutes` out of every `interval_minutes + save_minutes` are work.",
    ],
)


def share_of_work(hours, interval, save, restart, lost=None, left=None, work=None, minutes=60) -> float:
    """Do what `my_new_work` does, with one thing different: ``lost(t, u)``, ``left(x)`` or ``work(t, w)``."""
    share = (lost or (lambda t, u: u + t / 2))(interval, restart) / (minutes * hours)
    kept = left(share) if left else 1 - share
    return kept * (work(interval, save) if work else interval / (interval + save))


new_work.mistakes_of(
    share_of_work,
    (dict(lost=lambda t, u: t / 2), "The restart is missing: until the next step runs, nothing is computed."),
    (
        dict(lost=lambda t, u: u),
        "The work since the last save is missing: it is done once more. On average that is half an interval.",
    ),
    (
        dict(lost=lambda t, u: u + t),
        "A failure comes at any time between two saves, so on average half an interval is lost, not a whole one.",
    ),
    (
        dict(lost=lambda t, u: (u + t) / 2),
        "You halved the restart, too. Half an interval is repeated, and every restart is a whole one: u + T/2.",
    ),
    (
        dict(work=lambda t, w: 1),
        "Saves are missing: of every interval_minutes + save_minutes only interval_minutes are work.",
    ),
    (
        dict(work=lambda t, w: 1 - w / t),
        "From save to save pass interval_minutes + save_minutes, not interval_minutes: the share is T/(T + w).",
    ),
    (dict(work=lambda t, w: w / (t + w)), "That is the share of the saves. The rest is work."),
    (dict(minutes=1), "failure_hours are hours, the others minutes: 60 to an hour."),
    (dict(minutes=3600), "That counts seconds in an hour; the other numbers are minutes."),
    (dict(left=lambda share: share), "That is the share that failures cost. What is asked is what is left."),
    (
        dict(left=lambda share: 1 / (1 + share)),
        "They are lost out of every 60 * failure_hours: 1 minus the share.",
    ),
)


@new_work.mistake(
    "You subtracted all losses from 1. A save comes every T + w, and failures take from what is left for work and "
    "saves: multiply what failures leave by T/(T + w)."
)
def losses_added(hours, interval, save, restart):
    return 1 - (restart + interval / 2) / (60 * hours) - save / interval


@new_work.mistake("You divided the save by the time between failures. It comes once in every interval: w/T.")
def saves_at_failures(hours, interval, save, restart):
    return (1 - (restart + interval / 2) / (60 * hours)) / (1 + save / (60 * hours))


new_work.mistakes_in((None, lambda share: 1 - share, "This is the share that is lost: 1 minus what is asked."))
new_work.mistakes_in((None, lambda share: 100 * share, "That is in percent. Return the share, from 0 to 1."))
