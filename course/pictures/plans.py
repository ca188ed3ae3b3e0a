"""Draw how long a training run takes for each tensor size t and pipeline size p, and what does not fit."""

from dataclasses import replace
from math import inf, log

from course.pictures.parts import titled
from course.pictures.scene import WIDTH, Look, Scene, box, label
from course.pictures.style import FRAME_FILL, GREY, IDLE, MUTED, three_digits, tint
from course.sizing import Candidate, Hardware, Plan, fullest, step_time
from course.sizing.plan import uneven_stages
from course.table import Table
from labkit.sizes import Misfit

TP_SIZES = (1, 2, 4, 8, 16, 32)
PP_SIZES = (1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 15, 16, 20, 21, 24, 30, 32, 35, 40, 48, 64)
DAYS, CHOSEN = "#00204D", "#C9A227"  # in none of the axes' colours
LEFT, TOP, ROW, WIDEST = 60.0, 48.0, 26.0, 110.0
PALE, DARK = (0.2, 0.4), (0.63, 0.9)  # strengths: between the two, no number would stand out


def draw_plans(plan: Plan, hardware: Hardware, num_tokens: float = 300e9, best: Candidate | None = None) -> Scene:
    """Draw the days of a training run for each t and p, all else as in ``plan``, which has a frame.

    What does not fit is grey, and its fact says why. The key of a cell ends in "t8.p16". If the plan's stages differ in
    layers, those of the others may, too. The ``best`` plan of a search is a line below the cells, to click.
    """
    model, n, heads = plan.model, plan.world_size, plan.model.num_attention_heads or 1
    ts = sorted({plan.tp_size, *(size for size in TP_SIZES if heads % size == n % size == 0)})
    sizes = [size for size in PP_SIZES if n % size == 0 and size <= model.num_layers]
    ps = sorted({plan.pp_size, *(size for size in sizes if plan.stage_layers or model.num_layers % size == 0)})
    cells = {(t, p): _cell(plan, t, p, hardware, num_tokens) for t in ts for p in ps}
    now = cells[plan.tp_size, plan.pp_size][2]
    fitting = sorted((days, fact) for _, fact, days, _ in cells.values() if days < inf)
    width = min(WIDEST, (WIDTH - LEFT) / len(ps))
    marks = [label(f"p{p}", LEFT + (i + 0.5) * width, TOP - 14, f"p = {p}", anchor="middle") for i, p in enumerate(ps)]
    marks += [label(f"t{t}", 0, TOP + (i + 0.5) * ROW, f"t = {t}") for i, t in enumerate(ts)]
    for (t, p), (text, fact, days, look) in cells.items():
        if days < inf:
            (fewest, _), (most, _) = fitting[0], fitting[-1]
            means = "fewest days" if days == fewest else "most days" if days == most else ""
            share = log(days / fewest) / (log(most / fewest) or 1)
            (pale, dark), half = (DARK, 2 * share) if share < 0.5 else (PALE, 2 * share - 1)
            look = Look(fill=tint(DAYS, dark - (dark - pale) * half), means=means, bold=days == fewest)
            fact += _against(days, now)
        place = LEFT + ps.index(p) * width + 2, TOP + ts.index(t) * ROW + 2, width - 4, ROW - 4
        if (t, p) == (plan.tp_size, plan.pp_size):
            chosen = box("chosen", *place, "none", edge=CHOSEN, edge_width=4)
            text = f"▸ {text}"
        marks.append(box(f"t{t}.p{p}", *place, text=text, fact=fact, click=True, **look))
    marks.append(chosen)
    if best:
        assert best.estimate
        word = f"the fastest that a search finds, {three_digits(best.estimate.days(num_tokens))} days: "
        word += str(best).partition(":")[0]
        fact = f"{best}; click to take it"
        place = LEFT, TOP + len(ts) * ROW + 8, WIDTH - LEFT - 2, ROW
        marks.append(box("best", *place, "none", text=word, edge=CHOSEN, fact=fact, click=True))
    says = f"{len(fitting)} of {len(cells)} fit" + (f"; the fastest is {fitting[0][1]}" if fitting else "")
    rows = [(f"t = {t}", *(cells[t, p][0] for p in ps)) for t in ts]
    caption = "days; GB where a GPU has too little memory; – where sizes do not divide"
    table = Table(("", *(f"p = {p}" for p in ps)), rows, caption)
    return titled(f"Days for {num_tokens / 1e9:,g} billion tokens, by tensor t and pipeline p", says, marks, table)


def _against(days: float, now: float) -> str:
    """Say how many days more or less that is than those of the chosen plan, if that fits.

    >>> _against(20.5, 19.25), _against(18, 20), _against(3, 3), _against(3, inf)
    (' (1.25 days more)', ' (2 days less)', '', '')
    """
    if now == inf or days == now:
        return ""
    return f" ({three_digits(abs(days - now))} days {'more' if days > now else 'less'})"


def _cell(plan: Plan, t: int, p: int, hardware: Hardware, num_tokens: float) -> tuple[str, str, float, Look]:
    """Return a cell's text, its fact, its days (infinite if the plan does not fit), and its look."""
    sizes = f"t = {t}, p = {p}"
    try:
        split = uneven_stages(plan.model.num_layers, p * plan.num_chunks) if plan.stage_layers else None
        plan = replace(plan, tp_size=t, pp_size=p, stage_layers=split)
    except Misfit as misfit:
        return "–", f"{sizes}: {misfit.fault}", inf, Look(fill=IDLE, means="sizes do not divide")
    held, has = three_digits(fullest(plan).total / 1e9), f"{hardware.memory_bytes / 1e9:.0f}"
    if fullest(plan).total > hardware.memory_bytes:
        look = Look(fill=FRAME_FILL, edge=GREY, dashed=True, ink=MUTED, means="too large for a GPU")
        return f"{held} GB", f"{sizes}: needs {held} GB, a GPU has {has}", inf, look
    days = step_time(plan, hardware).days(num_tokens)
    fact = f"{sizes}, d = {plan.dp_size}: {three_digits(days)} days, {held} of {has} GB"
    return three_digits(days), fact, days, Look()
