"""The project: a Megatron in one file (one_file.py), which torchrun starts."""
