"""The notebook's side of the server: started once, anew when it is gone, in a directory of its own."""

import importlib.util
import itertools
import os
import shutil
import subprocess
import sys
import threading

import pytest

from labkit.launch import World, client, launch
from tests.support.sweep import IS_SWEEP


def test_a_run_directory_that_was_removed_is_made_anew_by_one_of_the_threads_that_launch():
    """As systemd removes it from /dev/shm when a user logs out. The threads start one server together."""
    launch(os.getpid, world_size=1)
    old = client.current_server()
    shutil.rmtree(old.directory)
    results = {}

    def launch_some(size):
        results[size] = launch(os.getppid, world_size=size)

    threads = [threading.Thread(target=launch_some, args=(size,)) for size in (1, 2, 3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == {size: [client.current_server().pid] * size for size in (1, 2, 3)}
    assert client.current_server() is not old and not old.connection.is_open


def test_threads_may_import_while_a_thread_launches():
    """The names of the modules that are there are gathered while others appear: here, between any two instructions."""
    names = (f"module{number}" for number in itertools.count())

    def import_one_more(frame, *_):
        if frame.f_code.co_filename == client.__file__:
            frame.f_trace_opcodes = True
            sys.modules[next(names)] = os
            return import_one_more

    sys.settrace(import_one_more)
    try:
        launch(os.getpid, world_size=1)
    finally:
        sys.settrace(None)
        added = [name for name, module in sys.modules.items() if module is os and name.startswith("module")]
        for name in added:
            del sys.modules[name]
    assert len(added) > 1000


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


@pytest.mark.parametrize(
    "announced", ["client.will_train()", "import torch.distributed.tensor"] if IS_SWEEP else ["client.will_train()"]
)
def test_ranks_that_will_train_find_imported_what_an_optimizer_needs(announced):
    """Eight ranks would each import it, on the cores that they share."""
    code = "import sys; from labkit.launch import client, launch\n"
    code += "def found(): return 'torch._dynamo' in sys.modules and 'labtrain' not in sys.modules\n"
    code += "facts = launch(found, world_size=1)\n"
    code += f"{announced}\n"
    code += "print(facts + launch(found, world_size=2))"
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert ran.stdout.splitlines()[-1] == "[False, True, True]", ran


@pytest.mark.parametrize("name", ["labkit.data_parallel", "labkit.pipeline", "course.explorers.live_losses"])
def test_every_module_that_trains_announces_it(monkeypatch, name):
    monkeypatch.setattr(client, "_ranks_will_train", False)
    spec = importlib.util.find_spec(name)
    assert spec and spec.loader
    spec.loader.exec_module(importlib.util.module_from_spec(spec))  # once more, if it has been imported
    assert client._ranks_will_train


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


def test_ranks_can_have_a_network_of_their_own():
    """As root and, where the machine allows it, as nobody in particular: other users can then not connect to them."""
    code = "import os; from labkit.launch import launch\n"
    code += "def sums():\n    import torch, torch.distributed as dist\n    x = torch.ones(1); dist.all_reduce(x)\n"
    code += "    return x.item(), os.readlink('/proc/self/ns/net')\n"
    code += "facts = launch(sums, world_size=2)\n"
    code += "print(facts[0] == facts[1], facts[0][0], facts[0][1] != os.readlink('/proc/self/ns/net'))"
    environment = {**os.environ, "LABKIT_OWN_NETWORK": "1"}
    said = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True)
    if "this machine lets no user make a network namespace" in said.stdout + said.stderr:
        pytest.skip("no network namespaces here")
    assert said.stdout.endswith("True 2.0 True\n"), said
