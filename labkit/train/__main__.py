"""The command line: ``python -m labkit.train --help``, also under torchrun and srun."""

import sys

import tyro

from labkit.train.config import TrainConfig
from labkit.train.trainer import train
from labkit.train.world import world


def main() -> int:
    """0 when all steps are done; 2 when the options do not fit, 1 when the numbers ran away."""
    try:
        config = tyro.cli(TrainConfig, prog="python -m labkit.train", config=(tyro.conf.FlagCreatePairsOff,))
        with world():
            train(config)
    except (ValueError, FloatingPointError) as error:
        print(f"labkit.train: {error}", file=sys.stderr)
        return 2 if isinstance(error, ValueError) else 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
