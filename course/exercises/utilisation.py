"""The exercises of notebook 09: utilisation from spans, bytes of a GPU, GPUs for a deadline, and a plan to beat.

The functions named my_... are the solutions; those with a leading underscore make the typical mistakes.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial

from course.exercises.base import Exercise, Mistake, Raised, Verdict, answer, indent, is_blank
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


def _waits_count(spans, start, end):
    return my_utilisation([("work", begin, finish) for _, begin, finish in spans], start, end)


def _not_clipped(spans, start, end):
    inside = [(begin, finish) for kind, begin, finish in spans if kind != "wait" and finish > start and begin < end]
    return sum(finish - begin for begin, finish in inside) / (end - start)


def _cut(spans, start, end, at_start=True, at_end=True, floor=True):
    """`my_utilisation` with spans cut at some ends of the window alone, and perhaps without the 0."""
    parts = [
        (min(finish, end) if at_end else finish) - (max(begin, start) if at_start else begin)
        for kind, begin, finish in spans
        if kind != "wait"
    ]
    return sum(max(0.0, part) if floor else part for part in parts) / (end - start)


_never_cut = partial(_cut, at_start=False, at_end=False)
_cut_at_the_end = partial(_cut, at_start=False)
_cut_at_the_end_no_floor = partial(_cut, at_start=False, floor=False)
_cut_at_the_start = partial(_cut, at_end=False)
_cut_at_the_start_no_floor = partial(_cut, at_end=False, floor=False)
_no_floor = partial(_cut, floor=False)


def _waits_count_and_not_clipped(spans, start, end):
    return sum(finish - begin for _, begin, finish in spans) / (end - start)


def _whole_spans_only(spans, start, end):
    inside = [(begin, finish) for kind, begin, finish in spans if kind != "wait" and start <= begin and finish <= end]
    return sum(finish - begin for begin, finish in inside) / (end - start)


def _of_the_spans(spans, start, end):
    """Divided by the time of all spans in the window, waits included."""
    return my_utilisation(spans, start, end) / (_waits_count(spans, start, end) or 1.0)


def _by_the_end(spans, start, end):
    return my_utilisation(spans, start, end) * (end - start) / end


def _in_percent(spans, start, end):
    return 100 * my_utilisation(spans, start, end)


_START_FORGOTTEN = (
    "Spans are cut at the window's end, but not at its start. What comes before counts neither: begin at "
    "`max(begin, start)`, and take 0 at least."
)
_END_FORGOTTEN = (
    "Spans are cut at the window's start, but not at its end. What comes after counts neither: stop at "
    "`min(finish, end)`, and take 0 at least."
)

utilisation = Exercise(
    "utilisation",
    my_utilisation,
    cases=[
        ([("forward", 0, 3)], 0, 4),
        ([("forward", 0, 2), ("wait", 2, 5), ("backward", 5, 9)], 0, 12),
        ([("forward", 0, 2), ("wait", 2, 5), ("backward", 5, 9)], 1, 7),
        ([("forward", 0, 2), ("backward", 6, 8)], 3, 5),
    ],
    mistakes=[
        Mistake(
            _waits_count,
            "Waits are counted as work. A rank that waits for a message holds its GPU and computes nothing.",
        ),
        Mistake(
            _waits_count_and_not_clipped,
            "Two things: waits are counted as work, and a span that reaches beyond the window counts whole.",
        ),
        Mistake(
            _not_clipped,
            "A span that reaches beyond the window counts whole. Only its part inside does: from the later of both "
            "starts to the earlier of both ends.",
        ),
        Mistake(
            _never_cut,
            "Spans count whole, wherever they lie. Only the part inside the window does: from the later of both "
            "starts to the earlier of both ends, and nothing where that is empty.",
        ),
        Mistake(_cut_at_the_end, _START_FORGOTTEN),
        Mistake(_cut_at_the_end_no_floor, _START_FORGOTTEN),
        Mistake(_cut_at_the_start, _END_FORGOTTEN),
        Mistake(_cut_at_the_start_no_floor, _END_FORGOTTEN),
        Mistake(
            _whole_spans_only,
            "Spans that reach beyond the window do not count at all. Their part inside the window does.",
        ),
        Mistake(
            _no_floor,
            "The part of a span that lies outside altogether came out negative: take 0 at least.",
        ),
        Mistake(
            _of_the_spans,
            "You divided by the time in which anything was noted. Utilisation is a share of the window, and what is "
            "not noted is idle time as well.",
        ),
        Mistake(_by_the_end, "You divided by the window's end. Its length is end - start."),
        Mistake(_in_percent, "That is in percent. A share is wanted, from 0 to 1."),
    ],
    hints=[
        "Go through the spans, leave out those of kind 'wait', and add up seconds.",
        "The part of a span in the window runs from `max(begin, start)` to `min(finish, end)`; it may be empty.",
        "Divide by the length of the window.",
    ],
)

# -- bytes of a GPU -------------------------------------------------------------------------------------------------


def my_state_bytes(num_parameters, t, p, d, sharded_optimizer):
    mine = num_parameters / (t * p)
    weights, gradients, optimizer = 2, 4, 12
    if sharded_optimizer:
        optimizer /= d
    return mine * (weights + gradients + optimizer)


def _by_all_gpus(num_parameters, t, p, d, sharded_optimizer):
    return my_state_bytes(num_parameters, t, p, d, sharded_optimizer) / d


def _by_all_gpus_and_never_sharded(num_parameters, t, p, d, sharded_optimizer):
    return 18 * num_parameters / (t * p * d)


def _never_sharded(num_parameters, t, p, d, sharded_optimizer):
    return 18 * num_parameters / (t * p)


def _two_byte_gradients_and_never_sharded(num_parameters, t, p, d, sharded_optimizer):
    return 16 * num_parameters / (t * p)


def _whole_model(num_parameters, t, p, d, sharded_optimizer):
    return my_state_bytes(num_parameters, 1, 1, d, sharded_optimizer)


def _tensor_only(num_parameters, t, p, d, sharded_optimizer):
    return my_state_bytes(num_parameters, t, 1, d, sharded_optimizer)


def _no_optimizer(num_parameters, t, p, d, sharded_optimizer):
    return 6 * num_parameters / (t * p)


def _two_byte_gradients(num_parameters, t, p, d, sharded_optimizer):
    return num_parameters / (t * p) * (4 + (12 / d if sharded_optimizer else 12))


def _always_sharded(num_parameters, t, p, d, sharded_optimizer):
    return my_state_bytes(num_parameters, t, p, d, True)


def _everything_sharded(num_parameters, t, p, d, sharded_optimizer):
    return num_parameters / (t * p) * (18 / d if sharded_optimizer else 18)


def _gradients_sharded(num_parameters, t, p, d, sharded_optimizer):
    return num_parameters / (t * p) * (2 + 16 / d if sharded_optimizer else 18)


state_bytes = Exercise(
    "state_bytes",
    my_state_bytes,
    cases=[(1000, 1, 1, 1, False), (1000, 2, 1, 1, False), (8000, 2, 4, 4, False), (8000, 2, 4, 4, True)],
    mistakes=[
        Mistake(
            _by_all_gpus,
            "You divided by d as well. The d replicas each hold the whole model: data parallelism saves no memory, "
            "unless the optimizer is sharded.",
        ),
        Mistake(
            _by_all_gpus_and_never_sharded,
            "You divided everything by d, sharded or not. Each replica holds weights and gradients of the whole model; "
            "only a sharded optimizer is divided among them.",
        ),
        Mistake(_never_sharded, "With sharded_optimizer, the optimizer's 12 bytes are divided by d; you left it out."),
        Mistake(
            _two_byte_gradients_and_never_sharded,
            "You have 2 bytes for a gradient; here, as in Megatron-LM, they are added up in 4. And with "
            "sharded_optimizer the optimizer's 12 bytes are divided by d.",
        ),
        Mistake(_whole_model, "That is the whole model. Of its parameters a GPU has 1/(t p)."),
        Mistake(_tensor_only, "p is missing: each stage of the pipeline has 1/p of the layers."),
        Mistake(
            _no_optimizer,
            "Weights and gradients only. Adam keeps 12 bytes a parameter on top: two moments and a copy of the weight, "
            "in 4 bytes each.",
        ),
        Mistake(
            _two_byte_gradients,
            "You have 2 bytes for a gradient, as ZeRO's paper counts. Here, as in Megatron-LM, gradients are added up "
            "in 4.",
        ),
        Mistake(_always_sharded, "You divided the optimizer's bytes by d although it is not sharded."),
        Mistake(
            _everything_sharded,
            "You divided everything by d. The sharded optimizer (ZeRO-1) divides its 12 bytes only; each replica has "
            "all weights and gradients.",
        ),
        Mistake(_gradients_sharded, "You divided the gradients as well. ZeRO-1 divides the optimizer's bytes only."),
    ],
    hints=[
        "How many parameters has one GPU? Tensor and pipeline parallelism divide the model, data parallelism copies.",
        "A parameter takes 2 bytes as a weight, 4 as a gradient, and 12 in the optimizer.",
        "The sharded optimizer divides the 12 among the d replicas: 6 + 12/d.",
    ],
)

# -- GPUs for a deadline --------------------------------------------------------------------------------------------


def my_gpus_needed(billion_tokens, billion_parameters, days, teraflops):
    flops = 8 * billion_tokens * 1e9 * billion_parameters * 1e9  # 2 forward, 4 backward, 2 for forward again
    return math.ceil(flops / (days * 86400 * teraflops * 1e12))


def _gpus(billion_tokens, billion_parameters, days, teraflops, flops_each=8, seconds=86400):
    """Not rounded."""
    return flops_each * billion_tokens * billion_parameters * 1e6 / (days * seconds * teraflops)


def _forward_only(*args):
    return math.ceil(_gpus(*args, flops_each=2))


def _not_recomputed(*args):
    return math.ceil(_gpus(*args, flops_each=6))


def _rounded_down(*args):
    return int(_gpus(*args))


def _not_rounded(*args):
    return _gpus(*args)


def _in_seconds(*args):
    return math.ceil(_gpus(*args, seconds=1))


def _in_hours(*args):
    return math.ceil(_gpus(*args, seconds=3600))


def _no_units(*args):
    return _gpus(*args, seconds=1) / 1e6


def _no_billions(*args):
    return math.ceil(_gpus(*args) / 1e6)


def _at_the_peak(billion_tokens, billion_parameters, days, teraflops):
    return math.ceil(_gpus(billion_tokens, billion_parameters, days, 312))


gpus_needed = Exercise(
    "gpus_needed",
    my_gpus_needed,
    cases=[(300, 175, 34, 140), (450, 1000, 84, 163), (100, 7.5, 10, 142)],
    mistakes=[
        Mistake(
            _forward_only, "That is the forward pass. Backward takes twice as much, and recomputing as much again."
        ),
        Mistake(
            _not_recomputed,
            "You counted 6 FLOPs a token and parameter: 2 forward and 4 backward. With full recomputation the forward "
            "pass runs twice: 8.",
        ),
        Mistake(_rounded_down, "Rounded down, the run is a little late. Round up."),
        Mistake(_not_rounded, "There are no parts of GPUs: round up to a whole number."),
        Mistake(_in_seconds, "FLOP/s are per second, and a day has 86400 seconds."),
        Mistake(
            _no_units, "The units are missing: T and P are in billions (1e9), X in tera (1e12), a day has 86400 s."
        ),
        Mistake(_no_billions, "T and P are in billions, and X in tera: 1e9 each above the line, 1e12 below."),
        Mistake(_in_hours, "A day has 86400 seconds; 3600 is an hour."),
        Mistake(
            _at_the_peak,
            "You took the peak of an A100. What a GPU achieves in training is about half of that: use the argument.",
        ),
    ],
    hints=[
        "Each parameter costs a token 2 FLOPs forward, 4 backward, and 2 more to compute forward again.",
        "All GPUs together do n · X FLOP/s; the run has days · 86400 seconds.",
        "Solve 8TP / (n X) = seconds for n, and round up: `math.ceil`.",
    ],
)

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
"""Slow layers, so that the start-up of messages on a busy machine does not decide."""


def my_plan():
    return replace(GIVEN, micro_batch_size=1, num_chunks=2, recompute="selective")


def _smaller_batch():
    return replace(GIVEN, batch_size=8, micro_batch_size=1)


def _as_given():
    return GIVEN


def _no_recomputation_at_all():
    return replace(GIVEN, recompute="none")


def _copies_only():
    return replace(GIVEN, pp_size=1, micro_batch_size=1, recompute="selective")


def _recomputes_all():
    return replace(GIVEN, micro_batch_size=1)


def _large_micro_batches():
    return replace(GIVEN, recompute="selective")


def _sizes_that_do_not_fit():
    return replace(GIVEN, micro_batch_size=3)


@dataclass
class Challenge(Exercise):
    """The learner writes a plan for the same work; it has to fit a GPU, and to be faster when real ranks run it."""

    given: Plan = field(default=GIVEN, kw_only=True)
    limit_bytes: float = field(default=LIMIT_BYTES, kw_only=True)

    def verdict(self, function: Callable) -> Verdict:
        """What `check` prints, as data; ranks run only for a plan that can win."""
        plan = answer(function, ())
        if is_blank(plan):
            return Verdict("not attempted", f"{self.name}: not attempted yet (it returns nothing so far).")
        if isinstance(plan, Raised):
            return Verdict("raised", f"{self.name}: it raised an error.\n{indent(plan.text)}{self._advice(plan)}")
        if fault := self._fault_of(plan):
            return Verdict("wrong", f"{self.name}: not yet.\n{indent(fault)}{self._advice(plan)}")
        assert isinstance(plan, Plan)  # or it would have had a fault
        with World(self.given.world_size) as world:
            ours, theirs = (measure_step(each, pace=PACE, world=world) for each in (plan, self.given))
        factor = theirs.seconds / ours.seconds
        facts = f"{ours.seconds * 1e3:.0f} ms a step, given {theirs.seconds * 1e3:.0f} ({ours.timeline.source})"
        if factor < MEASURED_FACTOR:
            text = f"On the ranks it is {factor:.2f} times as fast: {facts}. {MEASURED_FACTOR:g} times is asked for."
            return Verdict("wrong", f"{self.name}: not yet.\n{indent(text)}\n{indent(_why_slow(ours))}")
        return Verdict("passed", f"{self.name}: beaten, {factor:.1f} times as fast: {facts}.")

    def _fault_of(self, plan) -> str | None:
        """What is wrong with a plan before it has run."""
        if not isinstance(plan, Plan):
            return f"It returned {plan!r}: return a Plan, as by replace(beat.given, ...)."
        if (plan.model, plan.world_size, plan.batch_size) != (
            self.given.model,
            self.given.world_size,
            self.given.batch_size,
        ):
            return "That is another job: model, world_size and batch_size stay as given."
        if plan.zero_stage > 1:
            return f"zero_stage={plan.zero_stage} sends in the middle of a step, which is not run here: use 0 or 1."
        if (needed := fullest(plan).total) > self.limit_bytes:
            return f"It needs {needed / 1e9:.0f} GB, and {self.limit_bytes / 1e9:.0f} GB are there."
        factor = predict_step(self.given).seconds / predict_step(plan).seconds
        if factor < PREDICTED_FACTOR:
            return f"Predicted: {factor:.2f} times as fast as given. {PREDICTED_FACTOR:g} times is asked for."
        return None

    def _advice(self, plan) -> str:
        kind = _kind(plan)
        for mistake in self.mistakes:
            if kind == _kind(answer(mistake.function, ())):
                return f"\n{indent(f'What this usually is: {mistake.advice}')}"
        return ""


def _kind(plan) -> str:
    """Which mistake a plan that cannot win makes first."""
    if isinstance(plan, Raised):
        return "sizes"
    if not isinstance(plan, Plan) or (plan.model, plan.world_size) != (GIVEN.model, GIVEN.world_size):
        return "something else"
    if plan.batch_size != GIVEN.batch_size:
        return "batch"
    needed = fullest(plan)
    if needed.total > LIMIT_BYTES:
        return "activations" if needed.activations > needed.total / 2 else "states"
    changed = [getattr(plan, name) != getattr(GIVEN, name) for name in ("micro_batch_size", "recompute")]
    if plan == GIVEN:
        return "as given"
    return {(True, False): "recomputes", (False, True): "bubble"}.get(tuple(changed), "other")  # type: ignore[arg-type]


def _why_slow(step: TimedStep) -> str:
    computing, communication, idle = step.mean_shares
    shares = f"Computing {computing:.0%}, messages {communication:.0%}, idle {idle:.0%}."
    if communication > 0.25:
        return f"{shares} Messages take what you saved elsewhere: tensor parallelism sends two for each layer and way."
    return f"{shares} It was predicted to be faster: does something else use the cores? Try again."


beat = Challenge(
    "beat",
    my_plan,
    cases=[()],
    mistakes=[
        Mistake(
            _smaller_batch,
            "Half the batch takes half the time, and is half the work. The batch belongs to the training recipe.",
        ),
        Mistake(_as_given, "This is the plan as given. What is it idle for, and what does it compute twice?"),
        Mistake(
            _no_recomputation_at_all,
            "Activations are most of it. Keep fewer: smaller micro-batches, or recompute the attention alone "
            "(recompute='selective'), which costs only a few percent.",
        ),
        Mistake(
            _copies_only,
            "Weights, gradients and optimizer do not fit: t · p must divide the model enough, or the optimizer be "
            "sharded (zero_stage=1, where d is above 1).",
        ),
        Mistake(
            _recomputes_all,
            "The bubble is small now. But recompute='full' computes every forward pass twice, a quarter of the work: "
            "with memory to spare, recompute less.",
        ),
        Mistake(
            _large_micro_batches,
            "It recomputes less now, but ranks still stand idle: with p = 8 a few micro-batches leave a large bubble. "
            "Make them smaller, so that there are more.",
        ),
        Mistake(
            _sizes_that_do_not_fit,
            "The sizes do not fit together. The message names the rule, and sizes that do.",
        ),
    ],
    hints=[
        "Two things make the given plan slow. What is (p-1)/(v m) for it? And what does recompute='full' cost?",
        "More micro-batches: a smaller micro_batch_size. They also need less memory each.",
        "With the memory that this frees: recompute='selective'. Then there are num_chunks, or fewer stages with "
        "zero_stage=1.",
    ],
)
