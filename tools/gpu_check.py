"""Checks what of this lab works on this machine's GPUs, and writes a page and a JSON file about it.

    python tools/gpu_check.py

It runs from the repository, without an installation and without a network. It needs torch 2.11 or newer, numpy,
cloudpickle and tqdm. With one GPU it takes at most 8 minutes, with several at most 15. On a machine without a GPU it
runs on CPU ranks what can run there, and says which rows need a GPU.
"""

import argparse
import importlib
import json
import os
import platform
import select
import shutil
import signal
import subprocess
import sys
import time
import traceback
from dataclasses import asdict, dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT)] * (str(ROOT) not in sys.path)

BUDGET_SECONDS = {0: 480.0, 1: 480.0, 2: 900.0}
"""By the number of GPUs; more than two count as two."""
PASSED = "passed"
FAILED = "FAILED"
LEFT_OUT = "left out"
TAIL_CHARACTERS = 2000


@dataclass
class Line:
    """One line of the report."""

    name: str
    notebook: str
    cell: str
    verdict: str = LEFT_OUT
    measured: str = ""
    expected: str = ""
    seconds: float = 0.0
    error: str = ""


# --- a process that runs rows ---------------------------------------------------------------------------------------


def work(table: str, names: list[str], device: str, num_gpus: int, numbers_of_ranks: list[int], answers: int) -> None:
    """Run rows of a table one after the other, and write what each found.

    It ends after a row that fails: the next rows get a process without its marks.
    """
    import torch

    from tools.gpu_rows.row import LeftOut, Where

    torch.set_float32_matmul_precision("highest")  # NGC containers multiply with 10 bits
    all_rows = importlib.import_module(table).all_rows
    rows = {row.name: row for row in all_rows(num_gpus, tuple(numbers_of_ranks))}
    where = Where(device, num_gpus)

    def say(message: dict) -> None:
        os.write(answers, json.dumps(message).encode() + b"\n")

    say({"ready": True})
    for name in names:
        print(f"--- {name}", file=sys.stderr, flush=True)
        start = time.monotonic()
        said = {"verdict": PASSED}
        try:
            found = rows[name].check(where)
            said |= {"measured": found.measured, "expected": found.expected}
            if not found.is_right:
                said["verdict"] = FAILED
        except LeftOut as reason:
            said = {"verdict": LEFT_OUT, "error": str(reason)}
        except Exception as error:
            traceback.print_exc()
            said = {"verdict": FAILED, "error": f"{type(error).__name__}: {error}"}
        say(said | {"seconds": time.monotonic() - start})
        if said["verdict"] == FAILED:
            break
    where.close()


class Worker:
    """That process, as its parent sees it."""

    def __init__(self, names: list[str], asked: argparse.Namespace, log: Path):
        self.log = log
        self.answers, theirs = os.pipe()
        self.unread = b""
        task = [asked.table, names, asked.device, asked.num_gpus, asked.ranks, theirs]
        command = [sys.executable, __file__, "--work", json.dumps(task)]
        with open(log, "wb") as output:
            self.process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=output, stderr=output, cwd=ROOT, pass_fds=[theirs],
                start_new_session=True,
            )  # fmt: skip
        os.close(theirs)

    def answer(self, limit_seconds: float) -> dict | None:
        """Wait for what the next row found; return None if it has not come in time, or never will."""
        deadline = time.monotonic() + limit_seconds
        while b"\n" not in self.unread:
            left = deadline - time.monotonic()
            if left <= 0 or not select.select([self.answers], [], [], left)[0]:
                return None
            read = os.read(self.answers, 1 << 16)
            if not read:
                return None
            self.unread += read
        line, _, self.unread = self.unread.partition(b"\n")
        return json.loads(line)

    def status(self) -> int | None:
        """Return the exit status of the process; None if it runs."""
        try:
            return self.process.wait(timeout=1.0)
        except subprocess.TimeoutExpired:
            return None

    def end(self) -> None:
        """End the process and what it started."""
        self.status()  # if it has done everything, it leaves by itself
        try:
            os.killpg(self.process.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass
        self.process.wait()
        os.close(self.answers)

    def tail(self) -> str:
        return self.log.read_text(errors="replace")[-TAIL_CHARACTERS:].strip()


# --- the rows, one after the other ----------------------------------------------------------------------------------


def run_rows(rows: list, asked: argparse.Namespace, report: "Report") -> None:
    """Run all rows; none that fails, hangs or dies keeps the others from running."""
    deadline = time.monotonic() + asked.budget_seconds
    left = list(rows)
    while left:
        batch = [left[0]]
        if not left[0].is_alone:
            for row in left[1:]:
                if row.is_alone:
                    break
                batch.append(row)
        num_done = run_batch(batch, asked, report, deadline)
        left = left[num_done:]


def run_batch(batch: list, asked: argparse.Namespace, report: "Report", deadline: float) -> int:
    """Run rows in one process until one of them fails; return how many were run, or left out."""
    if time.monotonic() > deadline:
        for row in batch:
            reason = f"the {asked.budget_seconds:.0f} seconds of the whole check were over: --budget-seconds takes more"
            report.add(Line(row.name, row.notebook, row.cell, error=reason))
        return len(batch)
    worker = Worker([row.name for row in batch], asked, asked.folder / "log.txt")
    try:
        worker.answer(limit_seconds=120)  # it has imported torch
        for number, row in enumerate(batch):
            if time.monotonic() > deadline:
                return number
            line = run_row(row, worker, min(row.limit_seconds, deadline + 20 - time.monotonic()))
            report.add(line)
            if line.verdict == FAILED:
                return number + 1
        return len(batch)
    finally:
        worker.end()


def run_row(row, worker: Worker, limit_seconds: float) -> Line:
    line = Line(row.name, row.notebook, row.cell)
    start = time.monotonic()
    answer = worker.answer(limit_seconds)
    line.seconds = time.monotonic() - start
    if answer is not None:
        for name, value in answer.items():
            setattr(line, name, value)
        if line.verdict == FAILED and line.error:
            line.error += f"\n\n{worker.tail()}"
        return line
    line.verdict = FAILED
    status = worker.status()
    if status is None:
        line.error = f"no answer after {limit_seconds:.0f} seconds: its process was ended"
    else:
        line.error = f"its process ended with exit status {status}"
    line.error += f"\n\n{worker.tail()}"
    return line


# --- the report -----------------------------------------------------------------------------------------------------


class Report:
    """A page in Markdown and a JSON file, written anew after each row."""

    def __init__(self, folder: Path, machine: dict[str, str]):
        self.folder = folder
        self.machine = machine
        self.lines: list[Line] = []
        folder.mkdir(parents=True, exist_ok=True)

    def add(self, line: Line) -> None:
        self.lines.append(line)
        note = line.measured or line.error.partition("\n")[0]
        print(f"{line.verdict:<9} {line.seconds:6.1f} s  {line.name}: {note}", flush=True)
        self.write()

    def count(self, verdict: str) -> int:
        return sum(line.verdict == verdict for line in self.lines)

    def write(self) -> None:
        numbers = {verdict: self.count(verdict) for verdict in (PASSED, FAILED, LEFT_OUT)}
        content = {"machine": self.machine, "numbers": numbers, "rows": [asdict(line) for line in self.lines]}
        (self.folder / "report.json").write_text(json.dumps(content, indent=1) + "\n")
        (self.folder / "report.md").write_text(self.page(numbers))

    def page(self, numbers: dict[str, int]) -> str:
        parts = ["# GPU check", ", ".join(f"{number} {verdict}" for verdict, number in numbers.items()) + "."]
        facts = "\n".join(f"{name:<14} {value}" for name, value in self.machine.items())
        parts.append(f"```\n{facts}\n```")
        table = ["| row | stands for | verdict | measured | expected | seconds |", "|---|---|---|---|---|---|"]
        for line in self.lines:
            if line.verdict == LEFT_OUT:
                continue
            place = f"{line.notebook}, `{line.cell}`"
            measured = one_line(line.measured or line.error)
            table.append(
                f"| {line.name} | {place} | {line.verdict} | {measured} | {one_line(line.expected)} "
                f"| {line.seconds:.1f} |"
            )
        parts.append("\n".join(table))
        left_out = [line for line in self.lines if line.verdict == LEFT_OUT]
        if left_out:
            lines = [f"- {line.name} ({line.notebook}, `{line.cell}`): {line.error}" for line in left_out]
            parts.append("## Left out\n\n" + "\n".join(lines))
        for line in self.lines:
            if line.verdict == FAILED and line.error:
                parts.append(f"## {line.name}\n\n```\n{line.error}\n```")
        return "\n\n".join(parts) + "\n"


def one_line(text: str) -> str:
    return text.partition("\n")[0].replace("|", "\\|")


def look_at_machine(num_gpus: int) -> dict[str, str]:
    """Return what the page says of this machine; it does not name it."""
    from course.measure.environment import facts
    from course.measure.environment import look_at_machine as look

    found = [line.partition("  ") for line in facts(look()).splitlines()]
    import torch

    machine = {"ran on": f"{num_gpus} GPUs" if num_gpus else "the CPU only: this says nothing about GPUs"}
    machine |= {"Python": platform.python_version(), "CUDA": str(torch.version.cuda)}
    machine |= {name: value.strip() for name, _, value in found}
    commit = subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=False)
    machine["lab"] = commit.stdout.strip() or "no git here"
    if shutil.which("nvidia-smi"):
        driver = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
        said = subprocess.run(driver, capture_output=True, text=True, timeout=20, check=False)
        machine["driver"] = said.stdout.partition("\n")[0]
    return machine


def count_gpus() -> int:
    """Count the GPUs in a process of its own, so that this one holds none."""
    command = [sys.executable, "-c", "import torch; print(torch.cuda.device_count())"]
    said = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    if said.returncode:
        raise SystemExit(f"torch cannot be imported by {sys.executable}:\n{said.stderr[-TAIL_CHARACTERS:]}")
    return int(said.stdout.split()[-1])


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--work", help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, default=ROOT / "build/gpu_check", help="where the report goes")
    parser.add_argument("--device", choices=["cuda", "cpu"], help="by default the GPUs, if there are any")
    parser.add_argument("--ranks", type=int, nargs="+", help="numbers of ranks; by default 2 4 8, or one per GPU")
    parser.add_argument("--budget-seconds", type=float, help="after so many seconds the other rows are left out")
    parser.add_argument("--table", default="tools.gpu_rows.table", help=argparse.SUPPRESS)  # tests have one of faults
    parser.add_argument("--only", default="", help="run only rows whose name contains this")
    asked = parser.parse_args()
    if asked.work is None:
        asked.num_gpus = 0 if asked.device == "cpu" else count_gpus()
        if asked.device == "cuda" and not asked.num_gpus:
            parser.error("torch sees no GPU here: leave out --device, and the rows run on the CPU")
        if asked.ranks and not all(1 < number <= 64 for number in asked.ranks):
            parser.error(f"--ranks {asked.ranks} must be numbers from 2 to 64")
        asked.device = "cuda" if asked.num_gpus else "cpu"
        asked.ranks = asked.ranks or ([asked.num_gpus] if asked.num_gpus > 1 else [2, 4, 8])
        asked.budget_seconds = asked.budget_seconds or BUDGET_SECONDS[min(asked.num_gpus, 2)]
    return asked


def main() -> int:
    asked = options()
    if asked.work is not None:
        work(*json.loads(asked.work))
        return 0
    from tools.gpu_rows.row import A_GPU, SEVERAL_GPUS

    all_rows = importlib.import_module(asked.table).all_rows
    report = Report(asked.folder, look_at_machine(asked.num_gpus))
    there = {"": True, A_GPU: asked.num_gpus > 0, SEVERAL_GPUS: asked.num_gpus > 1}
    rows = [row for row in all_rows(asked.num_gpus, tuple(asked.ranks)) if asked.only in row.name]
    run_rows([row for row in rows if there[row.needs]], asked, report)
    for row in rows:
        if not there[row.needs]:
            report.add(Line(row.name, row.notebook, row.cell, error=f"it needs {row.needs}"))
    report.write()
    print(f"The report is in {asked.folder / 'report.md'}, and in report.json beside it.")
    return 1 if report.count(FAILED) else 0


if __name__ == "__main__":
    raise SystemExit(main())
