"""Pictures of sharded data parallelism: columns are as high as the bytes, and lines join copies of one shard."""

import re

import pytest

from course.pictures.fully_sharded import draw_cluster, draw_moments
from course.sizing.fully_sharded import moments
from tests.support.pictures import marks

MOMENTS = moments([400, 800, 400], dp_size=4)
SCENES = {str(size): draw_cluster(32, size) for size in (8, 32)} | {"moments": draw_moments(MOMENTS, 1600, "a step")}
SCENES |= {str(size): draw_cluster(32, size) for size in (8, 16, 32)}


def test_a_column_is_as_high_as_what_a_rank_holds():
    scene = SCENES["moments"]
    unit = scene.by_key["m0.w0"].height / 400
    for number, moment in enumerate(MOMENTS):
        own = [mark for mark in scene.marks if re.match(rf"m{number}\.[wgs]", mark.key)]
        held = moment.shards + sum(moment.weights) + sum(moment.gradients)
        assert sum(mark.height for mark in own) == pytest.approx(held * unit)
        assert max(mark.bottom for mark in own) == scene.by_key["m0.shards"].bottom
    assert scene.by_key["whole"].y == pytest.approx(scene.by_key["m0.shards"].bottom - 1600 * unit)


def test_what_is_fetched_ahead_looks_different_from_what_computes():
    scene = SCENES["moments"]
    assert [scene.by_key[key].means for key in ("m1.w1", "m1.w2", "m4.w1", "m4.w0", "m4.g1")] == [
        "weights in use", "fetched ahead", "weights in use", "fetched ahead", "whole gradients"
    ]  # fmt: skip
    assert scene.table.rows[1] == ["F1", "400 B", "1, 2", "none"]
    assert scene.says == "A rank holds at most 1.6 kB of weights; by the formula 1.6 kB"


def test_frames_are_nodes_and_lines_join_the_same_shard():
    scene = SCENES["8"]
    frames = marks(scene, "frame")
    assert len(frames) == 4 and not any(frame.dashed for frame in frames)
    for shard in range(8):
        line = scene.by_key[f"copies{shard}"]
        assert {mark.text for mark in scene.marks if f"shard{shard}" in mark.tags and mark.text} == {
            f"GPU {rank}\nshard {shard}" for rank in range(shard, 32, 8)
        }
        assert line.dashed and len(line.points) == 4
    assert scene.table.rows[-1] == ["all-reduce of gradient shards", "4", "across nodes", "0.188"]  # 2 * 3/4 / 8


def test_one_copy_has_no_lines_and_its_gathers_leave_the_nodes():
    scene = SCENES["32"]
    assert not marks(scene, "copies")
    assert scene.by_key["frame0"].dashed
    assert scene.says == "Gathers and reduce-scatters across nodes"
    assert SCENES["8"].says.startswith("Gathers and reduce-scatters inside a node; all-reduces")
