"""How many micro-batches each rank holds."""

from matplotlib.figure import Figure

from course.pictures.in_flight import draw_in_flight, peaks_in_flight
from labkit.schedules import interleaved
from labkit.timeline import simulate


def test_peaks_count_a_chunks_pass_as_a_part():
    schedule = interleaved(4, 8, 2)
    assert peaks_in_flight(simulate(schedule)) == [schedule.peak_in_flight(rank) / 2 for rank in range(4)]
    [bars] = draw_in_flight(simulate(schedule), Figure().subplots(), most=5.5).collections[:1]
    assert max(path.get_extents().x1 for path in bars.get_paths()) == 5.5
