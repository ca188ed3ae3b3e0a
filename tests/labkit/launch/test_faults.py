"""Every fault that a learner can cause, made to happen in a real Jupyter kernel.

After each, nothing is left behind and the next launch works: see the `kernel` fixture. The times are
upper limits that users are promised, far above what is measured; they are not benchmarks.
"""

import os
import re
import signal
import time

import pytest

from tests.support.kernel import children, descriptors, is_alive, listening, wait_until
from tools.kernel import Kernel

pytestmark = pytest.mark.alone

QUICK = "watchdog._QUIET_SECONDS = 0.5"  # so that thirty deadlocks take no minute
HELLO = "print(launch(lambda: dist.get_rank(), world_size=2))"


@pytest.fixture(scope="module")
def one_kernel(tmp_path_factory):
    kernel = Kernel(tmp_path_factory.mktemp("kernel"))
    assert "[0, 1]" in kernel.run(HELLO).stdout
    kernel.run("import os\nos.environ.pop('LABKIT_NO_NOTES', None)")  # `make test` sets it
    kernel.run(f"from labkit.launch import watchdog\nown_pace = watchdog._QUIET_SECONDS\n{QUICK}")
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


WAITS = r"waits in barrier number 1 of the world \[0, 1, 2\], at this cell, line 4"
CANNOT_BE_SHOWN = "class Odd(Exception):\n    def __str__(self): 1 / 0\n"
ERRORS = {  # what a rank does: what the report says, within two seconds
    "if rank == 1: raise ValueError('a bad thing')\ndist.barrier()": [
        r"^RankFailed: rank 1 of 3 raised ValueError: a bad thing",
        r"at this cell, line 3, in work:  if rank == 1: raise ValueError",
        f"rank 0: {WAITS}",
        f"rank 2: {WAITS}",
    ],
    "torch.ones(2) @ torch.ones(3)": [
        "RuntimeError: inconsistent tensor size",
        r"line 3, in work:  torch.ones\(2\) @ torch.ones\(3\)\n  rank 1: the same\n  rank 2: the same",
    ],
    "if rank == 2: os._exit(7)\ndist.barrier()": ["rank 2 of 3 left with exit code 7 without returning"],
    "if rank == 1: os.kill(os.getpid(), signal.SIGKILL)\ndist.barrier()": [
        "rank 1 of 3 was killed by SIGKILL",
        "ran out of memory",
    ],
    "if rank == 1: os.kill(os.getpid(), signal.SIGRTMIN + 2)\ndist.barrier()": [
        f"rank 1 of 3 was killed by signal {signal.SIGRTMIN + 2}"
    ],
    "import ctypes\nif rank == 1: ctypes.string_at(0)\ndist.barrier()": [
        "rank 1 of 3 was killed by SIGSEGV",
        "Segmentation fault",  # what the rank wrote
        "File this cell, line 4 in work",
    ],
    "if rank == 1: print('last words', file=sys.stderr); os.abort()\ndist.barrier()": [
        "rank 1 of 3 was killed by SIGABRT",
        "last words",
    ],
    "if rank == 2: dist.send(torch.ones(2), rank + 1)": [
        "rank 2 of 3 raised ValueError: dst=3 is not a rank: ranks run from 0 to 2; in a ring use % 3",
        "line 3, in work:  if rank == 2: dist.send",
    ],
    "dist.isend(torch.ones(2), (rank + 1) % 3)\ndist.recv(torch.ones(2), (rank - 1) % 3)": [
        r"raised RuntimeError: the request of this isend to rank \d .* is lost: keep what it returns, and call",
        "at this cell, line 3, in work:  dist.isend",
    ],
    "import threading\nreturn threading.Lock()": ["the result, of type lock, cannot be sent back"],
    "try: 1 / 0\nexcept ZeroDivisionError as error: raise KeyError('k') from error": [
        "raised KeyError: 'k', from ZeroDivisionError: division by zero"
    ],
    "def deeper(n): return deeper(n + 1)\ndeeper(0)": [
        r"line 4, in work:  deeper\(0\)\n.*\n    \.\.\. \d+ calls more\n"
    ],
    f"{CANNOT_BE_SHOWN}raise Odd": [r"raised Odd: \(its text cannot be shown\)"],
    f"{CANNOT_BE_SHOWN}raise KeyError from Odd()": [r"raised KeyError: \(its text cannot be shown\)"],
    "raise ValueError('x' * 10**7)": ["raised ValueError: xxx"],
    "launch(print, world_size=2)": ["launch was called on a rank"],
}


@pytest.mark.parametrize("body", ERRORS)
def test_an_error_is_reported_at_once(kernel, body):
    report = fails(kernel, body, within=3 if body.startswith("launch") else 2)
    for pattern in ERRORS[body]:
        assert re.search(pattern, report), report
    assert "Traceback" not in report and "rank.py" not in report
    assert ("ran out of memory" in report) == ("SIGKILL" in body)
    assert len(report) < 6000


OUTER = "pair = dist.new_group([0, 2], group_desc='the outer ranks')\n"
ORDERS = "orders = [[0, 1], [1, 2]]\nif rank == 1: orders.reverse()\nfor ranks in orders: dist.new_group(ranks)\n"
DEADLOCKS = {
    "if rank != 1: dist.all_reduce(torch.ones(3, 4))\nelse: dist.barrier()": [
        r"all_reduce number 1 \(float \[3, 4\]\) of the world \[0, 1, 2\]: ranks 0, 2 wait; rank 1 never came",
        r"barrier number 1 of the world \[0, 1, 2\]: rank 1 waits; ranks 0, 2 never came",
        "Different operations meet",
        r"rank 1: waits in barrier number 1 .* at this cell, line 4, in work:  else: dist.barrier",
    ],
    f"{OUTER}if rank == 0: dist.all_reduce(torch.ones(5), group=pair)\nelse: dist.barrier()": [
        r"all_reduce number 1 \(float \[5\]\) of the outer ranks \[0, 2\]: rank 0 waits; rank 2 never came",
        r"barrier number 1 of the world \[0, 1, 2\]: ranks 1, 2 wait; rank 0 never came",
    ],
    "if rank == 0: dist.all_reduce(torch.ones(2), async_op=True).wait()": [
        "rank 0 waits; ranks 1, 2 have returned without it",
        "rank 1, 2: has returned",
    ],
    "if rank == 0: dist.irecv(torch.ones(2, 3), 1).wait()": [
        r"rank 0: waits in recv from rank 1 \(float32 \[2, 3\]\), at this cell"
    ],
    "x = torch.ones(2)\nif rank == 0: dist.send(x, 1, tag=3)\nif rank == 1: dist.recv(x, 0, tag=4)": [
        "rank 1: waits in recv from rank 0"
    ],
    "if rank == 1:\n    request = dist.isend(torch.ones(2), 0)\n    request.wait()": [
        r"rank 1: waits in send to rank 0 \(float32 \[2\]\), at this cell, line 5"
    ],
    f"{ORDERS}dist.barrier()": [r"new_group of ranks \[0, 1\]", r"new_group of ranks \[1, 2\]"],
}


@pytest.mark.parametrize("body", DEADLOCKS)
def test_a_deadlock_is_reported_with_who_waits_where(kernel, body):
    report = fails(kernel, body, within=5)
    assert report.startswith("Deadlock: no rank can go on.")
    for pattern in DEADLOCKS[body]:
        assert re.search(pattern, report), report


DIFFERENT_SHAPES = "dist.all_reduce(torch.ones(3 + 1000 * rank))"


def test_shapes_that_differ_are_named_under_strict(kernel):
    assert "strict=True" in fails(kernel, DIFFERENT_SHAPES, within=5, world_size=2)
    report = fails(kernel, DIFFERENT_SHAPES, within=5, world_size=2, options=", strict=True")
    assert "Detected mismatch between collectives on ranks" in report
    assert report.count("SequenceNumber=") >= 2  # both sides


def test_the_exception_itself_can_be_caught(kernel):
    ran = kernel.run(
        "def work(): raise KeyError('k')\n"
        "try: launch(work, world_size=2)\n"
        "except RuntimeError as error: print(repr(error.cause), 'work' in error.tracebacks[error.rank])"
    )
    assert ran.stdout == "KeyError('k') True\n"


def test_deadlock_is_reported_within_five_seconds(kernel):
    kernel.run("watchdog._QUIET_SECONDS = own_pace")
    assert "Deadlock" in fails(kernel, "if rank: dist.barrier()", within=5)
    kernel.run(QUICK)


WAITED_FOR = {  # work: results
    """import threading
def work():
    if dist.get_rank(): threading.Timer(4, dist.send, (torch.ones(1), 0)).start()  # a helper thread that will send
    else: dist.recv(torch.ones(1), 1)
    return 1
""": [1, 1],
    """import threading, queue
def work():
    x, fetched = torch.ones(1), queue.SimpleQueue()
    work = dist.all_reduce(x, async_op=True)
    if dist.get_rank():
        threading.Timer(4, fetched.put, (1,)).start()  # a helper thread that fills a queue
        fetched.get()
    work.wait()
    dist.barrier()
    return x.item()
""": [2.0, 2.0],
    """import threading, psutil
def work():
    if dist.get_rank():
        helper = threading.Thread(target=psutil.Popen(["sleep", "4"]).wait)  # no line of the learner's in it
        helper.start()
        helper.join()
    dist.barrier()
    return 1
""": [1, 1],
    """import datetime
def work():
    four, ends = datetime.timedelta(seconds=4), 0  # time-outs of the learner's own
    for wait in (lambda: dist.irecv(torch.ones(1), 1 - dist.get_rank()).wait(four),
                 lambda: dist.get_rank() or dist.monitored_barrier(timeout=four)):
        try: wait()
        except RuntimeError: ends += 1
    return ends
""": [2, 1],
}


@pytest.mark.parametrize("work", WAITED_FOR, ids=["a helper that sends", "a queue", "a library's thread", "time-outs"])
def test_a_wait_that_will_end_is_left_alone(kernel, work):
    ran = kernel.run(f"{work}print(launch(work, world_size=2))")
    assert ran.stdout.endswith(f"{WAITED_FOR[work]}\n"), ran


SLOW = {  # what keeps rank 1 for seven seconds: where a note finds it
    "ends = []\nsignal.signal(signal.SIGALRM, lambda *_: ends.append(1))\nsignal.alarm(7)\nwhile not ends: pass": (
        "rank 1: runs at this cell, line 8, in work:  while not ends: pass"
    ),
    "ctypes.PyDLL(None).usleep(7_000_000)": (  # which keeps the GIL
        "rank 1: holds the GIL in C code, or waits for a core, at this cell, line 5, in work:  ctypes.PyDLL"
    ),
}


@pytest.mark.parametrize("keeps", SLOW, ids=["a loop that calls nothing", "C code that keeps the GIL"])
def test_a_slow_rank_is_left_alone_and_noted(kernel, keeps):
    """So are signals of the learner's own: Slurm sends SIGUSR1 before it takes a node away."""
    body = "signal.signal(signal.SIGUSR1, lambda *_: print('mine'))\nif dist.get_rank():\n"
    body += "".join(f"    {line}\n" for line in keeps.split("\n")) + "dist.barrier()\nreturn 1\n"
    function = "def work():\n" + "".join(f"    {line}\n" for line in body.splitlines())
    ran = kernel.run(f"import ctypes\n{function}print(launch(work, world_size=2))")
    assert ran.stdout.endswith("[1, 1]\n") and "mine" not in ran.stdout and not ran.stderr, ran
    assert "nothing is wrong yet" in ran.notes
    assert "rank 0: waits in barrier number 1" in ran.notes
    assert SLOW[keeps] in ran.notes, ran


def test_request_that_is_kept_from_call_to_call_is_not_lost(kernel):
    kernel.run("def begin(): dist.kept = dist.isend(torch.ones(2), 1 - dist.get_rank())")
    kernel.run("def end(): dist.recv(torch.ones(2), 1 - dist.get_rank()); dist.kept.wait(); return 'sent'")
    assert "['sent', 'sent']" in kernel.run("with World(2) as w: w.run(begin); print(w.run(end))").stdout


def test_process_that_a_rank_forks_does_not_answer_for_it(kernel):
    """A child that returns like the rank does would be heard twice: its result would be that of the next call."""
    kernel.run("def forks(): return 'rank' if os.fork() else 'child'\ndef raises(): 1 / (0 if os.fork() == 0 else 1)")
    cell = "with World(2) as w: print(w.run(forks), w.run(raises), w.run(dist.get_rank))"
    assert "['rank', 'rank'] [None, None] [0, 1]" in kernel.run(cell).stdout


def test_interrupt(kernel):
    cell = "def work():\n    if dist.get_rank(): dist.barrier()\n    time.sleep(60)\nlaunch(work, world_size=3)"
    message_id = kernel.start(cell)
    assert wait_until(lambda: len(children(kernel_server(kernel))) == 3, 5)
    time.sleep(0.5)
    kernel.manager.interrupt_kernel()
    ran = kernel.finish(message_id)
    assert ran.seconds < 2
    assert ran.error_name == "KeyboardInterrupt"
    assert re.search(r"rank 0: runs at this cell, line 3, in work:  time.sleep\(60\)", ran.error), ran
    assert re.search(r"rank 1, 2: waits in barrier number 1", ran.error)


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


def test_two_notebooks_at_once_and_then_one_kernel_is_killed(kernel, tmp_path):
    """As Jupyter kills it when it is restarted."""
    other = Kernel(tmp_path)
    try:
        messages = [one.start("print(launch(lambda: os.getppid(), world_size=4))") for one in (kernel, other)]
        rank_0, rank_1 = (one.finish(message) for one, message in zip((kernel, other), messages))
        servers = [set(eval(ran.stdout.splitlines()[-1])) for ran in (rank_0, rank_1)]
        assert len(servers[0]) == len(servers[1]) == 1
        assert servers[0] != servers[1]
        other.start(LEAVES_PROCESSES.format(seconds=SLEEP_SECONDS, then="time.sleep(100)"))
        assert wait_until(lambda: sleepers() == 8, 20)
        server = kernel_server(other)
        ranks, directory = children(server), _command(str(server)).split("\0")[-2]
        assert os.listdir(directory)
        os.kill(other.pid, signal.SIGKILL)
        assert wait_until(lambda: not any(map(is_alive, [server, *ranks])) and sleepers() == 0, 2)
        assert wait_until(lambda: not os.path.exists(directory), 2)
    finally:
        other.close()


def test_server_is_killed(kernel, tmp_path):
    message_id = kernel.start(
        "import subprocess\ndef work():\n"
        f"    subprocess.Popen(['setsid', 'sleep', '{SLEEP_SECONDS}']); os.mkdir(f'{tmp_path}/{{os.getpid()}}')\n"
        "    time.sleep(60)\nlaunch(work, world_size=2)"
    )
    server = kernel_server(kernel)
    assert wait_until(lambda: len(os.listdir(tmp_path)) == 2, 5)
    ranks = children(server)
    os.kill(server, signal.SIGKILL)
    ran = kernel.finish(message_id)
    assert ran.seconds < 2
    assert ran.error == ("RankFailed: the launch server was killed, and its ranks with it: run the cell again")
    assert wait_until(lambda: not any(map(is_alive, ranks)) and sleepers() == 0, 1)
    again = kernel.run(HELLO)
    assert "Starting the launcher" in again.stdout and "[0, 1]" in again.stdout


@pytest.mark.parametrize("moment", ["Server.__init__", "Server.gpu_count", "Ranks.__init__", "Ranks.end"])
def test_interrupt_while_a_world_starts_or_ends(kernel, moment):
    kernel.run(f"""
from labkit.launch.client import ServerHandle as Server, current_server
from labkit.launch.ranks import Ranks
method = {moment}
def pressed(*args, **kwargs):
    signal.raise_signal(signal.SIGINT)
    return method(*args, **kwargs)
{moment} = pressed
if {moment == "Server.__init__"}:
    current_server().close()
""")
    ran = kernel.run("launch(os.getpid, world_size=2)")
    kernel.run(f"{moment} = method")
    assert (ran.error_name, ran.error) == ("KeyboardInterrupt", "KeyboardInterrupt: Stopped.")


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


def test_dead_world(kernel):
    kernel.run("world = World(2)\ndef bad():\n    dist.get_rank() or os._exit(3)\n    dist.barrier()")
    assert "left with exit code 3" in kernel.run("world.run(bad)").error
    assert "this world has ended (RankFailed in an earlier call): make a new one" in kernel.run("world.run(bad)").error
    kernel.run("world.close(); del world")


def test_rank_that_dies_between_two_calls(kernel):
    kernel.run("world = World(2); pids = world.run(os.getpid); os.kill(pids[1], signal.SIGKILL); time.sleep(.2)")
    assert "rank 1 of 2 was killed by SIGKILL" in kernel.run("world.run(os.getpid)").error


def test_world_that_nobody_closed(kernel):
    kernel.run("world = World(2); world.run(os.getpid)")
    kernel.run("del world; import gc; gc.collect()")
