"""Draw a sequence that is cut: who holds which tokens, what work the causal mask leaves to each, and what travels.

Tokens go right; ranks, or the tokens that ask (queries), go down. A tint is a rank, and its boxes carry its number.
"""

from collections.abc import Iterator, Sequence
from typing import Any

from course.pictures.parts import own_box, rank_names, titled
from course.pictures.scene import SMALLEST, WIDTH, Mark, Scene, arrow, box, fitting, label, line
from course.pictures.style import CP, FRAME, FRAME_FILL, INK, MUTED, tint, tints
from course.sizing.context import attention_work, pace
from course.table import Table
from labkit.partition import tokens_of_rank
from labkit.sizes import counted

SIDE, PANEL, TOP = 360.0, 480.0, 84.0  # pixels: a triangle; from one to the next; what is above it
BAR, LANE = 90.0, 84.0  # the highest bar of work; from rank to rank
PARTS = 4  # a triangle on the diagonal is drawn as so many steps
NAMES = {False: "Consecutive", True: "Zigzag"}


def draw_triangle(seq_length: int, cp_size: int) -> Scene:
    """Draw which keys each query sees, in the tint of the rank that holds the query, and each rank's share of the work.

    Left, ranks hold consecutive tokens; right, an early and a late chunk.
    """
    marks, rows, says = [], [], []
    for zigzag, x in ((False, 0.0), (True, PANEL)):
        work, kept = attention_work(seq_length, cp_size, zigzag), pace(seq_length, cp_size, zigzag)
        says.append(f"{NAMES[zigzag].lower()}: ranks compute {kept:.1%} of the time")
        marks.append(label(f"name{zigzag}", x, 58, says[-1].capitalize(), bold=True))
        marks += _triangle(seq_length, cp_size, zigzag, x)
        marks += _bars(work, max(attention_work(seq_length, cp_size, zigzag=False)), f"{zigzag}.", x)
        for rank, share in enumerate(work):
            held = ", ".join(f"{part[0]}-{part[-1]}" for part in tokens_of_rank(seq_length, cp_size, rank, zigzag))
            rows.append([NAMES[zigzag], str(rank), held, f"{share:.1%}"])
    title = f"{seq_length:,} tokens on {counted(cp_size, 'rank')}: who computes what"
    table = Table(["cut", "rank", "tokens", "share of the work"], rows)
    return titled(title, "; ".join(says), marks, table)


def _triangle(seq_length: int, cp_size: int, zigzag: bool, x: float) -> Iterator[Mark]:
    """Yield the keys as a row of boxes, and below them a box for each few queries, as wide as what they see."""
    scale, fills, parts = SIDE / seq_length, tints(CP, cp_size), max(1, 8 // cp_size)
    is_wide = fitting(str(cp_size - 1), SIDE / (cp_size * (1 + zigzag)) - 4, 20, SMALLEST)
    for rank, fill in enumerate(fills):
        look = dict[str, Any](fill=fill, edge=FRAME, radius=0, tags=(own := f"{zigzag}.{rank}",), lights=(own,))
        for number, chunk in enumerate(held := tokens_of_rank(seq_length, cp_size, rank, zigzag)):
            fact = f"Rank {rank} holds tokens {chunk[0]} to {chunk[-1]}"
            place, key = (x + chunk.start * scale, TOP - 12, len(chunk) * scale, 22), f"{own}.{number}"
            yield box(f"keys{key}", *place, text=(f"rank {rank}", str(rank)) if is_wide else "", fact=fact, **look)
            for queries in _split(chunk, parts * 2 // len(held)):
                seen = (queries.start + queries.stop + 1) / 2
                place = x, TOP + 14 + queries.start * scale, seen * scale, len(queries) * scale
                fact = f"Rank {rank}: token {queries[-1]} sees {counted(queries[-1] + 1, 'token')}, itself included"
                yield box(f"pairs{own}.{queries[0]}", *place, text=str(rank), fact=fact, **look)


def _bars(work: Sequence[float], highest: float, key: str, x: float) -> Iterator[Mark]:
    """Yield a bar for each rank's share of the work, and a line where all would be equal."""
    foot, wide = TOP + SIDE + 40 + BAR, SIDE / len(work)
    for rank, (share, fill) in enumerate(zip(work, tints(CP, len(work)))):
        high, said, own = BAR * share / highest, f"{share:.1%}", f"{key}{rank}"
        texts = f"rank {rank}\n{said}", f"{rank}\n{said}", str(rank)
        look = dict[str, Any](
            edge=FRAME, fact=f"Rank {rank} computes {share:.1%} of all pairs", tags=(own,), lights=(own,)
        )
        yield box(f"bar{own}", x + rank * wide + 2, foot - high, wide - 4, high, fill, radius=0, **look)
        yield box(f"under{own}", x + rank * wide, foot + 3, wide, 36, "none", texts, size=12)
    y = foot - BAR / len(work) / highest
    yield line(f"equal{key}", [(x, y), (x + SIDE, y)], INK, dashed=True, fact="an equal share for each rank")
    yield label(f"work{key}", x + SIDE + 8, y, "if equal", ink=MUTED)


def _split(tokens: range, parts: int) -> Iterator[range]:
    """Yield a range in so many parts, or in single tokens if it has fewer."""
    parts = min(parts, len(tokens))
    for number in range(parts):
        yield tokens[len(tokens) * number // parts : len(tokens) * (number + 1) // parts]


def ring_steps(cp_size: int, zigzag: bool = True) -> list[Scene]:
    """Draw a ring's steps: queries stay, keys and values move on, and each rank computes what the mask leaves it."""
    ranks, num_chunks = range(cp_size), cp_size * (2 if zigzag else 1)
    chunks = [[part.start for part in tokens_of_rank(num_chunks, cp_size, rank, zigzag)] for rank in ranks]
    return [_ring(chunks, step) for step in ranks]


def _ring(chunks: Sequence[Sequence[int]], step: int) -> Scene:
    c, x = len(chunks), WIDTH - SIDE
    size, fills, blocks, rows = len(chunks[0]), tints(CP, c), [], []
    scale, marks = SIDE / (c * size), rank_names(c, TOP + 24, LANE)
    for key, left, word in (("q", 68, "queries (stay)"), ("kv", 214, "keys, values"), ("work", 360, "computes")):
        marks.append(label(f"{key}.name", left, TOP - 16, word, bold=True))
    for rank, own in enumerate(chunks):
        source = (rank - step) % c
        pairs = [(q, k) for q in own for k in chunks[source] if k <= q]
        says = f"Q {_list(q for q, _ in pairs)} × K {_list(k for _, k in pairs)}" if pairs else "nothing: later keys"
        says += "\nwith the causal mask" * (source == rank)
        y, tag = TOP + rank * LANE, f"now{rank}"
        queries, keys = (f"{'chunks' if size > 1 else 'chunk'} {_list(chunks[each])}" for each in (rank, source))
        rows.append([str(rank), queries, f"{keys} of rank {source}", says.replace("\n", " ")])
        marks.append(own_box(f"q{rank}", rank, (68, y, 112, 48), fills[rank], f"Q of {rank}\n{queries}", "its queries"))
        look = dict[str, Any](
            fact=f"The keys and values of rank {source}, on rank {rank} in this step", tags=(f"rank{rank}",)
        )
        look |= dict(edge=CP, edge_width=2, lights=(tag,), same=f"kv{source}")
        marks.append(box(f"kv{source}", 214, y, 112, 48, fills[source], f"KV of {source}\n{keys}", **look))
        look = dict[str, Any](edge=FRAME, dashed=not pairs, lights=(tag,))
        marks.append(own_box(f"work{rank}", rank, (360, y, 176, 48), "#ffffff", says, rows[-1][-1], **look))
        for at, held in enumerate(chunks):
            state = "now" if at == source else "done" if (rank - at) % c < step else "later"
            for q, k in ((q, k) for q in own for k in held if k <= q):
                blocks += _block(q, k, rank, fills[rank], state, (x + k * scale, TOP + q * scale, scale))
    marks += sorted(blocks, key=lambda block: block.edge == INK)  # frames above what is beside them
    marks += _onward(c) if step < c - 1 else ()
    marks.append(label("pairs", x, TOP - 16, "all pairs: queries down, keys right", bold=True))
    says = f"{step} of {c - 1} moves are done; framed squares are computed now, tinted ones were before"
    title = f"A ring of {counted(c, 'rank')}, {'consecutive' if size == 1 else 'zigzag'}"
    bottom = TOP + max(SIDE, c * LANE)
    table = Table(["rank", "its queries", "keys and values", "computes"], rows)
    return titled(title, says, marks, table, says, bottom)


def _block(q: int, k: int, rank: int, fill: str, state: str, place: tuple[float, float, float]) -> Iterator[Mark]:
    """Yield the pairs of a chunk of queries and one of keys: a square, or on the diagonal the steps of a triangle."""
    (x, y, side), parts = place, PARTS if q == k else 1
    fact = f"Rank {rank}: queries of chunk {q}, keys of chunk {k}: {'half of them, ' * (q == k)}{state}"
    look = dict[str, Any](fact=fact, radius=0, tags=(f"rank{rank}", *[f"now{rank}"] * (state == "now")))
    look |= dict(edge=INK, edge_width=2.5) if state == "now" else dict(edge=FRAME)
    for part in range(parts):
        width, high = side * (part + 0.5 if parts > 1 else 1) / parts, side / parts
        text = str(rank) if state != "later" and parts == 1 else ""
        spot = x, y + part * high, width, high
        yield box(f"block{q}.{k}.{part}", *spot, FRAME_FILL if state == "later" else fill, text, **look)


def _onward(cp_size: int) -> Iterator[Mark]:
    """Yield the messages of a step: each rank's keys and values go to the next, the last rank's to the first."""
    fact, foot = "sent to the next rank while this one computes", TOP + (cp_size - 1) * LANE
    for rank in range(cp_size - 1):
        y = TOP + rank * LANE
        yield arrow(f"onward{rank}", [(270, y + 50), (270, y + LANE - 2)], CP, fact=fact)
    around = [(214, foot + 24), (196, foot + 24), (196, TOP + 24), (212, TOP + 24)]
    yield arrow("around", around, CP, fact=fact)


def ulysses_steps(cp_size: int, num_heads: int) -> list[Scene]:
    """Draw two ways to cut the same numbers: by tokens, and after the all-to-all by heads."""
    heads = num_heads // cp_size
    left, high = 70.0, (LANE - 16) / cp_size
    wide, fills, scenes = (WIDTH - left) / (2 * cp_size), tints(CP, cp_size), []
    for by_heads in (False, True):
        marks, rows = rank_names(cp_size, TOP + (LANE - 16) / 2, LANE), []
        for rank in range(cp_size):
            place = left, TOP + rank * LANE, WIDTH - left, LANE - 16
            marks.append(box(f"frame{rank}", *place, FRAME_FILL, edge=FRAME, radius=0))
            own = f"{rank * heads}-{(rank + 1) * heads - 1}" if heads > 1 else str(rank)
            chunks = _list(part.start for part in tokens_of_rank(2 * cp_size, cp_size, rank))
            rows.append([str(rank), "all" if by_heads else chunks, own if by_heads else "all"])
        for rank, group in ((rank, group) for rank in range(cp_size) for group in range(cp_size)):
            row, first = (group if by_heads else rank), group * heads
            name = f"heads {first}-{first + heads - 1}" if heads > 1 else f"head {first}"
            for part in tokens_of_rank(2 * cp_size, cp_size, rank):
                spot = left + part.start * wide, TOP + row * LANE + group * high, wide * len(part) - 1, high - 1
                fact, tag = f"chunk {part.start} of rank {rank}, {name}, now on rank {row}", f"{rank}.{group}"
                look = dict[str, Any](edge=FRAME, fact=fact, tags=(f"rank{row}", tag), lights=(tag,), radius=0)
                texts = name, name.split()[1]
                marks.append(box(f"piece{tag}.{part.start}", *spot, fills[rank], texts, size=11, **look))
        says = "A tint is the rank whose tokens these are; tokens go right, heads down"
        title = f"After the all-to-all: all tokens, {counted(heads, 'head')} on each rank" * by_heads
        title = title or f"Before: a rank has its tokens, and all {num_heads} heads of them"
        table = Table(["rank", "chunks of tokens", "heads"], rows)
        scenes.append(titled(title, says, marks, table, says, TOP + cp_size * LANE - 16))
    return scenes


def draw_merge(weights: Sequence[Sequence[float]], values: Sequence[Sequence[float]]) -> Scene:
    """Draw blocks of keys as wide as their weights, each block's mean, and the mean of all, made from these means."""
    total = sum(map(sum, weights))
    scale, x, marks, rows = (WIDTH - 80) / total, 80.0, [], []
    for number, name in enumerate(("keys", "blocks", "whole")):
        marks.append(label(f"{name}.name", 0, 80 + number * 64, name, bold=True))
    for number, (own, held) in enumerate(zip(weights, values)):
        mean, start = sum(w * v for w, v in zip(own, held)) / sum(own), x
        for index, (weight, value) in enumerate(zip(own, held)):
            texts = f"weight {weight:g}\nvalue {value:g}", f"{weight:g}\n{value:g}"
            look = dict[str, Any](edge=FRAME, together=f"b{number}", fact=f"weight {weight:g}, value {value:g}")
            marks.append(box(f"key{number}.{index}", x, 58, weight * scale - 2, 46, tint(CP, 0.16), texts, **look))
            rows.append([f"key {index} of block {number}", f"{weight:g}", f"{value:g}"])
            x += weight * scale
        texts = f"weight {sum(own):g}\nmean {mean:g}", f"{sum(own):g}\n{mean:g}"
        look = dict[str, Any](edge=CP, edge_width=2, together=f"b{number}", fact=f"block {number}: {texts[0]}")
        marks.append(box(f"block{number}", start, 122, x - start - 2, 46, tint(CP, 0.34), texts, **look))
        rows.append([f"block {number}", f"{sum(own):g}", f"{mean:g}"])
    mean = sum(w * v for own, held in zip(weights, values) for w, v in zip(own, held)) / total
    marks.append(box("whole", 80, 186, WIDTH - 82, 46, tint(CP, 0.58), f"weight {total:g}\nmean {mean:g}", edge=CP))
    rows.append(["whole", f"{total:g}", f"{mean:g}"])
    says = "A box is as wide as its weight"
    return titled("One softmax from two", says, marks, Table(["", "weight", "value or mean"], rows), says)


def _list(numbers) -> str:
    return ", ".join(map(str, dict.fromkeys(numbers)))
