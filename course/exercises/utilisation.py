"""The exercises of notebook 12: utilisation from spans, and a plan to beat."""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial

from course.exercises.base import Exercise, Verdict, indent, is_blank
from course.exercises.calling import Raised, answer
from course.measure.utilisation import Pace, TimedStep, measure_step, predict_step
from course.sizing import Plan, fullest
from course.sizing.runs import LLAMA_8B
from labkit.launch import World

# -- utilisation, as a monitor has it -------------------------------------------------------------------------------


def my_utilisation(spans, start, end):
    busy = 0.0
    for kind, begin, finish in spans:
        if kind != "wait":
            busy += max(0.0, min(finish, end) - max(begin, start))  # the part inside the window
    return busy / (end - start)


utilisation = Exercise(
    "utilisation",
    my_utilisation,
    notebook="12",
    cases=[
        ([("forward", 0, 3)], 0, 4),
        ([("forward", 0, 2), ("wait", 2, 5), ("backward", 5, 9)], 0, 12),
        ([("forward", 0, 2), ("wait", 2, 5), ("backward", 5, 9)], 1, 7),
        ([("forward", 0, 2), ("backward", 6, 8)], 3, 5),
        ([("forward", 0.25, 1.25), ("wait", 1.25, 2.5), ("backward", 2.5, 4)], 0.5, 3.5),  # 7/12: no samples give it
    ],
    hints=[
        "Go through the spans, leave out those of kind 'wait', and add up seconds.",
        "The part of a span in the window runs from `max(begin, start)` to `min(finish, end)`; it may be empty.",
        "Divide by the length of the window.",
    ],
)


START_FORGOTTEN = (
    "Spans are cut at the window's end, but not at its start. What comes before does not count either: begin at "
    "`max(begin, start)`, and take at least 0."
)
END_FORGOTTEN = (
    "Spans are cut at the window's start, but not at its end. What comes after does not count either: stop at "
    "`min(finish, end)`, and take at least 0."
)


def busy_share(spans, start, end, part: Callable) -> float:
    """Return the share of the window, from s to e, that is busy if ``part(b, f, s, e)`` seconds of a span count."""
    return sum(part(begin, finish, start, end) for kind, begin, finish in spans if kind != "wait") / (end - start)


@utilisation.mistake("Waits are counted as work. A rank that waits for a message holds its GPU and computes nothing.")
def waits_count(spans, start, end):
    return my_utilisation([("work", begin, finish) for _, begin, finish in spans], start, end)


@utilisation.mistake("Two things: waits are counted as work, and a span that reaches beyond the window counts whole.")
def waits_count_and_nothing_is_cut(spans, start, end):
    return sum(finish - begin for _, begin, finish in spans) / (end - start)


utilisation.mistakes_of(
    busy_share,
    (
        dict(part=lambda b, f, s, e: f - b if f > s and b < e else 0),
        "A span that reaches beyond the window counts whole. Only its part inside does.",
    ),
    (
        dict(part=lambda b, f, s, e: f - b),
        "Spans count whole, wherever they lie. Only the part inside the window does: from the later of both starts to "
        "the earlier of both ends, and nothing where that is empty.",
    ),
    (dict(part=lambda b, f, s, e: max(0, min(f, e) - b)), START_FORGOTTEN),
    (dict(part=lambda b, f, s, e: min(f, e) - b), START_FORGOTTEN),
    (dict(part=lambda b, f, s, e: max(0, f - max(b, s))), END_FORGOTTEN),
    (dict(part=lambda b, f, s, e: f - max(b, s)), END_FORGOTTEN),
    (
        dict(part=lambda b, f, s, e: f - b if s <= b and f <= e else 0),
        "Spans that reach beyond the window do not count at all. Their part inside the window should.",
    ),
    (
        dict(part=lambda b, f, s, e: min(f, e) - max(b, s)),
        "The part of a span that lies outside altogether came out negative: take at least 0.",
    ),
)


@utilisation.mistake("You counted whole seconds, as by `range` or `int`. Spans begin and end at any time: subtract.")
def second_by_second(spans, start, end):
    work = [(begin, finish) for kind, begin, finish in spans if kind != "wait"]
    seconds = range(int(start), int(end))
    return sum(any(begin <= second < finish for begin, finish in work) for second in seconds) / (end - start)


utilisation.mistakes_of(
    lambda spans, start, end, num: (
        sum(any(b <= start + (end - start) * i / num < f for kind, b, f in spans if kind != "wait") for i in range(num))
        / num
    ),
    *(
        (dict(num=num), "You looked at some moments of the window, which is close. Add up seconds: that is exact.")
        for num in (100, 1000)
    ),
)


@utilisation.mistake("You counted spans. They are of different lengths: add up their seconds inside the window.")
def spans_counted(spans, start, end):
    kinds = [kind for kind, begin, finish in spans if begin < end and finish > start]
    return sum(kind != "wait" for kind in kinds) / max(1, len(kinds))


@utilisation.mistake("Backward is missing: all that is not a wait is work.")
def forward_alone(spans, start, end):
    return my_utilisation([span for span in spans if span[0] == "forward"], start, end)


@utilisation.mistake("This is the share without waits. But where no span is at all, the rank computes nothing either.")
def all_but_waits(spans, start, end):
    return 1 - waits_count([span for span in spans if span[0] == "wait"], start, end)


@utilisation.mistake("You divided by the time in which anything was noted. The rest of the window is idle time.")
def share_of_the_spans(spans, start, end):
    return my_utilisation(spans, start, end) / waits_count(spans, start, end)


utilisation.mistakes_of(
    lambda spans, start, end, by: my_utilisation(spans, start, end) * (end - start) / by(start, end),
    (dict(by=lambda start, end: end), "You divided by the window's end. Its length is end - start."),
    (dict(by=lambda start, end: 1), "These are seconds. For the share, divide by the window's length, end - start."),
)
utilisation.mistakes_in((None, lambda share: 1 - share, "This is the idle share: 1 minus what is asked."))


# -- a plan to beat -------------------------------------------------------------------------------------------------

GIVEN = Plan(
    LLAMA_8B,
    world_size=8,
    batch_size=16,
    pp_size=8,
    micro_batch_size=4,
    recompute="full",
    fused_attention=True,
)
LIMIT_BYTES = 72e9
"""Of a GPU with 80 GB: the rest is for what no plan counts."""
PREDICTED_FACTOR, MEASURED_FACTOR = 2.0, 1.5
"""How much faster it has to be: without messages, and with them, on real ranks."""
PACE = Pace(0.003)
"""The layers are slow, so that the result does not depend on how fast a busy machine starts messages."""


@dataclass
class Challenge(Exercise):
    """The learner writes a plan for the same work; it must fit a GPU, and be faster when real ranks run it."""

    given: Plan = field(default=GIVEN, kw_only=True)

    def judge(self, function: Callable) -> Verdict:
        """Judge the plan; ranks run only for one that can win."""
        if not callable(function):
            return super().judge(function)
        plan = answer(function, ())
        if is_blank(plan):
            return self.nothing_returned(function, plan)
        if isinstance(plan, Raised):
            text = indent(plan.message + plan.where)
            return Verdict("raised", f"{self.name}: it raised an error.\n{text}{self._advice(plan)}")
        if fault := self._fault_of(plan):
            return Verdict("wrong", f"{self.name}: not yet.\n{indent(fault)}{self._advice(plan)}")
        assert isinstance(plan, Plan)  # or it would have had a fault
        with World(self.given.world_size) as world:
            ours, theirs = (measure_step(each, pace=PACE, world=world) for each in (plan, self.given))
        factor = theirs.seconds / ours.seconds
        facts = f"{ours.seconds * 1e3:.0f} ms a step, given {theirs.seconds * 1e3:.0f} ({ours.timeline.source})"
        if factor < MEASURED_FACTOR:
            text = f"On the ranks it is {factor:.2f} times as fast: {facts}. It must be {MEASURED_FACTOR:g} times."
            return Verdict("wrong", f"{self.name}: not yet.\n{indent(text)}\n{indent(why_slow(ours))}")
        return Verdict("passed", f"{self.name}: beaten, {factor:.1f} times as fast: {facts}.")

    def _fault_of(self, plan) -> str | None:
        """Say what is wrong with a plan before it has run."""
        if not isinstance(plan, Plan):
            return f"It returned {plan!r}: return a Plan, as by replace(beat.given, ...)."
        if any(getattr(plan, name) != getattr(self.given, name) for name in ("model", "world_size", "batch_size")):
            return "That is a different job: model, world_size and batch_size stay as given."
        if plan.zero_stage > 1:
            return f"zero_stage={plan.zero_stage} sends in the middle of a step, which is not run here: use 0 or 1."
        if (needed := fullest(plan).total) > LIMIT_BYTES:
            return f"It needs {needed / 1e9:.0f} GB, and there are {LIMIT_BYTES / 1e9:.0f} GB."
        factor = predict_step(self.given).seconds / predict_step(plan).seconds
        if factor < PREDICTED_FACTOR:
            bubbles = f"Idle / ideal is {plan.bubble_over_ideal:.2f}, given {self.given.bubble_over_ideal:.2f}."
            target = f"It must be {PREDICTED_FACTOR:g} times."
            return f"Predicted: {factor:.2f} times as fast as given. {target} {bubbles}"
        return None

    def _advice(self, plan) -> str:
        kind = first_mistake(plan)
        for mistake in self.mistakes:
            if kind == first_mistake(answer(mistake.function, ())):
                return f"\n{indent(f'What this usually is: {mistake.advice}')}"
        return ""


def first_mistake(plan) -> str:
    """Name the first mistake of a plan that cannot win."""
    if isinstance(plan, Raised):
        return "refused" if plan.message.startswith(("Misfit", "NotModelled", "ValueError")) else "something else"
    if not isinstance(plan, Plan) or (plan.model, plan.world_size) != (GIVEN.model, GIVEN.world_size):
        return "something else"
    if plan.batch_size != GIVEN.batch_size:
        return "smaller batch" if plan.batch_size < GIVEN.batch_size else "larger batch"
    if plan.zero_stage > 1:
        return "other"  # refused for that alone
    needed = fullest(plan)
    if needed.total > LIMIT_BYTES:
        if needed.activations <= needed.total / 2:
            return "states"
        return "activations of one sequence" if plan.micro_batch_size == 1 else "activations"
    if plan == GIVEN:
        return "as given"
    if plan.recompute == "full":
        without = replace(plan, recompute="none")
        return "recomputes" if fullest(without).total <= LIMIT_BYTES else "other"
    return "other"


def why_slow(step: TimedStep) -> str:
    computing, communication, idle = step.mean_shares
    shares = f"Computing {computing:.0%}, messages {communication:.0%}, idle {idle:.0%}."
    if communication > 0.25:
        return f"{shares} Messages take what you saved elsewhere: tensor parallelism sends two per layer and direction."
    return f"{shares} It was predicted to be faster: is something else using the cores? Try again."


def my_plan():
    return replace(GIVEN, micro_batch_size=1, recompute="none")


beat = Challenge(
    "beat",
    my_plan,
    notebook="12",
    cases=[()],
    hints=[
        "Two things make the given plan slow. What is (p-1)/(v m) for it? And what does recompute='full' cost?",
        "More micro-batches: a smaller micro_batch_size. They also need less memory each.",
        "With the memory that this frees: recompute='none'. Or keep recomputing: more num_chunks, or "
        "fewer stages with zero_stage=1.",
    ],
)


beat.mistakes_of(
    partial(replace, GIVEN),
    (
        dict(batch_size=8, micro_batch_size=1),
        "A smaller batch takes less time, and is less work. The batch belongs to the training recipe.",
    ),
    (
        dict(batch_size=32, micro_batch_size=1),
        "A larger batch has more micro-batches, and is more work. Of the same batch, smaller micro-batches make more.",
    ),
    (dict(), "This is the plan as given. What is it idle for, and what does it compute twice?"),
    (
        dict(recompute="none"),
        "Most of it is activations. Keep fewer: take smaller micro-batches.",
    ),
    (
        dict(pp_size=2, micro_batch_size=1, recompute="none", zero_stage=1),
        "Most of it is activations, and micro-batches have one sequence already. recompute='full' keeps the inputs of "
        "layers only. Without it, a GPU needs fewer weights (more stages, if ranks are left), or fewer chunks.",
    ),
    (
        dict(pp_size=1, micro_batch_size=1, recompute="none"),
        "Weights, gradients and optimizer do not fit: t · p must divide the model enough, or the optimizer must be "
        "sharded (zero_stage=1, where d is above 1).",
    ),
    (
        dict(micro_batch_size=1),
        "recompute='full' computes every forward pass twice, a quarter of the work. This plan would fit without it.",
    ),
    (dict(micro_batch_size=3), "There is no such plan. The message names the rule, and the way out if it knows one."),
)
