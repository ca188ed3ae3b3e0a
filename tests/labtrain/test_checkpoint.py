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
from dataclasses import asdict, replace
from pathlib import Path
from unittest.mock import patch

import pytest
import torch.distributed as dist
from torch.distributed.checkpoint import filesystem, state_dict_saver

from course.stream import stream
from labkit.launch import RankFailed, World, launch, linux
from labtrain import checkpoint, export, steps, train, training
from labtrain.checkpoint_tensors import SlicedTensor
from tests.labtrain.tiny import TINY, TODAY, numbers

SEVEN_STEPS = replace(TINY, steps=7, eval_interval=4)
ONE_LAYER = replace(SEVEN_STEPS, num_layers=1)


def saves_in(folder, config=ONE_LAYER, **options):
    """A config whose run saves after every step, and resumes."""
    return replace(config, checkpoint_dir=str(folder), save_interval=1, resume=True, **options)


def one_step(config):
    """On a rank: resume if there is something, make a step, save."""
    with training(config) as trainer:
        return trainer.step()


def steps_of(ranks):
    return [step.step for step in ranks[0]]


def steps_in(folder):
    return [int(path.name[5:]) for path in sorted(folder.glob("step_*"))]


@pytest.fixture
def two_steps_saved(on_ranks):
    """Fills a folder with checkpoints of steps 1 and 2."""

    def fill(folder, **options):
        on_ranks(train, saves_in(folder, steps=2, **options))
        assert steps_in(folder) == [1, 2]

    return fill


def refused_here(config):
    """On a rank: what a refused run says."""
    try:
        train(config)
    except ValueError as error:
        return str(error)


@pytest.fixture
def refusal(on_ranks):
    """What a run says that two ranks refuse; both say the same, so neither waits for the other."""

    def text_of(config, refused=refused_here, *args):
        first, second = on_ranks(refused, config, *args)
        assert first == second
        assert first is not None, f"{config} was not refused"
        return first

    return text_of


# -- from layout to layout ---------------------------------------------------------------------------------------------

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
SPLITS = [  # of five layers; in a V the tied weight is one parameter on the first rank, elsewhere two
    (2, {"pp_size": 2, "stage_layers": (1, 4)}),
    (2, {"pp_size": 2, "schedule": "zero-bubble-v", "stage_layers": (1, 2, 1, 1)}),
    (4, {"pp_size": 4, "last_stage_layers": 2}),
    (4, {"pp_size": 2, "schedule": "v-half", "zero_stage": 1, "account_for_loss_in_pipeline_split": True}),
    (2, {"pp_size": 2, "schedule": "dualpipe-v", "first_stage_layers": 2}),
    (1, {}),
]


@pytest.mark.parametrize(("runs", "form"), [(RELAY, TODAY), (SPLITS, {"num_layers": 5})], ids=["layouts", "splits"])
def test_a_relay_has_the_losses_of_one_run(on_ranks, tmp_path, runs, form):
    """A model of today has two fused matrices and one more than GPT-2's form; the other tests save that one."""
    config = replace(SEVEN_STEPS, steps=len(runs), **form)
    [unbroken] = on_ranks(train, config, world_size=1)
    for expected, (world_size, options) in zip(unbroken, runs, strict=True):  # each resumes what the last one saved
        for step in on_ranks(one_step, saves_in(tmp_path, config, **options), world_size=world_size):
            assert step.step == expected.step
            assert numbers([step]) == pytest.approx(numbers([expected]), rel=1e-10, abs=0), f"{expected}, {options}"
    assert steps_in(tmp_path) == [step.step for step in unbroken]


def test_master_weights_change_the_layout_too(on_ranks, tmp_path):
    """A different stage adds up the norm in a different order; a different layout rounds more, and only comes close."""
    config = replace(SEVEN_STEPS, precision="bfloat16", num_layers=2, steps=4)
    *unbroken, last = on_ranks(train, config)[0]
    for expected in unbroken:
        step = on_ranks(one_step, saves_in(tmp_path, config, zero_stage=expected.step))[0]
        assert numbers([step]) == pytest.approx(numbers([expected]), rel=1e-5)
    step = on_ranks(one_step, saves_in(tmp_path, config, tp_size=2, pp_size=2), world_size=4)[0]
    assert step.loss == pytest.approx(last.loss, rel=0.01)


def test_dropout_goes_on_where_it_was(on_ranks, tmp_path):
    """Masks depend on nothing but the step and the replica: see `test_dropout_masks_differ_by_step_and_replica`."""
    config = replace(ONE_LAYER, dropout=0.2, steps=2)
    unbroken = on_ranks(train, config)[0]
    resumed = [on_ranks(one_step, saves_in(tmp_path, config))[0] for _ in range(2)]
    assert [step.loss for step in resumed] == [step.loss for step in unbroken]


def position(config):
    with training(config) as trainer:
        trainer.step()
        return trainer.steps_done, trainer.samples_done


def test_another_batch_size_goes_on_with_the_next_sample(on_ranks, tmp_path):
    for batch_size, expected in ((8, (1, 8)), (4, (2, 12)), (16, (3, 28))):
        assert on_ranks(position, saves_in(tmp_path, batch_size=batch_size)) == [expected] * 2


def test_what_a_resumed_run_says(on_ranks, tmp_path, capsys):
    config = saves_in(tmp_path, steps=2, stage_layers=(1,))
    longer = replace(config, steps=3, min_learning_rate=0.002)
    new = "min_learning_rate is 0.002 instead of 0.001, steps is 3 instead of 2\n"
    for changed, done, said in (
        (config, [1, 2], f"[rank 0] No checkpoint in {tmp_path}: starting with step 1"),
        (config, [], "[rank 0] Resuming after step 2, from step_00000002\n"),
        (longer, [3], f"step_00000002. From here on {new}"),
        (longer, [], "step_00000003\n"),
    ):
        assert steps_of(on_ranks(train, changed)) == done
        assert said in capsys.readouterr().out


@pytest.mark.parametrize(
    ("options", "left"),
    [
        ({"save_interval": 0}, [4]),
        ({"save_interval": 3}, [3, 4]),
        ({"save_interval": 2}, [2, 4]),
        ({"keep": 0}, [1, 2, 3, 4]),
        ({"keep": 2, "async_save": True}, [3, 4]),
        ({"keep": 9}, [1, 2, 3, 4]),
    ],
)
def test_checkpoints_are_written_when_asked_for_and_the_newest_kept(on_ranks, tmp_path, options, left):
    on_ranks(train, replace(saves_in(tmp_path, steps=4), **options))
    assert steps_in(tmp_path) == left


def test_tensors_are_stored_whole_and_by_name(on_ranks, tmp_path):
    """Any tool of PyTorch's can read them: here its own loader, into one process' model."""
    on_ranks(one_step, saves_in(tmp_path, tp_size=2, zero_stage=3), world_size=4)
    reader = filesystem.FileSystemReader(tmp_path / "step_00000001")
    sizes = {name: tuple(about.size) for name, about in reader.read_metadata().state_dict_metadata.items()}
    assert sizes["model.embedding.weight"] == (27, 16)  # without the padding to 28
    assert sizes["model.layers.0.attention.qkv.weight"] == (48, 16)
    assert sizes["optimizer.layers.0.mlp.down.weight.exp_avg"] == (16, 64)


def read_for_sums(config):
    """The files that this rank reads when it saves."""
    with patch.object(checkpoint, "_checksum", wraps=checkpoint._checksum) as checksum:
        one_step(config)
    return [call.args[0].name for call in checksum.call_args_list]


def test_each_rank_sums_its_own_files(on_ranks, tmp_path):
    files = on_ranks(read_for_sums, saves_in(tmp_path, tp_size=2))
    assert files == [["__0_0.distcp", ".metadata"], ["__1_0.distcp"]]


# -- killed in the middle of a save ------------------------------------------------------------------------------------


def killed_while_saving(config, rank, how_many):
    """Train; a rank, or all, is killed when, in the second save, it is about to sync or rename for the n-th time."""
    done = []

    def counting(really):
        def call(*args):
            partial_steps = Path(config.checkpoint_dir).glob("step_00000002.partial")
            if rank in (None, dist.get_rank()) and any(partial_steps):
                done.append(1)
                if len(done) == how_many:
                    os.kill(os.getpid(), signal.SIGKILL)
            return really(*args)

        return call

    with patch("os.fsync", counting(os.fsync)), patch.object(Path, "rename", counting(Path.rename)):
        return len(train(config))


@pytest.mark.parametrize(
    ("rank", "how_many", "async_save"), [(0, 1, False), (1, 1, False), (0, 5, True), (None, 1, True)]
)
def test_killed_in_the_middle_of_a_save(on_ranks, tmp_path, capsys, rank, how_many, async_save):
    """Before the first and the last point at which files become lasting; also of another rank than 0, or of all."""
    config = saves_in(tmp_path, steps=3, num_layers=2, pp_size=2, async_save=async_save)
    with pytest.raises(RankFailed, match=rf"rank {'.' if rank is None else rank} of 2 was killed by SIGKILL"):
        launch(killed_while_saving, config, rank, how_many, world_size=2)
    assert checkpoint.newest(tmp_path).name == "step_00000001"
    assert (tmp_path / "step_00000002.partial").exists()
    capsys.readouterr()
    assert steps_of(on_ranks(train, replace(config, pp_size=1, steps=2))) == [2]
    assert "[rank 0] Resuming after step 1, from step_00000001" in capsys.readouterr().out
    assert steps_in(tmp_path) == [1, 2]


def test_no_point_was_missed(on_ranks, tmp_path):
    """Rank 0 passes five points in a save: its data, DCP's metadata and that file's name, our file and the folder's."""
    config = saves_in(tmp_path, steps=2, num_layers=2, pp_size=2)
    assert on_ranks(killed_while_saving, config, 0, 6) == [2, 2]


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


def describe(folder, change, *left_out):
    """Change a description, and make its checksum right again."""
    path = folder / checkpoint.DESCRIPTION
    about = json.loads(path.read_text()) | change
    for name in ("checksum", *left_out):
        del about[name]
    path.write_text(json.dumps(about | {"checksum": zlib.crc32(json.dumps(about).encode())}))


def test_a_damaged_checkpoint_is_refused_and_the_one_before_is_not(on_ranks, two_steps_saved, refusal, tmp_path):
    original, folder = tmp_path / "original", tmp_path / "damaged"
    two_steps_saved(original, tp_size=2)
    config = saves_in(folder, steps=3, tp_size=2)
    for damage, name, said in (
        (flip, "__0_0.distcp", "has changed since it was written"),
        (truncate, ".metadata", "has changed since it was written"),
        (Path.unlink, "__1_0.distcp", "is missing"),
        (replace_by_a_folder, "__0_0.distcp", "is a folder"),
    ):
        shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(original, folder)
        damage(folder / "step_00000002" / name)
        text = refusal(config)
        assert f"step_00000002/{name} " in text and said in text
        assert "remove step_00000002 to resume from the checkpoint before it" in text
    shutil.rmtree(folder / "step_00000002")
    assert steps_of(on_ranks(train, config)) == [2, 3]


def test_a_description_that_was_altered_is_refused(two_steps_saved, refusal, tmp_path):
    two_steps_saved(tmp_path)
    description = tmp_path / "step_00000002" / checkpoint.DESCRIPTION
    description.write_text(description.read_text().replace('"step": 2', '"step": 1'))
    assert "step_00000002/labkit.json has changed since it was written: remove" in refusal(saves_in(tmp_path))
    for content in ("", "no json", "[]", "[3]", '{"step": 2}', '{"checksums": {}}'):
        description.write_text(content)
        assert "labkit.json is not the description of a labtrain checkpoint" in refusal(saves_in(tmp_path))


def test_a_checkpoint_of_other_tensors_is_refused(two_steps_saved, refusal, tmp_path):
    """Files that are whole and say the right sizes, but come from elsewhere."""
    two_steps_saved(tmp_path)
    describe(tmp_path / "step_00000002", {"num_layers": 2})
    said = r"step_00000002 has no model.layers.1.\S+ \(\d+ tensors are missing\): it is of a different model"
    assert re.search(said, refusal(saves_in(tmp_path, num_layers=2)))


OF_ANOTHER_RUN = {
    "hidden_size=32": "hidden_size is 16 there and 32 here",
    "num_layers=3, seq_length=4": "num_layers is 2 there and 3 here; seq_length is 8 there and 4 here",
    "num_attention_heads=4": "num_attention_heads is 8 there and 4 here",
    "text=None": "vocab_size is 256 there and 27 here",
    "text=other": "text is 190 bytes with checksum ",
    "precision='float64'": "precision is float32 there and float64 here",
    "seed=1": "seed is 0 there and 1 here: resume with what is there, or name a different checkpoint_dir",
    "precision='bfloat16'": "optimizer is AdamW there and AdamW with master weights here",
}


def test_another_run_is_refused_by_name(on_ranks, refusal, tmp_path):
    """A text that has moved is the same text."""
    texts = [tmp_path / name for name in ("a", "b", "moved")]
    for path, words in zip(texts, ("to be or not to be ", "to be or not to do ", "to be or not to be ")):
        path.write_text(words * 10)
    right = saves_in(tmp_path / "run", steps=1, num_layers=2, precision="float32", text=str(texts[0]))
    on_ranks(train, right)
    for options, message in OF_ANOTHER_RUN.items():
        text = refusal(replace(right, **eval(f"dict({options})", {"other": str(texts[1])})))
        assert text.startswith(f"{tmp_path}/run/step_00000001 does not fit: ")
        assert message in text
    assert on_ranks(train, replace(right, text=str(texts[2])), world_size=1) == [[]]  # it itself fits


# -- one folder, two runs ----------------------------------------------------------------------------------------------


def test_two_runs_at_once_in_one_folder(on_ranks, refusal, tmp_path):
    config = saves_in(tmp_path)
    with World(1) as first:
        running = stream(first, steps, config)
        assert next(running)[0].step == 1
        assert refusal(config) == f"checkpoint_dir={tmp_path} is in use by another run: name a different folder"
        assert next(running)[0].step == 2  # which did not disturb the first
    assert steps_of(on_ranks(train, replace(config, steps=3))) == [3]  # a lock dies with its run


def test_a_stream_that_is_left_early_leaves_its_folder(tmp_path):
    config = saves_in(tmp_path, steps=3)
    with World(2) as world:
        for _ in stream(world, steps, config):
            break
        assert steps_of(world.run(train, config)) == [2, 3]


def test_folders_that_cannot_be_used(two_steps_saved, refusal, tmp_path):
    """A run that does not resume leaves another alone."""
    two_steps_saved(tmp_path / "run")
    (tmp_path / "file").write_text("")
    (tmp_path / "run" / "step_00000003").write_text("of somebody else")
    new_run = replace(saves_in(tmp_path / "run"), resume=False)
    for config, said in (
        (new_run, "{0}/run already has step_00000002: resume it, or name a different folder"),
        (saves_in(tmp_path / "run" / "step_00000001"), "name the folder that it is in, {0}/run"),
        (saves_in(tmp_path / "file"), "checkpoint_dir={0}/file is a file: name a folder"),
        (saves_in(tmp_path / "file" / "a"), "{0}/file/a cannot be written (Not a directory): name a different folder"),
        (saves_in(tmp_path / "run"), "{0}/run/step_00000003 cannot be written (Not a directory): name a different"),
    ):
        assert said.format(tmp_path) in refusal(config)
    assert steps_in(tmp_path / "run") == [1, 2, 3]


# -- disks and libraries that fail -------------------------------------------------------------------------------------


def refused_on_a_full_disk(config, rank, num_bytes, free=None):
    """On a rank: what a run says when on one rank no file can grow above so many bytes, and ``free`` are left."""
    save, limits = state_dict_saver.save, resource.getrlimit(resource.RLIMIT_FSIZE)
    usage = shutil.disk_usage(".")

    def save_little(*args, **kwargs):
        if dist.get_rank() == rank:
            resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, limits[1]))
        try:
            save(*args, **kwargs)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)

    there = usage if free is None else usage._replace(free=free)
    with patch.object(state_dict_saver, "save", save_little), patch("shutil.disk_usage", lambda path: there):
        return refused_here(config)


@pytest.mark.parametrize(
    ("rank", "num_bytes", "async_save", "steps"), [(1, 10_000, False, 2), (0, 100, True, 2), (1, 10_000, True, 3)]
)
def test_a_full_disk_is_said_in_a_line_and_nothing_stays_on_it(
    on_ranks, refusal, tmp_path, rank, num_bytes, async_save, steps
):
    """Python, or torch's writer in C++, runs into it. In the background it is said at the end or at the next save."""
    config = saves_in(tmp_path, async_save=async_save)
    on_ranks(train, replace(config, steps=1))
    text = refusal(replace(config, steps=steps), refused_on_a_full_disk, rank, num_bytes)
    assert text.startswith(f"{tmp_path}/step_00000002 cannot be written (File too large: ")
    assert re.search(rf"files of rank {rank} need [1-9][\d,]+ bytes, [\d,]+ are free\): name a different folder$", text)
    assert steps_in(tmp_path) == [1]
    assert steps_of(on_ranks(train, replace(config, steps=2))) == [2]


def test_a_disk_without_space_is_called_so(refusal, tmp_path):
    """torch's writer says only "unexpected pos 704 vs 598"."""
    text = refusal(saves_in(tmp_path, steps=1), refused_on_a_full_disk, 0, 100, 10)
    assert "step_00000001 cannot be written (No space left on device: the files of rank 0 need" in text
    assert text.endswith(", 10 are free): make space, or name a folder on a different disk")


@pytest.mark.parametrize(("number", "way_out"), [("EDQUOT", "make space"), ("EROFS", "name a folder that you may")])
def test_the_way_out_is_that_of_the_error(number, way_out):
    error = OSError(getattr(errno, number), "because")
    assert f"run1 cannot be written (because): {way_out}" in checkpoint.unwritable("run1", error)


def raised_while_saving(config, where, error):
    """On a rank: what a save raises when a function under it fails in a way that is no fault of the file system."""
    with patch(where, side_effect=error), pytest.raises(type(error)) as raised:
        train(config)
    return str(raised.value)


@pytest.mark.parametrize(
    ("where", "error"),
    [
        ("torch.distributed.checkpoint.filesystem.FileSystemWriter.write_data", RuntimeError("a fault in a library")),
        ("torch.distributed.checkpoint.filesystem.FileSystemWriter.finish", RuntimeError("a fault in a library")),
        ("os.fsync", KeyboardInterrupt("the stop button")),
    ],
)
def test_an_error_of_unknown_cause_is_raised_as_it_is(on_ranks, tmp_path, where, error):
    """And nobody is told to make space for it."""
    assert on_ranks(raised_while_saving, saves_in(tmp_path, steps=1), where, error) == [str(error)] * 2
    assert steps_in(tmp_path) == []


# -- in the background ------------------------------------------------------------------------------------------------


def before_writing(wait):
    """On a rank: the thread that writes calls this first."""
    write = filesystem.FileSystemWriter.write_data
    return patch.object(filesystem.FileSystemWriter, "write_data", lambda *args: (wait(), write(*args))[1])


def saved_late(config):
    """On a rank: nothing is written before all that was to be saved has changed."""
    changed = threading.Event()
    with before_writing(changed.wait), training(config) as trainer:
        trainer.step()
        states = [tensor for state in trainer.optimizer.state.values() for tensor in state.values()]
        for tensor in (*trainer.parameters, *states):
            tensor.data.zero_()
        changed.set()


def test_the_values_are_those_of_the_moment(on_ranks, tmp_path):
    short = replace(ONE_LAYER, steps=3, eval_interval=3, tp_size=2)
    config = saves_in(tmp_path, short)
    on_ranks(saved_late, replace(config, async_save=True))
    resumed = on_ranks(train, config)[0]
    assert numbers(resumed) == numbers(on_ranks(train, short)[0][1:])


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
def test_a_checkpoint_on_its_way_arrives_though_training_stops(on_ranks, tmp_path, by, disk_is_full):
    """If it cannot arrive, nothing of it is left, and training's error is the one that is raised."""
    config = saves_in(tmp_path, steps=2, async_save=True)
    assert on_ranks(stopped_while_saving, config, by, disk_is_full) == [by, by]
    assert steps_in(tmp_path) == ([] if disk_is_full else [1])
    assert steps_of(on_ranks(train, config)) == ([1, 2] if disk_is_full else [2])


def stopped_on_rank_1(config):
    """On a rank: rank 1 is interrupted just before its first save; rank 0 leaves too."""
    try:
        with training(config) as trainer:
            if dist.get_rank() == 1:
                trainer.save = interrupt
            trainer.step()
    except (RuntimeError, KeyboardInterrupt) as error:
        return type(error), str(error)


def test_no_rank_waits_for_one_that_will_not_save(on_ranks, tmp_path):
    config = saves_in(tmp_path, async_save=True)
    (of_rank_0, text), (of_rank_1, _) = launch(stopped_on_rank_1, config, world_size=2)
    assert of_rank_1 is KeyboardInterrupt
    assert of_rank_0 is RuntimeError and "onnection" in text
    assert checkpoint.newest(tmp_path) is None
    assert steps_of(on_ranks(train, replace(config, steps=1))) == [1]
    assert steps_in(tmp_path) == [1]


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
def test_nothing_stays_open(on_ranks, tmp_path):
    for first, *others in on_ranks(open_after, saves_in(tmp_path, async_save=True)):
        assert others == [first, first]


def train_with_a_slow_disk(config):
    """On a rank: syncing a file takes rank 1 three seconds, in which the rank runs no code and no Python of ours."""
    if dist.get_rank() == 1:
        os.fsync = functools.partial(ctypes.CDLL(None).poll, None, 0, 3000)  # poll ignores the file's number
    return len(train(config))


def test_a_slow_disk_is_not_a_deadlock(tmp_path):
    config = saves_in(tmp_path, steps=1, async_save=True)
    assert launch(train_with_a_slow_disk, config, world_size=2) == [1, 1]


def bytes_saved(config):
    """On a rank: how many bytes it gives to a save."""
    name = "async_save" if config.async_save else "save"
    with patch.object(state_dict_saver, name, wraps=getattr(state_dict_saver, name)) as save:
        one_step(config)
    tensors = save.call_args.args[0]
    return sum(bytes_of(tensor) for name, tensor in tensors.items() if not name.endswith(".step"))


def bytes_of(tensor):
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
def test_ranks_with_the_same_numbers_save_them_once(on_ranks, tmp_path, world_size, options):
    """Replicas of stage 0 and of hybrid sharding, tensor ranks' norms, and the tied embedding of two stages."""
    config = replace(TINY, steps=1)
    [whole] = on_ranks(bytes_saved, saves_in(tmp_path / "whole", config), world_size=1)
    saving = saves_in(tmp_path / "shared", config, async_save=world_size == 4, **options)
    per_rank = on_ranks(bytes_saved, saving, world_size=world_size)
    assert sum(per_rank) == whole
    if options == {}:  # four replicas share the work
        assert all(whole / 10 < saved < whole / 2 for saved in per_rank)


# -- of older versions -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["norm_eps", "options"])
def test_a_checkpoint_of_an_older_version_is_refused_by_name(two_steps_saved, refusal, tmp_path, capsys, name):
    two_steps_saved(tmp_path)
    path = tmp_path / "step_00000002"
    describe(path, {}, name)
    said = f"{path} was written by an older version of labtrain, without {name}: use the version that wrote it"
    assert refusal(saves_in(tmp_path, steps=3)).startswith(said)
    capsys.readouterr()
    assert checkpoint.main(str(tmp_path)) == 1
    assert capsys.readouterr().out.startswith(said)


def as_a799b4f_wrote_it(folder):
    """Give a description the names that options had in that version, and what it said of the versions that wrote it."""
    options = json.loads((folder / checkpoint.DESCRIPTION).read_text())["options"]
    options["balanced"] = options.pop("zigzag")
    options["bias_update_rate"] = options.pop("expert_bias_update_rate")
    options["context_parallel"] = {"all_gather": "gathered"}.get(options["context_parallel"], "ring")
    del options["gpu_memory_gib"]
    wrote = {"torch": "2.13.0", "python": "3.11.7", "commit": "a799b4f"}
    describe(folder, {"options": options, "written_by": wrote})


def test_a_checkpoint_of_a799b4f_resumes_and_only_what_differs_is_said(on_ranks, tmp_path, capsys):
    options = dict(num_experts=2, cp_size=2, context_parallel="all_gather", zigzag=False)
    config = saves_in(tmp_path, steps=2, **options, expert_bias_update_rate=0.25)
    on_ranks(train, config)
    as_a799b4f_wrote_it(tmp_path / "step_00000002")
    assert checkpoint.main(str(tmp_path)) == 0
    assert '"balanced": false' in capsys.readouterr().out
    longer = replace(config, steps=3)
    changed = replace(longer, zigzag=True, context_parallel="ring", expert_bias_update_rate=0.5)
    of_changed = "context_parallel is ring instead of all_gather, expert_bias_update_rate is 0.5 instead of 0.25, "
    for run, said in (
        (longer, "steps is 3 instead of 2\n"),
        (changed, of_changed + "steps is 3 instead of 2, zigzag is True instead of False\n"),
    ):
        assert steps_of(on_ranks(train, run)) == [3]
        assert f"step_00000002. From here on {said}" in capsys.readouterr().out
        shutil.rmtree(tmp_path / "step_00000003")


def test_a_checkpoint_of_a799b4f_is_exported(on_ranks, tmp_path):
    on_ranks(train, saves_in(tmp_path / "run", steps=1))
    as_a799b4f_wrote_it(tmp_path / "run" / "step_00000001")
    assert export.export(tmp_path / "run", tmp_path / "model").endswith("parameters in float64, of step_00000001")


# -- what only some ranks see ------------------------------------------------------------------------------------------


def refused_where_files_are_lost(config):
    """As on nodes that do not share the folder: what other ranks write does not come to rank 0."""

    def lose(path, checksum=checkpoint._checksum):
        found = checksum(path)
        if path.name == "__1_0.distcp":
            path.unlink()
        return found

    with patch.object(checkpoint, "_checksum", lose):
        return refused_here(config)


def test_a_folder_that_nodes_do_not_share_is_noticed(refusal, tmp_path):
    text = refusal(saves_in(tmp_path, tp_size=2), refused_where_files_are_lost)
    assert "lacks __1_0.distcp: checkpoint_dir must be a folder that all nodes share" in text
    assert checkpoint.newest(tmp_path) is None


def refused_where_only_some_see_it(config):
    """As on a node that does not share the folder: rank 1 sees no checkpoint in it."""
    exists = Path.exists
    is_blind = dist.get_rank() == 1
    with patch.object(
        Path, "exists", lambda path: not (is_blind and path.name == checkpoint.DESCRIPTION) and exists(path)
    ):
        return refused_here(config)


def test_a_node_that_does_not_see_the_checkpoint_says_so(two_steps_saved, refusal, tmp_path):
    two_steps_saved(tmp_path)
    why = f"rank 1 does not see {tmp_path}/step_00000002: checkpoint_dir must be a folder that all nodes share"
    assert refusal(saves_in(tmp_path), refused_where_only_some_see_it) == why


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
    two_steps_saved(tmp_path)
    options = json.loads(json.dumps(asdict(saves_in(tmp_path, steps=2))))
    capsys.readouterr()
    for folder in (tmp_path, tmp_path / "step_00000002"):
        assert checkpoint.main(str(folder)) == 0
        text, last = capsys.readouterr().out.rsplit("}\n", 1)
        about = json.loads(text + "}")
        assert about["options"] == options
        assert about["layout"].startswith("2 ranks = ")
        assert re.fullmatch(r"step_00000002 is whole: \d+ files\n", last)
    file = next((tmp_path / "step_00000002").glob("*.distcp"))
    flip(file)
    for folder, said in (
        (tmp_path, f"step_00000002 is damaged: {file} has changed since it was written"),
        (tmp_path / "none", "no complete checkpoint is in"),
    ):
        assert checkpoint.main(str(folder)) == 1
        assert said in capsys.readouterr().out
