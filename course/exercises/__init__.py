"""The notebooks' exercises: a file holds the cases, typical mistakes, hints and solutions of one notebook."""
