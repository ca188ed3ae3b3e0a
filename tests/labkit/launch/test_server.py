"""When the server refuses to fork, and when it leaves."""

import os
import socket
import threading

import pytest

from labkit.launch import server
from labkit.launch.wire import Connection


def test_the_server_refuses_to_fork_with_a_second_thread():
    stop = threading.Event()
    thread = threading.Thread(target=stop.wait)
    thread.start()
    try:
        with pytest.raises(OSError, match="threads"):
            server._check_safe_to_fork()
    finally:
        stop.set()
        thread.join()


def test_a_fork_that_the_system_refuses_is_said(monkeypatch):
    def refuse():
        raise BlockingIOError(11, "Resource temporarily unavailable")

    monkeypatch.setattr(server, "_check_safe_to_fork", lambda: None)
    monkeypatch.setattr(os, "fork", refuse)
    kernel, theirs = map(Connection, socket.socketpair())
    theirs.descriptors = [os.open(os.devnull, os.O_RDONLY) for _ in range(6)]
    server.Server(theirs, os.getpid())._fork_ranks(world_id=7, num_ranks=2)
    assert kernel.arrived() == [("refused", 7, "[Errno 11] Resource temporarily unavailable")]
    assert theirs.descriptors == []


def test_a_kernel_killed_before_it_read_everything_is_gone_like_any_other():
    kernel, theirs = map(Connection, socket.socketpair())
    theirs.send("exit", 0, 0, 0)
    kernel.socket.close()  # with that message unread
    server.Server(theirs, os.getpid())._read_kernel()
    assert not theirs.is_open
