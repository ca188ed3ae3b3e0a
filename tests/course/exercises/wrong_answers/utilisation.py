"""Answers to the exercises on utilisation."""

import math
from dataclasses import replace

from course.exercises.utilisation import beat
from course.sizing import Plan

WORK = ("forward", "backward")


def clipped(begin, finish, start, end):
    return max(0, min(finish, end) - max(begin, start))


def waits_are_work(spans, start, end):
    return sum(clipped(b, f, start, end) for _, b, f in spans) / (end - start)


def spans_not_cut(spans, start, end):
    return sum(f - b for kind, b, f in spans if kind in WORK and f > start and b < end) / (end - start)


def negative_parts(spans, start, end):
    return sum(min(f, end) - max(b, start) for kind, b, f in spans if kind in WORK) / (end - start)


def only_spans_inside(spans, start, end):
    return sum(f - b for kind, b, f in spans if kind in WORK and start <= b and f <= end) / (end - start)


def divided_by_end(spans, start, end):
    return sum(clipped(b, f, start, end) for kind, b, f in spans if kind in WORK) / end


def divided_by_all_spans(spans, start, end):
    work = sum(clipped(b, f, start, end) for kind, b, f in spans if kind in WORK)
    return work / (sum(clipped(b, f, start, end) for _, b, f in spans) or 1)


def forward_only(spans, start, end):
    return sum(clipped(b, f, start, end) for kind, b, f in spans if kind == "forward") / (end - start)


def all_but_waits(spans, start, end):
    return 1 - sum(clipped(b, f, start, end) for kind, b, f in spans if kind == "wait") / (end - start)


def cut_at_the_end_only(spans, start, end):
    return sum(max(0, min(f, end) - b) for kind, b, f in spans if kind in WORK) / (end - start)


def in_percent(spans, start, end):
    return 100 * utilisation_by_loop(spans, start, end)


def utilisation_by_loop(spans, start, end):
    busy = 0.0
    for kind, begin, finish in spans:
        if kind != "wait" and finish > start and begin < end:
            begin, finish = max(begin, start), min(finish, end)
            busy += finish - begin
    return busy / (end - start)


def plan_with(**changes):
    def my_plan():
        return replace(beat.given, **changes)

    return my_plan


def a_dict_of_changes():
    return dict(micro_batch_size=1, recompute="selective")


def per_gpu(num_parameters, t, p):
    return num_parameters / (t * p)


def all_shared_by_replicas(num_parameters, t, p, d, sharded_optimizer):
    return 18 * num_parameters / (t * p * d)


def always_sharded(num_parameters, t, p, d, sharded_optimizer):
    return per_gpu(num_parameters, t, p) * (6 + 12 / d)


def never_sharded(num_parameters, t, p, d, sharded_optimizer):
    return 18 * per_gpu(num_parameters, t, p)


def everything_sharded(num_parameters, t, p, d, sharded_optimizer):
    return 18 * per_gpu(num_parameters, t, p) / (d if sharded_optimizer else 1)


def gradients_sharded_too(num_parameters, t, p, d, sharded_optimizer):
    return per_gpu(num_parameters, t, p) * (2 + 16 / (d if sharded_optimizer else 1))


def condition_swapped(num_parameters, t, p, d, sharded_optimizer):
    return per_gpu(num_parameters, t, p) * (6 + 12 / (1 if sharded_optimizer else d))


def stages_forgotten(num_parameters, t, p, d, sharded_optimizer):
    return num_parameters / t * (6 + 12 / (d if sharded_optimizer else 1))


def gradients_of_2_bytes(num_parameters, t, p, d, sharded_optimizer):
    return per_gpu(num_parameters, t, p) * (4 + 12 / (d if sharded_optimizer else 1))


def for_all_gpus(num_parameters, t, p, d, sharded_optimizer):
    return num_parameters * d * (6 + 12 / (d if sharded_optimizer else 1))


def state_bytes_by_parts(num_parameters, t, p, d, sharded_optimizer):
    weights, gradients, optimizer = (num_parameters * size / t / p for size in (2, 4, 12))
    return weights + gradients + (optimizer / d if sharded_optimizer else optimizer)


def exact_gpus(billion_tokens, billion_parameters, days, teraflops, flops=8, seconds=24 * 3600):
    return flops * billion_tokens * 1e9 * billion_parameters * 1e9 / (teraflops * 1e12 * days * seconds)


def rounded_down(billion_tokens, billion_parameters, days, teraflops):
    return int(exact_gpus(billion_tokens, billion_parameters, days, teraflops))


def rounded_to_nearest(billion_tokens, billion_parameters, days, teraflops):
    return round(exact_gpus(billion_tokens, billion_parameters, days, teraflops))


def always_one_more(billion_tokens, billion_parameters, days, teraflops):
    return int(exact_gpus(billion_tokens, billion_parameters, days, teraflops)) + 1


def not_rounded(billion_tokens, billion_parameters, days, teraflops):
    return exact_gpus(billion_tokens, billion_parameters, days, teraflops)


def six_flops(billion_tokens, billion_parameters, days, teraflops):
    return math.ceil(exact_gpus(billion_tokens, billion_parameters, days, teraflops, flops=6))


def minutes_for_seconds(billion_tokens, billion_parameters, days, teraflops):
    return math.ceil(exact_gpus(billion_tokens, billion_parameters, days, teraflops, seconds=24 * 60))


def giga_for_tera(billion_tokens, billion_parameters, days, teraflops):
    return math.ceil(exact_gpus(billion_tokens, billion_parameters, days, teraflops / 1000))


def one_billion_forgotten(billion_tokens, billion_parameters, days, teraflops):
    return math.ceil(exact_gpus(billion_tokens, billion_parameters / 1e9, days, teraflops))


def days_multiply(billion_tokens, billion_parameters, days, teraflops):
    return math.ceil(exact_gpus(billion_tokens, billion_parameters, 1 / days, teraflops))


def gpus_in_small_numbers(billion_tokens, billion_parameters, days, teraflops):
    return math.ceil(8 * billion_tokens * billion_parameters * 1e6 / (teraflops * days * 86400))


def beat_1() -> Plan:
    return replace(beat.given, micro_batch_size=1)


def beat_2() -> Plan:
    return replace(beat.given, recompute="selective")


def beat_3() -> Plan:
    return replace(beat.given, pp_size=4, micro_batch_size=1, recompute="none")


def gpus_needed_1(billion_tokens: float, billion_parameters: float, days: float, teraflops: float) -> int:
    flops = 8 * billion_tokens * 1e9 * billion_parameters * 1e9
    return int(flops / (teraflops * 1e12 * days * 24 * 3600))


def gpus_needed_2(billion_tokens: float, billion_parameters: float, days: float, teraflops: float) -> int:
    flops = 6 * billion_tokens * 1e9 * billion_parameters * 1e9
    return math.ceil(flops / (teraflops * 1e12 * days * 86400))


def gpus_needed_3(billion_tokens: float, billion_parameters: float, days: float, teraflops: float) -> int:
    flops = 8 * billion_tokens * 1e9 * billion_parameters * 1e9
    return math.ceil(flops / (teraflops * 1e12 * days * 3600))


def state_bytes_1(num_parameters: float, t: int, p: int, d: int, sharded_optimizer: bool) -> float:
    optimizer = 12 / d if sharded_optimizer else 12
    return (2 + 2 + optimizer) * num_parameters / (t * p)


def state_bytes_2(num_parameters: float, t: int, p: int, d: int, sharded_optimizer: bool) -> float:
    total = (2 + 4 + 12) * num_parameters / (t * p)
    if sharded_optimizer:
        total /= d
    return total


def state_bytes_3(num_parameters: float, t: int, p: int, d: int, sharded_optimizer: bool) -> float:
    own = num_parameters / (t * p * d)
    return 18 * own


def utilisation_1(spans: list[tuple[str, float, float]], start: float, end: float) -> float:
    parts = (min(finish, end) - max(begin, start) for _, begin, finish in spans)
    return sum(max(0, part) for part in parts) / (end - start)


def utilisation_2(spans: list[tuple[str, float, float]], start: float, end: float) -> float:
    work = 0.0
    for kind, begin, finish in spans:
        if kind in ("forward", "backward"):
            work += min(finish, end) - max(begin, start)
    return work / (end - start)


def utilisation_3(spans: list[tuple[str, float, float]], start: float, end: float) -> float:
    busy = 0.0
    for kind, begin, finish in spans:
        if kind != "wait" and begin >= start and finish <= end:
            busy += finish - begin
    return busy / (end - start)


def utilisation_4(spans: list[tuple[str, float, float]], start: float, end: float) -> float:
    work = total = 0.0
    for kind, begin, finish in spans:
        part = max(0, min(finish, end) - max(begin, start))
        total += part
        if kind != "wait":
            work += part
    return work / total


def utilisation_5(spans: list[tuple[str, float, float]], start: float, end: float) -> float:
    work = 0.0
    for kind, begin, finish in spans:
        if kind == "forward":
            work += max(0, min(finish, end) - max(begin, start))
    return work / (end - start)


WRONG = [
    ("utilisation", waits_are_work, "counts waits as work"),
    ("utilisation", spans_not_cut, "work outside the window counts"),
    ("utilisation", negative_parts, "spans outside count as negative"),
    ("utilisation", only_spans_inside, "spans across an edge are lost"),
    ("utilisation", divided_by_end, "divides by the end, not the length"),
    ("utilisation", divided_by_all_spans, "divides by spans, not the window"),
    ("utilisation", forward_only, "the backward pass is missing"),
    ("utilisation", all_but_waits, "gaps count as work"),
    ("utilisation", cut_at_the_end_only, "work before the window counts"),
    ("utilisation", in_percent, "percent instead of a share"),
    ("beat", plan_with(), "the given plan, unchanged"),
    ("beat", plan_with(micro_batch_size=1), "still computes every forward twice"),
    ("beat", plan_with(recompute="selective"), "the bubble is as large as before"),
    ("beat", plan_with(micro_batch_size=1, num_chunks=2, recompute="none"), "does not fit into memory"),
    ("beat", plan_with(pp_size=4, micro_batch_size=1, recompute="selective"), "just too large: optimizer not sharded"),
    ("beat", plan_with(tp_size=8, pp_size=1, micro_batch_size=1, recompute="selective"), "sends too much with t = 8"),
    ("beat", plan_with(batch_size=8, micro_batch_size=1, recompute="selective"), "does half of the work"),
    ("beat", plan_with(zero_stage=3, micro_batch_size=1, recompute="selective"), "zero_stage is 0 or 1"),
    ("beat", plan_with(num_chunks=3, micro_batch_size=1, recompute="selective"), "chunks do not divide the layers"),
    ("beat", a_dict_of_changes, "returns a dict, not a plan"),
    ("state_bytes", all_shared_by_replicas, "divides everything by all GPUs"),
    ("state_bytes", always_sharded, "always shards the optimizer"),
    ("state_bytes", never_sharded, "never shards the optimizer"),
    ("state_bytes", everything_sharded, "shards weights and gradients too"),
    ("state_bytes", gradients_sharded_too, "shards the gradients too"),
    ("state_bytes", condition_swapped, "shards when it should not"),
    ("state_bytes", stages_forgotten, "forgets the pipeline stages"),
    ("state_bytes", gradients_of_2_bytes, "gradients have 4 bytes, not 2"),
    ("state_bytes", for_all_gpus, "bytes of all GPUs together"),
    ("gpus_needed", rounded_down, "rounds down: too few GPUs"),
    ("gpus_needed", rounded_to_nearest, "rounds to nearest: sometimes too few"),
    ("gpus_needed", always_one_more, "one GPU too many if exact"),
    ("gpus_needed", not_rounded, "a fraction of a GPU"),
    ("gpus_needed", six_flops, "forgets the second forward pass"),
    ("gpus_needed", minutes_for_seconds, "takes minutes for seconds"),
    ("gpus_needed", giga_for_tera, "tera is 1e12, not 1e9"),
    ("gpus_needed", one_billion_forgotten, "parameters are in billions too"),
    ("gpus_needed", days_multiply, "more days need fewer GPUs"),
    ("beat", beat_1, "only smaller micro-batches, still recomputes"),
    ("beat", beat_2, "only recomputation mended"),
    ("beat", beat_3, "shorter pipelines do not fit"),
    ("gpus_needed", gpus_needed_1, "rounds down"),
    ("gpus_needed", gpus_needed_2, "6 FLOPs, without recomputation"),
    ("gpus_needed", gpus_needed_3, "hours taken for days"),
    ("state_bytes", state_bytes_1, "ZeRO's 16 bytes, not 18"),
    ("state_bytes", state_bytes_2, "replicas divide everything"),
    ("state_bytes", state_bytes_3, "d divides even without sharding"),
    ("utilisation", utilisation_1, "waits counted as work"),
    ("utilisation", utilisation_2, "negative parts outside the window"),
    ("utilisation", utilisation_3, "only spans wholly inside the window"),
    ("utilisation", utilisation_4, "divides by work plus waits"),
    ("utilisation", utilisation_5, "backward is forgotten"),
]

RIGHT = [
    ("utilisation", utilisation_by_loop),
    ("beat", plan_with(micro_batch_size=1, num_chunks=2, recompute="selective")),
    ("state_bytes", state_bytes_by_parts),
    ("gpus_needed", gpus_in_small_numbers),
]
