"""Fits the constants of each kind of GPU and precision to published runs: ``python -m course.sizing.fit``.

Least squares of the logarithm of estimated over measured seconds, by Gauss-Newton steps within what each constant may
be. A leave-one-out error is that of a run whose constants were fitted to all others of its group. Left out with it are,
in the second column of errors, all runs of its model: so a model says nothing about itself.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from math import log
from typing import NamedTuple

from course.sizing.hardware import Hardware
from course.sizing.runs import RUNS, SECTIONS, Run
from course.sizing.step_seconds import step_time
from course.table import Table


class Constant(NamedTuple):
    """A constant of `Hardware`, what it may be, and where the search for it starts."""

    name: str
    least: float
    most: float
    start: float

    def put(self, hardware: Hardware, value: float) -> Hardware:
        """Return ``hardware`` with this constant."""
        if hasattr(hardware, self.name):
            return replace(hardware, **{self.name: value})
        return replace(hardware, hidden=hardware.hidden._replace(**{self.name: value}))


EFFICIENCY = Constant("product_efficiency", 0.1, 1.0, 0.7)
FP8_EFFICIENCY = Constant("fp8_efficiency", 0.1, 1.0, 0.5)
ATTENTION = Constant("attention_efficiency", 0.05, 1.0, 0.4)
OVERHEAD = Constant("layer_overhead_seconds", 0.0, 5e-3, 2e-4)
EXPERT_OVERHEAD = Constant("expert_overhead_seconds", 0.0, 2e-3, 1e-4)
HIDDEN_TENSOR, HIDDEN_EXPERT = Constant("tensor", 0.0, 1.0, 0.5), Constant("expert", 0.0, 1.0, 0.5)
CONSTANTS = {
    "H100 bf16": [EFFICIENCY, OVERHEAD, HIDDEN_TENSOR],
    "H100 fp8": [FP8_EFFICIENCY],
    "H100 experts": [EXPERT_OVERHEAD, HIDDEN_EXPERT],
    "H100 FlashAttention-2 fp8": [],
    "H100 FSDP of 2023 bf16": [EFFICIENCY, OVERHEAD],
    "H100 500 W fp8": [ATTENTION],
    "A100 bf16": [EFFICIENCY, OVERHEAD],
    "GB200 bf16": [EFFICIENCY],
    "GB200 fp8": [FP8_EFFICIENCY],
    "GB300 fp8": [FP8_EFFICIENCY],
    "B200 fp8": [FP8_EFFICIENCY, ATTENTION],
    "B200 experts": [EXPERT_OVERHEAD],
    "GB200 and GB300 experts": [EXPERT_OVERHEAD],
    "GB200 and GB300 of 2026 experts": [HIDDEN_EXPERT],
}
"""What is fitted to each group of runs, in this order: a group takes all other constants from those before it.

Without a fit: what attention reaches on the A100, and on the H100 with FlashAttention-2 and with cuDNN, is published of
the kernels; messages of the gradients, and of the pipeline where a rank has another chunk, hide behind the work that
there is, as their sources say.
"""


def rows_of(group: str) -> list[Run]:
    """Return the runs that determine a group's constants."""
    return [run for run in RUNS if run.group == group and run.fits]


def fitted_constants(
    runs: Sequence[Run], constants: Sequence[Constant], hardware: Callable[[Run], Hardware] = lambda run: run.hardware
) -> dict[str, float]:
    """Return the constants with which `step_time` is nearest to these runs; ``hardware`` has all others.

    Raises:
        ValueError: fewer runs than constants.
    """
    if not constants:
        return {}
    if len(runs) < len(constants):
        raise ValueError(f"{len(runs)} runs cannot determine {len(constants)} constants: give {len(constants)} or more")
    values = [each.start for each in constants]

    def errors(values: Sequence[float]) -> list[float]:
        return [log(estimated(run, dict(zip(names, values)), hardware) / run.seconds) for run in runs]

    names = [each.name for each in constants]
    for _ in range(6):
        errors_now, slopes = errors(values), []
        for number, each in enumerate(constants):
            step = (each.most - each.least) * (1e-4 if values[number] < each.most else -1e-4)
            changed = errors([value + step * (number == place) for place, value in enumerate(values)])
            slopes.append([(after - before) / step for before, after in zip(errors_now, changed)])
        values = _nearest(values, errors_now, slopes, constants)
    return dict(zip(names, values))


def _nearest(
    values: Sequence[float], errors: list[float], slopes: list[list[float]], constants: Sequence[Constant]
) -> list[float]:
    """Return the values, within their limits, whose errors have the least squares if they change along the slopes.

    One constant after the other takes its best value, until none moves: with limits, too, that is the least sum.
    """
    found = list(values)
    for _ in range(500):
        before = list(found)
        for number, (each, slope) in enumerate(zip(constants, slopes)):
            square = sum(part * part for part in slope)
            if not square:  # no run depends on it
                continue
            best = found[number] - sum(map(float.__mul__, slope, errors)) / square
            change = min(max(best, each.least), each.most) - found[number]
            errors = [error + change * part for error, part in zip(errors, slope)]
            found[number] += change
        if all(abs(new - old) <= 1e-7 * each.most for new, old, each in zip(found, before, constants)):
            break
    return found


def estimated(run: Run, values: dict[str, float], hardware: Callable[[Run], Hardware]) -> float:
    """Return the seconds of a step with these constants."""
    changed = hardware(run)
    for name, value in values.items():
        changed = Constant(name, 0, 0, 0).put(changed, value)
    return step_time(run.plan, changed).total


def left_out_errors(group: str, same: Callable[[Run], object] = id) -> list[float]:
    """Return each run's relative error from constants fitted to the others; all that are the ``same`` are left out.

    Where too few others are left, the constants are those of all.
    """
    runs, constants, found = rows_of(group), CONSTANTS[group], {}
    for run in runs:
        if same(run) not in found:
            others = [other for other in runs if same(other) != same(run)]
            found[same(run)] = fitted_constants(others if len(others) >= len(constants) else runs, constants)
    return [estimated(run, found[same(run)], lambda run: run.hardware) / run.seconds - 1 for run in runs]


def fits(group: str) -> Table:
    """Return each run of a group with its errors: fitted, left out, and its whole model left out."""
    runs, constants = rows_of(group), CONSTANTS[group]
    found = fitted_constants(runs, constants)
    columns = [
        [estimated(run, found, lambda run: run.hardware) / run.seconds - 1 for run in runs],
        left_out_errors(group),
        left_out_errors(group, lambda run: run.model),
    ]
    rows = [(str(run), f"{run.seconds:.3g}", *(f"{each:+.1%}" for each in errors))
            for run, *errors in zip(runs, *columns)]  # fmt: skip
    for name, of in (("mean", mean_size), ("worst", worst)):
        rows.append((name, "", *(f"{of(column):.1%}" for column in columns)))
    said = ", ".join(f"{name} {value:.3g}" for name, value in found.items()) or "nothing is fitted"
    return Table(("run", "measured, s", "fitted", "left out", "model left out"), rows, f"{group}: {said}")


def by_section() -> Table:
    """Return the errors of all runs by section: of those that are fitted, each left out; and of the others."""
    left_out = {}
    for group in CONSTANTS:
        left_out |= {run.name: error for run, error in zip(rows_of(group), left_out_errors(group))}
    rows = []
    for section in SECTIONS:
        inside = [run for run in RUNS if run.section == section]
        errors = [left_out[run.name] for run in inside if run.name in left_out]
        others = [run.error for run in inside if run.name not in left_out]
        cells = [(str(len(some)), f"{mean_size(some):.1%}", f"{worst(some):.1%}") if some else ("0", "", "")
                 for some in (errors, others)]  # fmt: skip
        rows.append((section, *cells[0], *cells[1]))
    heads = "section", "fitted runs", "mean, left out", "worst", "other runs", "mean", "worst"
    return Table(heads, rows, "Errors by section. Other runs: what had to be assumed could explain any error.")


def mean_size(errors: Sequence[float]) -> float:
    """Return the mean of the errors' absolute values."""
    return sum(map(abs, errors)) / len(errors)


def worst(errors: Sequence[float]) -> float:
    """Return the largest of them."""
    return max(map(abs, errors))


def main() -> None:
    for group in CONSTANTS:
        print(fits(group), end="\n\n")
    print(by_section())


if __name__ == "__main__":
    from labtrain.command_line import run_command  # a browser has no pipes

    run_command(main)
