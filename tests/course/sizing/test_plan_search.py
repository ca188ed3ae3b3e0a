"""The search: every choice once, the fastest first, each rejection with its rule, and the paper's own choices."""

import re
from dataclasses import replace

import pytest

from course.sizing import DGX_A100, RECOMPUTE, Plan, fullest, reasons, search, step_time, table_1
from labkit.shape import GPT

GPT_3 = GPT(num_layers=96, hidden_size=12288, seq_length=2048, vocab_size=51200, num_attention_heads=96)
LONG = GPT(32, 4096, 32768, 51200, 32)
ROWS = table_1()


@pytest.fixture(scope="module")
def found():
    row = ROWS[8]
    return search(row.plan.model, row.plan.world_size, row.plan.batch_size, DGX_A100, gradient_bytes=2)


def test_the_search_tries_every_choice_once_and_says_why_not(found):
    pairs = sum(2520 % (t * p) == 0 for t in range(1, 2521) for p in range(1, 2521) if 2520 % t == 0 and 2520 % p == 0)
    assert len(found) == pairs * 5 * 4 * len(RECOMPUTE) > 10_000
    assert len({(c.tp_size, c.pp_size, c.micro_batch_size, c.num_chunks, c.recompute) for c in found}) == len(found)
    for candidate in found:
        assert (candidate.rejected is None) == (candidate.estimate is not None)
        assert candidate.rejected is None or re.search("use |GB are ", candidate.rejected.advice)


def test_the_fastest_comes_first_and_what_is_out_comes_last(found):
    seconds = [candidate.estimate.total for candidate in found if candidate.estimate]
    assert seconds == sorted(seconds)
    assert [candidate.estimate is None for candidate in found] == [False] * len(seconds) + [True] * (
        len(found) - len(seconds)
    )


def test_what_fits_fits_and_what_is_too_large_is(found):
    for candidate in found:
        if candidate.plan is not None:
            assert candidate.memory_bytes == fullest(candidate.plan).total
            assert (candidate.memory_bytes <= 0.9 * 80e9) == (candidate.rejected is None)


@pytest.mark.parametrize(("plan", "options", "way_out"), [
    (Plan(GPT_3, 64, 64, 8, 8, recompute="selective"), {},  # t * p is all GPUs
     "51 GB are weights, gradients and optimizer; it fits with recompute='full' or sequence_parallel=True"),
    (Plan(GPT_3, 512, 1536, 8, 2), {"zero_stage": 1},
     "70 GB are weights, gradients and optimizer; it fits with sequence_parallel=True or tp_size=16 or pp_size=4"),
    (Plan(GPT_3, 512, 1536, 8, 2), {},
     "198 GB are weights, gradients and optimizer; best is zero_stage=1: 75 GB, still too much"),
    (Plan(LONG, 8, 64, 1, 8, recompute="selective"), {},  # full recomputation would need more
     "147 GB are activations; best is tp_size=2 and pp_size=4: 114 GB, still too much"),
    (Plan(GPT_3, 8, 64, 8), {}, "393 GB are weights, gradients and optimizer; use more GPUs"),
    (Plan(LONG, 1, 64), {}, "192 GB are activations; use more GPUs"),  # one sequence, recomputed in full, on one GPU
])  # fmt: skip
def test_what_is_too_large_is_told_what_would_help(plan, options, way_out):
    found = search(plan.model, plan.world_size, plan.batch_size, DGX_A100, **options)
    [rejected] = [each.rejected for each in found if each.plan == replace(plan, **options)]
    assert rejected.rule == "the fullest GPU must have the memory that it needs"
    assert re.fullmatch(r"needs \d+ GB of the 72 to plan with", rejected.fault)
    assert rejected.advice == way_out


def test_what_is_said_to_fit_fits():
    """Make every change that any message of a search names."""
    said = set()
    for candidate in search(GPT_3, 64, 64, DGX_A100):
        advice = candidate.rejected.advice if candidate.rejected else ""
        for change in re.findall(r"(?:it fits with| or) (\w+=\S+(?: and \w+=\S+)?)", advice):
            code = f"replace(plan, {change.replace(' and ', ', ')})"
            other = eval(code, {"replace": replace, "plan": candidate.plan})
            assert fullest(other).total <= 0.9 * 80e9 < candidate.memory_bytes
            said.add(re.sub(r"\d+", "#", change))
    assert len(said) > 5


def test_reasons_count_every_rejection_by_its_rule(found):
    counts = reasons(found)
    assert sum(counts.values()) == sum(candidate.rejected is not None for candidate in found)
    assert list(counts.values()) == sorted(counts.values(), reverse=True)
    assert not re.search(r"\d", " ".join(counts))


def test_the_reasons_of_notebook_12():
    assert reasons(search(GPT_3, 512, 1536, DGX_A100, zero_stage=1)) == {
        "the fullest GPU must have the memory that it needs": 879,
        "pp_size * num_chunks must divide num_layers": 840,
        "tp_size must divide num_attention_heads": 600,
        "pp_size must divide the micro-batches of interleaved chunks": 270,
        "dp_size * micro_batch_size must divide batch_size": 240,
        "num_chunks needs a pipeline of several stages": 180,
    }


PLACES, PERCENT_SLOWER = [1, 3, 6, 21, 47, 1, 2, 4, 1, 2], [0, 5.4, 9.2, 13.2, 19.0, 0, 0.3, 2.0, 0, 4.3]


@pytest.mark.parametrize(
    ("row", "place", "percent"),
    list(zip(ROWS, PLACES, PERCENT_SLOWER)),
    ids=[f"{row.billions} billion" for row in ROWS],
)
def test_the_papers_own_choice_among_ours(row, place, percent):
    """Eight of ten are among the first six, six within 5 percent; for two the model would rather divide by t = 2."""
    found = search(
        row.plan.model, row.plan.world_size, row.plan.batch_size, DGX_A100, recompute=["full"], gradient_bytes=2
    )
    assert [each.plan for each in found].index(row.plan) < place
    slower = step_time(row.plan, DGX_A100).total / found[0].estimate.total - 1
    assert 100 * slower == pytest.approx(percent, abs=0.05)


def test_the_best_plan_with_t_8_takes_7_percent_longer_as_notebook_12_tells_it():
    found = search(GPT_3, 512, 1536, DGX_A100, zero_stage=1, micro_batch_sizes=[1])
    best = step_time(Plan(GPT_3, 512, 1536, 4, 16, recompute="selective", zero_stage=1), DGX_A100).total
    eight = min(each.estimate.total for each in found if each.estimate and each.tp_size == 8)
    assert round(100 * (eight / best - 1)) == 7


def test_context_parallelism_is_tried_if_it_is_offered_and_makes_long_sequences_fit():
    known = dict(micro_batch_sizes=[1], num_chunks=[1], recompute=["none"], fused_attention=True, zero_stage=1)
    long = replace(LONG, seq_length=65536)
    alone = search(long, 64, 8, DGX_A100, **known)
    offered = search(long, 64, 8, DGX_A100, cp_sizes=(1, 2, 4, 8), **known)
    assert [str(each) for each in offered if each.cp_size == 1] == [str(each) for each in alone]
    best = offered[0]
    assert best.estimate and best.cp_size > 1 and best.plan.cp_size == best.cp_size
    assert str(best).startswith(f"t={best.tp_size} c={best.cp_size} p={best.pp_size} b=1 v=1 none: ")
    assert alone[0].estimate and alone[0].estimate.total > 2 * best.estimate.total
    same = next(each for each in alone if (each.tp_size, each.pp_size) == (best.tp_size, best.pp_size))
    assert same.rejected and same.rejected.advice.endswith("or cp_size=2")


def test_a_candidate_says_its_choice_and_its_time_or_its_fault(found):
    assert str(found[0]).startswith("t=8 p=35 b=1 v=3")
    assert " s a step, " in str(found[0])
    assert str(found[-1]).endswith(str(found[-1].rejected))


@pytest.mark.parametrize(("options", "says"), [
    ({"zero_stage": 7}, "zero_stage=7"),
    ({"memory_share": 1.5}, r"memory_share=1.5 must be in \(0, 1\]"),
    ({"micro_batch_sizes": [0]}, "micro_batch_size=0 must be at least 1"),
    ({"recompute": ["some"]}, "recompute='some' is unknown"),
])  # fmt: skip
def test_a_search_that_no_choice_could_mend_is_refused(options, says):
    with pytest.raises(ValueError, match=says):
        search(GPT_3, 64, 64, DGX_A100, **options)
