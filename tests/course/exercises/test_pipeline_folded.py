"""The exercise on a V: any rule that schedules it well is right, and a wrong one is told what became of its ranks."""

import pytest

from course.exercises.pipeline_folded import (
    AS_OFFERED,
    DECLINED,
    FILLED,
    FINE,
    HAS_ROOM,
    NO_ROOM,
    ORDER,
    W_FIRST,
    Obedient,
    my_choice,
    next_op,
    what_happens,
)
from labkit.schedules import Schedule, check, v_shape
from labkit.schedules.greedy import KINDS

CASES = next_op.cases


@pytest.mark.parametrize("case", CASES)
def test_the_solution_makes_a_schedule_that_runs_within_the_limit(case):
    p, m, limit, most_units = case
    steps, ranks = Obedient(my_choice, p, m, limit).run()
    made = Schedule("mine", p, m, ranks, 2, KINDS, v_shape(p))
    check(made)
    assert max(map(made.peak_in_flight, range(p))) <= limit
    assert most_units - 1 <= steps <= most_units  # so a rule that takes two units more does not pass
    assert what_happens(my_choice, *case[:3], steps) == (FINE, "")
    assert what_happens(my_choice, *case[:3], steps - 1) == (f"all ranks finish, but after {steps} time units", ORDER)


def asked(rule):
    """What a rule is asked in the first pipeline."""
    questions = []

    def noting(*question):
        questions.append(question)
        return rule(*question)

    what_happens(noting, *CASES[0])
    return questions


def test_a_rule_is_asked_for_each_op_of_each_rank():
    questions = asked(my_choice)
    assert questions[0] == (["F0"], 0, 4)
    assert len(questions) >= 2 * 4 * 2 * 3
    assert all(ops and len(ops) == len(set(ops)) <= 5 and held <= limit == 4 for ops, held, limit in questions)
    assert len([op for op in max((ops for ops, *_ in questions), key=len) if op[0] == "W"]) <= 1


@pytest.mark.parametrize(
    ("rule", "says"),
    [
        (lambda can_run, num_held, limit: "F7", "rank 0 can run F0, and the rule says 'F7'"),
        (lambda can_run, num_held, limit: can_run, "rank 0 can run F0, and the rule says ['F0']"),
        (lambda can_run, num_held, limit: can_run[0], "rank 0 runs F1.1 with 4 chunks held already"),
        (
            lambda can_run, num_held, limit: next((op for op in can_run if op[0] != "W" and num_held < limit), None),
            "no rank goes on",
        ),
        (lambda can_run, num_held, limit: can_run[9], "IndexError"),
    ],
)
def test_a_wrong_rule_is_told_what_it_does(rule, says):
    verdict = next_op.verdict(rule)
    assert verdict.status in ("wrong", "raised")
    assert says in " ".join(verdict.text.split())


def by(needed, can_run, num_held, limit):
    """Return an op by the solution's order, where forwards need as many places as ``needed`` says."""
    fits = [op for op in can_run if op[0] != "F" or limit - num_held >= needed(op)]
    return min(fits, key=lambda op: ("BFW".index(op[0]), not op.endswith(".1")), default=None)


@pytest.mark.parametrize(
    ("rule", "advice"),
    [
        (lambda can_run, num_held, limit: "F0", AS_OFFERED),
        (lambda can_run, num_held, limit: min(can_run).split(".")[0], AS_OFFERED),
        (lambda can_run, num_held, limit: can_run[-1], NO_ROOM),
        (lambda can_run, num_held, limit: can_run[-1] if num_held < limit else None, FILLED),
        (lambda can_run, num_held, limit: can_run[0] if num_held < limit else None, DECLINED),
        (lambda *given: by(lambda op: 2 - op.endswith("1"), *given), FILLED),  # F1 is not of chunk 1
        (lambda *given: by(lambda op: 2 - (len(op) > 2), *given), FILLED),  # nor is F10
        (lambda *given: by(lambda op: 2, *given), HAS_ROOM),
        (
            lambda *given: by(lambda op: 3 - op.endswith(".1"), *given),
            W_FIRST,
        ),  # for want of room that it does not need
    ],
)
def test_what_becomes_of_the_ranks_has_its_own_advice(rule, advice):
    text = " ".join(next_op.verdict(rule).text.split())
    assert text.endswith(f"What this usually is: {advice}")


def test_forgotten_weight_gradients_are_noticed_at_the_end_too():
    def keeps_the_last(can_run, num_held, limit):
        return None if can_run[0][0] == "W" and num_held == 1 else my_choice(can_run, num_held, limit)

    assert "no rank goes on: rank 0 holds 1 and is offered W" in what_happens(keeps_the_last, *CASES[1])[0]


def test_forwards_first_is_right_too():
    """With a place left for chunk 1, the limit decides more than the order of F and B."""

    def forwards_first(can_run, num_held, limit):
        fits = [op for op in can_run if op[0] != "F" or limit - num_held > (not op.endswith(".1"))]
        return min(fits, key=lambda op: ("FBW".index(op[0]), not op.endswith(".1")), default=None)

    assert next_op.verdict(forwards_first).status == "passed"
