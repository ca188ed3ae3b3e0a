"""Draw bars of plans: what a GPU holds against its limit, and where a step's time goes."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any

from course.pictures import style
from course.pictures.parts import titled
from course.pictures.scene import WIDTH, Mark, Scene, box, label, line, text_width
from course.pictures.style import three_digits, tint
from course.sizing import Hardware, MemoryEstimate, Plan, StepTime, memory
from course.table import Table

MEMORY_LOOKS: dict[str, dict[str, Any]] = {
    "weights": dict(fill=tint(style.INK, 0.75)),
    "gradients": dict(fill=style.BACKWARD),
    "optimizer": dict(fill=tint(style.MUTED, 0.45)),
    "activations": dict(fill=style.FORWARD),
}
TIME_LOOKS: dict[str, dict[str, Any]] = {
    "products": dict(fill=style.FORWARD, means="matrix products"),
    "memory_bound": dict(fill=tint(style.FORWARD, 0.45), means="memory only"),
    "overhead": dict(fill=style.WEIGHT_GRADIENT),
    "tensor_parallel": dict(fill=style.TP, means="tensor messages"),
    "context_parallel": dict(fill=style.CP, means="context messages"),
    "expert_parallel": dict(fill=style.EP, means="expert messages"),
    "pipeline_messages": dict(fill=style.PP, means="pipeline messages"),
    "bubble": dict(fill=style.IDLE, edge=style.GREY, dashed=True),
    "data_parallel": dict(fill=style.DP, means="gradient messages"),
    "optimizer": dict(fill=tint(style.MUTED, 0.45)),
}
LEFT, BARS, ROW = 190.0, 580.0, 32.0
"""The pixels of the rows' names, of the longest bar, and from row to row."""
HALF = (WIDTH - 20) / 2  # of two pictures beside each other


def draw_memory(
    plans: Mapping[str, Plan], hardware: Hardware, before: Plan | None = None, width: float = WIDTH
) -> Scene:
    """Draw what a GPU of the first and of the last stage holds under each plan, and the GPU's limit as a line.

    What it held ``before`` a change of the only plan is pale behind it.
    """
    rows = {}
    for name, plan in plans.items():
        for stage in sorted({0, plan.pp_size - 1}):
            where = "" if plan.pp_size == 1 else "first stage" if stage == 0 else "last stage"
            rows[", ".join(filter(None, (name, where))) or "each GPU"] = memory(plan, stage)
    held = [memory(before, stage) for stage in (0, before.pp_size - 1)] if before else []
    return draw_held(rows, hardware, held, width)


def draw_held(
    held: Mapping[str, MemoryEstimate], hardware: Hardware, before: Sequence[MemoryEstimate] = (), width: float = WIDTH
) -> Scene:
    """Draw what a GPU holds in each row, and its limit as a line."""
    rows, limit = {name: asdict(each) for name, each in held.items()}, hardware.memory_bytes
    totals, has = [each.total for each in held.values()], f"{limit / 1e9:.0f}"
    sums = [f"{three_digits(total / 1e9)} GB: {'too much' if total > limit else 'fits'}" for total in totals]
    ghosts, (left, room) = [asdict(each) for each in before[: len(rows)]], _room(width)
    end = max(limit, *totals, *(sum(ghost.values()) for ghost in ghosts))
    x, bottom = left + limit / end * room, 44 + ROW * len(rows)
    marks = [line("memory.limit", [(x, 38), (x, bottom)], style.PP, 3, fact=f"a GPU has {has} GB")]
    marks.append(label("memory.limit.word", x, 28, f"limit {has} GB", anchor="middle", ink=style.PP))
    return _bars(
        "Memory of a GPU", "memory", rows, MEMORY_LOOKS, 1e9, "GB", end, sums, f"GB; a GPU has {has}", marks, x,
        ghosts, width,
    )  # fmt: skip


def draw_step_time(estimates: Mapping[str, StepTime], before: StepTime | None = None, width: float = WIDTH) -> Scene:
    """Draw the parts of each estimated step, in seconds; the parts ``before`` a change are pale behind the first."""
    rows = {name: estimate.parts for name, estimate in estimates.items()}
    totals = [estimate.total for estimate in estimates.values()]
    sums = [f"{three_digits(total)} s" for total in totals]
    ghosts = [before.parts] if before else []
    every = [*rows.values(), *ghosts]
    unused = {part for part in ("context_parallel", "expert_parallel") if not any(parts[part] for parts in every)}
    looks = {part: look for part, look in TIME_LOOKS.items() if part not in unused}
    end = max(*totals, before.total if before else 0)
    return _bars("A step, estimated", "time", rows, looks, 1, "s", end, sums, "seconds", ghosts=ghosts, width=width)


def _room(width: float) -> tuple[float, float]:
    """Return the pixels of the rows' names, and of the longest bar, in a picture of this width."""
    return (LEFT, BARS) if width == WIDTH else (92, width - 242)


def together(title: str, scenes: Sequence[Scene], facts: Sequence[tuple[str, str]]) -> Scene:
    """Return one scene of several, beside each other where they are narrow enough; ``facts`` end the table.

    The keys of each scene's marks begin with its number.
    """
    marks, rows, panels, x, y, bottom = [], [], [], 0.0, 0.0, 0.0
    for number, scene in enumerate(scenes):
        if x and x + scene.width > WIDTH:
            x, y = 0.0, bottom
        marks += [replace(mark, key=f"{number}.{mark.key}", x=mark.x + x, y=mark.y + y) for mark in scene.marks]
        panels.append((x, y, scene.width, scene.height + 12))
        x, bottom, heads = x + scene.width + 20, max(bottom, y + scene.height + 12), scene.table.heads[1:]
        rows.append((scene.title, scene.table.caption))
        for name, *cells in scene.table.rows:
            rows.append((name, ", ".join(f"{head}: {cell}" for head, cell in zip(heads, cells))))
    says = "; ".join(scene.says for scene in scenes)
    return Scene(title, says, marks, bottom, table=Table(("", title), [*rows, *facts]), panels=panels)


def _bars(
    title: str, key: str, rows: Mapping[str, Mapping[str, float]], looks: dict, unit: float, symbol: str, end: float,
    sums: Sequence[str], caption: str, above: Sequence[Mark] = (), limit: float = -1.0,
    ghosts: Sequence[Mapping[str, float]] = (), width: float = WIDTH,
) -> Scene:  # fmt: skip
    """Draw one stacked bar per row, its sum in a column beyond the longest, and a legend of its parts.

    A ghost is what a row was before: pale, and behind it.
    """
    marks, cells, words = [], [], {part: look.get("means", part) for part, look in looks.items()}
    left, room = _room(width)
    for number, ((name, parts), said) in enumerate(zip(rows.items(), sums)):
        y, x, total, thin = 44 + number * ROW, left, sum(parts.values()), 0
        if ghosts[number : number + 1] not in ([], [parts]):
            thin, was = 5, left
            for part, look in looks.items():
                value, fact = ghosts[number][part], f"before: {words[part]} {three_digits(ghosts[number][part] / unit)}"
                place = was, y, value / end * room, ROW - 6
                pale, was = tint(look["fill"], 0.3), was + place[2]
                if value > 0.002 * end:
                    here = f"{key}.{number}.{part}.before"
                    marks.append(
                        box(here, *place, pale, fact=f"{fact} {symbol}", edge=style.GREY, dashed=True, radius=0)
                    )
        texts = {part: three_digits(parts[part] / unit) for part in looks}
        cells.append((name, *texts.values()))
        marks.append(label(f"{key}.{number}", 0, y + ROW / 2 - 3, name))
        for part, look in looks.items():
            wide = parts[part] / end * room
            if parts[part] > 0.002 * end:
                fact = f"{name}: {words[part]} {texts[part]} {symbol}, {parts[part] / total:.0%} of it"
                about = dict(edge="#ffffff", edge_width=0.8, means=words[part], together=f"{key}.{part}") | look
                place, about["fact"] = (x, y + thin, wide, ROW - 6 - 2 * thin), fact.removeprefix(": ")
                made = box(f"{key}.{number}.{part}", *place, text=texts[part], radius=0, **about)
                marks += _beside(made, limit)
            x += wide
        marks.append(label(f"{key}.{number}.sum", left + room + 10, y + ROW / 2 - 3, said, bold=True))
    says = "; ".join(f"{name} {said}" for name, said in zip(rows, sums))
    return titled(title, says, [*marks, *above], Table(("", *words.values()), cells, caption), width=width)


def _beside(part: Mark, limit: float) -> list[Mark]:
    """Return a part of a bar with its number, which stands beside the limit's line, or nowhere if there is no room."""
    half, wide = part.width / 2, text_width(part.text, part.size)
    if abs(part.x + half - limit) > wide / 2 + 4:
        return [part]
    left, right = limit - part.x, part.x + part.width - limit
    middle = part.x + left / 2 if left > right else limit + right / 2
    word = label(f"{part.key}.word", middle, part.y + part.height / 2, part.text, anchor="middle", size=part.size)
    return [replace(part, text=""), *[replace(word, ink=part.ink)] * (max(left, right) > wide + 8)]
