"""A formula that a page states is what the function beside it computes.

Each row has a notebook, words that its text must have, the formula, and the function: a page that changes its formula
changes its row, and a function that changes makes the page wrong.
"""

import re
from dataclasses import replace
from functools import cache
from math import sqrt

import nbformat
import pytest
import torch

from course import sizing
from course.sizing import DGX_H100, Plan, simulate
from course.sizing.context import attention_messages
from course.sizing.experts import all_to_all_bytes
from course.sizing.flops import training_days
from course.sizing.fully_sharded import moments
from course.sizing.ring import bus_factor
from course.sizing.roofline import operations, ridge
from course.sizing.runs import LLAMA_70B
from course.working_copy import ROOT, find
from labkit.expert_parallel import LoadBalancing
from labkit.expert_parallel.router import Router
from labkit.groups import groups_of_one
from labkit.layout import ParallelLayout
from labkit.schedules import interleaved, one_f_one_b
from labkit.shape import GPT

MIXTURE = GPT(2, 64, 32, 128, num_attention_heads=4, num_experts=8, top_k=2)


def widest(mlp):
    """The t at which an MLP's products take as long as 4 T h bytes by NVLink."""
    plan = Plan(replace(LLAMA_70B, mlp=mlp), 8, 1, tp_size=8, sequence_parallel=True, fused_attention=True)
    seconds = sum(each.flops for each in operations(plan) if each.name.startswith("MLP")) / DGX_H100.peak_flops
    sent = 4 * plan.model.seq_length * plan.model.hidden_size / DGX_H100.node_bytes_per_second
    return 8 * seconds / sent


def width_times_link_over_peak():
    return LLAMA_70B.mlp_width * DGX_H100.node_bytes_per_second / DGX_H100.peak_flops


def bytes_of_a_parameter(stage, d):
    held = sizing.memory(Plan(LLAMA_70B, d, d, zero_stage=stage, fused_attention=True))
    return (held.weights + held.gradients + held.optimizer) / LLAMA_70B.num_parameters


def states_of_a_gpu(t, c, d, gradient_bytes):
    sizes = dict(world_size=t * c * d, batch_size=d, tp_size=t, cp_size=c, zero_stage=1)
    held = sizing.memory(Plan(LLAMA_70B, **sizes, gradient_bytes=gradient_bytes, fused_attention=True))
    return held.weights + held.gradients + held.optimizer


def auxiliary_loss(coefficient, is_formula):
    torch.manual_seed(0)
    balance = LoadBalancing(aux_loss_coefficient=coefficient)
    router = Router(16, 8, 2, groups_of_one(), balance=balance)
    x = torch.randn(1, 12, 16)
    routing, load = router(x, seq_length=12)
    if not is_formula:
        return router.loss(load).item()
    chosen = routing.experts.flatten().bincount(minlength=8) / (12 * 2)
    scores = torch.nn.functional.linear(x[0], router.weight).softmax(-1).mean(0)
    return coefficient * 8 * (chosen * scores).sum().item()


def new_work(u, interval, w):
    m = sizing.time_to_failure(1024, 0.004)
    return (1 - (u + interval / 2) / m) / (1 + w / interval)


ROWS = [
    ("02", "2(n - 1)/n times the tensor", lambda n: 2 * (n - 1) / n, lambda n: bus_factor("all_reduce", n),
     [(2,), (5,)]),
    ("07", "makespan = (m + p − 1)(t_f + t_b)", lambda p, m: 3 * (m + p - 1),
     lambda p, m: simulate(one_f_one_b(p, m), 1, 2).makespan_seconds, [(4, 8), (2, 6)]),
    ("07", "makespan = (m + (p − 1) / v)(t_f + t_b)", lambda p, m, v: (m + (p - 1) / v) * 3,
     lambda p, m, v: simulate(interleaved(p, m, v), 1, 2).makespan_seconds, [(4, 8, 2), (2, 6, 3)]),
    ("07", "idle / ideal = (p − 1) / (v m)", lambda p, m, v: (p - 1) / (v * m),
     lambda p, m, v: simulate(interleaved(p, m, v), 1, 2).bubble_over_ideal, [(4, 8, 2), (2, 6, 3)]),
    ("07", "idle / total = (p − 1) / (v m + p − 1)", lambda p, m, v: (p - 1) / (v * m + p - 1),
     lambda p, m, v: simulate(interleaved(p, m, v), 1, 2).bubble_share, [(4, 8, 2), (2, 6, 3)]),
    ("07", "min(p − r, m) micro-batches instead of m", lambda p, r, m: min(p - r, m),
     lambda p, r, m: one_f_one_b(p, m).peak_in_flight(r), [(4, 0, 8), (4, 3, 8), (6, 1, 3)]),
    ("12", "idle / ideal = (p − 1)/(v m)", lambda p, m, v: (p - 1) / (v * m),
     lambda p, m, v: Plan(LLAMA_70B, p, m, pp_size=p, num_chunks=v).bubble_over_ideal, [(4, 16, 2), (8, 8, 5)]),
    ("12", "bound by memory below C/B FLOPs a byte",
     lambda: DGX_H100.peak_flops / DGX_H100.memory_bytes_per_second, lambda: ridge(DGX_H100), [()]),
    ("12", "t = 3/2 · F · W/C", lambda: 1.5 * width_times_link_over_peak(), lambda: widest("swiglu"), [()]),
    ("12", "For an MLP of two products it is F · W/C", width_times_link_over_peak, lambda: widest("gelu"), [()]),
    ("13", "ring: 3c − 2 messages a layer", lambda c: 3 * c - 2,
     lambda c: sum(map(len, attention_messages(LLAMA_70B, "ring", c))), [(2,), (8,)]),
    ("13", "2 b · s/c · kv heads/t · head size numbers", lambda c, t: 2 * LLAMA_70B.seq_length / c * 8 / t * 128,
     lambda c, t: attention_messages(LLAMA_70B, "ring", c, t).forward[0].sent_bytes / 2, [(2, 1), (8, 4)]),
    ("14", "| 0 | nothing: plain data parallelism | 2 + 4 + 12 |", lambda d: 2 + 4 + 12,
     lambda d: bytes_of_a_parameter(0, d), [(4,)]),
    ("14", "| 1 | the optimizer's states | 2 + 4 + 12/d |", lambda d: 2 + 4 + 12 / d,
     lambda d: bytes_of_a_parameter(1, d), [(4,), (16,)]),
    ("14", "| 2 | gradients, too | 2 + (4 + 12)/d |", lambda d: 2 + (4 + 12) / d,
     lambda d: bytes_of_a_parameter(2, d), [(4,), (16,)]),
    ("14", "| 3 | weights, too | (2 + 4 + 12)/d |", lambda d: (2 + 4 + 12) / d,
     lambda d: bytes_of_a_parameter(3, d), [(4,), (16,)]),
    ("14", "b P/d + (1 + prefetch) b u bytes", lambda d, ahead: 24 * 5 / d + (1 + ahead) * 24,
     lambda d, ahead: max(each.shards + sum(each.weights) for each in moments([24] * 5, d, ahead)), [(4, 1), (2, 2)]),
    ("14", "3 (d − 1)/d · P for each micro-batch", lambda d: 3 * (d - 1) / d,
     lambda d: 2 * bus_factor("all_gather", d) + bus_factor("reduce_scatter", d), [(4,)]),
    ("15", "p · t · c · d = n = p · expert_tp · ep · expert_dp", lambda t, c, p, etp, ep: 64 / (p * etp * ep),
     lambda t, c, p, etp, ep: ParallelLayout(64, t, p, c, ep_size=ep, expert_tp_size=etp).expert_dp_size,
     [(2, 2, 2, 1, 4), (4, 1, 2, 2, 16)]),
    ("15", "2 · T k h e · (1 − 1/ep) bytes in a layer forward", lambda ep: 2 * 10 * 2 * 64 * 2 * (1 - 1 / ep),
     lambda ep: all_to_all_bytes(MIXTURE, ep, 10 * 64 * 2), [(2,), (8,)]),
    ("15", "coefficient · E · Σ n_i/(T k) · P_i", lambda coefficient: auxiliary_loss(coefficient, is_formula=True),
     lambda coefficient: auxiliary_loss(coefficient, is_formula=False), [(0.01,)]),
    ("16", "bytes = (2 + 2 or 4 + 12/(d c)) P/(t p)",
     lambda t, c, d, g: (2 + g + 12 / (d * c)) * LLAMA_70B.num_parameters / t, states_of_a_gpu,
     [(4, 2, 2, 2), (8, 1, 4, 4)]),
    ("16", "8 T P / (n X) = days", lambda n: 8 * 1e12 * 7e9 / (n * 4e14) / 86400,
     lambda n: training_days(1e12, 7e9, n, 4e14), [(64,)]),
    ("16", "(1 − (u + T/2)/M) / (1 + w/T)", new_work,
     lambda u, interval, w: sizing.goodput(1024, 0.004, w, u, interval_seconds=interval).share, [(600, 1800, 60)]),
    ("16", "M = 1/(N r)", lambda n, r: 86400 / (n / 8 * r), sizing.time_to_failure, [(1024, 0.004)]),
    ("16", "T = √(2 w M)", lambda m, w: sqrt(2 * w * m), lambda m, w: sizing.checkpoint_interval(m, w).young,
     [(1e4, 60)]),
]  # fmt: skip


@cache
def text_of(number):
    path = ROOT / find(f"{number}_*")
    return re.sub(r"\s+", " ", "\n".join(cell.source for cell in nbformat.read(path, as_version=4).cells))


@pytest.mark.parametrize(("number", "words", "formula", "function", "cases"), ROWS, ids=[row[1] for row in ROWS])
def test_a_formula_of_a_page_is_what_the_function_computes(number, words, formula, function, cases):
    assert words in text_of(number)
    for case in cases:
        assert function(*case) == pytest.approx(formula(*case), rel=1e-3), case
