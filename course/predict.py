"""Predictions: questions that a notebook asks in place, before the cell that computes the answer has run.

What is asked, and what typical wrong answers show, stands in `course.predictions`, one file per notebook. The right
answer stands nowhere: the cell that computes it passes it to `Question.compare`. See also predict.js.
"""

import math
import re
from collections.abc import Iterable, Mapping
from datetime import datetime
from html import escape
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import anywidget
import traitlets

from course.exercises import record
from course.exercises.feedback import LOOKS

Wrong = Mapping[Any, str]
LATE = "You may still answer, but it does not count as a prediction."


class Between(NamedTuple):
    """Recognises as a typical wrong answer each number between two others."""

    low: float
    high: float

    def __call__(self, answer: float) -> bool:
        return self.low < answer < self.high


class Question:
    """A question: the last expression of a cell shows it, and `compare` gets the result where that is computed.

    An answer is kept under ``key``, such as "01.data_size", in the form that `course.exercises.record` describes. The
    first stays the first. Text in `backticks` is shown as code. No answer changes what a cell puts out: feedback
    appears in the widget, and only after the reader has answered.

    ``wrong`` has a sentence for each typical wrong answer, or for a function that recognises one.
    """

    kind: ClassVar[str]
    asks_for: str
    unit = ""

    def __init__(self, key: str, text: str, wrong: Wrong | None = None, options: Iterable = ()):
        self.key, self.text = key, text
        self.html = re.sub(r"`(.*?)`", r"<code>\1</code>", escape(text))
        pairs = options.items() if isinstance(options, Mapping) else ((each, each) for each in options)
        self.words = {str(value): str(word) for value, word in pairs}
        self.wrong = [(each if callable(each) else self.form(each), advice) for each, advice in (wrong or {}).items()]
        self.result: Any = None
        self._unwritten: record.Prediction | None = None  # the answer, where no file can keep it
        self._not_kept = ""  # why no file keeps it
        self._widget: Form | None = None

    def form(self, value: Any) -> Any:
        """Return a result in the form of an answer; ValueError if it cannot be one."""
        raise NotImplementedError

    def is_same(self, answer: Any, other: Any) -> bool:
        """Whether two answers count as the same one."""
        return answer == other

    def compare(self, result: Any) -> None:
        """Compare the answer, given already or later, with the result that a cell computed.

        The first result counts: a reader who changes the cell and runs it again is asking something else.

        Raises:
            ValueError: no answer can be the result, or the question calls it a typical mistake.
        """
        if self.result is not None:
            return
        result = self.form(result)
        if (advice := self.mistake(result)) is not None:
            rule = f"the result {result!r} is a typical mistake in the question ({advice!r})"
            raise ValueError(f"{self.key}: {rule}: correct the question or, if you changed this cell, undo that")
        self.result, was_seen = result, self.key in record.results()
        kept = self._kept()
        if kept and (kept["right"] is not None or not was_seen):  # else the answer came after the result
            kept["right"] = self.is_same(kept["first"], result)
            kept["mistake"] = None if kept["right"] else self.mistake(kept["first"])
        record.note_result(self.key)
        if kept:
            self._keep(kept)
        elif self._widget:
            self._widget.feedback = self.feedback()

    def answer(self, answer: Any) -> None:
        """Keep an answer: the first, or a further try."""
        kept = self._kept()
        if kept is None:
            now = datetime.now().astimezone().isoformat(timespec="seconds")
            kept = record.Prediction(
                kind=self.kind, first=answer, time=now, right=None, mistake=None, last=None, tries=0
            )
        if answer != kept["last"]:
            kept["last"], kept["tries"] = answer, kept["tries"] + 1
        self._keep(kept)

    def last(self) -> Any:
        """Return the last answer that was kept, or None."""
        kept = self._kept()
        return kept and kept["last"]

    def feedback(self) -> list[str]:
        """Return the status of the last answer, the word for it, and a sentence; nothing while all is open."""
        kept = self._kept()
        is_late = (kept is None or kept["right"] is None) and (self.result is not None or self.key in record.results())
        late = "It came after the result, so it does not count as a prediction." if is_late else ""
        if kept is None:
            return ["late", "○ the result is known", LATE] if is_late else []
        if self.result is None:
            return ["kept", "○ kept", f"{late or 'Run the next cell to see.'} {self._not_kept}".strip()]
        if self.is_same(kept["last"], self.result):
            is_first = self.is_same(kept["first"], self.result)
            earlier = "" if is_first else f"Your first answer was: {self.said(kept['first'])}."
            return ["passed", LOOKS["passed"][0], f"{earlier} {late}".strip()]
        advice = self.mistake(kept["last"]) or self.nearness(kept["last"], self.result)
        return ["wrong", LOOKS["wrong"][0], f"{advice} Compare with the next cell, or try again. {late}".strip()]

    def said(self, answer: Any) -> str:
        """Return an answer in words."""
        return str(answer)

    def nearness(self, answer: Any, result: Any) -> str:
        """Say something of a wrong answer that is not a typical one."""
        del answer, result
        return ""

    def fits(self, answer: Any) -> bool:
        """Whether this is an answer: one that was kept may be to an earlier wording."""
        raise NotImplementedError

    def mistake(self, answer: Any) -> str | None:
        """Return the sentence for the typical mistake that this answer makes, if it makes one."""
        found = (say for each, say in self.wrong if (each(answer) if callable(each) else self.is_same(answer, each)))
        return next(found, None)

    def _kept(self) -> record.Prediction | None:
        kept = record.predictions().get(self.key, self._unwritten)
        fits = kept and kept["kind"] == self.kind and self.fits(kept["first"]) and self.fits(kept["last"])
        return kept if fits else None

    def _keep(self, kept: record.Prediction) -> None:
        if self.result is not None:
            record.note_result(self.key)  # all may have been forgotten since
        self._not_kept = record.note_prediction(self.key, kept)
        self._unwritten = kept if self._not_kept else None
        if self._widget:
            self._widget.feedback = self.feedback()

    def __repr__(self) -> str:
        words = [f"  - {word}" for word in self.words.values()]
        return "\n".join([f"Predict. {self.text}", *words, f"{self.asks_for}."])

    def _repr_mimebundle_(self, **options: Any) -> tuple[dict[str, Any], dict[str, Any]]:
        """Return the widget and, for a reader without a kernel, the question as text, whatever was answered."""
        if self._widget is None or self._widget.answer != self.last():  # forgotten, or answered in a second notebook
            self._widget = Form(self)
        bundle = self._widget._repr_mimebundle_(**options)
        data, metadata = bundle if isinstance(bundle, tuple) else (bundle, {})
        words = "".join(f"<li>{escape(word)}</li>" for word in self.words.values())
        words = f"<ul>{words}</ul>" if words else ""
        html = f"<p><b>Predict.</b> {self.html}</p>{words}<p>{self.asks_for}. Run this cell to answer here.</p>"
        return {**(data or {}), "text/plain": repr(self), "text/html": html}, metadata


class Form(anywidget.AnyWidget):
    """What a reader answers a question with: native elements of the browser, and the feedback below them."""

    _esm = Path(__file__).with_name("predict.js")
    _css = Path(__file__).with_name("predict.css")
    kind = traitlets.Unicode().tag(sync=True)
    text = traitlets.Unicode().tag(sync=True)
    words = traitlets.List(traitlets.Unicode()).tag(sync=True)
    unit = traitlets.Unicode().tag(sync=True)
    answer = traitlets.Any(allow_none=True).tag(sync=True)
    feedback = traitlets.List(traitlets.Unicode()).tag(sync=True)

    def __init__(self, question: Question):
        super().__init__(
            kind=question.kind,
            text=question.html,
            words=list(question.words.values()),
            unit=question.unit,
            answer=question.last(),
            feedback=question.feedback(),
        )
        self.observe(lambda change: question.answer(change["new"]), "answer")


class Number(Question):
    """A question for a number. An answer is right within ``tolerance``, a fraction of the result."""

    kind, asks_for = "number", "Answer with a number"

    def __init__(self, key: str, text: str, wrong: Wrong | None = None, *, unit: str = "", tolerance: float = 1e-9):
        self.tolerance = tolerance
        super().__init__(key, text, wrong)
        self.unit = unit
        self.asks_for += f", in {unit}" if unit else ""

    def form(self, value: Any) -> int | float:
        number = float(value)
        if not math.isfinite(number):
            raise ValueError(f"{self.key}: {number} cannot be answered: compare a finite number")
        return int(number) if number.is_integer() else number

    def is_same(self, answer: float, other: float) -> bool:
        return abs(answer - other) <= self.tolerance * abs(other)

    def said(self, answer: float) -> str:
        return f"{answer:,} {self.unit}".strip()

    def nearness(self, answer: float, result: float) -> str:
        return "That is too large." if answer > result else "That is too small."

    def fits(self, answer: Any) -> bool:
        return isinstance(answer, int | float) and abs(answer) < float("inf")


class Choice(Question):
    """A choice of one of ``options``: their words, or values of the result with the words for them."""

    kind, asks_for = "choice", "Choose one"

    def __init__(self, key: str, text: str, options: Iterable, wrong: Wrong | None = None):
        super().__init__(key, text, wrong, options)

    def form(self, value: Any) -> str:
        if str(value) not in self.words:
            raise ValueError(f"{self.key}: {str(value)!r} is not offered: use one of {', '.join(self.words)}")
        return self.words[str(value)]

    def fits(self, answer: Any) -> bool:
        return answer in self.words.values()


class Order(Question):
    """A question for the order of ``items``: their words, or values of the result with the words for them.

    They are listed in a different order than the right one, which is where the reader begins.
    """

    kind, asks_for = "order", "Put these in order"

    def __init__(self, key: str, text: str, items: Iterable, wrong: Wrong | None = None):
        super().__init__(key, text, wrong, items)
        self.wrong.append((list(self.words.values()), "That is the order in which they were listed."))

    def form(self, value: Iterable) -> list[str]:
        values = [each for each in map(str, value) if each in self.words]  # a cell may compute more than is asked for
        if sorted(values) != sorted(self.words):
            raise ValueError(f"{self.key}: {values} does not have each item once: order {list(self.words)}")
        return [self.words[each] for each in values]

    def said(self, answer: list[str]) -> str:
        return ", ".join(answer)

    def nearness(self, answer: list[str], result: list[str]) -> str:
        num_right = sum(each == right for each, right in zip(answer, result))
        return f"In the right place: {num_right} of {len(result)}."

    def fits(self, answer: Any) -> bool:
        return isinstance(answer, list) and sorted(map(str, answer)) == sorted(self.words.values())
