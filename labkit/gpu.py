"""CUDA's defaults, changed for ranks."""

import os


def prepare_gpu() -> None:
    """Change CUDA's defaults for messages that wait, and for float32, before a rank first touches it."""
    import torch

    # Lazy loading makes a kernel's first launch wait for all that runs: for ever, if that is a receive posted ahead.
    os.environ.setdefault("CUDA_MODULE_LOADING", "EAGER")
    torch.set_float32_matmul_precision("highest")  # NGC containers multiply with 10 bits
