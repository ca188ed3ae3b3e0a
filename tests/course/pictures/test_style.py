"""Letters and colours that every reader can tell apart."""

import pytest

from course.pictures.style import AXIS_COLOR, TINTS, group_letter, text_on, tint


def test_letters_go_on_after_z():
    letters = [group_letter(index) for index in range(26 + 26 * 26 + 1)]
    assert letters[25:28] == ["Z", "AA", "AB"]
    assert letters[-2:] == ["ZZ", "AAA"]
    assert len(set(letters)) == len(letters)


@pytest.mark.parametrize("axis", AXIS_COLOR)
@pytest.mark.parametrize("strength", [*TINTS, 1.0, 0.15])
def test_text_on_every_tint_is_readable(axis, strength):
    def luminance(color):
        shares = [channel / 255 for channel in bytes.fromhex(color[1:])]
        channels = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in shares]
        return 0.2126 * channels[0] + 0.7152 * channels[1] + 0.0722 * channels[2]

    background = tint(AXIS_COLOR[axis], strength)
    light, dark = sorted([luminance(background), luminance(text_on(background))], reverse=True)
    assert (light + 0.05) / (dark + 0.05) >= 3.0  # WCAG's limit for large text
