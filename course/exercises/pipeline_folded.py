"""The exercise on schedules that fold: a rule says which op a free rank runs next, and a pipeline obeys it."""

from collections.abc import Callable
from functools import cache

from course.exercises.advice import explain
from course.exercises.base import Exercise, Trial
from course.exercises.calling import Raised, answer
from labkit.schedules import BACKWARD, FORWARD, WEIGHT_GRADIENT, Op, Schedule, v_shape
from labkit.schedules.greedy import KINDS, Greedy
from labkit.sizes import counted

FINE, EARLY = "all ranks finish in time, and none holds too much", "ran before an op that other ranks wait for"
W_FIRST = (
    "W comes before a forward or a backward. Other ranks wait for those, and nobody waits for a W: it can fill a time "
    "in which the rank has nothing else to do, or no room for it."
)


class Obedient(Greedy):
    """A V while it is scheduled by a learner's ``rule``, which is asked whenever a rank is free and could run an op."""

    def __init__(self, rule: Callable, p: int, m: int, limit: int):
        needs = cache(Schedule("so far", p, m, [()] * p, 2, KINDS, v_shape(p)).needs)
        super().__init__(p, m, limit, needs, "none", "", 0)
        self.rule, self.num_early = rule, 0
        self.fault: str | Raised | None = None

    def can_run(self, rank: int) -> dict[str, Op]:
        """Return the ops whose inputs are there: of each kind and chunk the next, and the first W."""
        heads = [queue[0] for queue in self.left[rank].values() if queue]
        ready = [op for op in heads if self.done.issuperset(self.needs(rank, op))]
        return {str(op): op for op in [*ready, *list(self.weights[rank])[:1]]}

    def choose(self, rank: int) -> Op | None:
        """Return the op that the rule names; after a fault, nothing runs any more."""
        ops, held = self.can_run(rank), self.held[rank]
        if self.fault or not ops:
            return None
        chosen = answer(self.rule, (list(ops), held, self.limit))
        op = ops.get(chosen) if isinstance(chosen, str) else None
        if chosen is None or chosen is ...:
            return None
        if isinstance(chosen, Raised):
            self.fault = chosen
        elif op is None:
            self.fault = f"rank {rank} can run {' or '.join(ops)}, and the rule says {chosen!r}"
        elif op.kind == FORWARD and held == self.limit:
            self.fault = f"rank {rank} runs {chosen} with {counted(held, 'chunk')} held already, which is the limit"
        else:
            others = [other for other in ops.values() if other.kind != WEIGHT_GRADIENT]
            fits = [other.kind == BACKWARD or held + (1 if other.chunk else 2) <= self.limit for other in others]
            self.num_early += op.kind == WEIGHT_GRADIENT and any(fits)
            return op
        return None


def what_happens(rule: Callable, p: int, m: int, limit: int, most_units: int) -> str | Raised | None:
    """Return what becomes of a V that a rule schedules; None if it never names an op."""
    pipeline = Obedient(rule, p, m, limit)
    ran = pipeline.run()
    if pipeline.fault or not pipeline.done:
        return pipeline.fault
    if not ran or any(pipeline.weights):
        could = {rank: list(ops) for rank in range(p) if (ops := pipeline.can_run(rank))}
        texts = [f"rank {rank} holds {pipeline.held[rank]} and is offered {' or '.join(could[rank])}" for rank in could]
        return f"after {counted(len(pipeline.done), 'op')} no rank goes on: {'; '.join(texts)}"
    early = f"; {counted(pipeline.num_early, 'W')} {EARLY}" if pipeline.num_early else ""
    return FINE if ran[0] <= most_units else f"all ranks finish, but after {ran[0]} time units{early}"


class RuleExercise(Exercise):
    """The learner writes a rule; each case is a pipeline, and any rule by which it does well enough is right."""

    def trials(self, function: Callable, case: tuple) -> list[Trial]:
        """Return what becomes of the pipeline."""
        p, m, limit, most_units = case
        given = (
            f"{counted(p, 'rank')}, {counted(m, 'micro-batch')}; limit {counted(limit, 'chunk')}, {most_units} units"
        )
        return [Trial(given, what_happens(function, *case), FINE)]

    def advice(self, function: Callable, number: int, trials: list[Trial]) -> str:
        """Return the mistake by which the same becomes of all pipelines."""
        del number, trials
        rules = function, self.solution_function, *(mistake.function for mistake in self.mistakes)
        got, right, *wrong = ([what_happens(rule, *case) for case in self.cases] for rule in rules)
        found = explain(got, right, list(zip([mistake.advice for mistake in self.mistakes], wrong)))
        is_early = any(isinstance(each, str) and each.endswith(EARLY) for each in got)
        return found or f"What this usually is: {W_FIRST}" * is_early

    def cases_text(self) -> str:
        return f"in {counted(len(self.cases), 'pipeline')}"


def my_choice(can_run, num_held, limit):
    num_free = limit - num_held
    fitting = []
    for op in can_run:
        needed = 1 if op.endswith(".1") else 2  # a forward of chunk 0 leaves a place for its own chunk 1
        if op[0] != "F" or num_free >= needed:
            fitting.append(op)
    return min(fitting, key=lambda op: ("BFW".index(op[0]), not op.endswith(".1")), default=None)


next_op = RuleExercise(
    "next_op",
    my_choice,
    notebook="10",
    cases=[(2, 4, 4, 26), (4, 8, 8, 52), (4, 8, 6, 57), (4, 8, 4, 72)],
    hints=[
        "First take out what does not fit: a forward needs a free place, `limit - num_held`. Then order what is left: "
        "whom do other ranks wait for? Nobody waits for a W, so it comes last.",
        "What if forwards of chunk 0 have taken every place? A place becomes free only after a backward, and a "
        "micro-batch's first backward comes after its forward through chunk 1.",
        'So a forward of chunk 0 needs two free places, one of chunk 1 (`op.endswith(".1")`) needs one.',
    ],
)


def rule(can_run, num_held, limit, places=(2, 1), order="BFW", late_first=True, skips=()):
    """Return an op by a rule with these faults: ``places`` are what forwards of chunks 0 and 1 need."""
    num_free = limit - num_held
    fitting = [op for op in can_run if op[0] != "F" or num_free >= places[op.endswith(".1")]]
    fitting = [op for op in fitting if op[0] not in skips]
    return min(fitting, key=lambda op: (order.index(op[0]), op.endswith(".1") != late_first), default=None)


next_op.mistakes_of(
    rule,
    (
        dict(places=(1, 1)),
        "The limit is kept, but a rank fills all its places with forwards of chunk 0. Then none of them can go on to "
        "chunk 1, so no backward ever comes, and no place becomes free. Leave one place for chunk 1.",
    ),
    (
        dict(places=(0, 0)),
        "Forwards run whether there is room or not: the limit counts chunks held, this one included.",
    ),
    (
        dict(places=(2, 2)),
        "The forward of chunk 1 needs one place only: the one that the forward of chunk 0 has left for it.",
    ),
    (dict(order="BWF"), W_FIRST),
    (dict(order="WBF"), W_FIRST),
    (
        dict(order="FWB"),
        "Backwards come last. Other ranks wait for them, and without a backward there is no W, which frees a place.",
    ),
    (
        dict(late_first=False),
        "Of two ops of a kind, that of chunk 0 comes first. The one of chunk 1 is nearer to its end: after it, places "
        "become free.",
    ),
    (dict(skips="W"), "No W ever runs. It is what frees a chunk: run one when nothing else can run, or fits."),
)


@next_op.mistake("A rank that is full waits for ever. It must go on with backwards, and with the Ws that free a place.")
def waits_when_full(can_run, num_held, limit):
    return my_choice(can_run, num_held, limit) if num_held < limit else None


@next_op.mistake("Return the op as it stands in `can_run`, such as 'F3.1', not its number in the list.")
def returns_its_place(can_run, num_held, limit):
    chosen = my_choice(can_run, num_held, limit)
    return None if chosen is None else can_run.index(chosen)


@next_op.mistake("Return the op as it stands in `can_run`, such as 'F3.1', not its kind alone.")
def returns_its_kind(can_run, num_held, limit):
    chosen = my_choice(can_run, num_held, limit)
    return None if chosen is None else chosen[0]
