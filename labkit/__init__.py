"""labkit: how Megatron-style training spreads one model over many GPUs, small enough to read.

Each file holds one idea and imports only lower floors; nothing is re-exported here, so that an
import line says where to read: ``from labkit.layout import ParallelLayout``.
"""

# A report counts the code in these folders as the lab's, not the learner's. A package above adds
# its folder.
lab_folders = [*__path__]
