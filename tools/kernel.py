"""Runs cells in a real Jupyter kernel, as JupyterLab does, and collects what they print, show and raise."""

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
