"""What the tests of a pipeline share."""

import os
import subprocess
import time

import pytest


def children(pid):
    listed = subprocess.run(["ps", "-o", "pid=", "--ppid", str(pid)], capture_output=True, text=True, check=False)
    return [int(word) for word in listed.stdout.split()]


@pytest.fixture
def no_rank_is_left():
    """See that the test leaves no rank behind."""
    before = ranks()
    yield
    deadline = time.monotonic() + 5
    while (left := ranks() - before) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not left


def ranks():
    """The processes that run ranks: they are children of the launcher's server, which is ours."""
    return {child for server in children(os.getpid()) for child in children(server)}
