"""Reports tell the course's code from the learner's."""

import pytest

from course.measure.flow import trace_flow
from labkit.launch import RankFailed


def test_a_report_names_the_learners_line_and_not_the_courses_that_called_it():
    def wrong(x):
        raise ValueError("a bad thing")

    with pytest.raises(RankFailed) as failed:
        trace_flow(wrong, [[1.0], [2.0]])
    assert 'test_reports.py, line 11, in wrong:  raise ValueError("a bad thing")' in str(failed.value)
    assert "flow.py" not in str(failed.value)


def test_an_error_in_the_course_is_shown_where_it_happened():
    with pytest.raises(RankFailed, match=r"TypeError.*\n    at course/measure/flow.py, line \d+, in _trace_here"):
        trace_flow(lambda x: 3, [[1.0], [2.0]])  # is not a tensor
