"""Measures what the machine and the ranks really do: bandwidth, operations, flow, waiting, utilisation."""
