"""Plan, search and the explorer of plans say of random questions what `ParallelConfig` says, in its words.

`questions` and `expected` are for everybody who is asked what fits (tests/labtrain/test_agreement.py asks, too).
"""

import random
from dataclasses import replace
from functools import lru_cache
from typing import Any, NamedTuple

import pytest

from course.explorers.sizing import ONE_F_ONE_B, sizing_explorer
from course.sizing import FITTED, Plan, search
from course.sizing.plan import NotModelled
from labkit.parallel_config import V_SHAPED, ParallelConfig
from labkit.shape import GPT
from labkit.sizes import Misfit

DENSE = GPT(12, 384, 48, 256, 12, num_query_groups=6)
MODELS = [
    DENSE,
    replace(DENSE, ffn_hidden_size=500),
    replace(DENSE, num_experts=8, moe_ffn_hidden_size=96),
    replace(DENSE, num_experts=6, moe_layer_freq=2, num_shared_experts=1, moe_ffn_hidden_size=100),
]


class Question(NamedTuple):
    """Does this model fit so many ranks, with these fields of a `ParallelConfig`? Its attention is fused."""

    model: GPT
    world_size: int
    options: dict[str, Any]


def questions(count: int = 200, seed: int = 46) -> list[Question]:
    """Return random questions, the same for everybody who asks."""
    draw = random.Random(seed)
    return [_question(draw) for _ in range(count)]


def _question(draw: random.Random) -> Question:
    model = draw.choice(MODELS)
    options: dict[str, Any] = {
        "batch_size": draw.choice((6, 24, 48)),
        "micro_batch_size": draw.choice((1, 1, 2, 5)),
        "tp_size": draw.choice((1, 1, 1, 2, 2, 2, 3, 4, 5)),
        "cp_size": draw.choice((1, 1, 1, 1, 2, 4, 5)),
        "context_parallel": draw.choice(("ring", "ring", "ring", "ulysses", "all_gather")),
        "pp_size": draw.choice((1, 2, 2, 2, 4, 8)),
        "sequence_parallel": draw.random() < 0.5,
        "zero_stage": draw.choice((0, 0, 1, 1, 2, 3)),
        "recompute": draw.choice((*["none", "full"] * 5, "selective")),
        "schedule": draw.choice(("1f1b", "1f1b", "interleaved", *V_SHAPED, "dualpipe-v")),
    }
    if options["schedule"] != "1f1b":
        options["num_chunks"] = draw.choice((2, 2, 2, 2, 2, 2, 3))
    if model.num_experts or draw.random() < 0.05:
        options["ep_size"] = draw.choice((1, 1, 2, 2, 4, 5))
        options["expert_tp_size"] = draw.choice((None, 1, 1, 2, 5))
    if draw.random() < 0.1:
        options["stage_layers"] = draw.choice(((6, 6), (5, 7), (6, 5), (3, 3, 3, 3), (2, 4, 4, 2)))
    sizes = [options[name] for name in ("tp_size", "cp_size", "pp_size")]
    world_size = sizes[0] * sizes[1] * sizes[2] * draw.choice((1, 2, 4))
    if draw.random() < 0.2:
        world_size = draw.choice((1, 6, 16, 60))
    return Question(model, world_size, options)


def refusal(question: Question) -> Misfit | None:
    """Return the Misfit that `ParallelConfig` raises; None if it fits."""
    config = ParallelConfig(**question.options)
    try:
        config.check_model(question.model)
        config.check_recompute(fused_attention=True)
        config.check(question.model, question.world_size)
    except Misfit as misfit:
        return misfit
    return None


def expected(question: Question) -> str:
    """Return the sentence of that Misfit; "" if it fits."""
    return str(refusal(question) or "")


def plan_says(question: Question) -> str:
    """Return how a Plan refuses it; "" if it fits, whether or not it is modelled."""
    try:
        Plan(question.model, question.world_size, fused_attention=True, **_plans_options(question))
    except NotModelled:
        return ""
    except ValueError as error:
        return str(error)
    return ""


def search_says(question: Question) -> str:
    """Return what a search that tries this alone says about it; "" if it fits."""
    options = _plans_options(question)
    batch_size = options.pop("batch_size")
    fixed = {name: options.pop(name) for name in ("context_parallel", "sequence_parallel")}
    lists = {name: [value] for name, value in options.items()}
    sizes = question.model, question.world_size, batch_size
    rejected = search(*sizes, FITTED["H100"], fused_attention=True, **fixed, **lists).ask().rejected
    return "" if rejected is None or isinstance(rejected, NotModelled) else str(rejected)


def explorer_says(question: Question) -> str:
    """Return why the explorer of plans would move a control; "" if it fits."""
    explorer = _explorer(question.model)
    choice = explorer.choice._replace(world_size=question.world_size, fused_attention=True)
    options = _plans_options(question)
    options["schedule"] = options["schedule"] or ONE_F_ONE_B
    options["expert_tp_size"] = options.get("expert_tp_size") or question.options["tp_size"]
    del options["context_parallel"]
    try:
        explorer._fit(choice._replace(**options))
    except NotModelled:
        return ""
    except ValueError as error:
        return str(error)
    return ""


@lru_cache
def _explorer(model: GPT) -> sizing_explorer:
    return sizing_explorer(model, world_size=1, batch_size=24, tp_size=1, pp_size=1)


def _plans_options(question: Question) -> dict[str, Any]:
    """Return the fields as a Plan has them: it calls 1F1B, and interleaved chunks, None."""
    schedule = question.options["schedule"]
    return question.options | {"schedule": schedule if schedule in V_SHAPED else None}


RULES = {
    "ZeRO stages 2 and 3 do not go with a schedule that splits backward",
    "dp_size * micro_batch_size must divide batch_size",
    "each stage must have 1 layer or more",
    "each stage must have 1 layer or more, and all num_layers together",
    "ep_size must divide num_experts",
    "ep_size needs a model with experts",
    "num_chunks needs schedule='interleaved'",
    "schedule='dualpipe-v' needs 2 * pp_size micro-batches",
    "selective recomputation needs attention that is not fused",
    "tp_size * cp_size must divide num_query_groups",
    "tp_size must divide ffn_hidden_size",
    "tp_size must divide num_attention_heads",
    "tp_size must divide num_query_groups",
    "2 * cp_size must divide seq_length",
}
"""What the questions must meet, among others."""


def test_the_questions_meet_all_kinds_of_misfit():
    met = {misfit.rule for misfit in map(refusal, questions()) if misfit}
    assert met >= RULES, sorted(met)
    assert any("world_size" in rule for rule in met) and any("expert grid" in rule for rule in met)
    assert sum(not expected(question) for question in questions()) >= 20


@pytest.mark.parametrize("says", [plan_says, search_says, explorer_says])
def test_everybody_says_what_parallel_config_says(says):
    for question in questions():
        if says is not plan_says and "stage_layers" in question.options:
            continue  # they choose these themselves
        if says is explorer_says and not explorer_can_ask(question):
            continue
        assert says(question) == expected(question), question


def explorer_can_ask(question: Question) -> bool:
    """Say whether its controls can: there is none for the way of context parallelism, or for experts that are not."""
    has_experts = question.model.num_experts is not None
    of_experts = question.options.keys() & {"ep_size", "expert_tp_size"}
    asks_for_etp = not has_experts or question.options.get("expert_tp_size") is not None
    return question.options["context_parallel"] == "ring" and (has_experts or not of_experts) and asks_for_etp
