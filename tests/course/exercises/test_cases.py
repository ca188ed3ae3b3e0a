"""Whether the cases of an exercise tell wrong answers from right ones: sizes that differ, and faults of one word.

A check that accepts a changed solution either has no case that tells it from the solution, or the two are the same
function. `make sweep-answers` tries all changes that `tools.mutants` makes.
"""

import inspect
import itertools
import re
import resource
import sys
from collections.abc import Callable, Iterator

import pytest

from course.exercises import calling, on_ranks, utilisation
from course.exercises.base import Exercise
from course.exercises.on_ranks import RankExercise
from course.exercises.source import source_of
from course.progress import all_exercises
from tests.course.exercises.conftest import limit_memory
from tests.support.sweep import IS_SWEEP
from tools.mutants import Mutant, mutants_of

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
    "pipeline_stage": "num_stages: t",
    "vocab_cross_entropy": "logits: tokens words, target: tokens",
}
"""The sizes of each argument that is a tensor or a list, outside in. Sizes of one name are the same by their nature."""

SAME = {
    "all_reduce_from_halves": {"5: 0 -> 1": "all pieces are equally long"},
    "ring_all_reduce": {"5: 0 -> 1": "all pieces are equally long"},
    "place": {"6: 8 -> 9": "a product of powers of two is not 9"},
    "norm": {
        "4: 0 -> 1": "what both tensor ranks hold may count on either",
        "4: tp_rank == 0 -> (tp_rank != 0)": "what both tensor ranks hold may count on either",
    },
    "layer_parameters": {"5: 2 * 2 -> (2 + 2)": "it is the same number"},
    "ring_forward": {"3: 1 -> 2": "-inf is -inf in every shape that goes with the rows of out"},
    "unit_forward": {"7: 0 -> 1": "one byte is less than any parameter"},
    "which_stage_fits": {"4: 4 -> 5": "a stage 4 would have nothing more to divide"},
    "gpus_needed": {"3: 86400 -> 86401": "a second a day is no GPU"},
}
"""Changes that a check may accept, with the reason: the solution stays the same function, or is no worse."""


@pytest.fixture(autouse=True)
def predicted(monkeypatch):
    """No test depends on what `beat` measures."""
    monkeypatch.setattr(utilisation, "measure_step", lambda plan, **_: utilisation.predict_step(plan))


def sizes_in(name: str, value) -> dict[str, int | float]:
    """Return the sizes that an argument has, by an expression for each.

    >>> sizes_in("steps", [[1, 2, 3], [4, 5, 6]])
    {'len(steps)': 2, 'len(steps[0])': 3}
    """
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        return {name: value}
    if hasattr(value, "shape"):
        return {f"{name}.shape[{dim}]": size for dim, size in enumerate(value.shape)}
    if not isinstance(value, (list, tuple)):
        return {}
    found = {f"len({name})": len(value)}
    if value and not isinstance(value[0], (int, float, str)):
        found |= sizes_in(f"{name}[0]", value[0])
    return found


def sizes_of_all(names, arguments) -> dict[str, int | float]:
    found = {}
    for name, value in zip(names, arguments):
        found |= sizes_in(name, value)
    return found


def calls_of(function: Callable, call: Callable) -> list[dict]:
    """Return the arguments of each call of a function meanwhile."""
    found = []

    def note(frame, event, _) -> None:
        if frame.f_code is function.__code__ and event == "call":
            found.append(dict(frame.f_locals))

    before = sys.getprofile()
    sys.setprofile(note)
    try:
        call()
    finally:
        sys.setprofile(before)
    return found


def sizes_on_rank(names, inputs, rest) -> dict[str, int | float]:
    return sizes_of_all(names, inputs(*rest))


def sizes_given(exercise: Exercise) -> Iterator[dict[str, int | float]]:
    """Yield the sizes that the solution is given in each call, on each rank."""
    function = exercise.solution_function
    names = list(inspect.signature(function).parameters)
    if not isinstance(exercise, RankExercise):
        for arguments in calls_of(function, lambda: exercise.verdict(function)):
            yield sizes_of_all(names, [arguments[name] for name in names])
        return
    for world_size, *rest in exercise.cases:
        given = on_ranks.launch(sizes_on_rank, names, exercise.inputs, rest, world_size=world_size, backend="gloo")
        for rank, sizes in enumerate(given):
            yield {"dist.get_world_size()": world_size, "dist.get_rank()": rank, **sizes}


def symbols_of(name: str, texts) -> dict[str, str]:
    """Return the symbol of each size, as `SIZES` names them."""
    words = {}
    for part in filter(None, SIZES.get(name, "").split(", ")):
        argument, symbols = part.split(": ")
        words[argument] = symbols.split()
    found = {"dist.get_world_size()": "t", "dist.get_rank()": "rank"}
    for text in texts:
        [argument] = re.findall(r"^(?:len\()?(\w+)", text)
        left = words.get(argument)
        found.setdefault(text, left.pop(0) if left else text)
    return found


@pytest.mark.parametrize("name", EXERCISES)
def test_some_case_tells_each_two_sizes_apart(name, launches_on_kept_ranks):
    given = list(sizes_given(EXERCISES[name]))
    texts = dict.fromkeys(text for sizes in given for text in sizes)
    symbols = symbols_of(name, texts)
    seen = []
    for sizes in given:
        values = {}
        for text, size in sizes.items():
            assert values.setdefault(symbols[text], size) == size, f"{symbols[text]} is not one size"
        seen.append(values)
    used = sorted({symbols[text] for text in texts})
    alike = [
        (one, other)
        for one, other in itertools.combinations(used, 2)
        if all(values[one] == values[other] for values in seen if values.keys() >= {one, other})
    ]
    assert alike == []


def changed(function: Callable, mutant: Mutant, source: str) -> Callable:
    """Return the function with one change."""
    text = source[: mutant.start] + mutant.after + source[mutant.end :]
    names = dict(function.__globals__)
    exec(compile(text, "<changed>", "exec"), names)
    return names[function.__name__]


@pytest.fixture
def little_memory() -> Iterator[None]:
    before = resource.getrlimit(resource.RLIMIT_AS)
    limit_memory()
    yield
    resource.setrlimit(resource.RLIMIT_AS, before)


@pytest.mark.parametrize("name", EXERCISES)
def test_each_changed_solution_is_refused_or_is_the_same_function(
    name, tmp_path, launches_on_lasting_ranks, little_memory, monkeypatch
):
    exercise = EXERCISES[name]
    function = exercise.solution_function
    source = source_of(function)
    path = tmp_path / "solution.py"
    path.write_text(source)
    found = mutants_of(path, tmp_path)
    tried = found if not isinstance(exercise, RankExercise) or IS_SWEEP else found[::12]
    monkeypatch.setattr(calling, "MOST_SECONDS", 0.5)
    monkeypatch.setattr(type(exercise), "advice", lambda *_: "")  # what is said of them is not asked here
    accepted = set()
    for mutant in tried:
        if exercise.verdict(changed(function, mutant, source)).status == "passed":
            accepted.add(f"{mutant.line}: {mutant.before} -> {mutant.after}")
    same = SAME.get(name, {}).keys()
    assert accepted - same == set()
    if tried == found:
        assert same - accepted == set(), "this is refused, or not a change any more"
