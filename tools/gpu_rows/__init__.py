"""What `tools/gpu_check.py` checks: each row is a function of where it runs, and stands for a cell of a notebook."""
