"""Compares what every rank has with what one process has, parameter by parameter.

The factor between the two names most mistakes: gradients d times too large were summed over d replicas, not averaged.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import nn

Tensors = Mapping[str, torch.Tensor | None]


def gradients(module: nn.Module) -> dict[str, torch.Tensor | None]:
    """Return copies of the gradients as they are now, by parameter name; None where there is none."""
    return {name: None if p.grad is None else p.grad.detach().clone() for name, p in module.named_parameters()}


def weights(module: nn.Module) -> dict[str, torch.Tensor]:
    """Return copies of the parameters as they are now, by name."""
    return {name: parameter.detach().clone() for name, parameter in module.named_parameters()}


@dataclass(frozen=True)
class Difference:
    """How one tensor differs from what one process has, where |x| is the root of the sum of squares.

    ``error`` is |got - expected| / |expected|. ``ratio`` is the factor that brings expected closest to got, and
    ``rest`` the error that is then left. ``both_zero`` means that both sides are zero, so any factor fits.
    """

    name: str
    error: float
    ratio: float
    rest: float
    both_zero: bool = field(default=False, repr=False)


def compare(got: Tensors, expected: Tensors) -> list[Difference]:
    """Return one `Difference` per tensor in ``got``; a rank may have fewer than one process has. None counts as zeros.

    >>> ones = torch.ones(4)
    >>> compare({"weight": 4 * ones}, {"weight": ones, "bias": ones})
    [Difference(name='weight', error=3.0, ratio=4.0, rest=0.0)]

    Raises:
        ValueError: a name is not in ``expected``, or has a different shape there.
    """
    return [_difference(name, tensor, expected) for name, tensor in got.items()]


@dataclass(frozen=True)
class Parity:
    """What `compare` found on every rank, in rank order; its text shows the worst of each rank.

    >>> print(Parity([compare({"a": torch.ones(2)}, {"a": torch.ones(2)})] * 2))
    rank     error    ratio  worst at
       0   0.0e+00   1.0000  a
       1   0.0e+00   1.0000  a
    """

    ranks: Sequence[Sequence[Difference]]

    def worst(self, rank: int) -> Difference:
        """Return the largest difference on one rank; the first, if several are equal but for rounding."""
        nothing = Difference("(it has none)", 0.0, 1.0, 0.0, both_zero=True)  # a rank without parameters
        return max(self.ranks[rank], key=lambda difference: float(f"{difference.error:.4g}"), default=nothing)

    @property
    def error(self) -> float:
        """The largest error of all ranks and parameters."""
        return max(self.worst(rank).error for rank in range(len(self.ranks)))

    @property
    def common_ratio(self) -> float | None:
        """The one factor between everything on every rank and what one process has; None if there is no such factor."""
        found = [each for differences in self.ranks for each in differences if not each.both_zero]
        first = found[0].ratio if found else 1.0
        alike = all(math.isclose(each.ratio, first, rel_tol=1e-4) and each.rest < 1e-4 for each in found)
        return first if alike else None

    def __str__(self) -> str:
        lines = [f"rank{'error':>10}{'ratio':>9}  worst at"]
        for rank in range(len(self.ranks)):
            worst = self.worst(rank)
            lines.append(f"{rank:>4}{worst.error:>10.1e}{worst.ratio:>9.4f}  {worst.name}")
        if self.common_ratio is not None and not math.isclose(self.common_ratio, 1, rel_tol=1e-4):
            lines.append(f"everything is {self.common_ratio:.4g} times what one process has")
        return "\n".join(lines)


def _difference(name: str, got: torch.Tensor | None, expected_tensors: Tensors) -> Difference:
    if name not in expected_tensors:
        raise ValueError(f"one process has no {name}: it has {', '.join(expected_tensors)}")
    expected = expected_tensors[name]
    if got is not None and expected is not None and got.shape != expected.shape:
        shapes = f"{list(got.shape)} here and {list(expected.shape)} in one process"
        raise ValueError(f"{name} is {shapes}: compare a shard with the same shard of the whole")
    one, other = (torch.zeros(1) if x is None else x.detach().cpu() for x in (got, expected))
    one, other = torch.broadcast_tensors(one.double(), other.double())
    size = other.norm().item()
    if size == 0:  # so no error relative to it
        both_zero = one.norm().item() == 0
        error, ratio = (0.0, 1.0) if both_zero else (math.inf, math.inf)
        return Difference(name, error, ratio, rest=error, both_zero=both_zero)
    ratio = (one * other).sum().item() / size**2
    error, rest = ((one - factor * other).norm().item() / size for factor in (1.0, ratio))
    if not math.isfinite(error):  # an overflow is not close to anything
        error = rest = math.inf
    return Difference(name, error, ratio, rest)
