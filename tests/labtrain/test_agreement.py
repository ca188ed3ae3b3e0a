"""Whoever is asked whether a model fits over some ranks gives the same answer, in the same sentence.

The questions are those that Plan, search and an explorer are asked (tests/course/sizing/test_agreement.py), with more
options. What the command line says is put back into Python's names by spelling the expected sentence as it would.
"""

import random
import sys
from collections import Counter
from dataclasses import asdict, replace

import pytest

from course.measure import dry_run as dry
from labkit.parallel_config import ParallelConfig
from labkit.sizes import Misfit
from labtrain import TrainConfig
from labtrain.__main__ import main
from labtrain.memory_estimate import MemoryEstimate
from labtrain.spelling import as_typed, options, switch
from tests.course.sizing import test_agreement as of_plans

VOCABULARY = TrainConfig().shape.vocab_size
MORE = [  # which only runs have
    dict(order="tp-dp-pp"),
    dict(expert_tp_size=1),
    dict(expert_tp_size=4),
    dict(shard_size=2),
    dict(stage_layers=(6, 6)),
    dict(num_chunks=2),
    dict(first_stage_layers=1),
    dict(last_stage_layers=1, account_for_loss_in_pipeline_split=True),
    dict(zigzag=False),
]


def asked():
    """The questions that Plan, search and an explorer are asked, each with an option that only runs have."""
    choose = random.Random(0).choice
    for question in of_plans.questions(400):
        model = replace(question.model, vocab_size=VOCABULARY)
        yield model, ParallelConfig(**question.options | choose([{}, choose(MORE)])), question.world_size


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
    return [(question, answer(ask_labkit, question)) for question in asked()]


@pytest.mark.parametrize("who", ASKED)
def test_all_give_the_same_answer_in_the_same_sentence(questions, who, nothing_runs):
    for question, expected in questions:
        assert answer(ASKED[who], question) == expected, question


def test_so_does_the_command_line(questions, nothing_runs, monkeypatch, capsys):
    for question, expected in questions[::4]:  # each takes a while to parse
        monkeypatch.setattr(sys, "argv", ["labtrain", *typed(*question)])
        code = main()
        said = capsys.readouterr()
        if expected:
            assert (code, said.err.strip()) == (2, f"labtrain: {as_typed(expected)}"), question
        else:
            assert (code, said.err) == (0, "")
