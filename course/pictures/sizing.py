"""Draw bars of plans: what a GPU holds against its limit, and where a step's time goes."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any

from course.pictures import style
from course.pictures.parts import titled
from course.pictures.scene import Mark, Scene, box, label, line, text_width
from course.pictures.style import three_digits, tint
from course.sizing import Hardware, Memory, Plan, StepTime, memory
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
    "pipeline_messages": dict(fill=style.PP, means="pipeline messages"),
    "bubble": dict(fill=style.IDLE, edge=style.GREY, dashed=True),
    "data_parallel": dict(fill=style.DP, means="gradient messages"),
    "optimizer": dict(fill=tint(style.MUTED, 0.45)),
}
LEFT, BARS, ROW = 190.0, 580.0, 32.0
"""The pixels of the rows' names, of the longest bar, and from row to row."""


def draw_memory(plans: Mapping[str, Plan], hardware: Hardware) -> Scene:
    """Draw what a GPU of the first and of the last stage holds under each plan, and the GPU's limit as a line."""
    rows = {}
    for name, plan in plans.items():
        for stage in sorted({0, plan.pp_size - 1}):
            where = "" if plan.pp_size == 1 else "first stage" if stage == 0 else "last stage"
            rows[", ".join(filter(None, (name, where))) or "each GPU"] = memory(plan, stage)
    return draw_held(rows, hardware)


def draw_held(held: Mapping[str, Memory], hardware: Hardware) -> Scene:
    """Draw what a GPU holds in each row, and its limit as a line."""
    rows, limit = {name: asdict(each) for name, each in held.items()}, hardware.memory_bytes
    totals, has = [each.total for each in held.values()], f"{limit / 1e9:.0f}"
    sums = [f"{three_digits(total / 1e9)} GB: {'too much' if total > limit else 'fits'}" for total in totals]
    end = max(limit, *totals)
    x, bottom = LEFT + limit / end * BARS, 44 + ROW * len(rows)
    marks = [line("memory.limit", [(x, 38), (x, bottom)], style.PP, 3, fact=f"a GPU has {has} GB")]
    marks.append(label("memory.limit.word", x, 28, f"limit {has} GB", anchor="middle", ink=style.PP))
    return _bars(
        "Memory of a GPU", "memory", rows, MEMORY_LOOKS, 1e9, "GB", end, sums, f"GB; a GPU has {has}", marks, x
    )


def draw_step_time(estimates: Mapping[str, StepTime]) -> Scene:
    """Draw the parts of each estimated step, in seconds."""
    rows = {name: estimate.parts for name, estimate in estimates.items()}
    totals = [estimate.total for estimate in estimates.values()]
    sums = [f"{three_digits(total)} s" for total in totals]
    has_context = any(parts["context_parallel"] for parts in rows.values())
    looks = {part: look for part, look in TIME_LOOKS.items() if has_context or part != "context_parallel"}
    return _bars("A step, estimated", "time", rows, looks, 1, "s", max(totals), sums, "seconds")


def below(title: str, scenes: Sequence[Scene], facts: Sequence[tuple[str, str]]) -> Scene:
    """Return one scene of several below each other, whose keys begin with its number; ``facts`` end the table."""
    marks, rows, top = [], [], 0.0
    for number, scene in enumerate(scenes):
        marks += [replace(mark, key=f"{number}.{mark.key}", y=mark.y + top) for mark in scene.marks]
        heads, top = scene.table.heads[1:], top + scene.height + 12
        rows.append((scene.title, scene.table.caption))
        for name, *cells in scene.table.rows:
            rows.append((name, ", ".join(f"{head}: {cell}" for head, cell in zip(heads, cells))))
    says = "; ".join(scene.says for scene in scenes)
    return Scene(title, says, marks, top, table=Table(("", title), [*rows, *facts]))


def _bars(
    title: str, key: str, rows: Mapping[str, Mapping[str, float]], looks: dict, unit: float, symbol: str, end: float,
    sums: Sequence[str], caption: str, above: Sequence[Mark] = (), limit: float = -1.0,
) -> Scene:  # fmt: skip
    """Draw one stacked bar per row, its sum in a column beyond the longest, and a legend of its parts."""
    marks, cells, words = [], [], {part: look.get("means", part) for part, look in looks.items()}
    for number, ((name, parts), said) in enumerate(zip(rows.items(), sums)):
        y, x, total = 44 + number * ROW, LEFT, sum(parts.values())
        texts = {part: three_digits(parts[part] / unit) for part in looks}
        cells.append((name, *texts.values()))
        marks.append(label(f"{key}.{number}", 0, y + ROW / 2 - 3, name))
        for part, look in looks.items():
            width = parts[part] / end * BARS
            if parts[part] > 0.002 * end:
                fact = f"{name}: {words[part]} {texts[part]} {symbol}, {parts[part] / total:.0%} of it"
                about = dict(edge="#ffffff", edge_width=0.8, means=words[part], together=f"{key}.{part}") | look
                place, about["fact"] = (x, y, width, ROW - 6), fact.removeprefix(": ")
                made = box(f"{key}.{number}.{part}", *place, text=texts[part], radius=0, **about)
                marks += _beside(made, limit)
            x += width
        marks.append(label(f"{key}.{number}.sum", LEFT + BARS + 10, y + ROW / 2 - 3, said, bold=True))
    says = "; ".join(f"{name} {said}" for name, said in zip(rows, sums))
    return titled(title, says, [*marks, *above], Table(("", *words.values()), cells, caption))


def _beside(part: Mark, limit: float) -> list[Mark]:
    """Return a part of a bar with its number, which stands beside the limit's line, or nowhere if there is no room."""
    half, wide = part.width / 2, text_width(part.text, part.size)
    if abs(part.x + half - limit) > wide / 2 + 4:
        return [part]
    left, right = limit - part.x, part.x + part.width - limit
    middle = part.x + left / 2 if left > right else limit + right / 2
    word = label(f"{part.key}.word", middle, part.y + part.height / 2, part.text, anchor="middle", size=part.size)
    return [replace(part, text=""), *[replace(word, ink=part.ink)] * (max(left, right) > wide + 8)]
