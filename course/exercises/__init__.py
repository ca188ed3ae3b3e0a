"""The notebooks' exercises: each file holds the cases, typical mistakes, hints and solutions of one notebook."""

from course.exercises.base import Exercise, Mistake, Verdict

__all__ = ["Exercise", "Mistake", "Verdict"]
