"""Widgets that redraw a picture when a number changes: one file for each subject."""
