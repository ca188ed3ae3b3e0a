"""Timelines on a slide: all letters have 16 pixels, nothing is lost or written over, and long ones are divided."""

from itertools import pairwise

import pytest

from course.explorers.schedule_builder import schedule_builder
from course.pictures.narrow import START, read, scene_of
from course.pictures.scene import MARGIN, Scene, text_width
from course.pictures.slide import TALLEST, TIMES, WIDTH, on_slide, svgs_on_slide
from course.pictures.timeline import LEFT
from tests.course.pictures.test_narrow import CHOICES, drawn, stored_timelines


def wrong(scene: Scene) -> list[str]:
    """What in a picture for a slide is too small, outside of it, or written over a text that begins on its left."""
    small = [mark.key for mark in scene.marks if mark.text and mark.size * TIMES < 24]
    outside = [mark.key for mark in scene.marks if not -1 <= mark.x <= mark.right <= WIDTH + MARGIN]
    below = [mark.key for mark in scene.marks if not -1 <= mark.y <= mark.bottom <= scene.height + 1]
    spans = []
    for mark in scene.marks:
        if mark.shape == "label":
            width = text_width(mark.text, mark.size)
            left = mark.x - width * {"start": 0, "middle": 0.5, "end": 1}[mark.anchor]
            spans.append((round(mark.y / 3), left, left + width, mark.text))
    spans.sort()
    over = [f"{one[3]} / {two[3]}" for one, two in pairwise(spans) if one[0] == two[0] and two[1] < one[2]]
    return small + outside + below + over


@pytest.mark.parametrize("choice", CHOICES, ids=str)
def test_all_of_a_timeline_is_on_its_slide(choice):
    wide = drawn(*choice)
    slide = on_slide(wide)
    assert wrong(slide) == []
    assert slide.width == WIDTH and slide.height < wide.height * 1.2
    longer = (slide.clock[1] - START) / (read(wide.marks).right - LEFT)
    for mark in wide.marks:
        if mark.fact and mark.shape == "box":
            there = slide.by_key[mark.key]
            assert there.fact == mark.fact
            if "held" not in mark.key:
                assert there.width == pytest.approx(mark.width * longer, abs=0.1)
    assert slide.by_key["held0.peak"].y == pytest.approx(slide.by_key["0.F0"].y, abs=6)  # beside its row


def test_ops_of_the_first_schedules_are_written():
    wide = drawn("1F1B", 4, 8)
    slide = on_slide(wide)
    assert [slide.by_key[f"2.{op}"].text for op in ("F0", "F7", "B0", "B7")] == ["F0", "F7", "B0", "B7"]
    [stored] = svgs_on_slide(wide.svg())  # in which numbers are rounded
    assert stored.count(">F7<") == stored.count(">B7<") == 4


def test_each_stored_timeline_has_its_slide_or_its_timelines_have():
    numbers = {}
    for name, svg in stored_timelines():
        slides = [scene_of(each) for each in svgs_on_slide(svg)]
        numbers[name] = len(slides)
        blocks = read(scene_of(svg).marks).blocks
        assert len(slides) in (1, len(blocks)), name
        assert [wrong(each) for each in slides] == [[]] * len(slides), name
        assert max(each.height for each in slides) <= TALLEST
        titles = [mark.text for each in slides for mark in each.marks if mark.bold]
        assert titles == [block.title for block in blocks if block.title]
    assert numbers["order-run"] == 1 and numbers["timeline-draw"] == 3


def test_another_picture_is_none():
    assert svgs_on_slide(Scene("A title", "", [], 10.0).svg()) == []
    assert svgs_on_slide("<svg></svg>") == []


@pytest.mark.parametrize("placement", ["in turn", "V"])
def test_a_schedule_written_by_hand_is_drawn_for_its_slide(placement):
    builder = schedule_builder(4, 8, ["F0 F1", "F0"], placement, True)
    [slide] = builder.slide_steps
    assert wrong(slide) == []
    assert slide.by_key.keys() == builder.steps[0].by_key.keys()
