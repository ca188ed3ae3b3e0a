"""The monitor shows what nvidia-smi printed, or that there is none."""

import time

from course.measure.utilisation import GpuMonitor
from course.measure.utilisation.monitor import read_samples


def test_a_monitor_without_gpus_says_so(monkeypatch):
    monkeypatch.setenv("PATH", "")
    with GpuMonitor() as monitor:
        pass
    assert "no GPU" in str(monitor)


def test_a_monitor_shows_what_nvidia_smi_printed(monkeypatch, tmp_path):
    script = tmp_path / "nvidia-smi"
    script.write_text("#!/bin/sh\ntrap '' TERM\nwhile true; do echo '0, 89'; echo '1, 6'; /bin/sleep 0.05; done\n")
    script.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/bin:/usr/bin")
    with GpuMonitor() as monitor:
        time.sleep(0.5)
    assert set(monitor.samples) == {0, 1}
    assert str(monitor).splitlines()[2].split()[:4] == ["1", "6", "6", "6"]
    assert read_samples("0, 5\n0, 9") == {0: [5]}  # the last line may be cut off
