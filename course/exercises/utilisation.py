"""The exercises of notebook 12: utilisation from spans, bytes of a GPU, GPUs for a deadline, and a plan to beat."""

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial

from course.exercises.base import Exercise, Verdict, indent, is_blank
from course.exercises.calling import Raised, answer
from course.measure.utilisation import Pace, TimedStep, measure_step, predict_step
from course.sizing import Plan, fullest
from labkit.launch import World
from labkit.shape import GPT

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


# -- bytes of a GPU -------------------------------------------------------------------------------------------------


def my_state_bytes(num_parameters, t, p, d, sharded_optimizer):
    mine = num_parameters / (t * p)
    weights, gradients, optimizer = 2, 4, 12
    if sharded_optimizer:
        optimizer /= d
    return mine * (weights + gradients + optimizer)


state_bytes = Exercise(
    "state_bytes",
    my_state_bytes,
    notebook="12",
    cases=[(1000, 1, 1, 1, False), (1000, 2, 1, 1, False), (8000, 2, 4, 4, False), (8000, 2, 4, 4, True)],
    hints=[
        "How many parameters has one GPU? Tensor and pipeline parallelism divide the model, data parallelism copies.",
        "A parameter takes 2 bytes as a weight, 4 as a gradient, and 12 in the optimizer.",
        "The sharded optimizer divides the 12 among the d replicas: 6 + 12/d.",
    ],
)


def held_bytes(num_parameters, t, p, d, sharded_optimizer, each: Callable) -> float:
    """Return the bytes of a GPU if a parameter takes ``each(d, z)``; z is d if the optimizer is sharded, or else 1."""
    return num_parameters / (t * p) * each(d, d if sharded_optimizer else 1)


state_bytes.mistakes_of(
    held_bytes,
    (
        dict(each=lambda d, z: (6 + 12 / z) / d),
        "You divided by d as well. Each replica holds the whole model, unless the optimizer is sharded.",
    ),
    (
        dict(each=lambda d, z: 18 / d),
        "You divided everything by d, sharded or not. Each replica holds weights and gradients of the whole model; "
        "only a sharded optimizer is divided among them.",
    ),
    (dict(each=lambda d, z: 18), "With sharded_optimizer the optimizer's 12 bytes are divided by d: you left it out."),
    (
        dict(each=lambda d, z: 16),
        "You counted 2 bytes for a gradient; here, as in Megatron-LM, gradients are added up in 4. And with "
        "sharded_optimizer the optimizer's 12 bytes are divided by d.",
    ),
    (dict(each=lambda d, z: 6 + 8 / z), "You counted 8 bytes in the optimizer, two moments. Its weight takes 4."),
    (dict(each=lambda d, z: 6), "These are weights and gradients. Adam adds 12 bytes: two moments, a float32 weight."),
    (
        dict(each=lambda d, z: 4 + 12 / z),
        "You counted 2 bytes for a gradient, as the ZeRO paper does. Here, as in Megatron-LM, it is 4.",
    ),
    (dict(each=lambda d, z: 6 + 12 / d), "You divided the optimizer's bytes by d although it is not sharded."),
    (dict(each=lambda d, z: 18 / z), "You divided all of it by d. ZeRO-1 divides the optimizer's 12 bytes only."),
    (dict(each=lambda d, z: 6 + 12 * z / d), "The wrong way round: divide by d where sharded_optimizer is True."),
    (dict(each=lambda d, z: 2 + 16 / z), "You divided the gradients, too. ZeRO-1 divides the optimizer's bytes only."),
)


state_bytes.mistakes_of(
    lambda n, t, p, d, sharded, scale: scale(t, p, d) * my_state_bytes(n, t, p, d, sharded),
    (dict(scale=lambda t, p, d: t * p), "That is the whole model. A GPU has 1/(t p) of its parameters."),
    (dict(scale=lambda t, p, d: t * p * d), "These are the bytes of all GPUs together. Divide by t p, too."),
    (dict(scale=lambda t, p, d: p), "p is missing: each stage of the pipeline has 1/p of the layers."),
)


# -- GPUs for a deadline --------------------------------------------------------------------------------------------


def my_gpus_needed(billion_tokens, billion_parameters, days, teraflops):
    flops = 8 * billion_tokens * 1e9 * billion_parameters * 1e9  # 2 forward, 4 backward, 2 for forward again
    return math.ceil(flops / (days * 86400 * teraflops * 1e12))


gpus_needed = Exercise(
    "gpus_needed",
    my_gpus_needed,
    notebook="12",
    cases=[(300, 175, 34, 140), (450, 1000, 84, 163), (100, 7.5, 10, 142), (864, 1, 1, 100)],
    hints=[
        "Each parameter costs a token 2 FLOPs forward, 4 backward, and 2 more to compute forward again.",
        "All GPUs together do n · X FLOP/s; the run has days · 86400 seconds.",
        "Solve 8TP / (n X) = seconds for n, and round up: `math.ceil`.",
    ],
)


def gpus(
    billion_tokens, billion_parameters, days, teraflops, flops_each=8, seconds=86400, units=1e6, rounded=math.ceil
):
    """Do what `my_gpus_needed` does, with one thing wrong."""
    return rounded(flops_each * billion_tokens * billion_parameters * units / (days * seconds * teraflops))


gpus_needed.mistakes_of(
    gpus,
    (dict(flops_each=2), "That is the forward pass. Backward takes twice as much, recomputing as much again."),
    (dict(flops_each=6), "You counted 6 FLOPs per token and parameter. With full recomputation forward runs twice: 8."),
    (dict(rounded=int), "Rounded down, the run ends a little late. Round up."),
    (dict(rounded=round), "Rounded to the nearest number, the run can end a little late. Round up."),
    (dict(rounded=lambda n: math.ceil(n) + 1), "This is one too many: `math.ceil` has rounded up already."),
    (dict(rounded=lambda n: int(n) + 1), "One more than rounded down is one too many where n is whole: `math.ceil`."),
    (dict(rounded=float), "There are no fractions of GPUs: round up to a whole number."),
    (dict(seconds=1), "FLOP/s are per second, and a day has 86400 seconds."),
    (
        dict(seconds=1, units=1, rounded=float),
        "The units are missing: T and P are in billions (1e9), X in tera (1e12), a day has 86400 s.",
    ),
    (dict(units=1), "T and P are in billions, and X in tera: 1e9 each above the line, 1e12 below."),
    (dict(seconds=1440), "A day has 1440 minutes, but FLOP/s are per second: 86400."),
    (dict(units=1e9), "X is in tera, 1e12; you took 1e9, giga."),
    (dict(seconds=3600), "A day has 86400 seconds; 3600 is an hour."),
)


@gpus_needed.mistake("More days need fewer GPUs: the days belong below the line.")
def days_above_the_line(billion_tokens, billion_parameters, days, teraflops):
    return gpus(billion_tokens, billion_parameters, 1 / days, teraflops)


@gpus_needed.mistake("You took the peak of an A100. A GPU achieves about half of that in training: use the argument.")
def at_the_peak(billion_tokens, billion_parameters, days, teraflops):
    return gpus(billion_tokens, billion_parameters, days, 312)


# -- a plan to beat -------------------------------------------------------------------------------------------------

GIVEN = Plan(
    GPT(num_layers=16, hidden_size=8192, seq_length=2048, vocab_size=51200, num_attention_heads=64),
    world_size=8,
    batch_size=16,
    pp_size=8,
    micro_batch_size=4,
    recompute="full",
)
LIMIT_BYTES = 72e9
"""Of a GPU with 80 GB: the rest is for what no plan counts."""
PREDICTED_FACTOR, MEASURED_FACTOR = 2.0, 1.5
"""How much faster it has to be: without messages, and with them, on real ranks."""
PACE = Pace(0.006)
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
            return f"Predicted: {factor:.2f} times as fast as given. It must be {PREDICTED_FACTOR:g} times."
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
        return "sizes"
    if not isinstance(plan, Plan) or (plan.model, plan.world_size) != (GIVEN.model, GIVEN.world_size):
        return "something else"
    if plan.batch_size != GIVEN.batch_size:
        return "batch"
    needed = fullest(plan)
    if needed.total > LIMIT_BYTES:
        return "activations" if needed.activations > needed.total / 2 else "states"
    if plan == GIVEN:
        return "as given"
    changed = plan.micro_batch_size != GIVEN.micro_batch_size, plan.recompute != GIVEN.recompute
    return {(True, False): "recomputes", (False, True): "bubble"}.get(changed, "other")


def why_slow(step: TimedStep) -> str:
    computing, communication, idle = step.mean_shares
    shares = f"Computing {computing:.0%}, messages {communication:.0%}, idle {idle:.0%}."
    if communication > 0.25:
        return f"{shares} Messages take what you saved elsewhere: tensor parallelism sends two per layer and direction."
    return f"{shares} It was predicted to be faster: is something else using the cores? Try again."


def my_plan():
    return replace(GIVEN, micro_batch_size=1, num_chunks=2, recompute="selective")


beat = Challenge(
    "beat",
    my_plan,
    notebook="12",
    cases=[()],
    hints=[
        "Two things make the given plan slow. What is (p-1)/(v m) for it? And what does recompute='full' cost?",
        "More micro-batches: a smaller micro_batch_size. They also need less memory each.",
        "With the memory that this frees: recompute='selective'. Then there are num_chunks, or fewer stages with "
        "zero_stage=1.",
    ],
)


beat.mistakes_of(
    partial(replace, GIVEN),
    (
        dict(batch_size=8, micro_batch_size=1),
        "Half the batch takes half the time, and is half the work. The batch belongs to the training recipe.",
    ),
    (dict(), "This is the plan as given. What is it idle for, and what does it compute twice?"),
    (
        dict(recompute="none"),
        "Most of it is activations. Keep fewer: take smaller micro-batches, or recompute the attention alone "
        "(recompute='selective'), which costs only a few percent.",
    ),
    (
        dict(pp_size=1, micro_batch_size=1, recompute="selective"),
        "Weights, gradients and optimizer do not fit: t · p must divide the model enough, or the optimizer must be "
        "sharded (zero_stage=1, where d is above 1).",
    ),
    (
        dict(micro_batch_size=1),
        "The bubble is small now. But recompute='full' computes every forward pass twice, a quarter of the work: with "
        "memory to spare, recompute less.",
    ),
    (
        dict(recompute="selective"),
        "It recomputes less now, but ranks still stand idle: with p = 8 a few micro-batches leave a large bubble. Make "
        "them smaller, so that there are more.",
    ),
    (dict(micro_batch_size=3), "The sizes do not fit together. The message names the rule, and sizes that fit."),
)
