"""Pictures of plans: every part as long as its number, on the limit's scale, and every bar with its sum."""

from dataclasses import asdict, replace
from itertools import pairwise

import pytest

from course.pictures.scene import WIDTH, text_width
from course.pictures.sizing import BARS, LEFT, below, draw_memory, draw_step_time
from course.sizing import DGX_A100, Plan, memory, step_time
from labkit.shape import GPT

PLAN = Plan(GPT(16, 8192, 2048, 51200, 64), 8, 16, pp_size=8, recompute="selective")


def bars(scene, row):
    """The parts of a row's bar, from left to right."""
    return [mark for mark in scene.marks if mark.shape == "box" and f".{row}." in mark.key]


def test_memory_is_stacked_to_the_total_of_each_stage():
    scene = draw_memory({"mine": PLAN}, DGX_A100)
    assert [scene.by_key[f"memory.{row}"].text for row in (0, 1)] == ["mine, first stage", "mine, last stage"]
    for row, stage in enumerate((0, 7)):
        held = memory(PLAN, stage)
        widths = [mark.width / BARS * DGX_A100.memory_bytes for mark in bars(scene, row)]
        assert widths == pytest.approx(list(asdict(held).values()))
        assert scene.by_key[f"memory.{row}.sum"].text == f"{held.total / 1e9:.3g} GB: fits"
        assert scene.table.rows[row][1:] == tuple(f"{value / 1e9:.3g}" for value in asdict(held).values())
    fact = scene.by_key["memory.0.weights"].fact
    weights, total = memory(PLAN).weights, memory(PLAN).total
    assert fact == f"mine, first stage: weights {weights / 1e9:.3g} GB, {weights / total:.0%} of it"
    assert scene.by_key["memory.limit"].x == LEFT + BARS
    assert [mark.text for mark in scene.marks if mark.key.endswith(".word") and "legend" in mark.key] == [
        "weights", "gradients", "optimizer", "activations",
    ]  # fmt: skip


def test_the_limits_line_strikes_through_no_number():
    for batch in (1, 2, 4, 8, 16, 24, 32):
        scene = draw_memory({"": replace(PLAN, recompute="none", micro_batch_size=batch, batch_size=96)}, DGX_A100)
        limit = scene.by_key["memory.limit"].x
        parts = [mark for mark in scene.marks if mark.text and (mark.shape == "box" or mark.key.endswith("s.word"))]
        for mark in (mark for mark in parts if "legend" not in mark.key):
            assert abs(mark.x + mark.width / 2 - limit) > text_width(mark.text, mark.size) / 2, (batch, mark.key)


def test_what_does_not_fit_is_said_and_passes_the_limit():
    scene = draw_memory({"": replace(PLAN, recompute="none", micro_batch_size=16)}, DGX_A100)
    limit = scene.by_key["memory.limit"].x
    for row in (0, 1):
        assert scene.by_key[f"memory.{row}.sum"].text.endswith("too much")
        assert bars(scene, row)[-1].x + bars(scene, row)[-1].width > limit
    assert draw_memory({"": replace(PLAN, pp_size=1)}, DGX_A100).by_key["memory.0"].text == "each GPU"


def test_sums_stand_in_one_column_beyond_every_bar():
    plans = {how: replace(PLAN, micro_batch_size=16, recompute=how) for how in ("none", "selective", "full")}
    scene = draw_memory(plans, DGX_A100)
    sums = [mark for mark in scene.marks if mark.key.endswith(".sum")]
    assert [mark.text.partition(": ")[2] for mark in sums] == [*["too much"] * 2, *["fits"] * 4]
    [place] = {mark.x for mark in sums}
    assert place > max(mark.x + mark.width for mark in scene.marks if mark.shape == "box")
    assert max(place + text_width(mark.text, mark.size, mark.bold) for mark in sums) <= WIDTH


def test_parts_of_a_step_follow_each_other_and_light_up_in_all_steps():
    estimate = step_time(PLAN, DGX_A100)
    scene = draw_step_time({"mine": estimate, "other": step_time(replace(PLAN, recompute="full"), DGX_A100)})
    for bar, following in pairwise(bars(scene, 0)):
        assert bar.x + bar.width == pytest.approx(following.x, abs=0.01 * BARS)
    drawn = sum(bar.width for bar in bars(scene, 0)) / sum(bar.width for bar in bars(scene, 1))
    assert drawn == pytest.approx(estimate.total / step_time(replace(PLAN, recompute="full"), DGX_A100).total, rel=0.01)
    assert scene.by_key["time.0.sum"].text == f"{estimate.total:.3g} s"
    bubble = scene.by_key["time.0.bubble"]
    assert bubble.lights == bubble.tags == scene.by_key["time.1.bubble"].tags


def test_scenes_below_each_other_do_not_overlap():
    scenes = draw_memory({"": PLAN}, DGX_A100), draw_step_time({"a step": step_time(PLAN, DGX_A100)})
    both = below("both", scenes, [("bubble", "none")])
    ends = [max(mark.y for mark in both.marks if mark.key.startswith(f"{number}.")) for number in (0, 1)]
    assert ends[0] < min(mark.y for mark in both.marks if mark.key.startswith("1.")) and ends[1] < both.height
    assert len(both.marks) == sum(len(scene.marks) for scene in scenes)
    facts = dict(both.table.rows)
    assert facts["bubble"] == "none"
    assert facts["first stage"] == ", ".join(
        map(": ".join, zip(scenes[0].table.heads[1:], scenes[0].table.rows[0][1:]))
    )
