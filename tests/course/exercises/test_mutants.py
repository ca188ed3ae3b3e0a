"""Whether the cases of an exercise tell wrong answers from right ones: sizes that differ, and faults of one word.

The full sweep is long: ``LABKIT_ALL_ANSWERS=1 pytest -o faulthandler_timeout=7200 tests/course/exercises/test_mutants.py``.
"""

import copy
import inspect
import itertools
import os
import re
import sys
from collections.abc import Callable
from functools import cache

import pytest

from course.exercises import calling, on_ranks, utilisation
from course.exercises.base import Exercise
from course.exercises.on_ranks import RankExercise
from course.exercises.pipeline_folded import RuleExercise
from course.progress import all_exercises
from tests.course.exercises.mutants import Names, mutants, sizes_in

EXERCISES = {exercise.name: exercise for exercise in all_exercises() if isinstance(exercise, Exercise)}
SIZES = {
    "all_reduce_from_halves": "x: size",
    "ring_all_reduce": "x: size",
    "column_forward": "x: batch in, master_weight: out in, master_bias: out",
    "column_backward": "x: batch in, weight: out/t in, grad_output: batch out/t",
    "stride_shard": "master: rows columns",
    "merge_blocks": "out: queries head, lse: queries 1, block_out: queries head, block_lse: queries 1",
    "ring_forward": "q: tokens head, k: tokens head, v: tokens head",
    "ulysses_backward": "grad: rows columns",
    "loss_scale": "losses: tokens, is_counted: tokens",
    "average": "gradients: num size",
    "bucketed_average": "gradients: num size",
    "training_loop": "weight: in, steps: steps m rows in",
    "unequal_average": "gradient: size",
    "split_sizes": "experts: tokens k",
    "dispatch_backward": "grad: received hidden, tokens: sent, send_splits: t, recv_splits: t",
    "auxiliary_loss": "scores: tokens experts, experts: tokens k",
    "unit_forward": "x: rows in, shard: shard",
    "unit_backward": "grad: rows out, x: rows in, shard: shard",
    "accumulate": "micro_batches: m rows in",
    "norm_of_shards": "gradients: num size, is_cut: num",
    "next_word": "logits: rows words",
    "average_gradient": "weight: in, micro_batches: m rows in",
    "row_forward": "x: tokens in/t, weight: out in/t, bias: out",
    "row_backward": "grad_y: tokens out, x: tokens in/t, weight: out in/t",
    "gather_backward": "grad_y: tokens out, x: tokens in, weight: out/t in",
    "norm": "gradients: num size, kinds: num",
    "tied": "gradient: rows columns, num_stages: t",
    "vocab_cross_entropy": "logits: tokens words, target: tokens",
}
"""The sizes of each argument that is a tensor or a list, outside in. Sizes of one name are the same by their nature."""


SAME: dict[str, list[tuple[str, str]]] = {}
"""Mutants that are accepted, each with the reason why it is the same function as the solution."""


class Seen:
    """What a function was given, and what its names stood for, whenever it was called."""

    def __init__(self) -> None:
        self.kinds: dict[str, str] = {}
        self.sizes: list[dict[str, int | float]] = []

    def watch(self, function: Callable, call: Callable) -> None:
        """Call, and note what is seen of the function meanwhile."""
        names = list(inspect.signature(function).parameters)

        def note(frame, event, _) -> None:
            if frame.f_code is not function.__code__ or event not in ("call", "return"):
                return
            values = {name: value for name, value in frame.f_locals.items() if value is not None}
            if event == "call":
                sizes = [sizes_in(name, values[name]) for name in names if name in values]
                self.sizes.append({text: size for each in sizes for text, size in each.items()})
            self.kinds.update({name: type(value).__name__ for name, value in values.items()})

        before = sys.getprofile()
        sys.setprofile(note)
        try:
            call()
        finally:
            sys.setprofile(before)


def seen_here(function: Callable, inputs: Callable, rest: tuple) -> Seen:
    """Return what is seen of a function on this rank."""
    seen, arguments = Seen(), copy.deepcopy(inputs(*rest))
    seen.watch(function, lambda: function(*arguments))
    return seen


@cache
def seen_of(name: str) -> Seen:
    """Return what is seen of a solution in all cases, on all ranks."""
    exercise = EXERCISES[name]
    function, seen = exercise.solution_function, Seen()
    if isinstance(exercise, RuleExercise):
        seen.watch(function, lambda: exercise.verdict(function))
        return seen
    for case in exercise.cases:
        if not isinstance(exercise, RankExercise):
            seen.watch(function, lambda case=case: function(*copy.deepcopy(case)))
            continue
        given = function, exercise.inputs, case[1:]
        for rank, here in enumerate(on_ranks.launch(seen_here, *given, world_size=case[0], backend="gloo")):
            world = {"dist.get_world_size()": case[0], "dist.get_rank()": rank}
            seen.sizes += [world | sizes for sizes in here.sizes]
            seen.kinds = here.kinds | seen.kinds
    return seen


def names_of(name: str) -> Names:
    """Return what the names of a solution stand for, and the symbol of each size that it is given."""
    seen, symbols = seen_of(name), {"dist.get_world_size()": "t", "dist.get_rank()": "rank"}
    parts = [part.split(": ") for part in SIZES.get(name, "").split(", ")]
    words = {part[0]: part[1].split() for part in parts if len(part) == 2}
    found = dict.fromkeys(text for sizes in seen.sizes for text in sizes)
    for text in found:
        [argument] = re.findall(r"^(?:len\()?(\w+)", text)
        left = words.get(argument)
        symbols.setdefault(text, left.pop(0) if left else text)
    return Names(seen.kinds, {text: symbol for text, symbol in symbols.items() if text in found})


@pytest.fixture(autouse=True)
def predicted(monkeypatch):
    """No test depends on what `beat` measures."""
    monkeypatch.setattr(utilisation, "measure_step", lambda plan, **_: utilisation.predict_step(plan))


@pytest.mark.parametrize("name", EXERCISES)
def test_some_case_tells_each_two_sizes_apart(name, launches_on_kept_ranks):
    symbols, seen, alike = names_of(name).symbols, [], None
    for sizes in seen_of(name).sizes:
        values = {}
        for text, size in sizes.items():
            assert values.setdefault(symbols[text], size) == size, f"{symbols[text]} is not one size"
        seen.append(values)
    alike = [
        pair
        for pair in itertools.combinations(sorted(set(symbols.values())), 2)
        if all(values[pair[0]] == values[pair[1]] for values in seen if values.keys() >= set(pair))
    ]
    assert alike == []


@pytest.mark.parametrize("name", EXERCISES)
def test_each_mutant_is_refused_or_is_the_same_function(name, launches_on_lasting_ranks, monkeypatch):
    """Of exercises on ranks every twentieth, as a mutant there takes a tenth of a second; all with LABKIT_ALL_ANSWERS=1."""
    exercise = EXERCISES[name]
    found = list(mutants(exercise.solution_function, names_of(name)))
    is_sweep = "LABKIT_ALL_ANSWERS" in os.environ
    tried = found if is_sweep or not isinstance(exercise, RankExercise) else found[::20]
    monkeypatch.setattr(calling, "MOST_SECONDS", 0.5)
    monkeypatch.setattr(type(exercise), "advice", lambda *_: "")  # what is said of them is not asked here
    accepted = {mutant.lines for mutant in tried if exercise.verdict(mutant.function).status == "passed"}
    equal = {line for line, _ in SAME.get(name, ())}
    print(f"{name}: {len(tried)} mutants")
    assert accepted - equal == set()
    if tried == found:
        assert equal - accepted == set(), "this is refused, or not a mutant any more"
