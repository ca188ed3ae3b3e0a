"""labkit: how Megatron-style training spreads one model over many GPUs, small enough to read.

Each file holds one idea and imports only lower floors; nothing is re-exported here, so that an
import line says where to read: ``from labkit.layout import ParallelLayout``.
"""

# Whose code a report counts as the lab's, not the learner's; a package above adds its own
lab_folders = [*__path__]
