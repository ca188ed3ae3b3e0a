"""Says how near the estimate was for published runs like a plan: an error is worth as much as the runs behind it."""

from functools import cache

from course.sizing.hardware import Hardware
from course.sizing.plan import Plan
from course.sizing.runs import RUNS, Run

FACTOR = 4  # a sequence that many times as long, or as short, is another matter


def runs_like(plan: Plan, hardware: Hardware) -> list[Run]:
    """Return the published runs on this hardware in the plan's precision, with experts if it has some.

    Their sequences are as long, within a factor of 4.
    """
    return [run for run in RUNS if run.hardware.name == hardware.name and _is_like(run.plan, plan)]


def _is_like(published: Plan, plan: Plan) -> bool:
    ratio = published.model.seq_length / plan.model.seq_length
    has_experts = [each.model.num_experts is not None for each in (published, plan)]
    return published.precision == plan.precision and has_experts[0] == has_experts[1] and 1 / FACTOR <= ratio <= FACTOR


@cache
def unfitted_error() -> float:
    """Return the mean size of the errors of all published runs to which nothing was fitted."""
    errors = [abs(run.error) for run in RUNS if not run.fits]
    return sum(errors) / len(errors)


def how_sure(plan: Plan, hardware: Hardware) -> str:
    """Return in words how far off the estimate was for these, at most; those with guesses count only if no other does.

    Without any, it is as wrong as it is on average for all runs to which nothing was fitted.

    >>> from course.sizing import FITTED, RUNS
    >>> plan = RUNS[0].plan
    >>> how_sure(plan, FITTED["H100"]), how_sure(plan, FITTED["H200"])
    ('within 4%: 18 runs like this one', 'perhaps 24% off: no run like this one was published')
    """
    found = runs_like(plan, hardware)
    if not found:
        return f"perhaps {unfitted_error():.0%} off: no run like this one was published"
    stated = [run for run in found if run.fits]
    counted = stated or found
    largest = max(abs(run.error) for run in counted)
    several = "1 run" if len(counted) == 1 else f"{len(counted)} runs"
    return f"within {largest:.0%}: {several} like this one" + ("" if stated else ", of which something was guessed")
