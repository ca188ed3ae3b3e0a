"""What the load test adds up is the memory of a process and of all below it."""

import os
import subprocess
import sys

from tools.load import MIB, pss

CHILD = "x = bytearray(b'1' * 50_000_000); print(flush=True); input()"


def test_the_memory_of_a_child_counts_once():
    before, num_before = pss(os.getpid())
    with subprocess.Popen([sys.executable, "-c", CHILD], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        child.stdout.readline()
        grown, num_processes = pss(os.getpid())
        alone, _ = pss(child.pid)
        child.stdin.close()
    assert num_processes == num_before + 1
    assert 50_000_000 < alone < 100 * MIB
    assert 40_000_000 < grown - before < 100 * MIB
