"""The exercise on schedules that fold: a rule says which op a free rank runs next, and a pipeline obeys it."""

from collections.abc import Callable
from functools import cache

from course.exercises.advice import Evidence, explain
from course.exercises.base import Exercise, Trial, is_blank
from course.exercises.calling import Raised, answer
from labkit.schedules import FORWARD, WEIGHT_GRADIENT, Op, Schedule, v_shape
from labkit.schedules.greedy import KINDS, Greedy
from labkit.sizes import counted

FINE, EARLY = "all ranks finish in time, and none holds too much", "ran before an op that other ranks wait for"
W_FIRST = (
    "W comes before a forward or a backward. Other ranks wait for those, and nobody waits for a W: it can fill a time "
    "in which the rank has nothing else to do, or no room for it. Room is two free places for a forward of chunk 0, "
    "and one for chunk 1."
)
AS_OFFERED = (
    "Return one of the texts in `can_run` as it stands there, such as 'F3.1', or None to wait. What a rank can run is "
    "different each time, so choose from the list: a rule cannot know the op beforehand."
)
NO_ROOM = "Forwards run whether there is room or not: the limit counts chunks held, this one included."
FILLED = (
    "The limit is kept, but a rank fills all its places with forwards of chunk 0. Then none of them can go on to chunk "
    "1, so no backward ever comes, and no place becomes free. Leave one place for chunk 1. (Its ops end with '.1'; F1 "
    "and F11 are of chunk 0.)"
)
DECLINED = (
    "A rank waits, although a backward or a W could run. Neither needs a place, and without W, which frees one, a rank "
    "that is full waits for ever. None is only for a rank without room for what it could run."
)
HAS_ROOM = (
    "A rank waits, although there is room. A forward of chunk 0 needs two free places, its own and one for its chunk "
    "1; the forward of chunk 1 needs one only: the one that was left for it."
)
ORDER = (
    "It keeps the limit, but other ranks wait too long. Of what fits, take what they need most: backwards before "
    "forwards, W last; and of two ops of a kind that of chunk 1, after which places become free sooner."
)


class Obedient(Greedy):
    """A V while it is scheduled by a learner's ``rule``, which is asked whenever a rank is free and could run an op."""

    def __init__(self, rule: Callable, p: int, m: int, limit: int):
        needs = cache(Schedule("so far", p, m, [()] * p, 2, KINDS, v_shape(p)).needs)
        super().__init__(p, m, limit, needs, "none", "", 0)
        self.rule, self.num_early = rule, 0
        self.fault: str | Raised | None = None
        self.why = ""  # the advice for this fault

    def can_run(self, rank: int) -> dict[str, Op]:
        """Return the ops whose inputs are there: of each kind and chunk the next, and the first W."""
        heads = [queue[0] for queue in self.left[rank].values() if queue]
        ready = [op for op in heads if self.done.issuperset(self.needs(rank, op))]
        return {str(op): op for op in [*ready, *list(self.weights[rank])[:1]]}

    def fitting(self, rank: int) -> set[str]:
        """Return the kinds of those for which there is room."""
        ops, num_free = self.can_run(rank).values(), self.limit - self.held[rank]
        return {op.kind for op in ops if op.kind != FORWARD or num_free >= (1 if op.chunk else 2)}

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
            self.fault, self.why = f"rank {rank} can run {' or '.join(ops)}, and the rule says {chosen!r}", AS_OFFERED
        elif op.kind == FORWARD and held == self.limit:
            self.fault = f"rank {rank} runs {chosen} with {counted(held, 'chunk')} held already, which is the limit"
            self.why = NO_ROOM
        else:
            self.num_early += op.kind == WEIGHT_GRADIENT and self.fitting(rank) > {WEIGHT_GRADIENT}
            return op
        return None

    def stop(self) -> None:
        """Note that no rank goes on, and why."""
        could = {rank: list(ops) for rank in range(len(self.held)) if (ops := self.can_run(rank))}
        texts = [f"rank {rank} holds {self.held[rank]} and is offered {' or '.join(could[rank])}" for rank in could]
        self.fault = f"after {counted(len(self.done), 'op')} no rank goes on: {'; '.join(texts)}"
        fit = set().union(*map(self.fitting, could))
        self.why = DECLINED if fit - {FORWARD} else HAS_ROOM if fit else FILLED


def what_happens(rule: Callable, p: int, m: int, limit: int, most_units: int) -> tuple[str | Raised, str]:
    """Return what becomes of a V that a rule schedules, and what the mistake is."""
    pipeline = Obedient(rule, p, m, limit)
    ran = pipeline.run()
    if not pipeline.fault and (not ran or any(pipeline.weights)):
        pipeline.stop()
    if pipeline.fault:
        return pipeline.fault, pipeline.why
    assert ran
    if ran[0] <= most_units:
        return FINE, ""
    early = f"; {counted(pipeline.num_early, 'W')} {EARLY}" if pipeline.num_early else ""
    return f"all ranks finish, but after {ran[0]} time units{early}", W_FIRST if early else ORDER


class RuleExercise(Exercise):
    """The learner writes a rule; each case is a pipeline, and any rule by which it does well enough is right."""

    def trials(self, function: Callable, case: tuple) -> list[Trial]:
        """Return what becomes of the pipeline; None if the rule has no answer to the first question."""
        p, m, limit, most_units = case
        given = (
            f"{counted(p, 'rank')}, {counted(m, 'micro-batch')}; limit {counted(limit, 'chunk')}, {most_units} units"
        )
        is_stub = is_blank(answer(function, (["F0"], 0, self.cases[0][2])))
        return [Trial(given, None if is_stub else what_happens(function, *case)[0], FINE)]

    def advice(self, function: Callable, number: int, trials: list[Trial]) -> str:
        """Return the mistake by which the same becomes of all pipelines, or that of the first pipeline that failed."""
        del trials
        rules = function, self.solution_function, *(mistake.function for mistake in self.mistakes)
        got, right, *wrong = ([what_happens(rule, *case)[0] for case in self.cases] for rule in rules)
        why = what_happens(function, *self.cases[number])[1]
        found = explain(Evidence(got, right, list(zip([mistake.advice for mistake in self.mistakes], wrong))))
        return found if "usually" in found or not why else f"What this usually is: {why}"

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
    notebook="07",
    cases=[(2, 4, 4, 26), (4, 8, 8, 52), (4, 8, 6, 57), (4, 8, 4, 72), (4, 12, 2, 205)],
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
    (dict(places=(1, 1)), FILLED),
    (dict(places=(0, 0)), NO_ROOM),
    (dict(places=(2, 2)), HAS_ROOM),
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
    (dict(skips="W"), DECLINED),
)
