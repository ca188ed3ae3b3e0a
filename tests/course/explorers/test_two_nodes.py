"""Two nodes: what their ranks print becomes curves, one dies, and nothing is left. (The notebook trains with them.)

A script that prints as `labkit.train` does stands for torchrun, which would take seconds to start.
"""

import os
import tempfile
import time
from pathlib import Path

import pytest

from course.explorers import two_nodes
from course.explorers.live_losses import LiveLosses
from course.explorers.two_nodes import TwoNodes

NODE = """
import os, subprocess, sys, time
from pathlib import Path

def lives(process):
    try:
        return ") Z " not in Path(f"/proc/{process}/stat").read_text()
    except OSError:
        return False

folder = Path(sys.argv[sys.argv.index("--checkpoint-dir") + 1])
rank = subprocess.Popen(["sleep", "100"])
(folder / str(os.getpid())).touch()
while len(nodes := sorted(int(path.name) for path in folder.iterdir())) < 2:
    time.sleep(0.01)
if os.getpid() == nodes[1]:
    rank.wait()
print("8 ranks (tp 2, pp 4, dp 1); gloo")
for step in range(1, 4):
    print(f"step {step}/5: loss {4 - step / 10:.4f}, 7 tokens/s", flush=True)
while lives(nodes[1]):
    time.sleep(0.01)
print("4 ranks (tp 2, pp 2, dp 1 instead of tp 2, pp 4); gloo")
for step in range(3, 6):
    print(f"step {step}/5: loss {4 - step / 10:.4f}, 7 tokens/s", flush=True)
rank.kill()
sys.exit(int(sys.argv[sys.argv.index("--seed") + 1]))
"""


@pytest.fixture
def processes(monkeypatch, tmp_path):
    """The ids of all processes that the nodes have started, known before they are killed."""
    found = []

    def noted(process, really=two_nodes._children):
        found.extend(children := really(process))
        return children

    monkeypatch.setattr(two_nodes, "START", NODE)
    monkeypatch.setattr(two_nodes, "_children", noted)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return found


def is_gone(process):
    for _ in range(200):
        try:
            if ") Z " in Path(f"/proc/{process}/stat").read_text():
                return True
        except OSError:
            return True
        time.sleep(0.01)
    return False


def test_a_node_dies_and_the_other_goes_on(processes, tmp_path, monkeypatch):
    drawn = []
    monkeypatch.setattr(LiveLosses, "add", lambda _, *curve: drawn.append(curve))
    run = TwoNodes("--steps 5 --seed 0", dies_after=3)
    assert run.exit_codes == [0, -9]
    assert run.said == ["8 ranks (tp 2, pp 4, dp 1)", "4 ranks (tp 2, pp 2, dp 1 instead of tp 2, pp 4)"]
    assert run.losses == [[(1, 3.9), (2, 3.8), (3, 3.7)], [(3, 3.7), (4, 3.6), (5, 3.5)]]
    assert drawn[3:] == [(run.said[1], 3.9, 3.8, 3.7), (run.said[1], 3.6), (run.said[1], 3.5)]
    assert repr(run) == "a run of steps 1 to 3 and 3 to 5"
    assert processes and all(map(is_gone, processes)) and not os.listdir(tmp_path)


def test_an_interrupted_cell_leaves_nothing(processes, tmp_path, monkeypatch):
    def interrupt(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(LiveLosses, "add", interrupt)
    with pytest.raises(KeyboardInterrupt):
        TwoNodes("--steps 5 --seed 0", dies_after=3)
    assert processes and all(map(is_gone, processes)) and not os.listdir(tmp_path)


def test_a_run_that_fails_shows_what_it_said(processes, tmp_path):
    with pytest.raises(RuntimeError, match=r"(?s)before its last step:.*step 5/5: loss 3.5"):
        TwoNodes("--steps 5 --seed 1", dies_after=3)
    assert not os.listdir(tmp_path)
