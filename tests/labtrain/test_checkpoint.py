"""Checkpoints: saved in one layout, resumed in any other; killed, damaged, foreign and contested ones."""

import ctypes
import errno
import functools
import gc
import json
import os
import re
import resource
import shutil
import signal
import subprocess
import sys
import threading
import zlib
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from unittest.mock import patch

import pytest
import torch.distributed as dist
from torch.distributed.checkpoint import filesystem, state_dict_saver

from course.stream import stream
from labkit.launch import RankFailed, World, launch, linux
from labtrain import checkpoint, export, steps, train, training
from labtrain.checkpoint_tensors import SlicedTensor, tensors_of
from tests.labtrain.tiny import TINY, TODAY, numbers

SEVEN_STEPS = replace(TINY, steps=7, eval_interval=4)

# (World size, what differs from one process.)
# InventedText has 27 letters, which 2, 4 and 8 do not divide.
RELAY = [
    (1, {}),
    (4, {"tp_size": 2, "zero_stage": 1, "sequence_parallel": True}),
    (4, {"pp_size": 2, "num_chunks": 2, "schedule": "interleaved", "zero_stage": 2}),
    (8, {"tp_size": 2, "cp_size": 2, "zero_stage": 3, "shard_size": 2, "micro_batch_size": 4}),
    (2, {"tp_size": 2, "recompute": "full"}),
    (4, {"pp_size": 4, "schedule": "zero-bubble"}),
    (1, {"num_chunks": 2, "schedule": "interleaved"}),
]


@pytest.fixture(scope="module")
def worlds():
    """Warm ranks for what does not fail."""
    made = {size: World(size) for size in (1, 2, 4, 8)}
    yield made
    for world in made.values():
        world.close()


def one_step(config):
    """Resume if there is something, make a step, save."""
    with training(config) as trainer:
        return trainer.step()


def saves_in(folder, **options):
    """A config whose run saves after every step, and resumes."""
    return replace(SEVEN_STEPS, checkpoint_dir=str(folder), save_interval=1, resume=True, **options)


@pytest.fixture
def two_steps_saved(worlds):
    """Fills a folder with checkpoints of steps 1 and 2."""

    def fill(folder, **options):
        worlds[2].run(train, saves_in(folder, steps=2, **options))
        assert sorted(path.name for path in folder.glob("step_*")) == ["step_00000001", "step_00000002"]

    return fill


def refused_here(config):
    """On a rank: what a refused run says."""
    try:
        train(config)
    except ValueError as error:
        return str(error)


@pytest.fixture
def refusal(worlds):
    """What a run says that two ranks refuse; both say the same, so neither waits for the other."""

    def text_of(config):
        texts = worlds[2].run(refused_here, config)
        assert texts[0] == texts[1]
        assert texts[0] is not None, f"{config} was not refused"
        return texts[0]

    return text_of


# -- from layout to layout ---------------------------------------------------------------------------------------------


def test_a_relay_of_layouts_has_the_losses_of_one_run(worlds, tmp_path):
    """Of a model of today, with two fused matrices and one more than GPT-2's form; the other tests save that one."""
    unbroken = worlds[1].run(train, replace(SEVEN_STEPS, **TODAY))[0]
    for expected, (world_size, options) in zip(unbroken, RELAY, strict=True):  # each resumes what the last one saved
        for step in worlds[world_size].run(one_step, saves_in(tmp_path, **options, **TODAY)):
            assert step.step == expected.step
            assert numbers([step]) == pytest.approx(numbers([expected]), rel=1e-10, abs=0), f"{expected}, {options}"
    assert len(RELAY) == len(list(tmp_path.glob("step_*")))


SPLITS = [
    (2, {"pp_size": 2, "stage_layers": (1, 4)}),
    (2, {"pp_size": 2, "schedule": "zero-bubble-v", "stage_layers": (1, 2, 1, 1)}),
    (4, {"pp_size": 4, "last_stage_layers": 2}),
    (4, {"pp_size": 2, "schedule": "v-half", "zero_stage": 1, "account_for_loss_in_pipeline_split": True}),
    (2, {"pp_size": 2, "schedule": "dualpipe-v", "first_stage_layers": 2}),
    (1, {}),
]


def test_a_relay_of_splits_with_a_tied_weight_has_the_losses_of_one_run(worlds, tmp_path):
    """In a V the weight is one parameter on the first rank, elsewhere two."""
    unbroken = worlds[1].run(train, replace(SEVEN_STEPS, num_layers=5, steps=len(SPLITS)))[0]
    for expected, (world_size, options) in zip(unbroken, SPLITS, strict=True):
        resumed = saves_in(tmp_path, num_layers=5, steps=len(SPLITS), **options)
        for step in worlds[world_size].run(one_step, resumed):
            assert numbers([step]) == pytest.approx(numbers([expected]), rel=1e-10, abs=0), f"{expected}, {options}"


def test_master_weights_change_the_layout_too(worlds, tmp_path):
    """A different stage adds up the norm in a different order; a different layout rounds more, and only comes close."""
    config = saves_in(tmp_path, precision="bfloat16", num_layers=2)
    unbroken = worlds[2].run(train, replace(config, checkpoint_dir=None, save_interval=0, resume=False, steps=4))[0]
    for expected in unbroken[:3]:
        sharded = replace(config, zero_stage=expected.step, steps=4)
        assert numbers(worlds[2].run(one_step, sharded)[:1]) == pytest.approx(numbers([expected]), rel=1e-5)
    last = worlds[4].run(one_step, replace(config, tp_size=2, pp_size=2, steps=4))[0]
    assert last.loss == pytest.approx(unbroken[3].loss, rel=0.01)


def test_dropout_goes_on_where_it_was(worlds, tmp_path):
    """Masks depend on nothing but the step and the replica: see `test_dropout_masks_differ_by_step_and_replica`."""
    config = replace(SEVEN_STEPS, dropout=0.2, steps=2, num_layers=1)
    unbroken = worlds[2].run(train, config)[0]
    saving = saves_in(tmp_path, dropout=0.2, steps=2, num_layers=1)
    resumed = [worlds[2].run(one_step, saving)[0] for _ in range(2)]
    assert [step.loss for step in resumed] == [step.loss for step in unbroken]


def position(config):
    with training(config) as trainer:
        trainer.step()
        return trainer.steps_done, trainer.samples_done


def test_another_batch_size_goes_on_with_the_next_sample(worlds, tmp_path):
    assert worlds[2].run(position, saves_in(tmp_path, num_layers=1)) == [(1, 8)] * 2
    assert worlds[1].run(position, saves_in(tmp_path, num_layers=1, batch_size=4)) == [(2, 12)]
    assert worlds[2].run(position, saves_in(tmp_path, num_layers=1, batch_size=16)) == [(3, 28)] * 2


def test_nothing_is_left_to_do(worlds, tmp_path, capsys):
    assert len(worlds[2].run(train, saves_in(tmp_path, steps=2, num_layers=1))[0]) == 2
    assert worlds[2].run(train, saves_in(tmp_path, steps=2, num_layers=1)) == [[], []]
    said = capsys.readouterr().out
    assert f"[rank 0] No checkpoint in {tmp_path}: starting with step 1" in said
    assert "[rank 0] Resuming after step 2, from step_00000002" in said


def test_checkpoints_are_written_when_asked_for(worlds, tmp_path):
    for name, save_interval, expected in (("a", 0, [4]), ("b", 3, [3, 4]), ("c", 2, [2, 4])):
        folder = tmp_path / name
        config = replace(SEVEN_STEPS, steps=4, checkpoint_dir=str(folder), save_interval=save_interval, num_layers=1)
        worlds[2].run(train, config)
        assert sorted(int(path.name[5:]) for path in folder.glob("step_*")) == expected


def test_tensors_are_stored_whole_and_by_name(worlds, tmp_path):
    """Any tool of PyTorch's can read them: here its own loader, into one process' model."""
    worlds[4].run(one_step, saves_in(tmp_path, num_layers=2, tp_size=2, zero_stage=3))
    reader = filesystem.FileSystemReader(tmp_path / "step_00000001")
    sizes = {name: tuple(about.size) for name, about in reader.read_metadata().state_dict_metadata.items()}
    assert sizes["model.embedding.weight"] == (27, 16)  # without the padding to 28
    assert sizes["model.layers.0.attention.qkv.weight"] == (48, 16)
    assert sizes["optimizer.layers.1.mlp.down.weight.exp_avg"] == (16, 64)


def read_for_sums(config):
    """The files that this rank reads when it saves."""
    read, checksum = [], checkpoint._checksum
    checkpoint._checksum = lambda path: (read.append(path.name), checksum(path))[1]
    one_step(config)
    checkpoint._checksum = checksum
    return read


def test_each_rank_sums_its_own_files(worlds, tmp_path):
    config = saves_in(tmp_path, num_layers=1, tp_size=2)
    first, second = worlds[2].run(read_for_sums, config)
    folder = tmp_path / "step_00000001"
    assert first == ["__0_0.distcp", ".metadata"] and second == ["__1_0.distcp"]
    sums = json.loads((folder / checkpoint.DESCRIPTION).read_text())["checksums"]
    assert {*sums, checkpoint.DESCRIPTION} == {path.name for path in folder.iterdir()}


# -- killed in the middle of a save ------------------------------------------------------------------------------------


def killed_while_saving(config, rank, how_many):
    """Train; a rank, or all, is killed when, in the second save, it is about to sync or rename for the n-th time."""
    done, sync, rename = [], os.fsync, Path.rename

    def count(really, *args):
        partial_steps = Path(config.checkpoint_dir).glob("step_00000002.partial")
        if rank in (None, dist.get_rank()) and any(partial_steps):
            done.append(1)
            if len(done) == how_many:
                os.kill(os.getpid(), signal.SIGKILL)
        return really(*args)

    os.fsync, Path.rename = (lambda *args: count(sync, *args)), (lambda *args: count(rename, *args))
    try:
        return len(train(config))
    finally:
        os.fsync, Path.rename = sync, rename


@pytest.mark.parametrize(
    ("rank", "how_many", "async_save"),
    [(0, 1, False), (0, 5, False), (1, 1, False), (0, 5, True), (1, 1, True), (None, 1, True)],
)
def test_killed_in_the_middle_of_a_save(worlds, tmp_path, capsys, rank, how_many, async_save):
    """Before the first and the last point at which files become lasting; also of another rank than 0, or of all."""
    config = saves_in(tmp_path, steps=3, num_layers=2, pp_size=2, async_save=async_save)
    with pytest.raises(RankFailed, match=rf"rank {'.' if rank is None else rank} of 2 was killed by SIGKILL"):
        launch(killed_while_saving, config, rank, how_many, world_size=2)
    assert checkpoint.newest(tmp_path).name == "step_00000001"
    assert (tmp_path / "step_00000002.partial").exists()
    capsys.readouterr()
    assert [step.step for step in worlds[2].run(train, replace(config, pp_size=1, steps=2))[0]] == [2]
    assert "[rank 0] Resuming after step 1, from step_00000001" in capsys.readouterr().out
    assert sorted(path.name for path in tmp_path.glob("step_*")) == ["step_00000001", "step_00000002"]


def test_no_point_was_missed(worlds, tmp_path):
    """Rank 0 passes five points in a save: its data, DCP's metadata and that file's name, our file and the folder's."""
    config = saves_in(tmp_path, steps=2, num_layers=2, pp_size=2)
    assert worlds[2].run(killed_while_saving, config, 0, 6) == [2, 2]


# -- damaged, foreign, unfitting ---------------------------------------------------------------------------------------


def flip(file):
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 0x10
    file.write_bytes(bytes(data))


def truncate(file):
    file.write_bytes(file.read_bytes()[:-100])


def replace_by_a_folder(path):
    path.unlink()
    path.mkdir()


def test_a_damaged_checkpoint_is_refused_and_the_one_before_is_not(worlds, two_steps_saved, refusal, tmp_path, capsys):
    original, folder = tmp_path / "original", tmp_path / "damaged"
    two_steps_saved(original, num_layers=1, tp_size=2)
    config = saves_in(folder, steps=3, num_layers=1, tp_size=2)
    for name in ("__0_0.distcp", "__1_0.distcp", ".metadata"):
        for damage in (flip, truncate, Path.unlink, replace_by_a_folder):
            shutil.rmtree(folder, ignore_errors=True)
            shutil.copytree(original, folder)
            damage(folder / "step_00000002" / name)
            text = refusal(config)
            assert f"step_00000002/{name} " in text
            said = {Path.unlink: "is missing", replace_by_a_folder: "is a folder"}
            assert said.get(damage, "has changed since it was written") in text
            assert "remove step_00000002 to resume from the checkpoint before it" in text
    shutil.rmtree(folder / "step_00000002")
    capsys.readouterr()
    assert [step.step for step in worlds[2].run(train, config)[0]] == [2, 3]
    assert "Resuming after step 1" in capsys.readouterr().out


def test_a_description_that_was_altered_is_refused(two_steps_saved, refusal, tmp_path):
    two_steps_saved(tmp_path, num_layers=1)
    description = tmp_path / "step_00000002" / checkpoint.DESCRIPTION
    description.write_text(description.read_text().replace('"step": 2', '"step": 1'))
    text = refusal(saves_in(tmp_path, num_layers=1))
    assert "step_00000002/labkit.json has changed since it was written: remove step_00000002 to resume from" in text


@pytest.mark.parametrize("content", ["", "no json", "[]", "[3]", '{"step": 2}', '{"checksums": {}}'])
def test_a_folder_of_something_else_is_refused(refusal, tmp_path, content):
    (tmp_path / "step_00000007").mkdir()
    (tmp_path / "step_00000007" / checkpoint.DESCRIPTION).write_text(content)
    text = refusal(saves_in(tmp_path))
    assert "step_00000007/labkit.json is not the description of a labtrain checkpoint" in text


def test_a_checkpoint_of_other_tensors_is_refused(two_steps_saved, refusal, tmp_path):
    """Files that are whole and say the right sizes, but come from elsewhere."""
    two_steps_saved(tmp_path, num_layers=1)
    shutil.rmtree(tmp_path / "step_00000002")
    about = json.loads((tmp_path / "step_00000001" / checkpoint.DESCRIPTION).read_text())
    about["num_layers"] = 2
    del about["checksum"]
    about["checksum"] = zlib.crc32(json.dumps(about).encode())
    (tmp_path / "step_00000001" / checkpoint.DESCRIPTION).write_text(json.dumps(about))
    text = refusal(saves_in(tmp_path, num_layers=2))
    assert re.search(
        r"step_00000001 has no model.layers.1.\S+ \(\d+ tensors are missing\): it is of a different model", text
    )


def test_another_run_is_refused_by_name(worlds, refusal, tmp_path):
    worlds[2].run(train, saves_in(tmp_path, steps=1, num_layers=2, precision="float32"))
    right = saves_in(tmp_path, num_layers=2, precision="float32")
    file = tmp_path / "text.txt"
    file.write_text("to be or not to be " * 10)
    for options, message in [
        ({"hidden_size": 32}, "hidden_size is 16 there and 32 here"),
        ({"num_layers": 3, "seq_length": 4}, "num_layers is 2 there and 3 here; seq_length is 8 there and 4 here"),
        ({"num_attention_heads": 4}, "num_attention_heads is 8 there and 4 here"),
        ({"text": str(file)}, "vocab_size is 27 there and 256 here"),
        ({"precision": "float64"}, "precision is float32 there and float64 here"),
        ({"seed": 1}, "seed is 0 there and 1 here: resume with what is there, or name a different checkpoint_dir"),
        ({"precision": "bfloat16"}, "optimizer is AdamW there and AdamW with master weights here"),
    ]:
        text = refusal(replace(right, **options))
        assert text.startswith(f"{tmp_path}/step_00000001 does not fit: ")
        assert message in text
    assert worlds[1].run(train, replace(right, steps=1)) == [[]]  # it itself fits


def test_a_different_text_is_refused(worlds, refusal, tmp_path):
    """Of the same length too; a file that has moved is the same text."""
    texts = [tmp_path / name for name in ("a", "b", "c")]
    for path, words in zip(texts, ("to be or not to be ", "to be or not to do ", "to be or not to be ")):
        path.write_text(words * 10)
    config = saves_in(tmp_path / "run", steps=1, num_layers=1, text=str(texts[0]))
    worlds[2].run(train, config)
    text = refusal(replace(config, text=str(texts[1]), steps=2))
    assert re.search(r"text is 190 bytes with checksum \w{8} there and 190 bytes with checksum \w{8} here: ", text)
    assert len(worlds[2].run(train, replace(config, text=str(texts[2]), steps=2))[0]) == 1


def test_new_options_are_said(worlds, two_steps_saved, tmp_path, capsys):
    two_steps_saved(tmp_path, num_layers=1, stage_layers=(1,))
    capsys.readouterr()
    longer = saves_in(tmp_path, steps=3, num_layers=1, stage_layers=(1,), min_learning_rate=0.002)
    new = "min_learning_rate is 0.002 instead of 0.001, steps is 3 instead of 2\n"
    for said in (f"step_00000002. From here on {new}", "step_00000003\n"):
        worlds[2].run(train, longer)
        assert said in capsys.readouterr().out


@pytest.mark.parametrize(("keep", "left"), [(0, [1, 2, 3, 4]), (2, [3, 4]), (9, [1, 2, 3, 4])])
def test_only_the_newest_are_kept(worlds, tmp_path, keep, left):
    worlds[1].run(train, saves_in(tmp_path, steps=4, num_layers=1, keep=keep, async_save=keep == 2))
    assert [int(path.name[5:]) for path in sorted(tmp_path.glob("step_*"))] == left


# -- one folder, two runs ----------------------------------------------------------------------------------------------


def test_a_run_that_does_not_resume_leaves_a_run_alone(two_steps_saved, refusal, tmp_path):
    two_steps_saved(tmp_path, num_layers=1)
    text = refusal(replace(saves_in(tmp_path, num_layers=1), resume=False))
    assert text == f"checkpoint_dir={tmp_path} already has step_00000002: resume it, or name a different folder"
    assert sorted(path.name for path in tmp_path.glob("step_*")) == ["step_00000001", "step_00000002"]


def test_two_runs_at_once_in_one_folder(worlds, refusal, tmp_path):
    config = saves_in(tmp_path, num_layers=1)
    with World(1) as first:
        running = stream(first, steps, config)
        assert next(running)[0].step == 1
        text = refusal(config)
        assert text == f"checkpoint_dir={tmp_path} is in use by another run: name a different folder"
        assert next(running)[0].step == 2  # which did not disturb the first
    assert [step.step for step in worlds[2].run(train, replace(config, steps=3))[0]] == [3]  # a lock dies with its run


def test_a_stream_that_is_left_early_leaves_its_folder(tmp_path):
    config = saves_in(tmp_path, num_layers=1, steps=3)
    with World(2) as world:
        for _ in stream(world, steps, config):
            break
        assert [step.step for step in world.run(train, config)[0]] == [2, 3]


def test_folders_that_cannot_be_used(two_steps_saved, refusal, tmp_path):
    two_steps_saved(tmp_path / "run", num_layers=1)
    text = refusal(saves_in(tmp_path / "run" / "step_00000001", num_layers=1))
    assert text.endswith(f"is a checkpoint: name the folder that it is in, {tmp_path}/run")
    way_out = "name a different folder"
    (tmp_path / "file").write_text("")
    assert refusal(saves_in(tmp_path / "file")) == f"checkpoint_dir={tmp_path}/file is a file: name a folder"
    text = refusal(saves_in(tmp_path / "file" / "a"))
    assert text == f"checkpoint_dir={tmp_path}/file/a cannot be written (Not a directory): {way_out}"
    (tmp_path / "run" / "step_00000003").write_text("of somebody else")
    text = refusal(saves_in(tmp_path / "run", steps=3, num_layers=1))
    assert text == f"{tmp_path}/run/step_00000003 cannot be written (Not a directory): {way_out}"


def refused_on_a_full_disk(config, rank, num_bytes):
    """On a rank: what a run says when on one rank no file can grow above so many bytes."""
    save, limits = state_dict_saver.save, resource.getrlimit(resource.RLIMIT_FSIZE)

    def save_little(*args, **kwargs):
        if dist.get_rank() == rank:
            resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, limits[1]))
        try:
            save(*args, **kwargs)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)

    state_dict_saver.save = save_little
    try:
        return refused_here(config)
    finally:
        state_dict_saver.save = save


@pytest.mark.parametrize(
    ("rank", "num_bytes", "async_save", "steps"),
    [(0, 100, False, 2), (1, 10_000, False, 2), (0, 100, True, 2), (1, 10_000, True, 3)],
)
def test_a_full_disk_is_said_in_a_line_and_nothing_stays_on_it(worlds, tmp_path, rank, num_bytes, async_save, steps):
    """Python, or torch's writer in C++, runs into it. In the background it is said at the end or at the next save."""
    config = saves_in(tmp_path, num_layers=1, async_save=async_save)
    worlds[2].run(train, replace(config, steps=1))
    for text in worlds[2].run(refused_on_a_full_disk, replace(config, steps=steps), rank, num_bytes):
        assert re.fullmatch(
            rf"{tmp_path}/step_00000002 cannot be written \(File too large: .+\): name a different folder", text
        )
        assert re.search(rf"the files of rank {rank} need [1-9][\d,]+ bytes, [\d,]+ are free", text)
    assert [path.name for path in tmp_path.glob("step_*")] == ["step_00000001"]
    assert [step.step for step in worlds[2].run(train, replace(config, steps=2))[0]] == [2]


def test_a_disk_without_space_is_called_so(worlds, tmp_path):
    """torch's writer says only "unexpected pos 704 vs 598"."""
    usage = shutil.disk_usage(tmp_path)._replace(free=10)
    config, why = saves_in(tmp_path, num_layers=1, steps=1), "No space left on device: the files of rank 0 need"
    for text in worlds[2].run(refused_without_space, config, usage):
        assert f"step_00000001 cannot be written ({why}" in text
        assert text.endswith(", 10 are free): make space, or name a folder on a different disk")


def refused_without_space(config, usage):
    before, shutil.disk_usage = shutil.disk_usage, lambda path: usage
    try:
        return refused_on_a_full_disk(config, 0, 100)
    finally:
        shutil.disk_usage = before


@pytest.mark.parametrize(("number", "way_out"), [("EDQUOT", "make space"), ("EROFS", "name a folder that you may")])
def test_the_way_out_is_that_of_the_error(number, way_out):
    error = OSError(getattr(errno, number), "because")
    assert f"run1 cannot be written (because): {way_out}" in checkpoint.unwritable("run1", error)


def error_of_unknown_cause(config, method):
    """On a rank: what a save raises when torch's writer fails in a way that is no fault of the file system."""

    def fail(*args):
        raise RuntimeError("a fault in a library")

    with patch.object(filesystem.FileSystemWriter, method, fail), pytest.raises(RuntimeError) as raised:
        train(config)
    return str(raised.value)


@pytest.mark.parametrize("method", ["write_data", "finish"])
def test_an_error_of_unknown_cause_is_raised_as_it_is(worlds, tmp_path, method):
    """And nobody is told to make space for it."""
    config = saves_in(tmp_path, num_layers=1, steps=1)
    assert worlds[2].run(error_of_unknown_cause, config, method) == ["a fault in a library"] * 2
    assert not list(tmp_path.glob("step_*"))


def interrupted_while_saving(config):
    """On a rank: the stop button in the middle of torch's save."""

    def stop(_):
        raise KeyboardInterrupt

    sync, os.fsync = os.fsync, stop
    try:
        train(config)
    except KeyboardInterrupt:
        return "interrupted"
    finally:
        os.fsync = sync


def test_an_interrupt_stays_one_in_the_middle_of_a_save(worlds, tmp_path):
    assert worlds[1].run(interrupted_while_saving, saves_in(tmp_path, steps=1, num_layers=1)) == ["interrupted"]


# -- in the background ------------------------------------------------------------------------------------------------


@contextmanager
def before_writing(wait):
    """On a rank: the thread that writes calls this first."""
    write = filesystem.FileSystemWriter.write_data
    filesystem.FileSystemWriter.write_data = lambda *args: (wait(), write(*args))[1]
    try:
        yield
    finally:
        filesystem.FileSystemWriter.write_data = write


def saved_late(config):
    """On a rank: nothing is written before the weights have changed, by the next step or, in the end, to zeros."""
    changed = threading.Semaphore(0)
    with before_writing(changed.acquire), training(config) as trainer:
        save = trainer.save
        for number in range(config.steps):
            trainer.save = lambda *args, number=number: (number and changed.release(), save(*args))
            trainer.step()
        for parameter in trainer.parameters:
            parameter.data.zero_()
        changed.release()


def parts_in(folder):
    """The checksums of the tensors' files."""
    sums = json.loads((folder / checkpoint.DESCRIPTION).read_text())["checksums"]
    return {name: checksum for name, checksum in sums.items() if name != checkpoint.METADATA}


def test_the_values_are_those_of_the_moment(worlds, tmp_path):
    config = saves_in(tmp_path / "waits", steps=3, num_layers=1, tp_size=2)
    worlds[2].run(train, config)
    worlds[2].run(saved_late, replace(config, checkpoint_dir=str(tmp_path / "late"), async_save=True))
    steps = [f"step_{number:08d}" for number in (1, 2, 3)]
    expected = [parts_in(tmp_path / "waits" / step) for step in steps]
    assert [parts_in(tmp_path / "late" / step) for step in steps] == expected
    assert len({str(parts) for parts in expected}) == 3


def interrupt(*_):
    raise KeyboardInterrupt


def stopped_while_saving(config, by, disk_is_full):
    """On a rank: what ends training on all ranks while the first checkpoint is not yet written."""
    stopped = threading.Event()

    def wait():
        stopped.wait()
        if disk_is_full:
            raise OSError(errno.ENOSPC, "No space left on device")

    try:
        with before_writing(wait), training(config) as trainer:
            trainer.step()
            try:
                if by is KeyboardInterrupt:
                    trainer.loss = interrupt
                for parameter in trainer.parameters:
                    parameter.data.fill_(float("nan"))
                trainer.step()
            finally:
                stopped.set()
    except by as error:
        return type(error)


@pytest.mark.parametrize(
    ("by", "disk_is_full"), [(FloatingPointError, False), (FloatingPointError, True), (KeyboardInterrupt, False)]
)
def test_a_checkpoint_on_its_way_arrives_though_training_stops(worlds, tmp_path, by, disk_is_full):
    """If it cannot arrive, nothing of it is left, and training's error is the one that is raised."""
    config = saves_in(tmp_path, num_layers=1, steps=2, async_save=True)
    assert worlds[2].run(stopped_while_saving, config, by, disk_is_full) == [by, by]
    assert [path.name for path in tmp_path.glob("step_*")] == ([] if disk_is_full else ["step_00000001"])
    assert [step.step for step in worlds[2].run(train, config)[0]] == ([1, 2] if disk_is_full else [2])


def stopped_on_rank_1(config):
    """On a rank: rank 1 is interrupted just before its first save; rank 0 leaves too."""
    try:
        with training(config) as trainer:
            if dist.get_rank() == 1:
                trainer.save = interrupt
            trainer.step()
    except (RuntimeError, KeyboardInterrupt) as error:
        return type(error), str(error)


def test_no_rank_waits_for_one_that_will_not_save(worlds, tmp_path):
    config = saves_in(tmp_path, num_layers=1, async_save=True)
    (of_rank_0, text), (of_rank_1, _) = launch(stopped_on_rank_1, config, world_size=2)
    assert of_rank_1 is KeyboardInterrupt
    assert of_rank_0 is RuntimeError and "onnection" in text
    assert checkpoint.newest(tmp_path) is None
    assert [step.step for step in worlds[2].run(train, replace(config, steps=1))[0]] == [1]
    assert [path.name for path in tmp_path.glob("step_*")] == ["step_00000001"]


def open_after(config):
    """On a rank: the numbers of its open files and of its threads after runs of as many steps as are left."""
    counts = []
    for more in (1, 2, 3):
        train(replace(config, steps=more))
        for thread in threading.enumerate():
            if thread.name.startswith("AsyncCheckpoint"):
                thread.join(20)  # it ends by itself
        gc.collect()
        counts.append((len(os.listdir("/proc/self/fd")), len(linux.tasks())))
    return counts


@pytest.mark.gloo
def test_nothing_stays_open(worlds, tmp_path):
    for first, *others in worlds[2].run(open_after, saves_in(tmp_path, num_layers=1, async_save=True)):
        assert others == [first, first]


def train_with_a_slow_disk(config):
    """On a rank: syncing a file takes rank 1 five seconds, in which the rank runs no code and no Python of ours."""
    if dist.get_rank() == 1:
        os.fsync = functools.partial(ctypes.CDLL(None).poll, None, 0, 5000)  # poll ignores the file's number
    return len(train(config))


def test_a_slow_disk_is_not_a_deadlock(tmp_path):
    config = saves_in(tmp_path, num_layers=1, steps=1, async_save=True)
    assert launch(train_with_a_slow_disk, config, world_size=2) == [1, 1]


def bytes_to_save(config):
    """On a rank: how many bytes it copies for a save in the background, and how many its tensors have."""
    with training(config) as trainer:
        trainer.step()
        pairs = [(tensors_of(trainer._state, to_save=True)), tensors_of(trainer._state)]
        return [sum(slices_bytes(tensor) for name, tensor in each if not name.endswith(".step")) for each in pairs]


def slices_bytes(tensor):
    return sum(each.nbytes for each in tensor.slices.values()) if isinstance(tensor, SlicedTensor) else tensor.nbytes


@pytest.mark.parametrize(
    ("world_size", "options"),
    [
        (4, {}),
        (4, {"tp_size": 2, "sequence_parallel": True}),
        (4, {"pp_size": 2}),
        (8, {"tp_size": 2, "zero_stage": 3, "shard_size": 2}),
        (1, {"num_chunks": 2, "schedule": "interleaved"}),
    ],
    ids=str,
)
def test_ranks_with_the_same_numbers_save_them_once(worlds, world_size, options):
    """Replicas of stage 0 and of hybrid sharding, tensor ranks' norms, and the tied embedding of two stages."""
    config = replace(TINY, steps=1, **options)
    whole = worlds[1].run(bytes_to_save, replace(TINY, steps=1))[0][1]
    per_rank = worlds[world_size].run(bytes_to_save, config)
    assert sum(saved for saved, _ in per_rank) == whole
    if options == {}:  # four replicas share the work
        assert all(whole / 10 < saved < whole / 2 for saved, _ in per_rank)


@pytest.mark.parametrize("name", ["norm_eps", "options"])
def test_a_checkpoint_of_an_older_version_is_refused_by_name(two_steps_saved, refusal, tmp_path, capsys, name):
    two_steps_saved(tmp_path, num_layers=1)
    path = tmp_path / "step_00000002" / checkpoint.DESCRIPTION
    about = json.loads(path.read_text())
    del about[name], about["checksum"]
    path.write_text(json.dumps(about | {"checksum": zlib.crc32(json.dumps(about).encode())}))
    said = f"{path.parent} was written by an older version of labtrain, without {name}: use the version that wrote it"
    assert refusal(saves_in(tmp_path, num_layers=1, steps=3)).startswith(said)
    capsys.readouterr()
    assert checkpoint.main(str(tmp_path)) == 1
    assert capsys.readouterr().out.startswith(said)


def as_a799b4f_wrote_it(path):
    """Give a description the names that options had in that version, and what it said of the versions that wrote it."""
    about = json.loads(path.read_text())
    options = about["options"]
    options["balanced"] = options.pop("zigzag")
    options["bias_update_rate"] = options.pop("expert_bias_update_rate")
    options["context_parallel"] = {"all_gather": "gathered"}.get(options["context_parallel"], "ring")
    del options["gpu_memory_gib"], about["checksum"]
    about["written_by"] = {"torch": "2.13.0", "python": "3.11.7", "commit": "a799b4f"}
    path.write_text(json.dumps(about | {"checksum": zlib.crc32(json.dumps(about).encode())}))


def test_a_checkpoint_of_a799b4f_resumes_and_only_what_differs_is_said(worlds, tmp_path, capsys):
    options = dict(num_layers=1, num_experts=2, cp_size=2, context_parallel="all_gather", zigzag=False)
    config = saves_in(tmp_path, steps=2, **options, expert_bias_update_rate=0.25)
    worlds[2].run(train, config)
    as_a799b4f_wrote_it(tmp_path / "step_00000002" / checkpoint.DESCRIPTION)
    assert checkpoint.main(str(tmp_path)) == 0
    assert '"balanced": false' in capsys.readouterr().out
    steps = worlds[2].run(train, replace(config, steps=3))[0]
    assert [step.step for step in steps] == [3]
    assert "step_00000002. From here on steps is 3 instead of 2\n" in capsys.readouterr().out
    shutil.rmtree(tmp_path / "step_00000003")
    changed = replace(config, steps=3, zigzag=True, context_parallel="ring", expert_bias_update_rate=0.5)
    worlds[2].run(train, changed)
    said = "From here on context_parallel is ring instead of all_gather, "
    said += "expert_bias_update_rate is 0.5 instead of 0.25, steps is 3 instead of 2, zigzag is True instead of False\n"
    assert said in capsys.readouterr().out


def test_a_checkpoint_of_a799b4f_is_exported(worlds, tmp_path):
    worlds[2].run(train, saves_in(tmp_path / "run", steps=1, num_layers=1))
    as_a799b4f_wrote_it(tmp_path / "run" / "step_00000001" / checkpoint.DESCRIPTION)
    said = export.export(tmp_path / "run", tmp_path / "model")
    assert said.endswith("parameters in float64, of step_00000001")


# -- what only some ranks see ------------------------------------------------------------------------------------------


def save_where_only_some_see_it(config):
    """As on nodes that do not share the folder: what other ranks write does not come to rank 0."""
    checksum = checkpoint._checksum

    def lose(path):
        found = checksum(path)
        if path.name == "__1_0.distcp":
            path.unlink()
        return found

    checkpoint._checksum = lose
    try:
        return refused_here(config)
    finally:
        checkpoint._checksum = checksum


def test_a_folder_that_nodes_do_not_share_is_noticed(worlds, tmp_path):
    for text in worlds[2].run(save_where_only_some_see_it, saves_in(tmp_path, tp_size=2, num_layers=1)):
        assert "lacks __1_0.distcp: checkpoint_dir must be a folder that all nodes share" in text
    assert checkpoint.newest(tmp_path) is None


def refused_where_only_some_see_it(config):
    """As on a node that does not share the folder: rank 1 sees no checkpoint in it."""
    if dist.get_rank() == 1:
        exists, Path.exists = Path.exists, lambda path: path.name != checkpoint.DESCRIPTION and exists(path)
    return refused_here(config)


def test_a_node_that_does_not_see_the_checkpoint_says_so(two_steps_saved, tmp_path):
    two_steps_saved(tmp_path, num_layers=1)
    why = f"rank 1 does not see {tmp_path}/step_00000002: checkpoint_dir must be a folder that all nodes share"
    assert launch(refused_where_only_some_see_it, saves_in(tmp_path, num_layers=1), world_size=2) == [why, why]


def test_the_newest_is_the_highest_step(tmp_path):
    assert checkpoint.newest(tmp_path / "nowhere") is None
    for name in ("step_00000009", "step_00000010", "step_00000011.partial", "step_x"):
        (tmp_path / name).mkdir()
        (tmp_path / name / checkpoint.DESCRIPTION).touch()
    (tmp_path / "step_00000012").mkdir()  # without a description
    assert checkpoint.newest(tmp_path).name == "step_00000010"


def test_a_notebook_imports_the_trainer_without_what_only_checkpoints_need():
    code = "import sys, labtrain; sys.exit('torch.distributed.checkpoint' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_a_checkpoint_says_what_it_is_and_whether_it_is_whole(two_steps_saved, tmp_path, capsys):
    two_steps_saved(tmp_path, num_layers=1)
    config = saves_in(str(tmp_path), steps=2, num_layers=1)
    capsys.readouterr()
    for folder in (tmp_path, tmp_path / "step_00000002"):
        assert checkpoint.main(str(folder)) == 0
        text, last = capsys.readouterr().out.rsplit("}\n", 1)
        about = json.loads(text + "}")
        assert about["options"] == json.loads(json.dumps(asdict(config)))
        assert about["layout"].startswith("2 ranks = ")
        assert re.fullmatch(r"step_00000002 is whole: \d+ files\n", last)
    file = next((tmp_path / "step_00000002").glob("*.distcp"))
    file.write_bytes(file.read_bytes()[:-1] + b"?")
    assert checkpoint.main(str(tmp_path)) == 1
    assert f"step_00000002 is damaged: {file} has changed since it was written" in capsys.readouterr().out
    assert checkpoint.main(str(tmp_path / "none")) == 1
    assert "no complete checkpoint is in" in capsys.readouterr().out
