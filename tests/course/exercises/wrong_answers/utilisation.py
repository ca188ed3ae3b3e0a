"""Answers to the exercises on utilisation."""

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
    return dict(micro_batch_size=1, recompute="none")


def beat_1() -> Plan:
    return replace(beat.given, micro_batch_size=1)


def beat_2() -> Plan:
    return replace(beat.given, recompute="none")


def beat_3() -> Plan:
    return replace(beat.given, pp_size=4, micro_batch_size=1, recompute="none")


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


def second_by_second(spans, start, end):
    seconds = range(int(start), int(end))
    work = [s for s in seconds if any(kind in WORK and b <= s < f for kind, b, f in spans)]
    return len(work) / (end - start)


def utilisation_anew_sampled(spans, start, end):
    num_samples = 100
    hits = 0
    for i in range(num_samples):
        t = start + (end - start) * i / num_samples
        if any(b <= t < f for k, b, f in spans if k in {"forward", "backward"}):
            hits += 1
    return hits / num_samples


def utilisation_anew_count(spans, start, end):
    inside = [k for k, b, f in spans if b < end and f > start]
    return sum(k != "wait" for k in inside) / len(inside) if inside else 0.0


def utilisation_anew_merge(spans, start, end):
    work = [(max(b, start), min(f, end)) for k, b, f in spans if k != "wait" and f > start and b < end]
    if not work:
        return 0.0
    first = min(b for b, _ in work)
    last = max(f for _, f in work)
    return sum(f - b for b, f in work) / (last - first)


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
    ("beat", plan_with(recompute="none"), "does not fit into memory: large micro-batches"),
    ("beat", plan_with(micro_batch_size=1, num_chunks=2, recompute="none"), "does not fit into memory"),
    ("beat", plan_with(pp_size=4, micro_batch_size=1, recompute="none"), "too large: optimizer not sharded"),
    ("beat", plan_with(tp_size=8, pp_size=1, micro_batch_size=1, recompute="none"), "sends too much with t = 8"),
    ("beat", plan_with(batch_size=8, micro_batch_size=1, recompute="none"), "does half of the work"),
    ("beat", plan_with(zero_stage=3, micro_batch_size=1, recompute="none"), "zero_stage is 0 or 1"),
    ("beat", plan_with(num_chunks=3, micro_batch_size=1, recompute="none"), "chunks do not divide the layers"),
    ("beat", a_dict_of_changes, "returns a dict, not a plan"),
    ("beat", plan_with(batch_size=64, micro_batch_size=1, recompute="none"), "does more work"),
    ("beat", plan_with(pp_size=2, micro_batch_size=1, recompute="none", zero_stage=1), "one sequence does not fit"),
    ("beat", plan_with(micro_batch_size=1, recompute="none", schedule="zb-h1"), "an order that no plan knows"),
    ("beat", plan_with(pp_size=1, micro_batch_size=1, zero_stage=3), "zero_stage is 0 or 1, with one stage"),
    ("beat", beat_1, "only smaller micro-batches, still recomputes"),
    ("beat", beat_2, "only recomputation changed: does not fit"),
    ("beat", beat_3, "shorter pipelines do not fit"),
    ("utilisation", second_by_second, "counts whole seconds"),
    ("utilisation", utilisation_1, "waits counted as work"),
    ("utilisation", utilisation_2, "negative parts outside the window"),
    ("utilisation", utilisation_3, "only spans wholly inside the window"),
    ("utilisation", utilisation_4, "divides by work plus waits"),
    ("utilisation", utilisation_5, "backward is forgotten"),
    ("utilisation", utilisation_anew_sampled, "a hundred samples"),
    ("utilisation", utilisation_anew_count, "counts spans"),
    ("utilisation", utilisation_anew_merge, "from first to last work"),
]

RIGHT = [
    ("utilisation", utilisation_by_loop),
    ("beat", plan_with(micro_batch_size=1, num_chunks=4)),
    ("beat", plan_with(pp_size=1, micro_batch_size=1, zero_stage=1)),
]
