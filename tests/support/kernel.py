"""A real Jupyter kernel for tests: run cells, interrupt it, kill it, and see what it left behind."""

import contextlib
import os
import queue
import re
import time
from dataclasses import dataclass, field

from jupyter_client.manager import start_new_kernel


@dataclass
class Ran:
    """What one cell did."""

    stdout: str = ""
    stderr: str = ""
    error: str = ""  # the traceback as the learner reads it, without colours
    error_name: str = ""
    seconds: float = 0.0
    shown: list[dict] = field(default_factory=list)  # more than text, by kind
    notes: str = ""  # what stood in the cell for a while


class Kernel:
    def __init__(self, directory):
        self.manager, self.client = start_new_kernel(kernel_name="python3", cwd=str(directory))
        self.run("from labkit.launch import launch, World, progress\nimport os, time, signal, sys")
        self.run("import torch, torch.distributed as dist")

    @property
    def pid(self) -> int:
        return self.manager.provisioner.process.pid

    def start(self, code: str, cell: str | None = None) -> str:
        """Send a cell; ``cell`` is its id, which JupyterLab sends too."""
        message = self.client.session.msg("execute_request", {"code": code}, metadata={"cellId": cell} if cell else {})
        self.client.shell_channel.send(message)
        return message["header"]["msg_id"]

    def finish(self, message_id: str, timeout: float = 90.0) -> Ran:
        ran, start = Ran(), time.monotonic()
        while True:
            left = start + timeout - time.monotonic()
            try:
                message = self.client.get_iopub_msg(timeout=max(0.01, left))
            except queue.Empty:
                raise AssertionError(f"the cell did not finish within {timeout} s; so far: {ran}") from None
            if message["parent_header"].get("msg_id") != message_id:
                continue
            content = message["content"]
            match message["msg_type"]:
                case "stream":
                    setattr(ran, content["name"], getattr(ran, content["name"]) + content["text"])
                case "display_data" if content["data"]:
                    ran.shown.append(content["data"])
                case "update_display_data":
                    ran.notes += content["data"].get("text/plain", "")
                case "error":
                    ran.error = re.sub(r"\x1b\[[0-9;]*m", "", "\n".join(content["traceback"]))
                    ran.error_name = content["ename"]
                case "status" if content["execution_state"] == "idle":
                    ran.seconds = time.monotonic() - start
                    return ran

    def run(self, code: str, timeout: float = 90.0, cell: str | None = None) -> Ran:
        """Run a cell to its end."""
        return self.finish(self.start(code, cell), timeout)

    def value(self, expression: str):
        """The value of an expression, through its repr."""
        return eval(self.run(f"print(repr({expression}))").stdout)

    def server_pid(self) -> int:
        return self.value("__import__('labkit.launch.client').launch.client._server.pid")

    def close(self) -> None:
        self.client.stop_channels()
        self.manager.shutdown_kernel(now=True)


def children(pid: int) -> list[int]:
    try:
        with open(f"/proc/{pid}/task/{pid}/children") as file:
            return [int(child) for child in file.read().split()]
    except OSError:
        return []


def descriptors(pid: int) -> dict[str, int]:
    """The open descriptors of a process by kind, without those of Jupyter: its TCP sockets and its history file."""
    with open("/proc/net/unix") as file:
        unix = {f"socket:[{line.split()[6]}]" for line in file.read().splitlines()[1:]}
    links = _links(pid)
    return {
        "pipes": sum(link.startswith("pipe:") for link in links),
        "sockets": sum(link in unix for link in links),
        "files": sum("labkit" in link for link in links),
    }


def listening(*pids: int) -> set[str]:
    """The addresses, in hexadecimal, that these processes listen on."""
    links = {link for pid in pids for link in _links(pid)}
    addresses = set()
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        with contextlib.suppress(OSError), open(table) as file:
            for fields in map(str.split, file.read().splitlines()[1:]):
                if fields[3] == "0A" and f"socket:[{fields[9]}]" in links:
                    addresses.add(fields[1])
    return addresses


def _links(pid: int) -> list[str]:
    """What each open descriptor of a process leads to."""
    links = []
    for descriptor in os.listdir(f"/proc/{pid}/fd"):
        with contextlib.suppress(OSError):
            links.append(os.readlink(f"/proc/{pid}/fd/{descriptor}"))
    return links


def is_alive(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def wait_until(condition, seconds: float) -> bool:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if condition():
            return True
        time.sleep(0.02)
    return bool(condition())
