"""Options of a run beside what it computes: evaluations, checkpoints, logs and traces."""

from dataclasses import dataclass
from pathlib import Path

from labkit.sizes import counted
from labtrain.config.optimizer import OptimizerOptions
from labtrain.config.values import check_numbers

OF_CHECKPOINTS = ("resume", "save_interval", "keep", "async_save")


@dataclass(frozen=True)
class RunOptions(OptimizerOptions):
    """What a run of these steps writes and says."""

    eval_interval: int = 0  # Steps between evaluations; 0 for none.
    checkpoint_dir: str | None = None  # Where checkpoints are written, and read by --resume.
    save_interval: int = 0  # Steps between checkpoints; 0 for one at the end only.
    keep: int = 0  # Complete checkpoints to keep, the newest ones; 0 keeps all.
    # Write checkpoints in the background; a step waits only for a copy in the CPU's memory.
    async_save: bool = False
    # Continue from the newest complete checkpoint in checkpoint_dir, whatever its layout was.
    resume: bool = False
    # Minutes after which the run ends early, as it does on SIGTERM and SIGUSR1: it finishes the
    # step and saves.
    exit_duration: float | None = None
    log_interval: int = 10  # Steps between lines in a log; a terminal shows a bar instead.
    # A file that gets a JSON object for each step, after what it already has. A resumed run
    # replaces the lines of steps that it computes again.
    metrics: str | None = None
    tensorboard: str | None = None  # A folder for TensorBoard, if that package is there.
    # Train nothing: say what each of this many ranks would hold, and whether it fits.
    check: int | None = None
    # With --check: the memory of a GPU in GiB, such as 80, to plan a run on a machine without GPUs;
    # by default that of this machine's GPUs.
    gpu_memory_gib: float | None = None
    # Where each rank writes torch's trace of some steps; ui.perfetto.dev opens it.
    profile_dir: str | None = None
    profile_step_start: int = 10  # The first step that is profiled, counted from 1.
    profile_step_end: int = 20  # The step before which profiling stops.

    @property
    def profiled_steps(self) -> range:
        """The numbers of the steps that are profiled."""
        if not self.profile_dir:
            return range(0)
        return range(self.profile_step_start, min(self.profile_step_end, self.steps + 1))

    def _check_run(self) -> None:
        check_numbers(self, ("exit_duration", "gpu_memory_gib"), most=1_000_000)
        for name in ("checkpoint_dir", "profile_dir"):
            folder = getattr(self, name)
            if folder == "" or not isinstance(folder, str | Path | None):
                raise ValueError(f"{name}={folder!r} is not a folder: name one, or leave it out")
        if self.gpu_memory_gib is not None and self.check is None:
            fault = f"gpu_memory_gib={self.gpu_memory_gib:g} is for check="
            raise ValueError(f"{fault}: give a number of ranks too")
        if self.profile_dir and not self.profiled_steps:
            start = f"profile_step_start={self.profile_step_start}"
            given = f"{start} and profile_step_end={self.profile_step_end}"
            fault = f"{given} profile none of {counted(self.steps, 'step')}"
            raise ValueError(f"{fault}: use, for example, 1 and 6")
        given = [name for name in OF_CHECKPOINTS if getattr(self, name)]
        if given and self.checkpoint_dir is None:
            fault = f"{given[0]}={getattr(self, given[0])} needs a checkpoint_dir"
            raise ValueError(f"{fault}: name a folder")
