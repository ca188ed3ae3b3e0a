"""The course above labkit: what the notebooks show, ask and check."""

from labkit import lab_folders

lab_folders.extend(__path__)  # so that a report tells this code from the learner's
