"""Says whether this run is the long sweep, in which everything is tried that `make test` only samples."""

import os

IS_SWEEP = "SWEEP" in os.environ
