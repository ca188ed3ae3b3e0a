"""Four ways on from a complete my_megatron.py: for each a test of the whole file, and no stub.

Each way is an option that a learner adds. A test runs the file with it on ranks, and without it (or, with experts, with
it) on one rank, and looks at losses and norms, and at what makes the way worth it: sizes, messages, the order of work.
"""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from course.exercises.base import Verdict, indent
from course.exercises.feedback import give_feedback
from course.project.check import job_in_words, on_ranks, status_of
from course.project.parts import filled_in
from course.project.probes import SMALL
from course.project.steps import MINE, differences
from course.project.watch import NUM_STEPS, Facts, has_option, watch

Options = dict[str, Any]


@dataclass(frozen=True)
class Way:
    """What an option with a value must do. ``fault`` looks at all ranks of a job and returns what is not so yet."""

    option: str
    value: int
    promise: str
    jobs: list[tuple[int, Options]]
    fault: Callable[[list[Facts], Facts, Options], str | None]
    on_one_rank: int = 0  # the option's value there

    def verdict(self, path: str | Path) -> Verdict:
        """Try a whole file, and say what holds or does not."""
        source = filled_in(Path(path).read_text())
        asked = f"--{self.option} {self.value}: {self.promise}"
        if not has_option(source, self.option):
            text = f"not attempted yet. Add {self.option!r} to `options`, with a default that changes nothing."
            return Verdict("not attempted", f"{text}\n{indent(asked)}")
        for world_size, options in self.jobs:
            where = job_in_words(world_size, options)
            many = on_ranks(world_size, watch, source, str(path), options | {self.option: self.value})
            one = on_ranks(1, watch, source, str(path), without_split(options) | {self.option: self.on_one_rank})
            if many.ended or one.ended:
                ended = many if many.ended else one
                return Verdict(status_of(ended), f"With {where}:\n{ended.report}")
            fault = not_equal(many.seen, one.seen[0]) or self.fault(many.seen, one.seen[0], options)
            if fault:
                return Verdict("wrong", f"With {where}, not yet:\n{indent(fault)}\n{indent(asked)}")
        return Verdict("passed", f"It holds. {asked}")


def way(name: str, path: str | Path = MINE) -> None:
    """Try a whole file with one of the ``WAYS``, and say what holds or does not."""
    verdict = WAYS[name].verdict(path)
    give_feedback(verdict.status, f"{name}: {verdict.text}")


def without_split(options: Options) -> Options:
    return {name: value for name, value in options.items() if name not in ("tp", "pp")}


def not_equal(many: list[Facts], one: Facts) -> str | None:
    """Compare losses and norms."""
    for what, step, rank, got, expected in differences([facts.history for facts in many], one.history):
        return f"the {what} of step {step} is {got:.8g} on rank {rank}, and on one rank {expected:.8g}"
    return None


def sequence_fault(many: list[Facts], one: Facts, options: Options) -> str | None:
    """Look for tokens that all ranks keep, and for all-reduces of activations."""
    tp = options["tp"]
    batch, seq, hidden = one.norm_inputs[0]
    for rank, facts in enumerate(many):
        if wrong := [shape for shape in facts.norm_inputs if shape[1] != seq // tp]:
            return f"a norm on rank {rank} gets {list(wrong[0])}: it should be [{batch}, {seq // tp}, {hidden}]"
        if ("all_reduce", tp, 8 * batch * seq * hidden) in facts.messages:
            return f"rank {rank} still all-reduces [{batch}, {seq}, {hidden}] over its tensor group"
    return None


def zero_fault(many: list[Facts], one: Facts, options: Options) -> str | None:
    """Compare the numbers in the optimizers' states with a share of what AdamW keeps."""
    dp = len(many) // (options.get("tp", 1) * options.get("pp", 1))
    for rank, facts in enumerate(many):
        share = 2 * facts.num_parameters / dp
        if not 0 < facts.num_states <= 1.5 * share:
            return f"the optimizers of rank {rank} keep {facts.num_states:,} numbers: a share would be {share:,.0f}"
    return None


def interleaving_fault(many: list[Facts], one: Facts, options: Options) -> str | None:
    """Look at which blocks a rank has, and at how long a step takes if each block takes one unit each way."""
    num_layers, pp = options["layers"], options["pp"]
    half, per_chunk, ranks_per_stage = num_layers // 2, num_layers // (2 * pp), len(many) // pp
    for rank, facts in enumerate(many):
        first = rank // ranks_per_stage * per_chunk
        expected = [*range(first, first + per_chunk), *range(half + first, half + first + per_chunk)]
        if facts.layers != expected:
            return f"rank {rank} has the blocks {facts.layers}: they should be {expected}"
    pipeline = [facts.work[: len(facts.work) // NUM_STEPS] for facts in many[::ranks_per_stage]]
    num_micro_batches = pipeline[0].count(("F", 0))
    units = makespan(pipeline, num_layers)
    plain = (num_micro_batches + pp - 1) * 2 * num_layers // pp
    if units >= plain:
        return f"a step takes {units} units, one for a block each way: 1F1B with one stage on each rank takes {plain}"
    return None


def makespan(pipeline: list[list[tuple[str, int]]], num_layers: int) -> int:
    """Return when all stages have done their blocks: each takes one unit, and none begins before what it needs is done.

    >>> makespan([[("F", 0), ("B", 0)], [("F", 1), ("B", 1)]], num_layers=2)
    4
    """
    ends: dict[tuple[str, int, int], int] = {("F", -1, index): 0 for index in range(max(map(len, pipeline)))}
    clocks = [0] * len(pipeline)
    left = [numbered(work) for work in pipeline]
    moved = True
    while moved:
        moved = False
        for stage, work in enumerate(left):
            while work and (needed := what_it_needs(work[0], num_layers)) in ends:
                clocks[stage] = max(clocks[stage], ends[needed]) + 1
                ends[work.pop(0)] = clocks[stage]
                moved = True
    return max(clocks)


def numbered(work: list[tuple[str, int]]) -> list[tuple[str, int, int]]:
    """Add to each action of a block the number of its micro-batch: how often it has come before."""
    counts: Counter[tuple[str, int]] = Counter()
    actions = []
    for action in work:
        actions.append((*action, counts[action]))
        counts[action] += 1
    return actions


def what_it_needs(action: tuple[str, int, int], num_layers: int) -> tuple[str, int, int]:
    """Return the action that must have been done before this one."""
    kind, block, index = action
    if kind == "F":
        return "F", block - 1, index
    return ("B", block + 1, index) if block + 1 < num_layers else ("F", block, index)


def experts_fault(many: list[Facts], one: Facts, options: Options) -> str | None:
    """Look for experts on one rank, for a share of them on each of several, and for tokens that travel."""
    hidden = one.norm_inputs[0][-1]
    least = NUM_EXPERTS * SMALL["layers"] * 8 * hidden**2
    if one.num_parameters < least:
        return f"one rank has {one.num_parameters:,} parameters, and the weights of all experts alone are {least:,}"
    for rank, facts in enumerate(many):
        if facts.num_parameters > one.num_parameters / 2:
            return f"rank {rank} has {facts.num_parameters:,} parameters, and one rank alone {one.num_parameters:,}"
        if not any(operation == "all_to_all" for operation, *_ in facts.messages):
            return f"rank {rank} sends no all-to-all: how do tokens come to their experts?"
    return None


NUM_EXPERTS = 4
WAYS = {
    "sequence_parallel": Way(
        "sequence_parallel",
        1,
        "the norms of all blocks get seq / tp tokens, no activation is all-reduced over tensor ranks, and losses and "
        "norms are those of one rank. Norms, row biases and positions then get partial gradients, to be added up over "
        "tp_group. Sums of gradients, and of a few numbers for each token (the loss), may be all-reduced.",
        # With a micro-batch of 1, the positions' gradient would be as large as an activation.
        [(4, {"tp": 4, "micro_batch": 2}), (8, {"tp": 2, "pp": 2, "micro_batch": 2})],
        sequence_fault,
    ),
    "zero_1": Way(
        "zero",
        1,
        "the optimizers of a rank keep the state of about 1 / dp of its parameters, and losses and norms are those of "
        "one rank without.",
        [(4, {}), (8, {"tp": 2, "pp": 2})],
        zero_fault,
    ),
    "interleaving": Way(
        "chunks",
        2,
        "each rank has two short stages: with 8 layers and pp = 4, rank 1 has the blocks 1 and 5. A step is shorter "
        "than with 1F1B, if each block takes one unit of time each way, and losses and norms are those of one rank.",
        [(4, {"pp": 4, "layers": 8}), (8, {"tp": 2, "pp": 2, "layers": 8})],
        interleaving_fault,
        on_one_rank=1,
    ),
    "experts": Way(
        "experts",
        NUM_EXPERTS,
        "each block has 4 MLPs of 4 * hidden and a router that sends each token to one of them; none is dropped. They "
        "lie on different data-parallel ranks, so each rank holds 4 / dp of them and tokens travel by all-to-all. "
        "Losses and norms are those of one rank with 4 experts.",
        [(4, {})],
        experts_fault,
        on_one_rank=NUM_EXPERTS,
    ),
}
