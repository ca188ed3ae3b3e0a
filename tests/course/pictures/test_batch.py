"""Pictures of a batch and of its gradients: whose rows are where, what is alike, and when a bucket leaves."""

import pytest
import torch

from course.pictures.batch import BatchCut, Gradient, bucket_steps, draw_batch, draw_replicas
from course.pictures.style import BACKWARD, DP, FRAME_FILL, TINTS, bytes_text, tint
from tests.support.pictures import lit, marks, tagged

CUTS = [(128, 4, 1), (128, 4, 2), (96, 3, 4), (8, 1, 1), (16, 16, 1), (1024, 16, 8)]
OVERLAPPED = [  # two buckets of a layer each; the first is sent after 1.weight
    Gradient("1.bias", 4, "last", 0),
    Gradient("1.weight", 16, "last", 1),
    Gradient("0.weight", 16, "first", 1),
    Gradient("0.bias", 4, "first", 2),
]
AT_THE_END = [gradient._replace(num_sent=0) for gradient in OVERLAPPED]


def tints_of(num_ranks):
    return [tint(DP, TINTS[rank % len(TINTS)]) for rank in range(num_ranks)]


@pytest.mark.parametrize("sizes", CUTS)
def test_every_row_is_seen_once_as_chunk_deals_them_out(sizes):
    cut = BatchCut(*sizes)
    pieces = [cut.rows(rank, number) for rank in range(cut.dp_size) for number in range(cut.num_micro_batches)]
    of_ranks = torch.arange(cut.batch_size).chunk(cut.dp_size)
    assert [*map(list, pieces)] == [rows.tolist() for all_rows in of_ranks for rows in all_rows.chunk(sizes[2])]


@pytest.mark.parametrize("sizes", CUTS)
def test_all_rows_are_dealt_once_each_rank_in_its_tint(sizes):
    cut = BatchCut(*sizes)
    scene, seen = draw_batch(cut), []
    for rank in range(cut.dp_size):
        for number in range(cut.num_micro_batches):
            mark, piece = (scene.by_key[f"{kind}{rank}.{number}"] for kind in ("rows", "dealt"))
            first, last = cut.rows(rank, number)[0], cut.rows(rank, number)[-1]
            assert mark.text == (f"{first}-{last}" if last > first else str(first))
            assert mark.fill == piece.fill == tints_of(cut.dp_size)[rank]
            assert set(mark.lights) <= set(piece.tags) and mark.same == piece.same
            assert scene.table.rows[rank][1 + number] == mark.text
            seen.append(piece.x)
    assert seen == sorted(seen)


def test_pointing_at_a_rank_lights_its_rows_and_no_others():
    scene = draw_batch(BatchCut(128, 4, 2))
    assert lit(scene, "rank2") == {"rows2.0", "rows2.1", "dealt2.0", "dealt2.1"}
    assert scene.by_key["average"].text.startswith("all-reduce")
    assert draw_batch(BatchCut(8)).by_key["average"].text == "nothing to send"


def test_of_replicas_what_differs_is_tinted_and_what_does_not_is_pale():
    scene = draw_replicas(BatchCut(128, 4))
    fills = {name: [scene.by_key[f"{name}{rank}"].fill for rank in range(4)] for name in scene.table.heads[1:]}
    assert fills.pop("rows") == fills.pop("loss") == fills.pop("gradients") == tints_of(4)
    assert list(fills) == ["model", "averages", "new weights"]
    assert all(fill == [FRAME_FILL] * 4 for fill in fills.values())


def test_a_bucket_leaves_when_it_is_full_while_backward_goes_on():
    steps = bucket_steps(OVERLAPPED)
    sent = [[mark.key for mark in marks(scene, "message")] for scene in steps]
    assert sent == [[], [], *[["message0"]] * 2, *[["message0", "message1"]] * 2]
    first, last = (steps[-1].by_key[key] for key in ("message0", "message1"))
    assert first.x == pytest.approx(steps[-1].by_key["backward.2"].x)  # under the gradients of the first layer
    assert last.x == pytest.approx(steps[-1].by_key["wait"].x)
    assert "starts after 1.weight" in first.fact and "20 B" in first.fact


def test_without_overlap_all_messages_start_when_backward_has_ended():
    steps = bucket_steps(AT_THE_END)
    assert [len(marks(scene, "message")) for scene in steps] == [0, 0, 0, 0, 0, 2]
    assert all(steps[-1].by_key[f"message{b}"].x == pytest.approx(steps[-1].by_key["wait"].x) for b in (0, 1))


def test_a_gradient_falls_into_its_bucket_is_sent_and_becomes_the_average():
    steps = bucket_steps(OVERLAPPED)
    seen = [scene.by_key["grad.0"] for scene in steps]
    assert [mark.fill for mark in seen] == [FRAME_FILL, BACKWARD, *[tint(DP, 0.34)] * 3, tint(DP, 0.78)]
    assert [scene.table.rows[0][3] for scene in steps[:2]] == ["not computed yet", "this rank's, not sent yet"]
    bucket = steps[1].by_key["bucket0"]
    assert seen[0].y < bucket.y < seen[1].y and seen[1].y + seen[1].height < bucket.y + bucket.height
    for scene in steps:  # each over its own bucket, the first bucket at the right
        for i, gradient in enumerate(OVERLAPPED):
            own, mark = scene.by_key[f"bucket{int(gradient.bucket == 'first')}"], scene.by_key[f"grad.{i}"]
            assert own.x < mark.x and mark.x + mark.width < own.x + own.width
    assert steps[0].by_key["bucket1"].x < bucket.x


def test_the_picture_says_where_its_order_is_from():
    assert "(simulated;" in bucket_steps(OVERLAPPED)[0].by_key["head.says"].text
    assert "(measured;" in bucket_steps(OVERLAPPED, "measured")[0].by_key["head.says"].text


def test_a_gradient_is_followed_from_backward_through_its_message_to_the_mean():
    for scene in bucket_steps(OVERLAPPED, dp_size=4):
        first = OVERLAPPED[0]
        share = bytes_text(first.num_bytes * 2 * 3 / 4)
        assert scene.journeys["grad0"].startswith(
            f"gradient of {first.name}, {bytes_text(first.num_bytes)}: number 1 of"
        )
        assert (
            f"on each of 4 ranks for its own rows; it travels in {scene.journeys['bucket0']}" in scene.journeys["grad0"]
        )
        assert f"each rank sends {share} of it" in scene.journeys["grad0"]
    scene = bucket_steps(OVERLAPPED)[-1]
    assert tagged(scene, "grad0") == {"grad.0", "model.0", "backward.0", "bucket0", "message0"}
    gradients = {f"{kind}.{i}" for kind in ("model", "backward", "grad") for i in (2, 3)}
    assert lit(scene, "bucket1") == {"bucket1", "message1", *gradients}
