"""A prediction is kept as it was first made, is compared when the result is known, and changes no output of a cell."""

import json

import pytest
import torch

from course.exercises import record
from course.predict import Choice, Number, Order

GROUPS = {8: "That is the number of tensor groups.", (lambda answer: answer > 16): "There are only 16 GPUs."}


def data_size():
    return Number("00.data_size", "16 GPUs, `t = 2`, p = 4. What is d?", GROUPS)


def worst():
    return Choice("00.worst", "Which is worse?", {16: "t = 16", 8: "t = 8"}, {8: "That fits into a node."})


def stages():
    items = {(1, 2): "last", (0, 1): "first", (0, 2): "middle"}
    return Order("00.stages", "Which comes first?", items, {((0, 2), (0, 1), (1, 2)): "The first two are swapped."})


EACH = [
    (data_size, 8, 2, 2),
    (worst, "t = 8", "t = 16", 16),
    (stages, ["middle", "first", "last"], ["first", "middle", "last"], [(0, 1), (0, 2), (1, 2)]),
]


def state(question):
    """What a browser knows of a question, and what it saves."""
    question._repr_mimebundle_()
    return {name: value for name, value in question._widget.get_state().items() if not name.startswith("_")}


def texts(question):
    data, _ = question._repr_mimebundle_()
    return {kind: text for kind, text in data.items() if kind.startswith("text/")}


@pytest.mark.parametrize(("make", "wrong", "right", "result"), EACH)
def test_the_first_answer_is_kept_and_judged_when_the_result_is_known(make, wrong, right, result):
    question = make()
    assert state(question)["feedback"] == []
    question._widget.answer = wrong
    assert state(question)["feedback"] == ["kept", "○ kept", "Run the next cell to see."]
    [kept] = record.predictions().values()
    assert (kept["kind"], kept["first"], kept["right"], kept["mistake"]) == (question.kind, wrong, None, None)
    question.compare(result)
    status, word, sentence = state(question)["feedback"]
    [kept] = record.predictions().values()
    assert (status, word) == ("wrong", "✗ not right yet") and kept["right"] is False
    assert sentence.startswith(kept["mistake"]) and kept["mistake"] == question.wrong[0][1]
    question._widget.answer = right
    status, word, sentence = state(question)["feedback"]
    assert (status, word) == ("passed", "✓ correct") and question.said(wrong) in sentence
    [again] = record.predictions().values()
    assert again == {**kept, "last": right, "tries": 2}


@pytest.mark.parametrize(("make", "wrong", "right", "result"), EACH)
def test_a_result_that_nobody_predicted_yet_is_not_given_away(make, wrong, right, result):
    question = make()
    before, late = state(question), "does not count as a prediction."
    question.compare(result)
    said = state(question).pop("feedback")
    assert said[0] == "late" and said[2].endswith(late)
    assert {**state(question), "feedback": []} == before and record.predictions() == {}
    question._widget.answer = wrong
    assert state(question)["feedback"][0] == "wrong" and state(question)["feedback"][2].endswith(late)
    question._widget.answer = right
    assert state(question)["feedback"][0] == "passed" and state(question)["feedback"][2].endswith(late)
    assert record.predictions()[question.key]["right"] is None, "an answer after the result is not a prediction"
    later = make()
    assert state(later)["feedback"][0] == "kept" and state(later)["feedback"][2].endswith(late)
    later.compare(result)
    assert record.predictions()[question.key]["right"] is None


@pytest.mark.parametrize(("make", "wrong", "right", "result"), EACH)
def test_no_answer_changes_what_a_cell_puts_out(make, wrong, right, result, capsys):
    unanswered = texts(make())
    for answer in (wrong, right):
        question = make()
        question.answer(answer)
        assert texts(question) == unanswered
        question.compare(result)
        assert texts(question) == unanswered
    assert capsys.readouterr() == ("", "")
    assert set(unanswered) == {"text/plain", "text/html"}


@pytest.mark.parametrize(("make", "wrong", "right", "result"), EACH)
def test_an_answer_outlives_the_kernel(make, wrong, right, result):
    make().answer(wrong)
    later = make()
    assert state(later)["answer"] == wrong and state(later)["feedback"][0] == "kept"
    later.compare(result)
    assert state(later)["feedback"][0] == "wrong"
    later.answer(right)
    assert record.predictions()[later.key]["first"] == wrong


def test_without_a_kernel_a_question_is_text_with_its_choices():
    assert "<code>t = 2</code>" in texts(data_size())["text/html"]
    assert repr(worst()) == "Predict. Which is worse?\n  - t = 16\n  - t = 8\nChoose one."
    assert "<li>t = 16</li><li>t = 8</li>" in texts(worst())["text/html"]
    assert repr(Number("00.a", "How much?", unit="GB")).endswith("Answer with a number, in GB.")


def test_an_estimate_counts_within_its_tolerance():
    question = Number("00.ratio", "How many times?", {42: "You forgot the groups."}, tolerance=0.25)
    question.compare(torch.tensor(290.5))
    for answer, status, start in [
        (220, "passed", ""),
        (360, "passed", ""),
        (370, "wrong", "That is too large."),
        (210, "wrong", "That is too small."),
        (45, "wrong", "You forgot the groups."),
    ]:
        question.answer(answer)
        found, _, sentence = question.feedback()
        assert (found, sentence.startswith(start)) == (status, True)


def test_a_wrong_order_that_is_not_typical_says_how_much_is_in_place():
    question = stages()
    question.compare([(0, 1), (0, 2), (1, 2), (7, 7)])  # a cell may compute more than is asked for
    question.answer(["first", "last", "middle"])
    assert question.feedback()[2].startswith("In the right place: 1 of 3.")


def test_the_first_result_counts_whatever_a_reader_tries_in_the_cell_afterwards():
    question = data_size()
    question.compare(2)
    question.compare(8)  # would raise as the first
    question.answer(2)
    assert question.feedback()[0] == "passed"


@pytest.mark.parametrize(
    ("make", "result", "why"),
    [
        (data_size, 8, "typical mistake"),
        (data_size, 17, "typical mistake"),
        (data_size, float("nan"), "finite"),
        (worst, 8, "typical mistake"),
        (worst, 4, "not offered"),
        (stages, [(0, 2), (0, 1), (1, 2)], "typical mistake"),
        (stages, [(1, 2), (0, 1), (0, 2)], "in which they were listed"),
        (stages, [(0, 1), (1, 2)], "each item once"),
        (stages, [(0, 1), (0, 1), (1, 2), (0, 2)], "each item once"),
    ],
)
def test_a_question_that_does_not_fit_its_result_fails_where_it_is_compared(make, result, why):
    with pytest.raises(ValueError, match=why):
        make().compare(result)


@pytest.mark.parametrize(
    "make",
    [
        lambda: Choice("00.a", "Which?", ["x", "y"], {"z": "No."}),
        lambda: Order("00.a", "Which first?", ["x", "y"], {("x", "x"): "No."}),
    ],
)
def test_a_typical_mistake_that_cannot_be_answered_fails_at_once(make):
    with pytest.raises(ValueError):
        make()


def test_a_file_that_cannot_be_written_or_was_damaged_stops_nothing(monkeypatch, tmp_path):
    (tmp_path / "file").touch()
    monkeypatch.setenv("LABKIT_PROGRESS", str(tmp_path / "file" / "progress.json"))  # its folder is a file
    question = data_size()
    question.answer(8)
    assert "not kept in" in question.feedback()[2] and "Set LABKIT_PROGRESS" in question.feedback()[2]
    question.compare(2)
    assert state(question)["feedback"][0] == "wrong" and record.predictions() == {}
    monkeypatch.setenv("LABKIT_PROGRESS", str(tmp_path / "progress.json"))
    record.file().write_text(json.dumps({"predictions": {"00.data_size": {"first": 8}, "00.worst": []}}))
    assert state(data_size())["answer"] is state(worst())["answer"] is None


def test_an_answer_to_an_earlier_wording_does_not_count():
    worst().answer("t = 8")
    now = Choice("00.worst", "Which is worse?", {16: "16 tensor ranks", 8: "8 tensor ranks"})
    assert state(now)["answer"] is None and now.feedback() == []
    now.answer("8 tensor ranks")
    assert record.predictions()["00.worst"]["first"] == "8 tensor ranks"


def test_a_cell_that_runs_again_shows_the_same_question_unless_all_was_forgotten():
    question = data_size()
    (first, _), (again, _) = (question._repr_mimebundle_() for _ in range(2))
    assert first == again
    question._widget.answer = 8
    record.clear()
    assert state(question)["answer"] is None and state(question)["feedback"] == []
