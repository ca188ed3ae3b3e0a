"""What a rank finds when it runs the learner's function, and how results leave it."""

import os
import shutil
import subprocess
import sys
import time

import pytest
import torch
import torch.distributed as dist

import labkit
from labkit.launch import World, launch, linux, progress
from labkit.launch.rank import _apply_environment, describe_error
from labkit.launch.server import Server
from tests.labkit.launch.test_world import sum_of_ranks


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

        return edited.value

    for value in ("before", "after"):
        (tmp_path / "edited.py").write_text(f"value = {value!r}\n")
        assert launch(look, world_size=1) == [value]


def test_ranks_find_imported_what_the_kernel_has_of_labkit():
    here = {name for name in sys.modules if name.startswith("labkit.")}
    assert here <= launch(lambda: set(sys.modules), world_size=1)[0]


def test_edits_of_labkit_reach_the_next_launch(tmp_path, monkeypatch):
    monkeypatch.setattr(labkit, "__path__", [str(tmp_path)])
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    server = Server(None, os.getpid())  # pyright: ignore[reportArgumentType] - nobody asks this one
    for number, value in enumerate(("before", "after, and longer", None, "mended")):
        file = tmp_path / "edited.py"
        file.write_text("this is not Python" if value is None else f"value = {value!r}\n")
        os.utime(file, ns=(0, number))
        server._import_of_labkit({"labkit.edited"})
        assert getattr(sys.modules.get("labkit.edited"), "value", None) == value
        assert getattr(getattr(labkit, "edited", None), "value", None) == value
    del sys.modules["labkit.edited"], vars(labkit)["edited"]


def test_an_error_is_as_old_as_its_report_and_not_as_its_pickled_form():
    class Slow(ValueError):
        def __reduce__(self):
            time.sleep(0.2)
            return ValueError, ()

    before = time.monotonic()
    assert describe_error(Slow()).seconds < before + 0.2 <= time.monotonic()


def test_torchrun_environment():
    names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE")
    assert launch(lambda: [int(os.environ[name]) for name in names], world_size=2) == [[0, 0, 2, 2], [1, 1, 2, 2]]


def test_threads_are_divided_among_ranks():
    cores = len(os.sched_getaffinity(0))
    assert launch(torch.get_num_threads, world_size=cores) == [1] * cores
    assert launch(torch.get_num_threads, world_size=1) == [cores]


def test_threads_of_gloo_take_turns():
    def policies():
        dist.barrier()
        gloo = [task for task in linux.tasks() if "gloo" in linux.name(task)]
        return {os.sched_getscheduler(task) for task in gloo}

    assert launch(policies, world_size=2) == [{os.SCHED_BATCH}] * 2


def test_ranks_on_cores_see_no_gpu_and_ranks_on_gpus_have_defaults_that_a_user_can_change(monkeypatch):
    """A save or a first backward would make a context on the first GPU in every rank of gloo's."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    assert launch(lambda: os.environ["CUDA_VISIBLE_DEVICES"], world_size=1) == [""]
    monkeypatch.setattr(os, "environ", {})
    settings = {"rank": 0, "world_size": 1, "directory": "", "backend": "nccl"}
    _apply_environment({"NCCL_NVLS_ENABLE": "1", "CUDA_VISIBLE_DEVICES": "0,1"}, settings)
    assert (os.environ["CUDA_VISIBLE_DEVICES"], os.environ["NCCL_NVLS_ENABLE"]) == ("0,1", "1")
    assert os.environ["TORCH_NCCL_DUMP_ON_TIMEOUT"] == "0"


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


@pytest.mark.skipif(shutil.which("ss") is None, reason="needs ss, of Debian's package iproute2")
def test_ranks_listen_on_loopback_only():
    listening = launch(_listening, world_size=4)
    assert all(any(address.startswith("127.0.0.1:") for address in addresses) for addresses in listening)
    assert all(address.startswith("127.0.0.1:") for addresses in listening for address in addresses)


def _listening() -> list[str]:
    """The addresses that this rank listens on, as `ss` sees them."""
    dist.barrier()
    lines = subprocess.run(["ss", "-tulnpH"], capture_output=True, text=True, check=True).stdout.splitlines()
    local = [line.split()[4] for line in lines if f"pid={os.getpid()}," in line]
    dist.barrier()
    return local


def test_a_tensor_on_a_gpu_comes_back_on_the_cpu():
    class OnAGpu(torch.Tensor):
        is_cuda = True

        def cpu(self):
            return torch.arange(3)

    [back] = launch(lambda: {"found": [torch.zeros(3).as_subclass(OnAGpu)]}, world_size=1)
    assert type(back["found"][0]) is torch.Tensor and back["found"][0].tolist() == [0, 1, 2]
