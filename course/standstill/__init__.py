"""Notebook 17: twelve jobs that stand still, what PyTorch's own instruments show of them, and how each is mended."""
