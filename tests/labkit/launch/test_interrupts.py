"""The stop button, pressed at any moment."""

import signal
import subprocess
import sys

import pytest

from labkit.launch.client import DeferredInterrupt


@pytest.fixture
def sigint_raises():
    """A job in the background inherits that SIGINT is ignored."""
    previous = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, previous)


def test_interrupt_is_deferred(sigint_raises):
    def press_stop() -> None:
        with DeferredInterrupt() as interrupt:
            signal.raise_signal(signal.SIGINT)
            reached.append(interrupt.requested)

    reached = []
    with pytest.raises(KeyboardInterrupt):
        press_stop()
    assert reached == [True]
    with pytest.raises(KeyboardInterrupt):
        signal.raise_signal(signal.SIGINT)  # as before


RANDOM_INTERRUPTS = """
import os, random, signal, sys, threading, time
from labkit.launch import launch, client

def work():
    import torch, torch.distributed as dist
    dist.all_reduce(torch.ones(1))
    time.sleep(0.1)

signal.signal(signal.SIGINT, signal.default_int_handler)  # a job in the background inherits that it is ignored
launch(work, world_size=2)
server = client.current_server()
before, hits, random_times = len(os.listdir("/proc/self/fd")), 0, random.Random(5)
for _ in range(15):
    timer = threading.Timer(random_times.uniform(0, 0.2), os.kill, (os.getpid(), signal.SIGINT))
    try:
        timer.start()
        launch(work, world_size=2)
        time.sleep(1)  # until the timer strikes
    except KeyboardInterrupt:
        hits += 1
    timer.join()
    sys.last_exc = sys.last_value = sys.last_traceback = None
assert client.current_server() is server
launch(work, world_size=2)
children = open(f"/proc/{server.pid}/task/{server.pid}/children").read()
print(hits, len(os.listdir("/proc/self/fd")) - before, children.split(), os.listdir(server.directory))
"""


@pytest.mark.alone
def test_random_interrupts_leave_nothing():
    ran = subprocess.run([sys.executable, "-c", RANDOM_INTERRUPTS], capture_output=True, text=True, timeout=120)
    assert ran.stdout.splitlines()[-1] == "15 0 [] ['server.log']", ran
