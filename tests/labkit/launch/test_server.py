"""When the server refuses to fork, and when it leaves."""

import os
import socket
import sys
import threading

import pytest
import torch

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
    kernel, server_end = map(Connection, socket.socketpair())
    server_end.descriptors = [os.open(os.devnull, os.O_RDONLY) for _ in range(6)]
    server.Server(server_end, os.getpid())._fork_ranks(world_id=7, num_ranks=2)
    assert kernel.arrived() == [("refused", 7, "[Errno 11] Resource temporarily unavailable")]
    assert server_end.descriptors == []


def test_a_kernel_killed_before_it_read_everything_is_gone_like_any_other():
    kernel, server_end = map(Connection, socket.socketpair())
    server_end.send("exit", 0, 0, 0)
    kernel.socket.close()  # with that message unread
    server.Server(server_end, os.getpid())._read_kernel()
    assert not server_end.is_open


def test_where_there_are_gpus_the_server_imports_only_what_leaves_it_able_to_fork(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(server, "_PRELOAD_TO_TRAIN", ("starts_a_thread", "opens_a_gpu", "is_quiet"))
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    (tmp_path / "starts_a_thread.py").write_text(
        "import threading; threading.Thread(target=threading.Event().wait).start()"
    )
    (tmp_path / "nvidia-uvm").touch()
    (tmp_path / "opens_a_gpu.py").write_text(f"device = open({str(tmp_path / 'nvidia-uvm')!r})")
    (tmp_path / "is_quiet.py").touch()
    forking = server.Server(None, os.getpid())  # pyright: ignore[reportArgumentType] - nobody asks this one
    forking.has_gpus = True
    while forking.to_import:
        forking._import_next()
    found = {"starts_a_thread", "opens_a_gpu", "is_quiet"} & sys.modules.keys()
    sys.modules.pop("is_quiet", None)
    assert found == {"is_quiet"}


@pytest.mark.parametrize(("of_nvml", "of_cuda"), [(8, 8), (8, 1), (0, 0)], ids=["GPUs", "one instance of MIG", "none"])
def test_what_is_counted_is_what_cuda_can_use(monkeypatch, of_nvml, of_cuda):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: of_nvml)
    monkeypatch.setattr(torch._C, "_cuda_getDeviceCount", lambda: of_cuda, raising=False)
    _, status = os.waitpid(server._fork(server._exit_with_gpu_count, None), 0)
    assert os.waitstatus_to_exitcode(status) == of_cuda
