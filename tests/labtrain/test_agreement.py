"""Whoever is asked whether a model fits over some ranks gives the same answer, in the same sentence.

The questions are drawn at random, with a fixed seed; as many more are those that Plan, search and an explorer are
asked (tests/course/sizing/test_agreement.py). What the command line says is put back into Python's names by
spelling the expected sentence as it would.
"""

import random
import sys
from collections import Counter
from dataclasses import asdict, replace

import pytest

from course.measure import dry_run as dry
from labkit.parallel_config import SCHEDULES, V_SHAPED, ParallelConfig
from labkit.shape import GPT
from labkit.sizes import Misfit
from labtrain import TrainConfig
from labtrain.__main__ import main
from labtrain.memory_estimate import MemoryEstimate
from labtrain.spelling import as_typed, options, switch
from tests.course.sizing import test_agreement as of_plans

QUESTIONS = range(25907, 25907 + 200)  # seeds with which every rule is met
VOCABULARY = TrainConfig().shape.vocab_size
RULES = {  # all of labkit's and labtrain's, each met by a question
    "2 * cp_size must divide seq_length",
    "ZeRO stages 2 and 3 do not go with a schedule that splits backward",
    "both grids must have the same pipelines",
    "cp_size must divide seq_length",
    "dp_size * micro_batch_size must divide batch_size",
    "each stage must have 1 layer or more",
    "each stage must have 1 layer or more, and all num_layers together",
    "ep_size must divide num_experts",
    "ep_size needs a model with experts",
    "expert_tp_size * ep_size must divide a copy's tp_size*shard_size",
    "expert_tp_size * ep_size must divide the expert grid's world_size/pp_size",
    "expert_tp_size must divide width of an expert",
    "expert_tp_size needs a model with experts",
    "num_chunks needs schedule='interleaved'",
    "order must name cp if cp_size is above 1",
    "schedule='dualpipe-v' needs 2 * pp_size micro-batches",
    "schedule='interleaved' needs num_chunks=2 or more",
    "selective recomputation needs attention that is not fused",
    "shard_size must divide dp_size * cp_size",
    "shard_size needs a ZeRO stage",
    "tp_size * cp_size * pp_size must divide world_size",
    "tp_size * cp_size must divide num_attention_heads",
    "tp_size * cp_size must divide num_query_groups",
    "tp_size * pp_size must divide world_size",
    "tp_size must divide ffn_hidden_size",
    "tp_size must divide num_attention_heads",
    "tp_size must divide num_query_groups",
    "tp_size must divide seq_length",
    "tp_size must divide seq_length / cp_size",
    "tp_size must divide width of an expert",
    "tp_size must divide width of shared experts",
    "two of these say how many layers one stage has",
}


def drawn(seed):
    """A question: a model, a config, a number of ranks. Each of its choices is usually the harmless one."""
    choose = random.Random(seed)

    def rarely(value, *others, share=0.12):
        return choose.choice(others) if choose.random() < share else value

    experts = choose.random() < 0.4
    model = GPT(
        num_layers=rarely(8, 6, 9),
        hidden_size=48,
        seq_length=rarely(48, 36, 10, share=0.25),
        vocab_size=VOCABULARY,
        num_attention_heads=rarely(12, 6),
        num_query_groups=rarely(None, 2, 6),
        ffn_hidden_size=rarely(None, 50, 64, share=0.3),
        num_experts=rarely(8, 6) if experts else None,
        num_shared_experts=rarely(0, 1, share=0.5) if experts else 0,
        moe_layer_freq=rarely(1, 2, share=0.3) if experts else 1,
        moe_ffn_hidden_size=rarely(None, 30, share=0.5) if experts else None,
    )
    schedule = choose.choice([*SCHEDULES])
    pp_size = choose.choice([1, 1, 2, 2, 4])
    stages = pp_size * (2 if schedule in (*V_SHAPED, "interleaved") else 1)
    tp_size = choose.choice([1, 1, 2, 2, 3, 4])
    cp_size = choose.choice([1, 1, 2, 2, 3])
    dp_size = choose.choice([1, 2, 4])
    config = ParallelConfig(
        batch_size=rarely(16, 12, 4),
        micro_batch_size=rarely(1, 2),
        tp_size=rarely(tp_size, 5, share=0.05),
        cp_size=cp_size,
        context_parallel=rarely("ring", "ulysses", "all_gather", share=0.5),
        zigzag=rarely(True, False, share=0.4),
        pp_size=rarely(pp_size, 16, share=0.03),
        ep_size=choose.choice([1, 1, 2, 4]) if experts else rarely(1, 2, share=0.05),
        expert_tp_size=rarely(None, 1, 1, 1, 4, share=0.8) if experts else rarely(None, 2, share=0.1),
        order=rarely("tp-cp-dp-pp", "tp-dp-pp", "tp-cp-pp-dp", share=0.25),
        schedule=schedule,
        num_chunks=rarely(2 if schedule == "interleaved" else 1, 1, 2, 3),
        stage_layers=rarely(None, [max(1, model.num_layers // stages)] * stages, [1] * stages, share=0.08),
        first_stage_layers=rarely(None, 1, share=0.06),
        last_stage_layers=rarely(None, 1, 8, share=0.05),
        account_for_embedding_in_pipeline_split=rarely(False, True),
        account_for_loss_in_pipeline_split=rarely(False, True),
        sequence_parallel=rarely(False, True, share=0.5),
        zero_stage=rarely(1, 0, 2, 3, share=0.4),
        shard_size=rarely(None, 1, 2, 3, share=0.3),
        recompute=rarely("none", "full", "selective", share=0.12),
    )
    world_size = tp_size * cp_size * pp_size * dp_size
    return model, config, rarely(world_size, world_size + 1, 7)


def asked_of_plans():
    """The questions that Plan, search and an explorer are asked."""
    for question in of_plans.questions():
        model = replace(question.model, vocab_size=VOCABULARY)
        yield model, ParallelConfig(**question.options), question.world_size


def fields_of(model, config):
    """The fields of a `TrainConfig`, whose vocabulary is that of its text."""
    both = asdict(model) | asdict(config)
    del both["vocab_size"]
    return both


def ask_labkit(model, config, world_size):
    config.check_model(model)
    config.check_recompute(fused_attention=True)  # labtrain's is
    config.check(model, world_size)


def ask_a_run(model, config, world_size):
    TrainConfig(**fields_of(model, config)).make_schedule(world_size)


def ask_dry_run(model, config, world_size):
    dry.dry_run(TrainConfig(**fields_of(model, config)), world_size)


ASKED = {"ParallelConfig": ask_labkit, "TrainConfig": ask_a_run, "dry run": ask_dry_run}
"""Each raises a `Misfit` if it does not fit. Whoever else can be asked belongs here."""


def answer(ask, question):
    """The sentence that refuses it, or nothing."""
    try:
        ask(*question)
    except Misfit as misfit:
        return str(misfit)
    return ""


def typed(model, config, world_size):
    """The question as a command line."""
    words = ["--check", str(world_size)]
    for name, value in fields_of(model, config).items():
        if value == getattr(TrainConfig, name):
            continue
        if isinstance(value, bool):
            words.append(switch(name, value))
        else:
            several = value if isinstance(value, tuple) else (value,)
            words += [options()[name], *map(str, several)]
    return words


@pytest.fixture
def nothing_runs(monkeypatch):
    """What comes after the question is not asked here: memory is counted, and messages, for seconds."""
    nothing = (1, MemoryEstimate(1, 1, 1, 1))
    monkeypatch.setattr("labtrain.estimate.what_a_rank_holds", lambda *args: nothing)
    monkeypatch.setattr(dry, "what_a_rank_holds", lambda *args: nothing)
    monkeypatch.setattr(dry, "_run", lambda *args: (1, Counter()))


@pytest.fixture(scope="module")
def questions():
    """All of them with labkit's answers."""
    both = [*map(drawn, QUESTIONS), *asked_of_plans()]
    return [(question, answer(ask_labkit, question)) for question in both]


def test_questions_meet_every_rule_and_many_fit(questions):
    met = set()
    for question, _ in questions:
        try:
            ask_labkit(*question)
        except Misfit as misfit:
            met.add(misfit.rule)
    assert met == RULES
    assert 50 <= sum(said == "" for _, said in questions) < 150


@pytest.mark.parametrize("who", ASKED)
def test_all_give_the_same_answer_in_the_same_sentence(questions, who, nothing_runs):
    for question, expected in questions:
        assert answer(ASKED[who], question) == expected, question


def test_so_does_the_command_line(questions, nothing_runs, monkeypatch, capsys):
    for question, expected in questions:
        monkeypatch.setattr(sys, "argv", ["labtrain", *typed(*question)])
        code = main()
        said = capsys.readouterr()
        if expected:
            assert (code, said.err.strip()) == (2, f"labtrain: {as_typed(expected)}"), question
        else:
            assert (code, said.err) == (0, "")
