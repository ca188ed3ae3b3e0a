"""Typical wrong answers to each notebook's exercises, written without a look at the checks, and honest right ones.

A file for each notebook: WRONG lists the exercise, a learner's function, and what is wrong in a teacher's words. RIGHT
lists right answers that differ from the solutions.
"""
