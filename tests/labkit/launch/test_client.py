"""The notebook's side of the server: started once, anew when it is gone, in a directory of its own."""

import os
import shutil
import subprocess
import sys
import threading

import pytest
import torch.distributed as dist

from labkit.launch import World, client, launch


def test_a_run_directory_that_was_removed_is_made_anew():
    """As systemd does with /dev/shm when a user logs out."""
    launch(os.getpid, world_size=1)
    old = client.current_server()
    shutil.rmtree(old.directory)
    assert launch(dist.get_rank, world_size=2) == [0, 1]
    assert client.current_server() is not old and old.dead


def test_threads_may_launch_at_once(monkeypatch):
    client.current_server().close()  # they start it together
    results = {}

    def launch_some(size):
        results[size] = [launch(os.getppid, world_size=size) for _ in range(5)]

    threads = [threading.Thread(target=launch_some, args=(size,)) for size in (1, 2, 3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == {size: [[client.current_server().pid] * size] * 5 for size in (1, 2, 3)}


def test_run_directory_is_private():
    launch(os.getpid, world_size=1)
    directory = client.current_server().directory
    assert os.stat(directory).st_mode & 0o777 == 0o700
    with World(1):
        worlds = [name for name in os.listdir(directory) if name.startswith("world")]
        assert [os.stat(f"{directory}/{name}").st_mode & 0o777 for name in worlds] == [0o700]


def test_stale_run_directory_is_removed(tmp_path, monkeypatch):
    monkeypatch.setattr(client, "_tmpfs", lambda: str(tmp_path))
    for name in ("labkit-stale", "labkit-starting"):
        (tmp_path / name).mkdir()
    (tmp_path / "labkit-stale" / "server.log").touch()  # and nobody holds its lock
    client._remove_stale_directories()
    assert os.listdir(tmp_path) == ["labkit-starting"]


@pytest.mark.skipif(os.path.exists("/dev/nvidiactl"), reason="where there are GPUs nothing more is preloaded")
@pytest.mark.parametrize("imported", ["", "labkit.train", "course.explorers.live_losses"])
def test_ranks_that_will_train_find_imported_what_an_optimizer_needs(imported):
    """Eight ranks would each import it, on the cores that they share."""
    code = "import sys; from labkit.launch import launch\n"
    code += f"import {imported}\n" if imported else ""
    code += "print(launch(lambda: 'torch._dynamo' in sys.modules and 'labkit.train' not in sys.modules, world_size=2))"
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert ran.stdout.splitlines()[-1] == str([bool(imported)] * 2), ran


@pytest.mark.alone
def test_interrupt_while_the_server_starts():
    code = "import os, threading, signal; from labkit.launch import launch, client\n"
    code += "signal.signal(signal.SIGINT, signal.default_int_handler)\n"
    code += "threading.Timer(0.7, os.kill, (os.getpid(), signal.SIGINT)).start()\n"
    code += "try: launch(os.getpid, world_size=1)\n"
    code += "except KeyboardInterrupt: print(open(f'/proc/{os.getpid()}/task/{os.getpid()}/children').read().split())\n"
    code += "print(len(launch(os.getpid, world_size=2)))"
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    lines = [line for line in ran.stdout.splitlines() if not line.startswith(("Starting", "Ranks run"))]
    assert lines in (["[]", "2"], ["2"]), ran  # the second if the server was faster than the timer
