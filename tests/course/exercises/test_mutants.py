"""Whether the cases of an exercise tell wrong answers from right ones: sizes that differ, and faults of one word.

By default a few mutants of each exercise are tried. All of them, more than 4,000, take about twenty minutes:
``LABKIT_ALL_ANSWERS=1 pytest -o faulthandler_timeout=7200 tests/course/exercises/test_mutants.py``.
"""

import copy
import inspect
import itertools
import os
import re
import resource
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache

import pytest

from course.exercises import calling, on_ranks, utilisation
from course.exercises.base import Exercise
from course.exercises.on_ranks import RankExercise
from course.exercises.pipeline_folded import RuleExercise
from course.progress import all_exercises
from tests.course.exercises.conftest import limit_memory
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
    "block_plan": "mesh: t",
}
"""The sizes of each argument that is a tensor or a list, outside in. Sizes of one name are the same by their nature."""


SAME_LENGTH, MAY_CHANGE = "all pieces are equally long", "x may be changed"
SAME_DTYPE = "all that is given has one dtype"
RANGES = "a range is as good as a list of the same numbers"
SAME: dict[str, dict[str, list[str]]] = {
    "all_reduce_from_halves": {
        SAME_LENGTH: ["my_sum = torch.empty_like(pieces[1])", "my_sum = torch.empty_like(pieces[-1])"],
        MAY_CHANGE: ["my_sum = pieces[0]"],
    },
    "ring_all_reduce": {
        SAME_LENGTH: ["arriving = torch.empty_like(pieces[1])", "arriving = torch.empty_like(pieces[-1])"],
        MAY_CHANGE: ["pieces = list(x.chunk(world_size))"],
    },
    "vocab_cross_entropy": {
        "there are several tokens": ["chosen = logits.gather(-1, place.clamp(0, shard_size - 1)[:, None]).squeeze()"]
    },
    "average": {"gradients may be changed": ["total = gradient"]},
    "training_loop": {
        "all steps have equally many": ["loss = (x @ weight).square().mean() / len(steps[0])"],
    },
    "unequal_average": {
        "the ranks are on the CPU, and a sum of whole numbers is whole": [
            "count = torch.tensor(float(num_rows))",
            "count = torch.tensor(num_rows, device=gradient.device)",
            "count = torch.tensor(float(num_rows), device=total.device)",
        ]
    },
    "next_word": {
        "stack makes one dtype of both": ["pair = torch.stack([value, first + word])"],
        "there is one row": ["return words.gather(0, values.argmax(0, keepdim=True))[-1].long()"],
    },
    "norm": {
        "what both tensor ranks hold may count on either": [
            "if kind == 'shard' or (kind == 'whole' and tp_rank != 0):",
            "if kind == 'shard' or (kind == 'whole' and tp_rank == 1):",
        ]
    },
    "ring_forward": {
        "(rank - step) % c is at most rank exactly if step is": ["if step <= rank:"],
        "with an lse of -inf, whatever out is has no weight, and q, k and v have one shape": [
            "out, lse = (q, torch.full_like(q[:, :1], -math.inf))",
            "out, lse = (torch.ones_like(q), torch.full_like(q[:, :1], -math.inf))",
            "out, lse = (torch.zeros_like(k), torch.full_like(q[:, :1], -math.inf))",
            "out, lse = (torch.zeros_like(v), torch.full_like(q[:, :1], -math.inf))",
            "out, lse = (torch.zeros_like(q), torch.full_like(k[:, :1], -math.inf))",
            "out, lse = (torch.zeros_like(q), torch.full_like(v[:, :1], -math.inf))",
        ],
        "-inf is -inf in every shape that goes with the rows of out": [
            "out, lse = (torch.zeros_like(q), torch.full_like(q[:, :2], -math.inf))",
            "out, lse = (torch.zeros_like(q), torch.full_like(q[:1, :], -math.inf))",
        ],
    },
    "unit_forward": {
        "they share one memory": ["bias.untyped_storage().resize_(0)", "weight.untyped_storage().resize_(0)"],
        "one byte is less than any parameter": ["whole.untyped_storage().resize_(1)"],
        SAME_DTYPE: ["whole = x.new_empty(dist.get_world_size() * len(shard))"],
    },
    "unit_backward": {
        "the weight is not needed any more, and the padding is 0 there too": ["flat = whole"],
        SAME_DTYPE: ["whole = grad.new_empty(d * len(shard))", "whole = x.new_empty(d * len(shard))"],
    },
    "split_sizes": {
        "a tensor is as good as a list of the same numbers": [
            "return (send, recv.tolist())",
            "return (send.tolist(), recv)",
        ]
    },
    "dispatch_backward": {
        "rows keep their width and dtype on their way": [
            "grad_x = grad.new_zeros(num_tokens, grad_rows.shape[1])",
            "grad_x = grad_rows.new_zeros(num_tokens, grad.shape[1])",
        ]
    },
    "group_lists": {
        RANGES: [
            "tp_groups = [range(first, first + tp_size) for first in range(0, world_size, tp_size)]",
            "dp_groups = [range(stage + tp_rank, stage + stage_size, tp_size) "
            "for stage in range(0, world_size, stage_size) for tp_rank in range(tp_size)]",
            "pp_groups = [range(first, world_size, stage_size) for first in range(stage_size)]",
        ]
    },
    "expert_groups": {
        RANGES: [
            "ep_groups += [range(first + i, first + block, expert_tp_size) for i in range(expert_tp_size)]",
            "expert_dp_groups += [range(stage + i, stage + stage_size, block) for i in range(block)]",
        ]
    },
    "spread": {
        "both factors are the root of t": [
            "return {'same seed': local_width, 'local width': local_width, 'both': same_seed * local_width}[fault]",
            "return {'same seed': same_seed, 'local width': same_seed, 'both': same_seed * local_width}[fault]",
            "return {'same seed': same_seed, 'local width': local_width, 'both': local_width * local_width}[fault]",
            "return {'same seed': same_seed, 'local width': local_width, 'both': same_seed * same_seed}[fault]",
        ]
    },
    "layer_parameters": {"2 + 2 is 2 * 2": ["whole = 2 * h + (2 + 2) * h"]},
    "next_op": {
        "B comes before F, and F before W, in the alphabet too": [
            "return min(fitting, default=None)",
            "return min(fitting, key=lambda op: (op[0], not op.endswith('.1')), default=None)",
        ],
        "of two ops of a kind that of chunk 1 is offered first wherever it matters to the time": [
            "return min(fitting, key=lambda op: ('BFW'.index(op[0]), not op), default=None)",
            "return min(fitting, key=lambda op: ('BFW'.index(op[0]), not '.1'), default=None)",
            "return min(fitting, key=lambda op: ('BFW'.index(op[0]), not op.endswith('BFW')), default=None)",
            "return min(fitting, key=lambda op: ('BFW'.index(op[0]), not op.endswith('F')), default=None)",
        ],
    },
    "average_gradient": {"a sum of tensors has the same value": ["total += loss"]},
    "mended_row": {
        "all ranks finish, and rank 1 holds two micro-batches": [
            "return 'F0 F1 B0 B1 F2 B2'",
            "return 'F0 F1 B0 F2 B2 B1'",
            "return 'F1 F0 B0 F2 B1 B2'",
        ]
    },
    "place": {
        "all are powers of two, so the fewest stages, with the fewest tensor ranks that do, are the fewest ranks": [
            "fitting.append((p, p, t))",
            "fitting.append((p * p, p, t))",
            "fitting.append((num_parameters * p, p, t))",
            "fitting.append((num_heads * p, p, t))",
            "fitting.append((num_layers * p, p, t))",
            "fitting.append((node_size * p, p, t))",
            "fitting.append((memory_bytes * p, p, t))",
        ],
        "a product of powers of two is not 9": [
            "if t * p <= 9 and can_be_cut and (16 * num_parameters / (t * p) <= memory_bytes):"
        ],
        "8 divides 16": ["if t * p <= 8 and can_be_cut and (16 * num_parameters // (t * p) <= memory_bytes):"],
    },
    "which_stage_fits": {"a stage 4 would have nothing more to divide": ["for stage in range(5):"]},
    "state_bytes": {
        "a model is cut into equal parts": [
            "mine = num_parameters // (t * p)",
            "return int(mine) * (weights + gradients + optimizer)",
        ]
    },
    "gpus_needed": {"FLOPs are whole": ["return math.ceil(int(flops) / (days * 86400 * teraflops * 1000000000000.0))"]},
}
"""Mutants that are right, with the reason: they are the same function as the solution, or no worse."""


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
            for name, value in values.items():
                if self.kinds.get(name) != "float":  # a number that may be a fraction
                    self.kinds[name] = type(value).__name__

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
            seen.kinds |= here.kinds
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


@contextmanager
def limited_memory() -> Iterator[None]:
    before = resource.getrlimit(resource.RLIMIT_AS)
    limit_memory()
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)


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
    exercise = EXERCISES[name]
    found = list(mutants(exercise.solution_function, names_of(name)))
    is_sweep = "LABKIT_ALL_ANSWERS" in os.environ
    tried = found if is_sweep else found[:: 60 if isinstance(exercise, RankExercise) else 8]
    monkeypatch.setattr(calling, "MOST_SECONDS", 0.5)
    monkeypatch.setattr(type(exercise), "advice", lambda *_: "")  # what is said of them is not asked here
    with limited_memory():
        accepted = {mutant.lines for mutant in tried if exercise.verdict(mutant.function).status == "passed"}
    equal = {line for lines in SAME.get(name, {}).values() for line in lines}
    print(f"{name}: {len(tried)} mutants", *sorted(accepted - equal), sep="\n    ")
    assert accepted - equal == set()
    if tried == found:
        assert equal - accepted == set(), "this is refused, or not a mutant any more"


def area(width, height):
    return width * height


def test_equal_sizes_hide_faults():
    names = Names({"width": "int", "height": "int"}, {"width": "width", "height": "height"})
    found = list(mutants(area, names))
    assert {"return width * width", "return width + height", "return width"} <= {mutant.lines for mutant in found}
    hidden = [mutant.lines for mutant in found if mutant.function(2, 2) == 4]
    assert hidden == ["return width + height", "return height * height", "return width * width"]
    assert [mutant for mutant in found if mutant.function(2, 3) == 6] == []
