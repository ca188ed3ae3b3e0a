"""Explains a wrong answer: by a typical mistake that gives the same values, or by how they relate to the right ones."""

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from course.exercises.relations import num_parts, relation, swapped
from course.exercises.values import leaves, same

NONE = (
    "None is what a function gives back if it does not end with `return`, whatever it prints or changes. "
    "dist.all_reduce gives back None too, because it works in place: return the tensor that you gave it."
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
    "implicitly created only for scalar": "backward() starts from one number: take the mean or the sum of yours first.",
    "NoneType": "None comes from a function that does not end with `return`, and from dist.all_reduce, which works in "
    "place. It is also the `.grad` of a tensor that backward did not reach, or that was computed from others.",
    "Invalid process group specified": "This rank is not a member of the group, and only members may call it.",
    "torch.Tensor but got <class '(int|float|list)'>": "A collective takes tensors, and works in place. Put the "
    "number into one first: `total = torch.tensor(float(...))`. The sum is in `total` afterwards. A list goes, too.",
    "killed by SIGABRT": "C++ code ends a rank that gets more or fewer bytes than it expects. In a collective, what "
    "one rank sends to another must be as long as what that one receives into: print the sizes and the dtypes of the "
    "tensors (and the splits) on each rank. Which of them depends on what is in this rank's data?",
    "must be world size|size list": "The list must have one tensor per rank: `dist.get_world_size()`.",
    "different dtypes|same dtype|expected scalar type": "The tensors have different dtypes. Make new ones like those "
    "that were given: `torch.empty_like(x)`, or `x.new_zeros(...)`.",
    "reduce_scatter of|outputShape|times world size": "Reduce-scatter gives every rank an equal part: its input must "
    "be as long as all shards together, padding included.",
    "alltoall: invalid tensor size": "With gloo, dist.all_to_all sends tensors of one size. dist.all_to_all_single "
    "sends uneven parts of one tensor, given the splits.",
    "empty sequence|argument is empty|non-empty list|empty tensor|numel.. == 0": "A list or a tensor is empty here. "
    "What should happen then?",
    "values to unpack": "This line takes apart what has more parts, or fewer, than it has names on the left: a "
    "tensor's `shape` has one number for each dim. Look at the shapes.",
}
"""What to say of an error by what is in its message, if it is not a typical mistake."""

NAN = (
    "nan is what comes of 0 / 0, inf - inf and 0 * inf, and during a check it is in new memory to which nobody has "
    "written, such as that of `torch.empty`. The first nan makes all that is computed from it nan, too."
)


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


def explain(evidence: Evidence, everywhere: Evidence | None = None) -> str:
    """Return what a report says of wrong answers; "" if nothing is known.

    What holds ``everywhere``, in more cases, is preferred.

    >>> explain(Evidence([1, 3], [1, 2], [("You counted from 1.", [1, 3])]))
    'What this usually is: You counted from 1.'
    """
    evidence = replace(evidence, got=_without_brackets(evidence.got, evidence.right))
    pairs = list(zip(evidence.got, evidence.right))
    if advice := recognise(evidence):
        return advice if advice == swapped(pairs) else f"What this usually is: {advice}"
    if None in leaves(evidence.got) and None not in leaves(evidence.right):
        return f"What this usually is: {NONE}"
    first = next(got for got, right in pairs if not same(got, right))
    if is_error(first):
        message = " ".join(first.message.split())
        return next((words for part, words in ERRORS.items() if re.search(part, message)), "")
    if any(map(_is_nan, leaves(evidence.got))) and not any(map(_is_nan, leaves(evidence.right))):
        return NAN
    return relation_in(everywhere or evidence) or relation_in(evidence)


def relation_in(evidence: Evidence) -> str:
    """Return how the answers are related to the right ones; "" if some are errors."""
    if any(map(is_error, evidence.got)):
        return ""
    return relation(list(zip(evidence.got, evidence.right)), evidence.given)


def is_error(answer) -> bool:
    return hasattr(answer, "message")


def _without_brackets(got: list, right: list) -> list:
    """Return wrong numbers without the brackets of a tensor [1], if one number is right: they are not what is wrong."""
    numbers = [each[0] if isinstance(each, list) and len(each) == 1 else None for each in got]
    if not all(type(each) in (int, float) for each in [*numbers, *right]) or same(numbers, right):
        return got
    return numbers


def recognise(evidence: Evidence) -> str:
    """Return the advice for the typical mistakes that give these answers; "" if there are none."""
    case = _without_brackets(evidence.got, evidence.right), evidence.right, evidence.mistakes
    return next(filter(None, (find(*case) for find in (_nearest, _in_order, _by_parts))), "")


def _in_order(got: list, right: list, mistakes: list[tuple[str, list]]) -> str:
    """Say that two parts are swapped, before each of them is explained by a mistake of its own."""
    del mistakes
    return swapped(list(zip(got, right)))


def _is_nan(value) -> bool:
    return value != value


def _nearest(got: list, right: list, mistakes: list[tuple[str, list]]) -> str | None:
    """Return the advice for the mistake that gives all wrong answers, and of the others the most."""
    wrong = [place for place, (answer, wanted) in enumerate(zip(got, right)) if not same(answer, wanted)]
    values = [place for place in wrong if not is_error(got[place])] or wrong  # errors have many messages
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
