"""Sets what torch reads from the environment when it is first imported, so it comes before that."""

import os

# OpenMP's threads spin while they wait. On cores that something else uses too, torch's two threads
# were 15 times slower than one. With a short spin, two threads on cores of their own are only 10%
# slower.
os.environ.setdefault("GOMP_SPINCOUNT", "1000")

if "RANK" in os.environ:
    # When a peer dies, torch would warn of it in 60 lines of C++ frames.
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
