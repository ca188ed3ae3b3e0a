"""Chooses the device of ranks, a GPU each or CPU cores that they share, and prepares a process for
it.
"""

import contextlib
import os


def count_gpus() -> int:
    """Return how many GPUs CUDA can use in this process: of one in MIG mode, one instance."""
    import torch

    if not torch.cuda.device_count():  # NVML's answer: it does not start CUDA, and counts MIG whole
        return 0
    return torch._C._cuda_getDeviceCount()


def choose_backend(asked: str, num_ranks: int, num_gpus: int) -> tuple[str, str]:
    """Return ``"nccl"`` or ``"gloo"``, and a sentence that says why.

    ``asked`` may also be ``"auto"``.

    Raises:
        ValueError: NCCL was asked for, and there are too few GPUs.
    """
    have = f"this machine has {num_gpus or 'no'} GPU{'s' * (num_gpus > 1)}"
    if asked == "nccl" and num_gpus < num_ranks:
        way_out = "use backend='auto' or 'gloo', or fewer ranks"
        raise ValueError(
            f"backend='nccl' needs a GPU for each of the {num_ranks} ranks and {have}: {way_out}"
        )
    if asked != "gloo" and num_gpus >= num_ranks:
        return "nccl", f"Ranks run on {_taken(num_ranks)}, one each, and talk through NCCL: {have}."
    too_few = f", too few for {num_ranks} ranks" if num_gpus else ""
    why = ", as asked" if asked == "gloo" and num_gpus else f": {have}{too_few}"
    return "gloo", f"Ranks run on the CPU and talk through gloo{why}."


def _taken(num_ranks: int) -> str:
    """Name the GPUs that this many ranks take, as CUDA numbers them, or as the user does who shows
    only some.
    """
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "")
    names = visible.split(",") if visible else [str(number) for number in range(num_ranks)]
    of_all = f" of CUDA_VISIBLE_DEVICES={visible}" if visible else ""
    return f"GPU{'s' * (num_ranks > 1)} {', '.join(names[:num_ranks])}{of_all}"


def prepare_gpu(one_queue: bool = False, posts_receives: bool = True) -> None:
    """Change CUDA's defaults for messages that wait, and for float32, before a rank first touches
    it.

    Whoever posts receives ahead, as a pipeline does, needs all kernels loaded at the start: CUDA
    asks only once, when a process makes its context. `launch` cannot know then which functions its
    ranks will get, so it asks for that; where no function is a pipeline,
    ``os.environ["CUDA_MODULE_LOADING"] = "LAZY"`` before the first launch saves the loading.

    With ``one_queue``, kernels start in the order in which they are launched, so that a matrix
    product cannot take all processors from a message launched before it. Megatron-LM asks for this
    with tensor parallelism on GPUs before Blackwell. What the user has set stands; in a notebook,
    set it before the first launch.
    """
    import torch

    if one_queue:
        os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    # A kernel that is loaded late waits for all that runs: for ever, if that is a receive that was
    # posted ahead.
    if posts_receives:
        os.environ.setdefault("CUDA_MODULE_LOADING", "EAGER")
    torch.set_float32_matmul_precision("highest")  # NGC containers multiply with 10 bits


def wait_for_gpu() -> None:
    """Wait for all that this process has launched on its GPU, if it uses one.

    A kernel's error is raised here.
    """
    import torch

    if torch.cuda.is_initialized():
        torch.cuda.synchronize()


def gpu_is_lost() -> bool:
    """Return whether CUDA refuses every further call of this process, as after a failed assertion
    in a kernel.
    """
    import torch

    if not torch.cuda.is_initialized():
        return False
    try:
        torch.cuda.current_stream().query()  # does not wait
    except RuntimeError:
        return True
    return False


def take_turns() -> None:
    """Let this thread, and those it will start, wait for a core until whoever has it pauses or has
    had its time.

    For ranks that share cores: else Linux gives the sender's core to the reader that a message of
    gloo wakes, while the sender still holds the lock on which the reader spins. Eight ranks on two
    cores take a third of the time.
    """
    with contextlib.suppress(OSError):  # a container may forbid it
        os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
