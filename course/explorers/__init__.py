"""Widgets that redraw a picture when a control moves: one file per subject."""
