"""Writes results as JUnit, for programs that collect test results."""

from collections.abc import Iterable
from typing import NamedTuple
from xml.etree import ElementTree


class Case(NamedTuple):
    """One result: right, not right, or not attempted (None); ``message`` and ``text`` say what is not right."""

    kind: str
    name: str
    is_right: bool | None
    message: str = ""
    text: str = ""


def suite_of(name: str, cases: Iterable[Case]) -> ElementTree.Element:
    """Return a suite with its counts; what was not attempted is skipped.

    >>> ElementTree.tostring(suite_of("01", [Case("exercises", "a", None)])).decode()[:63]
    '<testsuite name="01" tests="1" failures="0" skipped="1"><testca'
    """
    cases = list(cases)
    rights = [case.is_right for case in cases]
    counts = {"tests": len(rights), "failures": rights.count(False), "skipped": rights.count(None)}
    suite = ElementTree.Element("testsuite", {"name": name, **{kind: str(count) for kind, count in counts.items()}})
    for case in cases:
        element = ElementTree.SubElement(suite, "testcase", classname=f"{name}.{case.kind}", name=case.name)
        if case.is_right is None:
            ElementTree.SubElement(element, "skipped")
        elif not case.is_right:
            ElementTree.SubElement(element, "failure", message=case.message).text = case.text or None
    return suite
