"""`labtrain` as processes of their own, as from a fresh terminal."""

import os
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
TINY = "--steps 3 --seq-length 8 --hidden-size 16 --num-layers 2 --batch-size 8 --micro-batch-size 2 --warmup-steps 2"
SIX = f"{TINY} --steps 6 --log-interval 1"
TRAIN_IN_FORKS = ["--run-path", "--start-method", "fork", str(ROOT / "labtrain/__main__.py")]
"""What torchrun starts: its ranks are forks of it, and it has imported what they need, which saves their imports."""
TORCHRUN = [sys.executable, "-c", "import labtrain; from torch.distributed.run import main; main()"]


def environment(**more):
    """A clean one: as in a fresh terminal."""
    ours = re.compile("RANK|WORLD_SIZE|LOCAL_|MASTER_|SLURM_|TORCHELASTIC|OMP_|GOMP_|COLUMNS|CUDA_[DM]")
    return {name: value for name, value in os.environ.items() if not ours.match(name)} | {"COLUMNS": "100"} | more


def start(command, **more):
    return subprocess.Popen(
        command, cwd=ROOT, env=environment(**more), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def finish(*processes):
    """(exit code, stdout, stderr) of each, when all have ended."""
    results = [(*process.communicate(timeout=240), process.returncode) for process in processes]
    return [(code, out, error) for out, error, code in results]


def losses(out):
    """What the log says of each step; a step that was computed again counts once if it has the same loss."""
    return sorted(set(re.findall(r"step (\d+)/\d+: loss (\S+),", out)))
