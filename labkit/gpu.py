"""CUDA's defaults, changed for ranks."""

import os


def prepare_gpu(one_queue: bool = False) -> None:
    """Change CUDA's defaults for messages that wait, and for float32, before a rank first touches it.

    With ``one_queue``, kernels start in the order in which they are launched, whatever their streams: so a message
    launched before a matrix product does not find all processors taken by it. Megatron-LM asks for this with tensor
    parallelism on GPUs before Blackwell (there, NVIDIA's launchers set CUDA_DEVICE_MAX_CONNECTIONS to 32). What the
    user has set stands; in a notebook, set it before the first launch.
    """
    import torch

    if one_queue:
        os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    # Lazy loading makes a kernel's first launch wait for all that runs: for ever, if that is a receive posted ahead.
    os.environ.setdefault("CUDA_MODULE_LOADING", "EAGER")
    torch.set_float32_matmul_precision("highest")  # NGC containers multiply with 10 bits
