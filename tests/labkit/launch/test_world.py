"""What launch and World promise when all goes well."""

import io
import os
import resource
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist

from labkit.launch import RankFailed, World, client, launch, progress, wire
from labkit.launch.interrupts import DeferredInterrupt
from labkit.launch.output import Output
from labkit.launch.report import Death, failure_report
from labkit.launch.watchdog import Silence

pytestmark = pytest.mark.alone


def sum_of_ranks() -> float:
    x = torch.tensor(float(dist.get_rank()))
    dist.all_reduce(x)
    return x.item()


def test_results_come_in_rank_order():
    assert launch(lambda: dist.get_rank(), world_size=3) == [0, 1, 2]
    assert launch(sum_of_ranks, world_size=4) == [6.0] * 4


def test_a_world_of_one():
    assert launch(sum_of_ranks, world_size=1) == [0.0]


def test_anything_made_in_a_cell_travels():
    scale = 3

    class Pair:
        def __init__(self, x):
            self.x = x * scale

    results = launch(lambda x, *, y: (Pair(x), y + 1, {x}), 2, y=np.ones(2), world_size=2)
    assert all(isinstance(pair, Pair) and pair.x == 6 for pair, _, _ in results)
    assert all((y == 2).all() and z == {2} for _, y, z in results)


def test_tensors_and_their_gradients_travel():
    weight = torch.arange(4.0, requires_grad=True)

    def gradient(weight):
        (weight * dist.get_rank()).sum().backward()
        return weight.grad

    zeros, ones = launch(gradient, weight, world_size=2)
    assert torch.equal(zeros, torch.zeros(4)) and torch.equal(ones, torch.ones(4))


def test_large_arguments_and_results_travel():
    big = torch.arange(1_500_000)
    with World(2) as world:
        assert torch.equal(world.run(lambda x: x + dist.get_rank(), big)[1], big + 1)
        assert not os.path.exists(f"{world._ranks.directory}/payload")  # memory that nobody needs any more


def test_large_argument_when_tmpfs_is_full(monkeypatch):
    real_write = Path.write_bytes

    def no_room(path, data):
        real_write(path, data[:100])
        raise OSError(28, "No space left on device")

    def work(data, directory):
        return len(data), os.path.exists(f"{directory}/payload")  # the part that was written must not stay

    monkeypatch.setattr(Path, "write_bytes", no_room)
    with World(2) as world:
        assert world.run(work, b"x" * 3_000_000, world._ranks.directory) == [(3_000_000, False)] * 2


def test_output_is_grouped_by_rank_in_rank_order(capfd):
    def talk():
        for i in range(3):
            dist.barrier()
            print("line", i)
        print("to stderr", file=sys.stderr)
        os.write(1, b"from C, without newline")

    launch(talk, world_size=2)
    out, err = capfd.readouterr()
    lines = [line for line in out.splitlines() if line.startswith("[rank")]
    expected = ["line 0", "line 1", "line 2", "from C, without newline"]
    assert lines == [f"[rank {rank}] {line}" for rank in (0, 1) for line in expected]
    assert err.splitlines() == ["[rank 0] to stderr", "[rank 1] to stderr"]


def test_live_output_comes_while_ranks_run(capsys):
    seen = []

    def talk():
        print("before")
        time.sleep(1)
        print("after")

    def watch():
        time.sleep(0.7)
        seen.append(capsys.readouterr().out)

    launch(sum_of_ranks, world_size=2)  # the server is up
    watcher = threading.Thread(target=watch)
    watcher.start()
    launch(talk, world_size=2, live=True)
    watcher.join()
    assert "[rank 1] before" in seen[0] and "after" not in seen[0]
    assert "[rank 1] after" in capsys.readouterr().out


def test_the_cut_of_many_lines_is_stated(capsys):
    output = Output(num_ranks=1, live=False)
    for start in range(0, 5000, 100):
        output.feed(0, "stdout", b"".join(b"%d\n" % i for i in range(start, start + 100)))
    output.finish()
    lines = capsys.readouterr().out.splitlines()
    assert lines[899:902] == ["[rank 0] 899", lines[900], "[rank 0] 4900"]
    assert "4,000 lines left out" in lines[900]
    assert lines[-1] == "[rank 0] 4999"


def test_letters_that_the_terminal_lacks_are_replaced(monkeypatch):
    terminal = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    monkeypatch.setattr(sys, "stdout", terminal)
    output = Output(num_ranks=1, live=False)
    output.feed(0, "stdout", "caf\u00e9 \u2192\n".encode())
    output.finish()
    assert terminal.buffer.getvalue() == b"[rank 0] caf? ?\n"


def test_progress_moves_a_bar(capsys):
    def work():
        for i in range(5):
            progress(i + 1, 5, "training")
            time.sleep(0.06)

    launch(work, world_size=2)
    assert "training: 100%" in capsys.readouterr().err


def test_progress_outside_a_rank_does_nothing():
    assert progress(1, 2) is False


def test_environment_directory_and_path_travel_with_each_call(tmp_path, monkeypatch):
    with World(2) as world:
        monkeypatch.chdir(tmp_path)
        monkeypatch.setenv("LAB_SETTING", "7")
        monkeypatch.syspath_prepend(str(tmp_path))
        (tmp_path / "my_module.py").write_text("value = 41\n")

        def look():
            import my_module  # pyright: ignore[reportMissingImports]

            return os.getcwd(), os.environ["LAB_SETTING"], my_module.value + 1

        assert world.run(look) == [(str(tmp_path), "7", 42)] * 2


def test_edits_of_the_learners_module_reach_the_next_launch(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(sys, "dont_write_bytecode", True)

    def look():
        import edited  # pyright: ignore[reportMissingImports]

        return edited.value, sorted(name for name in sys.modules if name in ("labkit.layout", "labkit.groups"))

    for value in ("before", "after"):
        (tmp_path / "edited.py").write_text(f"value = {value!r}\n")
        assert launch(look, world_size=1) == [(value, [])]


def test_a_world_keeps_its_ranks_between_calls():
    with World(2) as world:
        assert world.run(os.getpid) == world.run(os.getpid)
        assert world.run(sum_of_ranks) == [1.0, 1.0]
    with pytest.raises(RuntimeError, match="this world has ended \\(it was closed\\)"):
        world.run(os.getpid)


def test_two_worlds_at_once():
    with World(2) as one, World(3) as other:
        assert one.run(sum_of_ranks) == [1.0, 1.0]
        assert other.run(sum_of_ranks) == [3.0] * 3
        assert one.run(sum_of_ranks) == [1.0, 1.0]


def test_torchrun_environment():
    names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE")
    assert launch(lambda: [int(os.environ[name]) for name in names], world_size=2) == [[0, 0, 2, 2], [1, 1, 2, 2]]


def test_threads_are_divided_among_ranks():
    cores = len(os.sched_getaffinity(0))
    assert launch(torch.get_num_threads, world_size=cores) == [1] * cores
    assert launch(torch.get_num_threads, world_size=1) == [cores]


def test_ranks_own_init_process_group():
    """Pins the private rendezvous hook: env:// on a rank is our file store, and no port is opened."""

    def again():
        dist.destroy_process_group()
        dist.init_process_group("gloo")
        total = sum_of_ranks()
        dist.destroy_process_group()
        dist.init_process_group("gloo", init_method="env://")
        return total, sum_of_ranks()

    assert launch(again, world_size=2) == [(1.0, 1.0)] * 2


def test_flight_recorder_shows_what_waits():
    """Pins the private reader that the watchdog depends on."""

    def look():
        from labkit.launch.probe import Probe

        before = Probe().snapshot()
        if dist.get_rank() == 0:
            work = dist.all_reduce(torch.ones(2, 3), async_op=True)
            pending = Probe().snapshot()
            dist.send(torch.ones(1), 1)  # only now may the other rank join
        else:
            dist.recv(torch.ones(1), 0)
            pending = None
            work = dist.all_reduce(torch.ones(2, 3), async_op=True)
        work.wait()
        time.sleep(0.05)
        return before.collectives, pending and pending.collectives, Probe().snapshot().collectives

    (before, pending, after), _ = launch(look, world_size=2)
    assert before == after == ()
    (call,) = pending
    assert (call.group, call.number, call.operation) == ("0", 1, "all_reduce")
    assert (call.shapes, call.dtypes) == ("[2, 3]", "float")


def test_snapshots_tell_communication_from_other_waiting():
    """A rank with an asynchronous collective under way may wait for something else, and then goes on by itself."""

    def look(wait):
        from labkit.launch.probe import Probe

        seen, probe = [], Probe()
        watcher = threading.Timer(0.3, lambda: seen.append(probe.snapshot().elsewhere))
        watcher.start()
        wait()
        watcher.join()
        return seen[0]

    def wait_for_a_thread():
        thread = threading.Thread(target=time.sleep, args=(0.6,))
        thread.start()
        thread.join()

    def wait_in_communication():
        if dist.get_rank() == 0:
            time.sleep(0.6)
        dist.barrier()

    with World(2) as world:
        for wait in (lambda: time.sleep(0.6), lambda: subprocess.run(["sleep", "0.6"]), wait_for_a_thread):
            assert world.run(look, wait) == [True, True]
        assert world.run(look, wait_in_communication) == [True, False]


def test_questions_to_a_stopped_rank_do_not_block_the_kernel(monkeypatch):
    from labkit.launch.call import Call

    monkeypatch.setattr(Call, "_c_stacks", lambda self, ranks: {})  # quicker
    with World(1) as world:
        (pid,) = world.run(os.getpid)
        os.kill(pid, signal.SIGSTOP)
        call = Call(world._ranks, Output(1, live=False), DeferredInterrupt())
        for _ in range(1000):  # more than fit its socket
            call._ask(0.0)
        os.kill(pid, signal.SIGCONT)
        assert call._ask(5.0).snapshots.keys() == {0}


def test_too_many_open_files_leave_nothing():
    launch(os.getpid, world_size=1)
    before, limits = _held(), resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (len(before[0]) + 40, limits[1]))
    try:
        with pytest.raises(OSError, match="Too many open files"):
            launch(os.getpid, world_size=16)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    assert _held() == before


def _held() -> tuple[list[str], list[str]]:
    return os.listdir("/proc/self/fd"), os.listdir(client.current_server().directory)


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


def test_calls_of_one_world_from_two_threads_take_turns():
    results = []
    with World(2) as world:
        threads = [threading.Thread(target=lambda: results.append(world.run(sum_of_ranks))) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert results == [[1.0, 1.0]] * 4


def test_a_fork_of_the_kernel_does_not_end_its_ranks():
    with World(2) as world:
        pids = world.run(os.getpid)
        if (child := os.fork()) == 0:
            world.close()
            os._exit(0)
        os.waitpid(child, 0)
        assert world.run(os.getpid) == pids


def test_reading_while_a_message_is_unpickled_loses_nothing(monkeypatch):
    """Unpickling can collect garbage, a forgotten World among it, whose end reads from the same server."""

    class ReadsAgain:
        reader, inner = wire.Reader(), []

        def __reduce__(self):
            return _read_again, ()

    monkeypatch.setattr(sys, "reads_again", ReadsAgain, raising=False)
    outer = ReadsAgain.reader.feed(wire.pack("first", ReadsAgain()) + wire.pack("second", 2))
    assert (outer, ReadsAgain.inner) == ([("first", None)], [("second", 2)])


def _read_again() -> None:
    sys.reads_again.inner += sys.reads_again.reader.feed(b"")  # pyright: ignore[reportAttributeAccessIssue]


@pytest.mark.skipif(shutil.which("ss") is None, reason="needs ss, of Debian's package iproute2")
def test_ranks_listen_on_loopback_only():
    listening = launch(_listening, world_size=4)
    assert all(any(address.startswith("127.0.0.1:") for address in addresses) for addresses in listening)
    assert all(address.startswith("127.0.0.1:") for addresses in listening for address in addresses)


def _listening() -> list[str]:
    """The addresses that this rank listens on, as `ss` sees them."""
    dist.barrier()
    lines = subprocess.run(["ss", "-tulnpH"], capture_output=True, text=True, check=True).stdout.splitlines()
    mine = [line.split()[4] for line in lines if f"pid={os.getpid()}," in line]
    dist.barrier()
    return mine


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


def test_nothing_accumulates_over_200_launches():
    def state():
        pid, server = os.getpid(), client.current_server()
        return (
            len(os.listdir("/proc/self/fd")),
            len(os.listdir(f"/proc/{server.pid}/fd")),
            open(f"/proc/{pid}/task/{pid}/children").read(),
            threading.active_count(),
            os.listdir(server.directory),
            [name for name in os.listdir("/dev/shm") if not name.startswith("labkit-")],
        )

    launch(os.getpid, world_size=2)
    before = state()
    for _ in range(200):
        assert launch(dist.get_rank, world_size=2) == [0, 1]
    assert state() == before
    server = client.current_server().pid
    with open(f"/proc/{server}/task/{server}/children") as children:
        assert children.read() == ""


def test_the_server_refuses_to_fork_with_a_second_thread():
    from labkit.launch.server import _check_safe_to_fork

    stop = threading.Event()
    thread = threading.Thread(target=stop.wait)
    thread.start()
    try:
        with pytest.raises(OSError, match="threads"):
            _check_safe_to_fork()
    finally:
        stop.set()
        thread.join()


def test_a_fork_that_the_system_refuses_is_said(monkeypatch):
    from labkit.launch import server

    def refuse():
        raise BlockingIOError(11, "Resource temporarily unavailable")

    monkeypatch.setattr(server, "_check_safe_to_fork", lambda: None)
    monkeypatch.setattr(os, "fork", refuse)
    kernel, theirs = socket.socketpair()
    with kernel, theirs:
        server.Server(theirs, os.getpid())._fork_ranks(world_id=7, num_ranks=2)
        assert wire.receive(kernel) == ("refused", 7, "[Errno 11] Resource temporarily unavailable")


def test_a_kernel_killed_before_it_read_everything_is_gone_like_any_other():
    from labkit.launch import server

    kernel, theirs = socket.socketpair()
    wire.send(theirs, "exit", 0, 0, 0)
    kernel.close()  # with that message unread
    with theirs:
        assert server.Server(theirs, os.getpid())._read_kernel() is False


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
for _ in range(60):
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


@pytest.mark.skipif(os.path.exists("/dev/nvidiactl"), reason="where there are GPUs nothing more is preloaded")
@pytest.mark.parametrize("imported", ["", "labkit.train", "course.explorers.live_losses"])
def test_ranks_that_will_train_find_imported_what_an_optimizer_needs(imported):
    """Eight ranks would each import it, on the cores that they share."""
    code = "import sys; from labkit.launch import launch\n"
    code += f"import {imported}\n" if imported else ""
    code += "print(launch(lambda: 'torch._dynamo' in sys.modules and 'labkit.train' not in sys.modules, world_size=2))"
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert ran.stdout.splitlines()[-1] == str([bool(imported)] * 2), ran


def test_a_tensor_on_a_gpu_comes_back_on_the_cpu():
    class OnAGpu(torch.Tensor):
        is_cuda = True

        def cpu(self):
            return torch.arange(3)

    [back] = launch(lambda: {"found": [torch.zeros(3).as_subclass(OnAGpu)]}, world_size=1)
    assert type(back["found"][0]) is torch.Tensor and back["found"][0].tolist() == [0, 1, 2]


def test_what_nccl_says_when_a_rank_never_comes_is_said_in_words():
    words = (
        "[rank0]: Watchdog caught collective operation timeout: WorkNCCL(SeqNum=1, OpType=ALLREDUCE) ran for 60004 ms",
        *(f"frame #{number}: <unknown function> + 0x1 (0x7f in libc.so.6)" for number in range(30)),
    )
    report = failure_report({0: Death(signal.SIGABRT, words, 1.0)}, Silence(1, {}, frozenset()))[1]
    assert "SIGABRT: its GPU waited timeout_seconds in an operation, named below" in report
    assert "OpType=ALLREDUCE" in report and "frame #" not in report and "strict" not in report


def test_random_interrupts_leave_nothing():
    ran = subprocess.run([sys.executable, "-c", RANDOM_INTERRUPTS], capture_output=True, text=True, timeout=120)
    assert ran.stdout.splitlines()[-1] == "60 0 [] ['server.log']", ran


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


def test_collectives_time_out_after_timeout_seconds():
    def work():
        if dist.get_rank() == 1:
            end = time.time() + 6
            while time.time() < end:
                pass
        dist.barrier()

    start = time.monotonic()
    with pytest.raises(RankFailed, match="Timed out"):
        launch(work, world_size=2, timeout_seconds=1.0)
    assert time.monotonic() - start < 5


@pytest.mark.parametrize("seconds", [0, -1, float("nan"), float("inf")])
def test_bad_timeout(seconds):
    with pytest.raises(ValueError, match=f"timeout_seconds={seconds} cannot be"):
        launch(os.getpid, world_size=1, timeout_seconds=seconds)


def test_not_a_function():
    with pytest.raises(ValueError, match="fn=3 cannot be called"):
        launch(3, world_size=1)


@pytest.mark.parametrize(("gpus", "size", "chosen"), [(0, 2, "gloo"), (8, 8, "nccl"), (4, 8, "gloo"), (1, 1, "nccl")])
def test_backend_is_chosen_by_the_gpus_there_are(gpus, size, chosen, capsys, monkeypatch):
    from labkit.launch import world

    monkeypatch.setattr(world, "_last_said", "")
    assert world._choose_backend("auto", size, gpus) == chosen
    said = capsys.readouterr().out
    assert said.count(".") == 1
    assert ("NCCL" in said) == (chosen == "nccl")
    assert ("too few for 8 ranks" in said) == (gpus == 4)
    assert world._choose_backend("auto", size, gpus) == chosen
    assert capsys.readouterr().out == ""  # said once


SCRIPT = """
import sys, torch, torch.distributed as dist
from tests.labkit.launch.test_world import sum_of_ranks
dist.init_process_group("gloo")
total = sum_of_ranks()
sys.stdout.write(f"RESULT {dist.get_rank()} {total}\\n")  # in one piece: ranks share the terminal
"""


def test_same_function_under_torchrun(tmp_path):
    (tmp_path / "script.py").write_text(SCRIPT)
    path = os.pathsep.join([str(Path(__file__).parents[3]), *filter(None, [os.environ.get("PYTHONPATH")])])
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "script.py"]
    ran = subprocess.run(command, cwd=tmp_path, env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True)
    lines = sorted(line for line in ran.stdout.splitlines() if line.startswith("RESULT"))
    assert lines == [f"RESULT {rank} {total}" for rank, total in enumerate(launch(sum_of_ranks, world_size=2))], ran
