"""Every fault that a learner can cause, made to happen in a real Jupyter kernel.

After each, nothing is left behind and the next launch works: see the `kernel` fixture. The times are
upper limits that users are promised, far above what is measured; they are not benchmarks.
"""

import os
import re
import signal
import time

import pytest

from tests.support.kernel import Kernel, children, descriptors, is_alive, listening, wait_until

pytestmark = pytest.mark.alone

HELLO = "print(launch(lambda: dist.get_rank(), world_size=2))"


@pytest.fixture(scope="module")
def one_kernel(tmp_path_factory):
    kernel = Kernel(tmp_path_factory.mktemp("kernel"))
    assert "[0, 1]" in kernel.run(HELLO).stdout
    yield kernel
    kernel.close()


@pytest.fixture
def kernel(one_kernel):
    """The kernel; afterwards checks that the fault left no process, socket, descriptor or file behind."""
    server, before, sockets = one_kernel.server_pid(), descriptors(one_kernel.pid), listening(one_kernel.pid)
    yield one_kernel
    ran = one_kernel.run(HELLO)
    assert "[0, 1]" in ran.stdout, ran
    if one_kernel.server_pid() == server:
        assert wait_until(lambda: not children(server), 2), list(map(_command, map(str, children(server))))
    assert descriptors(one_kernel.pid) == before
    assert listening(one_kernel.pid, one_kernel.server_pid()) == sockets  # those of Jupyter itself
    assert one_kernel.value("os.listdir(__import__('labkit.launch.client').launch.client._server.directory)") == [
        "server.log"
    ]


def fails(kernel: Kernel, body: str, *, within: float, world_size: int = 3, options: str = "") -> str:
    """Run a cell that launches a function with this body; returns the report that the learner reads."""
    function = "def work():\n    rank = dist.get_rank()\n" + "".join(f"    {line}\n" for line in body.splitlines())
    ran = kernel.run(f"{function}launch(work, world_size={world_size}{options})")
    assert ran.error, ran
    assert ran.seconds < within, ran
    return ran.error


def test_exception(kernel):
    report = fails(kernel, "if rank == 1: raise ValueError('a bad thing')\ndist.barrier()", within=2)
    assert report.startswith("RankFailed: rank 1 of 3 raised ValueError: a bad thing")
    assert re.search(r"at Cell In\[\d+\], line 3, in work:  if rank == 1: raise ValueError", report)
    for rank in (0, 2):
        assert re.search(
            rf"rank {rank}: waits in barrier number 1 of the world \[0, 1, 2\], at Cell In\[\d+\], line 4", report
        )
    assert report.count("Traceback") == 0


def test_exception_that_comes_from_a_library(kernel):
    report = fails(kernel, "torch.ones(2) @ torch.ones(3)", within=2)
    assert "RuntimeError: inconsistent tensor size" in report
    assert "line 3, in work:  torch.ones(2) @ torch.ones(3)" in report
    assert report.count("Cell In") == 1  # the others say that they failed too, in one line each


def test_the_exception_itself_can_be_caught(kernel):
    ran = kernel.run(
        "def work(): raise KeyError('k')\n"
        "try: launch(work, world_size=2)\n"
        "except RuntimeError as error: print(repr(error.cause), 'work' in error.tracebacks[error.rank])"
    )
    assert ran.stdout == "KeyError('k') True\n"


def test_sys_exit(kernel):
    report = fails(kernel, "if rank == 2: sys.exit(3)\ndist.barrier()", within=2)
    assert "rank 2 of 3 called sys.exit(3)" in report


def test_exit_without_returning(kernel):
    report = fails(kernel, "if rank == 2: os._exit(7)\ndist.barrier()", within=2)
    assert "rank 2 of 3 left with exit code 7 without returning" in report


@pytest.mark.parametrize("name", ["SIGKILL", "SIGTERM"])
def test_killed(kernel, name):
    report = fails(kernel, f"if rank == 1: os.kill(os.getpid(), signal.{name})\ndist.barrier()", within=2)
    assert f"rank 1 of 3 was killed by {name}" in report
    assert ("ran out of memory" in report) == (name == "SIGKILL")


def test_killed_by_a_signal_without_a_name(kernel):
    report = fails(kernel, "if rank == 1: os.kill(os.getpid(), signal.SIGRTMIN + 2)\ndist.barrier()", within=2)
    assert f"rank 1 of 3 was killed by signal {signal.SIGRTMIN + 2}" in report


def test_crash_in_c_code(kernel):
    report = fails(kernel, "import ctypes\nif rank == 1: ctypes.string_at(0)\ndist.barrier()", within=2)
    assert "rank 1 of 3 was killed by SIGSEGV" in report
    assert "Segmentation fault" in report  # what the rank wrote
    assert re.search(r"File Cell In\[\d+\], line 4 in work", report)


def test_abort(kernel):
    report = fails(kernel, "if rank == 1: print('last words', file=sys.stderr); os.abort()\ndist.barrier()", within=2)
    assert "rank 1 of 3 was killed by SIGABRT" in report
    assert "last words" in report


def test_collective_that_a_rank_skips(kernel):
    report = fails(kernel, "if rank != 1: dist.all_reduce(torch.ones(3, 4))\nelse: dist.barrier()", within=5)
    assert report.startswith("Deadlock: no rank can go on.")
    assert "all_reduce number 1 (float [3, 4]) of the world [0, 1, 2]: ranks 0, 2 wait; rank 1 never came" in report
    assert "barrier number 1 of the world [0, 1, 2]: rank 1 waits; ranks 0, 2 never came" in report
    assert "Different operations meet" in report
    assert re.search(
        r"rank 1: waits in barrier number 1 .* at Cell In\[\d+\], line 4, in work:  else: dist.barrier", report
    )


def test_collective_that_a_rank_of_a_subgroup_skips(kernel):
    body = "pair = dist.new_group([0, 2], group_desc='the outer ranks')\n"
    report = fails(
        kernel, body + "if rank == 0: dist.all_reduce(torch.ones(5), group=pair)\nelse: dist.barrier()", within=5
    )
    assert "all_reduce number 1 (float [5]) of the outer ranks [0, 2]: rank 0 waits; rank 2 never came" in report
    assert "barrier number 1 of the world [0, 1, 2]: ranks 1, 2 wait; rank 0 never came" in report


def test_rank_that_returned_while_others_wait(kernel):
    report = fails(kernel, "if rank: dist.all_reduce(torch.ones(2))", within=5)
    assert "ranks 1, 2 wait; rank 0 has returned without it" in report
    assert "rank 0: has returned" in report


def test_asynchronous_collective_that_nobody_joins(kernel):
    report = fails(kernel, "if rank == 0: dist.all_reduce(torch.ones(2), async_op=True).wait()", within=5)
    assert "rank 0 waits; ranks 1, 2 have returned without it" in report


@pytest.mark.parametrize("call", ["dist.recv(torch.ones(2, 3), 1)", "dist.irecv(torch.ones(2, 3), 1).wait()"])
def test_receive_without_send(kernel, call):
    report = fails(kernel, f"if rank == 0: {call}", within=5)
    assert "Deadlock" in report
    assert "rank 0: waits in recv from rank 1 (float32 [2, 3]), at Cell In" in report


def test_receives_that_wait_for_each_other(kernel):
    report = fails(kernel, "x = torch.ones(2)\ndist.recv(x, 1 - rank)\ndist.send(x, 1 - rank)", within=5, world_size=2)
    assert "rank 0: waits in recv from rank 1" in report
    assert "rank 1: waits in recv from rank 0" in report


def test_receive_with_another_tag(kernel):
    body = "x = torch.ones(2)\nif rank == 0: dist.send(x, 1, tag=3); dist.recv(x, 1)\nelse: dist.recv(x, 0, tag=4)"
    report = fails(kernel, body, within=5, world_size=2)
    assert "rank 1: waits in recv from rank 0" in report


def test_send_to_a_rank_that_does_not_exist(kernel):
    report = fails(kernel, "if rank == 1: dist.send(torch.ones(2), rank + 1)", within=2, world_size=2)
    assert "rank 1 of 2 raised ValueError: dst=2 is not a rank: ranks run from 0 to 1; in a ring use % 2" in report
    assert "line 3, in work:  if rank == 1: dist.send" in report


def test_groups_made_in_different_order(kernel):
    body = "orders = [[0, 1], [1, 2]]\nif rank == 1: orders.reverse()\nfor ranks in orders: dist.new_group(ranks)\n"
    report = fails(kernel, body + "dist.barrier()", within=5)
    assert "Deadlock" in report
    assert "new_group of ranks [0, 1]" in report
    assert "new_group of ranks [1, 2]" in report


@pytest.mark.parametrize(
    ("mine", "theirs"),
    [
        ("dist.all_reduce(torch.ones(3))", "dist.all_reduce(torch.ones(4))"),
        ("dist.all_reduce(torch.ones(3))", "dist.all_reduce(torch.ones(3, dtype=torch.float64))"),
        ("dist.all_reduce(torch.ones(3))", "dist.broadcast(torch.ones(3), 0)"),
    ],
    ids=["shapes", "dtypes", "operations"],
)
def test_disagreement_under_strict(kernel, mine, theirs):
    report = fails(kernel, f"if rank == 1: {theirs}\nelse: {mine}", within=5, world_size=2, options=", strict=True")
    assert "Detected mismatch between collectives on ranks" in report
    assert report.count("SequenceNumber=") >= 2  # both sides


def test_shapes_that_differ_without_strict(kernel):
    report = fails(kernel, "dist.all_reduce(torch.ones(3 + 1000 * rank))", within=5, world_size=2)
    assert "strict=True" in report


def test_slow_rank_is_left_alone(kernel):
    body = "    if dist.get_rank() == 1:\n        end = time.time() + 7\n        while time.time() < end: pass\n"
    ran = kernel.run(f"def work():\n{body}    dist.barrier()\n    return 1\nprint(launch(work, world_size=2))")
    assert ran.stdout.endswith("[1, 1]\n"), ran
    assert "some ranks wait for others" in ran.stderr
    assert re.search(r"rank 0: waits in barrier number 1", ran.stderr)
    assert re.search(r"rank 1: runs at Cell In\[\d+\], line 4, in work:  while time.time\(\) < end: pass", ran.stderr)


def test_rank_that_holds_the_gil_is_left_alone(kernel):
    body = "    if dist.get_rank() == 1:\n        ctypes.PyDLL(None).system(b'sleep 8')\n"  # keeps the GIL
    cell = f"import ctypes\ndef work():\n{body}    dist.barrier()\n    return 1\nprint(launch(work, world_size=2))"
    ran = kernel.run(cell)
    assert ran.stdout.endswith("[1, 1]\n"), ran
    assert re.search(
        r"rank 1: runs C code that holds the GIL, at Cell In\[\d+\], line 4, in work:  ctypes.PyDLL", ran.stderr
    ), ran


def test_interrupt(kernel):
    cell = "def work():\n    if dist.get_rank(): dist.barrier()\n    time.sleep(60)\nlaunch(work, world_size=3)"
    message_id = kernel.start(cell)
    assert wait_until(lambda: len(children(kernel_server(kernel))) == 3, 5)
    time.sleep(0.5)
    kernel.manager.interrupt_kernel()
    ran = kernel.finish(message_id)
    assert ran.seconds < 2
    assert ran.error_name == "KeyboardInterrupt"
    assert re.search(r"rank 0: runs at Cell In\[\d+\], line 3, in work:  time.sleep\(60\)", ran.error), ran
    assert re.search(r"rank 2: waits in barrier number 1", ran.error)


def kernel_server(kernel: Kernel) -> int:
    """The server's pid, without asking the (busy) kernel."""
    for child in children(kernel.pid):
        with open(f"/proc/{child}/cmdline") as file:
            if "labkit.launch.server" in file.read():
                return child
    raise AssertionError("the kernel has no server")


SLEEP_SECONDS = 100_000 + os.getpid()  # known by it, also when two runs of these tests meet on a machine
LEAVES_PROCESSES = """
import subprocess
def work():
    subprocess.Popen(["sleep", "{seconds}"])
    subprocess.Popen(["setsid", "sleep", "{seconds}"])
    subprocess.run(["sh", "-c", "setsid sh -c 'sleep {seconds} & sleep {seconds}' & exit"])
    {then}
launch(work, world_size=2)
"""


def sleepers() -> int:
    return sum(f"sleep\x00{SLEEP_SECONDS}" in _command(pid) for pid in os.listdir("/proc") if pid.isdigit())


def _command(pid: str) -> str:
    try:
        with open(f"/proc/{pid}/cmdline") as file:
            return file.read()
    except OSError:
        return ""


@pytest.mark.parametrize("then", ["pass", "os.kill(os.getpid(), 9)"])
def test_what_a_rank_started_ends_with_it(kernel, then):
    kernel.run(LEAVES_PROCESSES.format(seconds=SLEEP_SECONDS, then=then))
    assert wait_until(lambda: sleepers() == 0, 2)


def test_what_a_rank_started_outlives_no_world_though_another_lives(kernel):
    kernel.run("other = World(2)")
    kernel.run(LEAVES_PROCESSES.format(seconds=SLEEP_SECONDS, then="pass"))
    assert wait_until(lambda: sleepers() == 0, 2)
    assert "[0, 1]" in kernel.run("print(other.run(dist.get_rank)); other.close()").stdout


@pytest.mark.parametrize("how", ["killed", "restarted"])
def test_kernel_is_gone(tmp_path, how):
    kernel = Kernel(tmp_path)
    kernel.start(LEAVES_PROCESSES.format(seconds=SLEEP_SECONDS, then="time.sleep(100)"))
    assert wait_until(lambda: sleepers() == 8, 20)
    server = kernel_server(kernel)
    ranks, directory = children(server), _command(str(server)).split("\0")[-2]
    assert os.listdir(directory)
    if how == "killed":
        os.kill(kernel.pid, signal.SIGKILL)
    else:
        kernel.manager.restart_kernel(now=True)
    assert wait_until(lambda: not any(map(is_alive, [server, *ranks])) and sleepers() == 0, 2)
    assert wait_until(lambda: not os.path.exists(directory), 2)
    kernel.close()


def test_server_is_killed(kernel, tmp_path):
    message_id = kernel.start(
        f"launch(lambda: (os.mkdir(f'{tmp_path}/{{os.getpid()}}'), time.sleep(60)), world_size=2)"
    )
    server = kernel_server(kernel)
    assert wait_until(lambda: len(os.listdir(tmp_path)) == 2, 5)
    ranks = children(server)
    os.kill(server, signal.SIGKILL)
    ran = kernel.finish(message_id)
    assert ran.seconds < 2
    assert ran.error == (
        "RankFailed: the launch server was killed, and its ranks with it: run the cell again to start a new one"
    )
    assert wait_until(lambda: not any(map(is_alive, ranks)), 1)
    again = kernel.run(HELLO)
    assert "Starting the launcher" in again.stdout and "[0, 1]" in again.stdout


def test_two_notebooks_at_once(kernel, tmp_path):
    other = Kernel(tmp_path)
    try:
        messages = [one.start("print(launch(lambda: os.getppid(), world_size=4))") for one in (kernel, other)]
        mine, theirs = (one.finish(message) for one, message in zip((kernel, other), messages))
        servers = [set(eval(ran.stdout.splitlines()[-1])) for ran in (mine, theirs)]
        assert len(servers[0]) == len(servers[1]) == 1
        assert servers[0] != servers[1]
    finally:
        other.close()


def test_a_million_lines(kernel):
    ran = kernel.run("def work():\n    for i in range(10**6): print('line', i)\nlaunch(work, world_size=2)", timeout=60)
    lines = ran.stdout.splitlines()
    assert len(lines) < 3000
    assert lines[0] == "[rank 0] line 0" and lines[-1] == "[rank 1] line 999999"
    assert any("999,000 lines left out" in line for line in lines)


def test_interrupt_while_ranks_print_without_end(kernel):
    message_id = kernel.start("def work():\n    while True: print('more')\nlaunch(work, world_size=2)")
    assert wait_until(lambda: len(children(kernel_server(kernel))) == 2, 5)
    time.sleep(1)
    kernel.manager.interrupt_kernel()
    ran = kernel.finish(message_id)
    assert ran.error_name == "KeyboardInterrupt"
    assert ran.seconds < 2


def test_a_line_without_end(kernel):
    ran = kernel.run("launch(lambda: print('x' * 50_000_000), world_size=1)")
    assert len(ran.stdout) < 500_000
    assert "more characters" in ran.stdout


def test_result_that_cannot_be_pickled(kernel):
    report = fails(kernel, "import threading\nreturn threading.Lock()", within=2)
    assert "the result, of type lock, cannot be sent back" in report


def test_launch_inside_a_rank(kernel):
    report = fails(kernel, "launch(print, world_size=2)", within=3)
    assert "launch was called on a rank" in report


def test_dead_world(kernel):
    kernel.run("world = World(2)\ndef bad(): raise ValueError('no')")
    assert "ValueError: no" in kernel.run("world.run(bad)").error
    assert "this world has ended (RankFailed in an earlier call): make a new one" in kernel.run("world.run(bad)").error
    kernel.run("world.close(); del world")


def test_rank_that_dies_between_two_calls(kernel):
    kernel.run("world = World(2); pids = world.run(os.getpid); os.kill(pids[1], signal.SIGKILL); time.sleep(.2)")
    assert "rank 1 of 2 was killed by SIGKILL" in kernel.run("world.run(os.getpid)").error


def test_world_that_nobody_closed(kernel):
    kernel.run("world = World(2); world.run(os.getpid)")
    kernel.run("del world; import gc; gc.collect()")
