"""Draw the operations of a layer below the roof of a GPU or of this machine: peak on the right, memory on the left."""

from collections.abc import Callable, Mapping, Sequence
from math import ceil, floor, log10
from typing import Any

from course.pictures import style
from course.pictures.parts import titled
from course.pictures.scene import WIDTH, Look, Mark, Scene, box, label, line, text_width
from course.pictures.style import GREY, INK, MUTED, three_digits
from course.sizing import Hardware
from course.sizing.roofline import Operation, ridge
from course.table import Table

LEFT, TOP, RIGHT, BOTTOM = 70.0, 64.0, WIDTH - 26, 430.0  # of the axes
POINT, NUMBER = 11.0, 15.0  # pixels of a point; from one number to the next below it
UNITS = ((1e15, "petaFLOP/s"), (1e12, "teraFLOP/s"), (1e9, "gigaFLOP/s"), (1e6, "megaFLOP/s"), (0, "FLOP/s"))
LOOKS: dict[str, Look] = {
    "product": dict(fill=style.TP, means="column- or row-parallel product"),
    "attention": dict(fill=style.PP, means="attention"),
    "memory": dict(fill=style.BACKWARD, edge=GREY, means="few FLOPs for each number"),
}


def draw_roofline(
    operations: Sequence[Operation], hardware: Hardware, seconds: Mapping[str, float] | None = None
) -> Scene:
    """Draw each operation where its FLOPs a byte are, as fast as the roof lets it be; or as it was in ``seconds``.

    The roof is the hardware's peak and its memory's bandwidth. Both axes are logarithmic.

    Raises:
        ValueError: no operations, or one of them has no time.
    """
    if not operations:
        raise ValueError("draw_roofline got no operations: give course.sizing.operations(plan)")
    if seconds is not None and (missing := [each.name for each in operations if each.name not in seconds]):
        raise ValueError(f"seconds has no time of {missing[0]!r}: measure the same operations")
    took = {each: seconds[each.name] if seconds else each.seconds(hardware) for each in operations}
    speed = {each: each.flops / took[each] for each in operations}
    peak, rate, corner = hardware.peak_flops, hardware.memory_bytes_per_second, ridge(hardware)
    xs = [*(each.intensity for each in operations), corner]
    first, last = floor(log10(min(xs) / 1.5)), ceil(log10(max(xs) * 1.5))
    least = floor(log10(min(*speed.values(), 10**first * rate)))
    most = ceil(log10(max(peak, *speed.values()) * 1.2))

    def at(intensity: float, flops: float) -> tuple[float, float]:
        across, up = (log10(intensity) - first) / (last - first), (log10(flops) - least) / (most - least)
        return LEFT + across * (RIGHT - LEFT), BOTTOM - up * (BOTTOM - TOP)

    marks = _axes(range(first, last + 1), range(least, most + 1), peak, at)
    top = f"peak: {_flops(peak)}"
    slope = f"memory: {three_digits(rate / 1e9)} GB/s; from {corner:.3g} FLOPs a byte on, the peak limits"
    roof = dict(width=2.5)
    marks.append(line("memory", [at(10.0**first, 10.0**first * rate), at(corner, peak)], INK, fact=slope, **roof))
    marks.append(line("peak", [at(corner, peak), at(10.0**last, peak)], INK, fact=top, **roof))
    marks.append(label("peak.word", RIGHT, at(1, peak)[1] - 18, top, anchor="end", bold=True))
    x, y = at((10.0**first * corner) ** 0.5, (10.0**first * corner) ** 0.5 * rate)
    marks.append(
        label("memory.word", x - 14, y - 10, f"memory: {three_digits(rate / 1e9)} GB/s", anchor="end", bold=True)
    )
    numbers, rows = [], []
    taken = [at(each.intensity, speed[each]) for each in operations]
    for number, each in enumerate(operations, start=1):
        x, y = at(each.intensity, speed[each])
        share = each.seconds(hardware) / took[each]
        limit = "memory" if each.is_limited_by_memory(hardware) else "peak"
        fact = f"{number}: {each.name}, {three_digits(each.intensity)} FLOPs a byte; the {limit} limits it"
        fact += f"; {_flops(speed[each])}, {share:.0%} of the roof" if seconds else f" to {_flops(speed[each])}"
        look: dict[str, Any] = dict(edge="#ffffff") | LOOKS[each.kind]
        tags: dict[str, Any] = dict(fact=fact, lights=(f"op{number}",))
        marks.append(box(f"op{number}", x - POINT / 2, y - POINT / 2, POINT, POINT, radius=POINT / 2, **look, **tags))
        spot = y + NUMBER
        while any(abs(x - other_x) < 20 and abs(spot - other_y) < NUMBER for other_x, other_y in taken):
            spot += NUMBER
        if spot > y + NUMBER:
            marks.append(line(f"op{number}.line", [(x, y), (x, spot - 7)], GREY, 1.0))
        taken.append((x, spot))
        numbers.append(label(f"op{number}.number", x, spot, str(number), anchor="middle", size=12, **tags))
        rows.append((str(number), each.name, three_digits(each.intensity), limit, _flops(speed[each]), f"{share:.0%}"))
    marks += [*numbers, *_names(operations)]
    limited = sum(each.is_limited_by_memory(hardware) for each in operations)
    how = "measured" if seconds else "as fast as the roof lets them be"
    says = f"{limited} of {len(operations)} operations are limited by the memory; {how}"
    heads = "", "operation", "FLOPs a byte", "limited by", "speed", "of the roof"
    table = Table(heads, rows, f"{hardware.name}: {top}, memory {three_digits(rate / 1e9)} GB/s")
    return titled(f"Roofline of {hardware.name}", says, marks, table, says, left=LEFT)


def _axes(x_powers: range, y_powers: range, peak: float, at: Callable) -> list[Mark]:
    """Return both axes with their numbers, powers of ten; speeds are in the unit that fits the peak."""
    marks = [line("left", [(LEFT, TOP), (LEFT, BOTTOM)], GREY)]
    marks.append(line("bottom", [(LEFT, BOTTOM), (RIGHT, BOTTOM)], GREY))
    for power in x_powers:
        x, _ = at(10.0**power, 10.0 ** y_powers[0])
        marks.append(line(f"x{power}.line", [(x, BOTTOM), (x, BOTTOM + 5)], GREY))
        marks.append(label(f"x{power}", x, BOTTOM + 16, three_digits(10.0**power), anchor="middle"))
    unit, symbol = next(each for each in UNITS if peak >= each[0])
    for power in y_powers:
        _, y = at(10.0 ** x_powers[0], 10.0**power)
        marks.append(line(f"y{power}.line", [(LEFT - 5, y), (LEFT, y)], GREY))
        marks.append(label(f"y{power}", LEFT - 9, y, three_digits(10.0**power / (unit or 1)), anchor="end"))
    means = "FLOPs for each byte that is moved"
    marks.append(label("x", (LEFT + RIGHT) / 2, BOTTOM + 36, means, anchor="middle", ink=MUTED))
    marks.append(label("y", LEFT + 12, TOP - 8, symbol, ink=MUTED))
    return marks


def _names(operations: Sequence[Operation]) -> list[Mark]:
    """Return the operations' numbers and names in rows below the axes."""
    found, x, y = [], LEFT, BOTTOM + 66
    for number, each in enumerate(operations, start=1):
        text = f"{number} {each.name}"
        if x > LEFT and x + text_width(text) > RIGHT:
            x, y = LEFT, y + 22
        found.append(label(f"op{number}.name", x, y, text, lights=(f"op{number}",)))
        x += text_width(text) + 24
    return found


def _flops(value: float) -> str:
    unit, symbol = next(each for each in UNITS if value >= each[0])
    return f"{three_digits(value / (unit or 1))} {symbol}"
