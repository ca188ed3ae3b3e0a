"""The old place of a formula, until the notebooks import it from `course.sizing`."""

from course.sizing.linear_cut import LinearCut as LinearCut
