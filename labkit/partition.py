"""Divides work among ranks: the rows of a batch, a sequence, a model's layers, a weight's dims.

Integers, no torch.
"""

from collections.abc import Iterable
from itertools import pairwise

from labkit.sizes import Misfit, check_size, divisors, does_not_divide, either, whole_number


def rows_of_replica(batch_size: int, dp_size: int, dp_rank: int) -> range:
    """Return which rows of a batch a replica sees in a step: consecutive ones, equally many on
    each.

    >>> rows_of_replica(8, dp_size=2, dp_rank=1)
    range(4, 8)
    """
    check_divides(dp_size, "batch_size", batch_size, parts_name="dp_size")
    size = batch_size // dp_size
    return range(dp_rank * size, (dp_rank + 1) * size)


def layers_of_stage(
    num_layers: int, stage: int, num_stages: int, stage_layers: Iterable[int] | None = None
) -> range:
    """Return the layers of one of the model's consecutive stages, with as many in each as
    `split_layers` says.

    >>> layers_of_stage(10, 1, 4), layers_of_stage(10, 1, 4, stage_layers=(1, 4, 4, 1))
    (range(2, 5), range(1, 5))
    """
    split = split_layers(num_layers, num_stages, stage_layers)
    if whole_number(stage) not in range(num_stages):
        raise ValueError(
            f"stage={stage!r} is not one of num_stages={num_stages}: use 0 to {num_stages - 1}"
        )
    return range(sum(split[:stage]), sum(split[: stage + 1]))


def split_layers(
    num_layers: int,
    num_stages: int,
    stage_layers: Iterable[int] | None = None,
    first_stage_layers: int | None = None,
    last_stage_layers: int | None = None,
    account_for_embedding_in_pipeline_split: bool = False,
    account_for_loss_in_pipeline_split: bool = False,
) -> tuple[int, ...]:
    """Return how many layers each stage has: those of ``stage_layers``, or about equally many.

    The first and the last may have numbers of their own; or the embedding and the loss count as a
    layer each.

    >>> split_layers(10, 4), split_layers(10, 4, first_stage_layers=1)
    ((2, 3, 2, 3), (1, 3, 3, 3))
    >>> both = ("account_for_embedding_in_pipeline_split", "account_for_loss_in_pipeline_split")
    >>> split_layers(126, 8, **dict.fromkeys(both, True))
    (15, 16, 16, 16, 16, 16, 16, 15)

    Raises:
        ValueError: the layers do not add up, a stage has none, or two arguments say how many a
            stage has.
    """
    num_layers = check_size("num_layers", num_layers)
    num_stages = check_size("num_stages", num_stages)
    given = {"first_stage_layers": first_stage_layers, "last_stage_layers": last_stage_layers}
    ends = {name: check_size(name, size) for name, size in given.items() if size is not None}
    extra_layers = {
        "account_for_embedding_in_pipeline_split": account_for_embedding_in_pipeline_split,
        "account_for_loss_in_pipeline_split": account_for_loss_in_pipeline_split,
    }

    said = _said(stage_layers, ends, extra_layers)
    if stage_layers is None:
        sizes = _equal_split(num_layers, num_stages, ends, *extra_layers.values())
    else:
        sizes = list(check_stage_layers(stage_layers))
    if len(sizes) != num_stages or sum(sizes) != num_layers or min(sizes) < 1:
        needed = f"num_stages={num_stages} must have 1 layer or more each"
        needed += f", and num_layers={num_layers} together"
        raise Misfit(
            "each stage must have 1 layer or more, and all num_layers together",
            f"{said} gives stages of {sizes} layers, but {needed}",
            "change the numbers, or use fewer stages",
        )
    return tuple(sizes)


def check_stage_layers(stage_layers: object) -> tuple[int, ...]:
    """Return a list of stages' layers as a tuple, or raise a ValueError if it is not one."""
    if not isinstance(stage_layers, Iterable) or isinstance(stage_layers, str):
        fault = f"stage_layers={stage_layers!r} must be a list"
        raise ValueError(f"{fault}: give one number for each stage")
    return tuple(check_size("stage_layers", size) for size in stage_layers)


def _said(stage_layers: object, ends: dict[str, int], extra_layers: dict[str, bool]) -> str:
    """Return the arguments that say how to split; raise a ValueError if two of them say it of one
    stage.
    """
    given: dict[str, object] = {} if stage_layers is None else {"stage_layers": stage_layers}
    given |= ends
    given |= {name: True for name, is_counted in extra_layers.items() if is_counted}
    said = ", ".join(f"{name}={value}" for name, value in given.items()) or "an equal split"
    first_twice = {"first_stage_layers", "account_for_embedding_in_pipeline_split"} <= given.keys()
    last_twice = {"last_stage_layers", "account_for_loss_in_pipeline_split"} <= given.keys()
    all_twice = "stage_layers" in given and len(given) > 1
    if first_twice or last_twice or all_twice:
        rule = "two of these say how many layers one stage has"
        raise Misfit(rule, f"{said}: {rule}", "leave one out")
    return said


def _equal_split(
    num_layers: int, num_stages: int, ends: dict[str, int], embedding: bool, loss: bool
) -> list[int]:
    """Return about equal numbers of layers, but for the ends whose number is given.

    The embedding and the loss take the place of a layer each, if they count.
    """
    sizes = []
    num_middle = num_stages - len(ends)
    if num_middle > 0:
        items = num_layers - sum(ends.values()) + embedding + loss
        bounds = [items * stage // num_middle for stage in range(num_middle + 1)]
        sizes = [end - start for start, end in pairwise(bounds)]
        sizes[0] -= embedding
        sizes[-1] -= loss
    if "first_stage_layers" in ends:
        sizes.insert(0, ends["first_stage_layers"])
    if "last_stage_layers" in ends:
        sizes.append(ends["last_stage_layers"])
    return sizes


def tokens_of_rank(seq_length: int, cp_size: int, cp_rank: int, zigzag: bool = True) -> list[range]:
    """Return which tokens of a sequence a context-parallel rank holds: consecutive ones, or two
    zigzag chunks.

    Zigzag means an early and a late one of 2c chunks, r and 2c - 1 - r: equal work under a causal
    mask.

    >>> tokens_of_rank(8, cp_size=2, cp_rank=0)
    [range(0, 2), range(6, 8)]
    >>> tokens_of_rank(8, cp_size=2, cp_rank=0, zigzag=False)
    [range(0, 4)]

    Raises:
        ValueError: the sequence cannot be cut so, or there is no such rank.
    """
    check_sequence_cut(seq_length, cp_size, zigzag)
    if check_size("cp_rank", cp_rank, least=0) >= cp_size:
        raise ValueError(
            f"cp_rank={cp_rank} is not one of cp_size={cp_size}: use 0 to {cp_size - 1}"
        )
    if not zigzag or cp_size == 1:
        length = seq_length // cp_size
        return [range(cp_rank * length, (cp_rank + 1) * length)]
    length = seq_length // (2 * cp_size)
    chunks = (cp_rank, 2 * cp_size - 1 - cp_rank)
    return [range(chunk * length, (chunk + 1) * length) for chunk in chunks]


def check_sequence_cut(seq_length: int, cp_size: int, zigzag: bool, tp_size: int = 1) -> None:
    """Raise a ValueError if a sequence cannot be cut among context-parallel ranks, and each part
    among ``tp_size``.
    """
    seq_length = check_size("seq_length", seq_length)
    chunks = 2 * check_size("cp_size", cp_size)
    if not zigzag or cp_size == 1:  # consecutive tokens, or one rank with all of them
        check_divides(cp_size, "seq_length", seq_length, parts_name="cp_size")
    elif seq_length % chunks:
        fits = either(multiples_near(seq_length, chunks))
        if seq_length % cp_size == 0:
            fits += ", or zigzag=False"
        fault = f"2 * cp_size={cp_size} = {chunks} does not divide seq_length={seq_length}"
        rule = "2 * cp_size must divide seq_length"
        raise Misfit(rule, f"zigzag chunks: {fault}", f"use seq_length {fits}")
    part = "seq_length" if cp_size == 1 else "seq_length / cp_size"
    check_divides(tp_size, part, seq_length // cp_size)


def chunks_of_rank(size: int, tp_size: int, tp_rank: int, stride: int = 1) -> list[range]:
    """Return what a tensor-parallel rank keeps of a dim of this size, by Megatron-LM's stride rule.

    The dim is cut into t * stride chunks, and rank r keeps chunks r, r + t, r + 2t, ... With
    stride=3, each rank gets the Q, the K and the V of its own heads from a fused [Q; K; V].

    >>> chunks_of_rank(12, tp_size=2, tp_rank=1, stride=3)
    [range(2, 4), range(6, 8), range(10, 12)]
    """
    chunk = size // (tp_size * stride)
    starts = range(tp_rank * chunk, size, tp_size * chunk)
    return [range(start, start + chunk) for start in starts]


def check_divides(
    parts: int,
    name: str,
    size: int,
    stride: int = 1,
    *,
    parts_name: str = "tp_size",
    is_given: bool = False,
) -> None:
    """Raise a Misfit if a dim of this size cannot be cut into parts * stride equal chunks.

    Of a size that is given, as by a model's weights, the error does not say which one to use
    instead.

    >>> check_divides(4, "rows", 9)
    Traceback (most recent call last):
    labkit.sizes.Misfit: tp_size=4 does not divide rows=9: use tp_size 1, 3 or 9, or rows 8 or 12
    """
    size = check_size(name, size)
    stride = check_size("stride", stride)
    chunks = parts * stride
    if size % chunks:
        fits = []
        if size % stride == 0:
            fits.append(f"{parts_name} {either(divisors(size // stride))}")
        if not is_given:
            fits.append(f"{name} {either(multiples_near(size, chunks))}")
        factors = {parts_name: parts}
        if stride > 1:
            factors["stride"] = stride
        fault = does_not_divide(name, size, **factors)
        rule = f"{' * '.join(factors)} must divide {name}"
        raise Misfit(rule, fault, f"use {', or '.join(fits)}")


def multiples_near(number: int, of: int) -> list[int]:
    """Return the multiples just below and just above a number, without 0: of 4, 8 and 12 are near
    10.
    """
    below = number // of * of
    return [multiple for multiple in (below, below + of) if multiple]
