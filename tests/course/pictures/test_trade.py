"""Bubble against memory: a point for each schedule where its timeline says, and a curve behind them."""

import pytest

from course.pictures.trade import draw_trade
from course.sizing import simulate
from labkit.schedules import greedy, one_f_one_b, v_half, v_min, zero_bubble_v

TIMELINES = {"1F1B": simulate(one_f_one_b(4, 8)), "V-Half": simulate(v_half(4, 8)), "V-Min": simulate(v_min(4, 8))}


def test_a_point_stands_at_what_a_schedule_holds_and_how_long_it_is_idle():
    plot = draw_trade(TIMELINES)
    [ax] = plot.figure.axes
    points = [line.get_xydata()[0].tolist() for line in ax.lines]
    assert points == [pytest.approx(each) for each in ([4, 0.375], [3, 2.5 / 24], [2, 5.5 / 24])]
    assert [text.get_text() for text in ax.texts] == ["1F1B", "V-Half", "V-Min"]
    assert [text.xy for text in ax.texts] == [pytest.approx(each) for each in points]
    assert ax.get_ylim()[1] > 0.375 and ax.get_xlim()[1] > 4
    assert "1F1B: 0.375 with 4. V-Half: 0.104 with 3. V-Min: 0.229 with 2." in repr(plot)
    assert "<svg" in plot.svg()


def test_a_curve_goes_from_little_memory_to_much_and_may_leave_the_plot():
    found = [simulate(greedy(4, 8, limit)) for limit in (8, 2, 7, 6, 4)]  # 7 finds what 6 does
    plot = draw_trade(TIMELINES, found, "greedy")
    curve, *_ = plot.figure.axes[0].lines
    assert curve.get_xdata().tolist() == [1, 2, 3, 4]
    assert max(curve.get_ydata()) > plot.figure.axes[0].get_ylim()[1] > 0.375
    assert "greedy: 1.833 with 1; 0.229 with 2; 0.104 with 3; 0.063 with 4." in repr(plot)


def test_schedules_at_one_place_share_their_label():
    named = {"ZB-V": simulate(zero_bubble_v(2, 4)), "V-Half": simulate(v_half(2, 4))}
    [text] = draw_trade(named).figure.axes[0].texts
    assert text.get_text() == "ZB-V, V-Half"
