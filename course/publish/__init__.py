"""Writes what others read of the lab: web pages, slides, a handout for participants, notebooks with their outputs."""
