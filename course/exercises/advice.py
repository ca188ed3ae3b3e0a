"""Explains a wrong answer: by a typical mistake that gives the same values, or by how they relate to the right ones."""

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from course.exercises.relations import num_parts, relation, shape_of, swapped
from course.exercises.values import FREED, leaves, same
from course.exercises.watch import UNWRITTEN

NONE = (
    "None is what a function gives back if it does not end with `return`, whatever it prints or changes. "
    "dist.all_reduce gives back None too, because it works in place: return the tensor that you gave it."
)


NONE_FOR_ZERO = (
    "It gives back None only where 0 is right. 0 counts as false: `x or None` and `if x:` take it for nothing, and "
    "`is None` does not."
)


ERRORS = {
    "set_requires_gradient_sync|set_is_last_backward": "PyTorch's `fully_shard` has this, and labkit's class does not: "
    "its backwards send nothing inside `with model.no_sync():`.",
    "has no attribute '(to_local|full_tensor)'": "Only a DTensor has that: `fully_shard` was not called on the module "
    "that this parameter belongs to. What lies outside of the layers belongs to the root, so call it on the model, "
    "too.",
    "Invariant encountered": "`fully_shard` was called on the model before its layers, so the model's unit has their "
    "parameters already. Go from the inside out: each layer first, and the model last.",
    "do not implement forward": "A list of layers has no forward of its own: call `fully_shard` on each layer in it.",
    "sharding strategy registered": "A collective got a DTensor. `fully_shard` has averaged its gradients already; "
    "what this rank has of a DTensor is `to_local()`.",
    "tensor subclasses, got DTensor": "A DTensor was returned: return what this rank has of it, `to_local()`.",
    "mixed torch.Tensor and DTensor": "An ordinary tensor met a DTensor. A model's own forward gathers its weights: "
    "call the model itself, not its parts. Elsewhere, `to_local()` is what this rank has, and `full_tensor()`, on all "
    "ranks, the whole.",
    "be applied to a module once": "`fully_shard` was called twice on one module: once is enough.",
    "has no attribute": "It has no such name: `dir(...)` lists those that it has. Is it of a different library?",
    "default process group twice": "The ranks are connected already: `launch` has called init_process_group. Leave it "
    "out; a function here is what a rank does afterwards.",
    "implicitly created only for scalar": "backward() starts from one number: take the mean or the sum of yours first.",
    "does not require grad": "backward() got a number that was computed without autograd: under torch.no_grad(), "
    "through .item(), .detach() or torch.tensor(...), or in a tensor that a collective has filled: autograd does not "
    "see what torch.distributed does.",
    "NoneType": "None comes from a function that does not end with `return`, and from dist.all_reduce, which works in "
    "place. It is also the `.grad` of a tensor that backward did not reach, or that was computed from others.",
    "Invalid process group specified": "This rank is not a member of the group, and only members may call it.",
    "torch.Tensor but got <class '(int|float|list)'>": "A collective takes tensors, and works in place. Put the "
    "number into one first: `total = torch.tensor(float(...))`. The sum is in `total` afterwards. A list goes, too.",
    "killed by SIGABRT": "C++ code ends a rank that gets more or fewer bytes than it expects. In a collective, what "
    "one rank sends to another must be as long as what that one receives into: print the sizes and the dtypes of the "
    "tensors (and the splits) on each rank. Which of them depends on what is in this rank's data?",
    "Split sizes|divide equally|in->size == out->size": "dist.all_to_all_single(output, input, splits of the output, "
    "splits of the input): each splits must add up to the rows of their tensor. Without splits, each rank gets equally "
    "many rows, and both tensors are equally long.",
    "must be world size|size list": "The list must have one tensor per rank: `dist.get_world_size()`.",
    "different dtypes|same dtype|expected scalar type": "The tensors have different dtypes. Make new ones like those "
    "that were given: `torch.empty_like(x)`, or `x.new_zeros(...)`.",
    "reduce_scatter of|outputShape|times world size": "Reduce-scatter gives every rank an equal part: its input must "
    "be as long as all shards together, padding included.",
    "alltoall: invalid tensor size": "With gloo, dist.all_to_all sends tensors of one size. dist.all_to_all_single "
    "sends uneven parts of one tensor, given the splits.",
    "view was created in no_grad mode": "On the CPU, dist.all_gather_into_tensor cannot send what autograd "
    "follows. Send `y.detach()`, or use dist.all_gather: autograd follows neither.",
    "storage of size 0": "This memory was freed by resize_(0) before it was used.",
    "cannot be multiplied|must match|Sizes of tensors|view size|invalid for input|1-d|number of dimensions|"
    "equal to source|Mismatch in shape": "The shapes do not fit.",
    "not implemented for": "There is no such operation for this dtype. Did an index or a count become a float, as "
    "`/` makes it? `//` does not.",
    "empty sequence|argument is empty|non-empty list|empty tensor|numel.. == 0": "A list or a tensor is empty here. "
    "What should happen then?",
    "values to unpack": "This line takes apart what has more parts, or fewer, than it has names on the left: a "
    "tensor's `shape` has one number for each dim. Look at the shapes.",
    "index .*out of": "An index is too large: the last is one less than the number of items.",
}
"""What to say of an error by what is in its message, if it is not a typical mistake."""

WRONG_ARGUMENTS = "positional argument|keyword argument"
NOT_OF_THE_STUB = "The check calls your function with the arguments of the stub: keep them."
NOT_OF_WHAT_IT_CALLS = (
    "What your line calls has no such arguments: `help(...)` lists those that it has. Are they of a different "
    "function, or of a different library?"
)
OWN_ERROR = "Your function raises this error itself. But what it refuses here is allowed, and has a right answer."
NONE_IS_RIGHT = "Your function raises this error itself. Here None is the right answer: return it instead."
NAN = "nan is what comes of 0 / 0, inf - inf and 0 * inf. The first one makes all that is computed from it nan, too."


@dataclass
class Evidence:
    """What was answered in all cases or on all ranks, what is right, and what typical mistakes answer there.

    Each of the ``mistakes`` is its advice and its answers. ``given`` has the arguments for each answer by name;
    `RANKS` is one of them if the answers are those of ranks.
    """

    got: list
    right: list
    mistakes: list[tuple[str, list]]
    given: Sequence[dict] = ()


def joined(parts: Iterable[Evidence]) -> Evidence:
    """Return what several cases say together; all know the same mistakes."""
    first, *rest = parts
    found = Evidence(list(first.got), list(first.right), list(first.mistakes), list(first.given))
    for part in rest:
        found.got += part.got
        found.right += part.right
        found.given = [*found.given, *part.given]
        found.mistakes = [
            (advice, [*answers, *more]) for (advice, answers), (_, more) in zip(found.mistakes, part.mistakes)
        ]
    return found


def explain(evidence: Evidence, why_nan: str = "", everywhere: Evidence | None = None) -> str:
    """Return what a report says of wrong answers; "" if nothing is known.

    ``why_nan`` says where nan came from. What holds ``everywhere``, in more cases, is preferred.

    >>> explain(Evidence([1, 3], [1, 2], [("You counted from 1.", [1, 3])]))
    'What this usually is: You counted from 1.'
    """
    evidence = replace(evidence, got=_without_brackets(evidence.got, evidence.right))
    got, right = evidence.got, evidence.right
    advice = recognise(evidence)
    if not advice and _is_none_for_zero(evidence):
        return NONE_FOR_ZERO
    if not advice and None in leaves(got) and None not in leaves(right):
        advice = NONE
    if advice:
        return advice if advice == swapped(list(zip(got, right))) else f"What this usually is: {advice}"
    is_error = [hasattr(value, "message") for value in got]
    if any(is_error):
        first = next(place for place, pair in enumerate(zip(got, right)) if not same(*pair))
        if not is_error[first]:  # the report shows this answer, not the error
            told = explain(_without_errors(evidence), why_nan)
            error = got[is_error.index(True)].message
            return f"{told} And in a later case: {error}".strip()
        return _of_raised(got[first], right[first], evidence.given[first:])
    if FREED in leaves(got):
        return "The memory of this result was freed by resize_(0). Free what you gathered, not what you return."
    if any(map(_is_nan, leaves(got))) and not any(map(_is_nan, leaves(right))):
        return why_nan or NAN
    if any(map(_is_unwritten, leaves(got))) and not any(map(_is_unwritten, leaves(right))):
        return f"New memory is in this answer, to which nobody has written. {UNWRITTEN}"
    pairs = list(zip(got, right))
    if everywhere and not any(hasattr(value, "message") for value in everywhere.got):
        found = relation(list(zip(everywhere.got, everywhere.right)), everywhere.given, says_where=False)
        if found:
            return found
    is_all = everywhere is None or len(everywhere.got) == len(evidence.got)
    return relation(pairs, evidence.given, named=is_all)


def _without_errors(evidence: Evidence) -> Evidence:
    """Return what is known of the cases that were answered."""
    answered = [place for place, value in enumerate(evidence.got) if not hasattr(value, "message")]

    def chosen(values: Sequence) -> list:
        return [values[place] for place in answered if place < len(values)]

    mistakes = [(advice, chosen(answers)) for advice, answers in evidence.mistakes]
    return Evidence(chosen(evidence.got), chosen(evidence.right), mistakes, chosen(evidence.given))


def _of_raised(error: Any, right: Any, given: Sequence[dict]) -> str:
    """Return what is known of an error in the place of a right answer."""
    lines = re.findall(r"(?m)^ *(?:in|at) (?!labkit/|course/).*: +(.*)", error.where)
    if any(line.startswith(("raise", "assert")) for line in lines):
        return NONE_IS_RIGHT if right is None else OWN_ERROR
    if re.search(WRONG_ARGUMENTS, error.message):
        places = re.findall(r"(?m)^ *(?:in|at) (.*)", error.where)
        is_the_call_itself = not places or places[-1].startswith("course/")
        return NOT_OF_THE_STUB if is_the_call_itself else NOT_OF_WHAT_IT_CALLS
    return _of_error(error.message, given)


def _without_brackets(got: list, right: list) -> list:
    """Return wrong numbers without the brackets of a tensor [1], if one number is right: they are not what is wrong."""
    numbers = [each[0] if isinstance(each, list) and len(each) == 1 else None for each in got]
    if not all(type(each) in (int, float) for each in [*numbers, *right]) or same(numbers, right):
        return got
    return numbers


def recognise(evidence: Evidence) -> str:
    """Return the advice for the typical mistakes that give these answers; "" if there are none."""
    case = _without_brackets(evidence.got, evidence.right), evidence.right, evidence.mistakes
    return next(filter(None, (find(*case) for find in (_nearest, _in_order, _by_parts, _by_cases))), "")


def _in_order(got: list, right: list, mistakes: list[tuple[str, list]]) -> str:
    """Say that two parts are swapped, before each of them is explained by a mistake of its own."""
    del mistakes
    return swapped(list(zip(got, right)))


def recognise_where_wrong(evidence: Evidence) -> str:
    """Return the advice for the mistake that gives all wrong answers, though it would give more; "" if there is none.

    It is for a mistake that some ranks make and others do not, as below an `if rank == ...`.
    """
    wrong = [place for place, pair in enumerate(zip(evidence.got, evidence.right)) if not same(*pair)]
    if len(wrong) < 2:
        return ""
    found = (
        advice
        for advice, answers in evidence.mistakes
        if all(same(evidence.got[place], answers[place]) for place in wrong)
    )
    return next(found, "")


def _is_none_for_zero(evidence: Evidence) -> bool:
    wrong = [(got, right) for got, right in zip(evidence.got, evidence.right) if not same(got, right)]
    zeros = [right for right in evidence.right if right is not None and same(right, 0)]
    return bool(wrong) and len(wrong) == len(zeros) and all(got is None and same(right, 0) for got, right in wrong)


def _is_nan(value) -> bool:
    return value != value


def _is_unwritten(value) -> bool:
    return type(value) is int and value in (2**31 - 1, 2**63 - 1)


def _of_error(message: str, given: Sequence[dict]) -> str:
    words = next((words for part, words in ERRORS.items() if re.search(part, " ".join(message.split()))), "")
    shapes = [f"{name} {shape}" for name, value in (given[0] if given else {}).items() if (shape := shape_of(value))]
    return f"{words} Given were {', '.join(shapes)}." if "shapes" in words and shapes else words


def _nearest(got: list, right: list, mistakes: list[tuple[str, list]]) -> str | None:
    """Return the advice for the mistake that gives all wrong answers, and of the others the most."""
    wrong = [place for place, (answer, wanted) in enumerate(zip(got, right)) if not same(answer, wanted)]
    values = [place for place in wrong if not hasattr(got[place], "message")] or wrong  # errors have many messages
    matches = [
        (sum(map(same, got, answers)), advice)
        for advice, answers in mistakes
        if all(same(got[place], answers[place]) for place in values)
    ]
    most, advice = max(matches, key=lambda match: match[0], default=(0, None))
    return advice if 4 * most >= 3 * len(got) else None


def _by_parts(got: list, right: list, mistakes: list[tuple[str, list]]) -> str | None:
    """Return the advice for several mistakes at once, if each wrong part is what one gives that has only this wrong."""
    found: list = []
    size = num_parts([*got, *right]) or 0
    for part in range(size):
        if not all(same(answer[part], wanted[part]) for answer, wanted in zip(got, right)):
            alone = [[*wanted[:part], answer[part], *wanted[part + 1 :]] for answer, wanted in zip(got, right)]
            found.append(next((advice for advice, answers in mistakes if same(answers, alone)), None))
    return None if None in found else " And: ".join(dict.fromkeys(found))


def _by_cases(got: list, right: list, mistakes: list[tuple[str, list]]) -> str | None:
    """Return the advice for several mistakes at once, each of which gives the wrong answers of some cases."""
    found, left = [], {place for place, pair in enumerate(zip(got, right)) if not same(*pair)}
    for advice, answers in mistakes:
        wrong = {place for place, pair in enumerate(zip(answers, right)) if not same(*pair)}
        if wrong & left and all(same(got[place], answers[place]) for place in wrong):
            found, left = [*found, advice], left - wrong
    return None if left else " And: ".join(dict.fromkeys(found))
