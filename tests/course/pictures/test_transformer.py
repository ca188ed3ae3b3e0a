"""A transformer layer with its messages, the pair step by step, and the embedding."""

import pytest
import torch
import torch.nn.functional as F

from course.pictures.style import BACKWARD, CP, FRAME_FILL, TP, tints
from course.pictures.transformer import draw_embedding, draw_pair, draw_transformer_layer
from tests.support.pictures import marks, texts


@pytest.mark.parametrize(
    ("sequence_parallel", "forward", "backward"),
    [
        (False, ["nothing", "all-reduce"] * 2, ["all-reduce", "nothing"] * 2),
        (True, ["all-gather", "reduce-scatter"] * 2, ["reduce-scatter", "all-gather"] * 2),
    ],
)
def test_messages_stand_where_the_operators_are(sequence_parallel, forward, backward):
    scene = draw_transformer_layer(2, sequence_parallel)
    for when, messages in (("forward", forward), ("backward", backward)):
        assert [mark.text for mark in sorted(marks(scene, when), key=lambda mark: mark.x)] == messages
    bars = [mark for mark in marks(scene, "bar") if mark.shape == "box"]
    assert bars[0].fact == f"attention begins: {forward[0]} forward, {backward[0]} backward"
    assert [row[2:] for row in scene.table.rows if row[2]] == [*zip(forward, backward)]


@pytest.mark.parametrize("tp_size", [1, 2, 4])
@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_each_rank_has_a_row_and_the_colour_says_what_is_cut(tp_size, sequence_parallel):
    scene = draw_transformer_layer(tp_size, sequence_parallel)
    for rank in range(tp_size):
        row = [mark for mark in scene.marks if mark.tags == (f"rank{rank}",)]
        whole = tints(CP, tp_size)[rank] if sequence_parallel else FRAME_FILL
        assert {mark.text: mark.fill for mark in row} == {
            **dict.fromkeys(["norm", "drop +"], whole),
            **dict.fromkeys(["Q K V", "heads", "out", "up", "GeLU", "down"], tints(TP, tp_size)[rank]),
        }


def test_the_steps_of_the_layer_have_the_same_marks():
    assert draw_transformer_layer(2).by_key.keys() - draw_transformer_layer(2, True).by_key.keys() == {
        "legend.same on every rank", "legend.same on every rank.word",
    }  # fmt: skip


@pytest.mark.parametrize("tp_size", [1, 2, 4, 8])
def test_the_pair_sends_one_all_reduce_forward_and_one_backward(tp_size):
    scenes = draw_pair(tp_size)
    sends = [[bar for bar in "fg" if scene.by_key[f"{bar}.word"].text == "all-reduce"] for scene in scenes]
    assert sends == [[], [], [], [], ["g"], [], [], [], [], ["f"]]
    for scene, bars in zip(scenes, sends):
        assert ("all-reduce" in scene.says) == bool(bars)
    assert [row[1] for row in scenes[0].table.rows] == [scene.says for scene in scenes]


def test_the_pair_computes_to_the_right_and_its_gradients_to_the_left():
    scenes = draw_pair(2)
    columns = [[mark.key[0] for mark in scene.marks if mark.tags == ("rank1",)] for scene in scenes]
    assert columns[0] == ["X", "A", "B"]
    assert columns[4] == [*"XAHGBPZ"]
    assert columns[-1] == [*"XDAHGBPZ"]
    yellow = [{mark.key[0] for mark in scene.marks if mark.fill == BACKWARD and mark.tags} for scene in scenes]
    assert yellow[4:] == [set(), {*"ZP"}, {*"ZPBG"}, {*"ZPBGH"}, {*"ZPBGHAD"}, {*"ZPBGHADX"}]
    for number, scene in enumerate(scenes):
        arrows = [mark for mark in scene.marks if mark.heads]
        assert all((mark.points[1][0] > 0) == (number < 5) for mark in arrows)
        assert bool(arrows) == (number > 0)


def test_the_pairs_boxes_have_the_shapes_of_the_matrices():
    by_key = draw_pair(2)[4].by_key
    x, a, h, b, z = (by_key[f"{name}.0"] for name in "XAHBZ")
    assert (h.width, h.height) == (a.width, x.height)  # X A_0
    assert (b.height, b.width) == pytest.approx((h.width, z.width))  # (X A_0) B_0
    assert a.width == pytest.approx(2 * x.width)  # 4h columns on 2 ranks


@pytest.mark.parametrize(("vocab_size", "tp_size"), [(10, 4), (27, 4), (8, 2), (5, 1)])
def test_the_ranks_answers_add_up_to_the_embedding(vocab_size, tp_size):
    """What the picture says, done in torch: each rank looks up its rows and gives zeros elsewhere."""
    tokens = [0, vocab_size - 1, 3, 3]
    weight = torch.eye(vocab_size)
    looked_up = torch.zeros(len(tokens), vocab_size)
    step = draw_embedding(vocab_size, tp_size, tokens)[1]
    for rank in range(tp_size):
        ids = step.by_key[f"shard{rank}"].text.split()
        own = range(int(ids[1]), int(ids[-1]) + 1)
        for number, token in enumerate(tokens):
            cell = step.by_key[f"cell{rank}.{number}"]
            assert (cell.text == "vector") == (token in own)
            if cell.text == "vector":
                looked_up[number] += weight[token]
    assert torch.equal(looked_up, F.embedding(torch.tensor(tokens), weight))


def test_before_the_all_reduce_only_the_owner_has_the_vector_and_after_it_every_rank():
    first, second, third = draw_embedding(10, 4, [0, 3, 9])
    assert not marks(first, "cell")
    assert sorted(texts(second, "cell")) == ["vector"] * 3 + ["zeros"] * 9
    for number, owner in enumerate((0, 1, 3)):
        after = [third.by_key[f"cell{rank}.{number}"] for rank in range(4)]
        assert {(mark.text, mark.fill) for mark in after} == {("vector", tints(TP, 4)[owner])}
        assert second.by_key[f"cell{owner}.{number}"].tags == second.by_key[f"token{number}"].lights
    assert first.table.rows == [("0", "rank 0", "0"), ("3", "rank 1", "0"), ("9", "rank 3", "0")]
    assert first.table.caption == "10 rows are padded to 12."
    assert draw_embedding(8, 4, [0])[0].table.caption == ""


def test_a_rank_that_has_only_padding_says_so():
    first = draw_embedding(5, 4, [4])[0]
    assert [first.by_key[f"shard{rank}"].text for rank in range(4)] == [
        "ids 0 to 1",
        "ids 2 to 3",
        "id 4",
        "padding",
    ]
