"""What travels between notebook and ranks: equal on arrival, shared in memory, the writer's own left alone."""

import io
import subprocess
import sys
import types
from unittest.mock import patch

import cloudpickle
import numpy
import pytest
import torch
import torch.distributed as dist
from torch import nn

from labkit.launch import World, launch, payload
from labkit.launch.payload import dump, load, pickled


def arrival(tmp_path, obj):
    return load(dump(str(tmp_path / "payload"), pickled(obj)))


def without_its_file(code):
    make, parts = cloudpickle.Pickler.dispatch_table[types.CodeType](code)
    return make, tuple("<dynamic-code>" if part == code.co_filename else part for part in parts)


def test_code_keeps_the_file_that_a_report_shows_a_line_of(tmp_path):
    """cloudpickle from 3.1.3 on leaves it out; the pinned one does not."""

    def outer():
        def inner():
            pass

        return inner

    with patch.object(payload._Pickler, "dispatch_table", {types.CodeType: without_its_file}):
        arrived = arrival(tmp_path, outer.__code__)
    [inner] = [constant for constant in arrived.co_consts if isinstance(constant, types.CodeType)]
    assert arrived.co_filename == inner.co_filename == __file__


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.bool, torch.complex64])
@pytest.mark.parametrize("size", [0, 3, 100_000], ids=["empty", "in the message", "in a file"])
def test_tensors_arrive_as_they_left(tmp_path, dtype, size):
    tensor = torch.arange(size).remainder(3).to(dtype)
    arrived = arrival(tmp_path, {"whole": tensor, "part": tensor[1::2]})
    for name, expected in (("whole", tensor), ("part", tensor[1::2])):
        assert arrived[name].dtype == dtype and arrived[name].stride() == expected.stride()
        assert torch.equal(arrived[name], expected)
    assert list(tmp_path.iterdir()) == [tmp_path / "payload"] * (size == 100_000)


WITHOUT_NUMPY = """
import sys
sys.modules["numpy"] = None
import torch
from labkit.launch.payload import dump, load, pickled
for tensor in (torch.arange(5.0), torch.zeros(100_000), torch.empty(0)):
    assert torch.equal(load(dump(sys.argv[1], pickled(tensor * 1))), tensor)
"""


def test_tensors_travel_where_numpy_is_not_installed(tmp_path):
    command = [sys.executable, "-W", "ignore", "-c", WITHOUT_NUMPY, tmp_path / "payload"]
    assert subprocess.run(command, capture_output=True, text=True).stderr == ""


def test_arrays_modules_and_what_is_shared_among_them(tmp_path):
    model = nn.Sequential(nn.Linear(300, 300), nn.Linear(300, 300))
    model[1].weight = model[0].weight  # tied
    array = numpy.arange(50_000, dtype=numpy.float64).reshape(100, 500)[:, ::2]
    copy, again, frozen = arrival(tmp_path, (model, array, torch.ones(3).requires_grad_(False)))
    assert copy[1].weight is copy[0].weight and copy[0].weight.requires_grad and not frozen.requires_grad
    assert all(map(torch.equal, model.state_dict().values(), copy.state_dict().values()))
    numpy.testing.assert_array_equal(again, array)


def test_what_arrives_may_be_written_to_and_no_other_reader_sees_it(tmp_path):
    sent = dump(str(tmp_path / "payload"), pickled(torch.zeros(100_000)))
    first, second = load(sent), load(sent)
    (tmp_path / "payload").unlink()  # the readers keep what they have mapped
    first += 1
    assert first.sum() == 100_000 and second.sum() == 0 and first.data_ptr() % 64 == 0


class _Full(io.FileIO):
    def write(self, data):
        if self.tell():
            raise OSError(28, "No space left on device")
        return super().write(data)


def test_where_the_folder_has_no_room_tmpdir_is_taken(tmp_path, monkeypatch):
    """As in containers, whose /dev/shm holds 64 MB. What was written there goes."""
    opened = lambda path, mode: (_Full if "x" in mode else io.FileIO)(path, mode)  # noqa: E731
    monkeypatch.setattr(payload, "open", opened, raising=False)
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "elsewhere"))
    sent = dump(str(tmp_path / "payload"), pickled(torch.arange(100_000)))
    assert sent[0].startswith(str(tmp_path / "elsewhere")) and torch.equal(load(sent), torch.arange(100_000))
    assert not (tmp_path / "payload").exists()
    monkeypatch.setattr("tempfile.NamedTemporaryFile", lambda **_: _Full(tmp_path / "elsewhere" / "second", "w"))
    with pytest.raises(OSError, match=r"No space left on device: .*elsewhere/second"):
        dump(str(tmp_path / "payload"), pickled(torch.arange(100_000)))


def test_an_argument_is_in_memory_once_for_all_ranks():
    """Each rank reads 64 MiB: private memory stays far below that. A page counts as private while one rank has it."""
    tensor = torch.zeros(1 << 26, dtype=torch.uint8)

    def private_mebibytes(x):
        assert x.max() == 0
        dist.barrier()
        with open("/proc/self/smaps_rollup") as file:
            fields = dict(line.split(":") for line in file.read().splitlines()[1:])
        dist.barrier()
        return sum(int(fields[f"Private_{kind}"].split()[0]) for kind in ("Clean", "Dirty")) // 1024

    with World(2) as world:
        before = world.run(private_mebibytes, tensor[:1].clone())
        assert all(now - then < 32 for now, then in zip(world.run(private_mebibytes, tensor), before))


class OnlyOnRanks:
    def __reduce__(self):
        return _refuse_in_the_notebook, ()


def _refuse_in_the_notebook():
    import os

    return "LABKIT_WORLD" in os.environ or 1 / 0


def test_a_result_that_cannot_be_read_here_names_its_rank():
    with pytest.raises(RuntimeError, match=r"the result of rank 0 cannot be read here: ZeroDivisionError"):
        launch(OnlyOnRanks, world_size=1)
