"""Two nodes: what their ranks print becomes curves, one dies, and nothing is left. (The notebook trains with them.)

A script that prints as `labtrain` does stands for torchrun, which would take seconds to start.
"""

import os
import tempfile
import time
from pathlib import Path

import pytest

from course.explorers import two_nodes
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


def test_a_node_dies_and_the_other_goes_on(processes, tmp_path):
    nodes = TwoNodes("--steps 5 --seed 0", dies_after=3)
    plot = nodes.finished()
    assert nodes.exit_codes == [0, -9]
    assert nodes.said == ["8 ranks (tp 2, pp 4, dp 1)", "4 ranks (tp 2, pp 2, dp 1 instead of tp 2, pp 4)"]
    assert nodes.losses == [[(1, 3.9), (2, 3.8), (3, 3.7)], [(3, 3.7), (4, 3.6), (5, 3.5)]]
    assert "dp 1): 3.90 to 3.70 at step 3. 4 ranks (tp 2, pp 2, dp 1 instead of tp 2, pp 4): 3.70 to 3.50" in plot.alt
    assert nodes.button.disabled and nodes.curves.value == plot.html()
    assert processes and all(map(is_gone, processes)) and not os.listdir(tmp_path)


def test_a_click_kills_the_second_node(processes):
    nodes = TwoNodes("--steps 5 --seed 0", dies_after=5)
    while len(nodes.losses) == 0 or len(nodes.losses[0]) < 3:
        time.sleep(0.01)
    nodes.button.click()
    nodes.finished()
    assert nodes.exit_codes == [0, -9] and len(nodes.said) == 2


def test_an_interrupted_cell_leaves_nothing(processes, tmp_path, monkeypatch):
    nodes = TwoNodes("--steps 5 --seed 0", dies_after=5)
    while not nodes.losses:
        time.sleep(0.01)
    join = nodes._thread.join

    def interrupted():
        monkeypatch.setattr(nodes._thread, "join", join)
        raise KeyboardInterrupt

    monkeypatch.setattr(nodes._thread, "join", interrupted)
    with pytest.raises(KeyboardInterrupt):
        nodes.finished()
    assert nodes.exit_codes == [-9, -9]
    assert processes and all(map(is_gone, processes)) and not os.listdir(tmp_path)


def test_a_cell_that_runs_again_ends_the_earlier_run(processes):
    first = TwoNodes("--steps 5 --seed 0", dies_after=5)
    second = TwoNodes("--steps 5 --seed 0", dies_after=3)
    assert set(first.exit_codes) == {-9}
    assert second.finished() and second.exit_codes == [0, -9]


def test_a_run_that_fails_shows_what_it_said(processes, tmp_path):
    with pytest.raises(RuntimeError, match=r"(?s)before its last step:.*step 5/5: loss 3.5"):
        TwoNodes("--steps 5 --seed 1", dies_after=3).finished()
    assert not os.listdir(tmp_path)
