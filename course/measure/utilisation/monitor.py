"""Samples nvidia-smi's utilisation of each GPU while a block runs, as a monitor shows it beside a run."""

import re
import subprocess
from collections import defaultdict

QUERY = ["nvidia-smi", "--query-gpu=index,utilization.gpu", "--format=csv,noheader,nounits"]


class GpuMonitor:
    """Sample the GPUs while the block runs; afterwards ``samples`` has percents, by GPU.

    nvidia-smi's number is the share of its last sampling period, a sixth of a second to a second, in which any kernel
    ran. So it says neither how much of a GPU worked nor who waited: a kernel of NCCL that waits for a message counts.

    >>> with GpuMonitor() as monitor:
    ...     pass  # measure_step(plan)
    """

    def __init__(self, milliseconds: int = 200):
        self.milliseconds, self.samples = milliseconds, {}

    def __enter__(self) -> "GpuMonitor":
        command = [*QUERY, f"--loop-ms={self.milliseconds}"]
        try:
            self._process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
        except OSError:  # no nvidia-smi, no GPUs
            self._process = None
        return self

    def __exit__(self, *_) -> None:
        if self._process:
            self._process.kill()  # it would wait for ever for one that ignores SIGTERM, as children of this process may
            self.samples = read_samples(self._process.communicate()[0])

    def __str__(self) -> str:
        """Return one row per GPU: lowest, mean and highest."""
        if not self.samples:
            return "no GPU to look at: nvidia-smi is missing, or saw none"
        lines = ["GPU  lowest  mean  highest   % of nvidia-smi's sampling periods"]
        for gpu, samples in sorted(self.samples.items()):
            mean = sum(samples) / len(samples)
            lines.append(f"{gpu:>3}{min(samples):>8}{mean:>6.0f}{max(samples):>9}   of {len(samples)} samples")
        return "\n".join(lines)


def read_samples(text: str) -> dict[int, list[int]]:
    """Return the percents of each GPU in what nvidia-smi printed, without a last line that was cut off.

    >>> read_samples("0, 12\\n1, 97\\n0, 14\\n1, [N/A]\\n0, 1")
    {0: [12, 14], 1: [97]}
    """
    samples: defaultdict[int, list[int]] = defaultdict(list)
    for gpu, percent in re.findall(r"^(\d+), (\d+)\n", text, re.MULTILINE):
        samples[int(gpu)].append(int(percent))
    return dict(samples)
