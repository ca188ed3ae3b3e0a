"""A job under torchrun: what it prints comes at once, and nothing is left of it, whatever it does.

That a script which fails is said to is shown in test_steps.py.
"""

import pytest

from course.project import torchrun
from tests.course.project.left import left

FORKS = """
import os, time
from pathlib import Path
if os.fork() == 0:
    os.setsid()
    Path("{pids}", str(os.getpid())).touch()
    time.sleep(600)
    os._exit(0)
while not list(Path("{pids}").iterdir()):
    time.sleep(0.01)
print("forked", flush=True)
"""


@pytest.fixture
def job(tmp_path, pids):
    def of(end):
        script = tmp_path / "script.py"
        script.write_text(FORKS.format(pids=pids) + end)
        return torchrun.torchrun(script, 2, {})

    return of


def test_a_script_that_ends_leaves_no_process(job, pids):
    assert "".join(job("")) == 2 * "forked\n"
    assert left(pids) == []


def test_a_reader_who_stops_ends_the_job(job, pids):
    texts = job("while True: pass")
    assert "forked" in next(text for text in texts if text)
    texts.close()
    assert left(pids) == []


def test_a_script_that_prints_for_ever_is_ended(job, pids):
    with pytest.raises(torchrun.Failed, match="printed more than 1,000,000 letters"):
        list(job("while True: print('x' * 1000)"))
    assert left(pids) == []


def test_a_job_that_takes_too_long_is_ended(job, monkeypatch):
    monkeypatch.setattr(torchrun, "MOST_SECONDS", 0.0)
    with pytest.raises(torchrun.Failed, match="took more than 0 seconds"):
        list(job("while True: pass"))
