"""Draw the messages of a collective on a ring and a tree: pieces that travel from rank to rank, and the bytes sent."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from fractions import Fraction

from course.pictures.collectives import CELL, GAP, HEAD, NAME, ROW, cell, numbers_text, rank_box
from course.pictures.parts import Place, heading
from course.pictures.scene import WIDTH, Look, Mark, Scene, arrow, box, label
from course.pictures.style import FRAME, FRAME_FILL, INK, MUTED, bytes_text
from course.sizing.messages import ELEMENT_BYTES, Held, Step, on_a_ring, on_a_tree, sent_bytes
from course.table import Table

LOOP, COUNTER = 20.0, 112.0  # pixels: the way back of a ring, and the bytes sent
ALPHA_SECONDS, BYTES_PER_SECOND = 10e-6, 50e9
"""The latency of a message, and what a link carries: about those of one 400 Gbit/s link between two nodes."""
RACE_STEPS = 12.0  # times a step's length: so long a race lasts


def ring_steps(start: Sequence[Sequence[float]], operation: str = "all-reduce") -> list[Scene]:
    """Draw an "all-reduce", "reduce-scatter" or "all-gather" on a ring, simulated on every rank's numbers."""
    return message_steps({f"{operation} on a ring (simulated)": on_a_ring(start, operation)})


def tree_and_ring(start: Sequence[Sequence[float]], size_bytes: float = 0.0) -> list[Scene]:
    """Draw an all-reduce on a tree and on a ring side by side, simulated on every rank's numbers.

    With ``size_bytes`` they race: a message of a tensor so large takes `ALPHA_SECONDS`, and its bytes at
    `BYTES_PER_SECOND`. Otherwise all messages take the same time.
    """
    runs = {"tree (simulated)": on_a_tree(start), "ring (simulated)": on_a_ring(start, "all-reduce")}
    return race_steps(runs, size_bytes) if size_bytes else message_steps(runs)


def message_steps(runs: Mapping[str, Sequence[Step]]) -> list[Scene]:
    """Draw runs side by side, a scene after each message; `ring_trace` has the messages that real ranks sent."""
    num_scenes = max(map(len, runs.values()))
    return [_scene(runs, [(min(at, len(steps) - 1), 0.0) for steps in runs.values()]) for at in range(num_scenes)]


def message_seconds(steps: Sequence[Step], size_bytes: float) -> float:
    """Return how long one message takes: the latency, and the bytes of a piece of a tensor of this size."""
    return ALPHA_SECONDS + size_bytes / len(steps[0].held[0]) / BYTES_PER_SECOND


def race_steps(runs: Mapping[str, Sequence[Step]], size_bytes: float) -> list[Scene]:
    """Draw runs side by side on one clock: a scene whenever a message has arrived on either side."""
    each = {name: message_seconds(steps, size_bytes) for name, steps in runs.items()}
    moments = {round(number * each[name], 12) for name, steps in runs.items() for number in range(len(steps))}
    total, scenes, last = max(moments), [], 0.0
    for moment in sorted(moments):
        at = []
        for name, steps in runs.items():
            now = min(int(moment / each[name] + 1e-6), len(steps) - 1)
            part = moment / each[name] - now if now < len(steps) - 1 else 0.0
            at.append((now, max(0.0, part)))
        lasts = (moment - last) / total * RACE_STEPS
        scenes.append(replace(_scene(runs, at, size_bytes, moment), lasts=lasts))
        last = moment
    return scenes


def _scene(
    runs: Mapping[str, Sequence[Step]], at: Sequence[tuple[int, float]], size_bytes: float = 0.0, moment: float = 0.0
) -> Scene:
    """Draw each run after so many messages, with the next ones so far on their way; in a race at this moment."""
    most = max(sent_bytes(steps, rank) for steps in runs.values() for rank in range(len(steps[0].held)))
    width, one = (WIDTH + GAP) / len(runs) - GAP, len(runs) == 1
    marks, rows, says, panels = [], [], [], []
    for number, ((name, steps), (now, part)) in enumerate(zip(runs.items(), at)):
        x, key, is_done = number * (width + GAP), f"{number}.", now == len(steps) - 1
        does = "what arrived was added" if steps[now].adds else "what arrived was kept" if now else "the start"
        text = f"after {now} of {len(steps) - 1} messages: {does}"
        says.append(text if one else f"{name} {text}")
        marks += heading(key, x, 0, name, text)
        clock = _clock_text(steps, now)
        if size_bytes:
            took = message_seconds(steps, size_bytes) * now if is_done else moment
            clock = f"{'done in ' * is_done}{microseconds(took)}" + f" = {clock}" * is_done
        fact = "A message takes the latency α, and its bytes over the bandwidth B; S is the whole tensor"
        look = Look(bold=bool(size_bytes) and is_done, anchor="end", ink=INK if size_bytes else MUTED, fact=fact)
        marks.append(label(f"{key}clock", x + width, 11, clock, **look))
        scale = size_bytes / ELEMENT_BYTES / _num_elements(steps) if size_bytes else 1.0
        bar = (COUNTER - 10) / max(1, most)
        marks += _panel(steps, now, key, x, width, bar, beside=one, part=part, scale=scale)
        for rank, row in enumerate(steps[now].held):
            holds = "; ".join(numbers_text(has.values) if has else "nothing" for has in row)
            rows.append([name, f"rank {rank}", holds, _sent_text(steps, now, rank, scale)][one:])
        panels += [] if one else [(x, 0, width)]
    height = max(mark.bottom for mark in marks) + 8
    when = f"at {microseconds(moment)}: " if size_bytes else ""
    table = Table(("on a", "rank", "holds, piece by piece", "bytes sent")[one:], rows)
    places = [(*place, height) for place in panels]
    return Scene(" and ".join(runs), when + "; ".join(says), marks, height, table=table, panels=places)


def _clock_text(steps: Sequence[Step], now: int) -> str:
    """Write how long so many messages take, each the latency and the bytes of a piece of S.

    >>> _clock_text(on_a_ring([[1, 2, 3, 4]] * 4, "all-reduce"), 6)
    '6 α + 3/2 S/B'
    """
    return f"{now} α + {Fraction(now, len(steps[0].held[0]))} S/B"


def microseconds(seconds: float) -> str:
    return f"{seconds * 1e6:,.0f} µs"


def _num_elements(steps: Sequence[Step]) -> int:
    return sum(len(has.values) for has in steps[0].held[0] if has)


def _sent_text(steps: Sequence[Step], now: int, rank: int, scale: float) -> str:
    sent = sent_bytes(steps[: now + 1], rank)
    return f"{sent}" if scale == 1 else bytes_text(sent * scale)


def _panel(
    steps: Sequence[Step], now: int, key: str, x, width, unit: float, beside: bool, part: float, scale: float,
) -> Iterable[Mark]:  # fmt: skip
    """Yield what ranks hold, what they sent, and the pieces that travel: ``beside`` a rank's own, or on top of it.

    The next messages are this ``part`` of their way. What was sent is ``scale`` times as large as the numbers are.
    """
    held, moves, _ = steps[now]
    before, num_pieces = steps[max(0, now - 1)].held, len(held[0])
    left, right, pitch = x + LOOP + NAME, x + width - COUNTER + 8, (width - LOOP - NAME - COUNTER) / num_pieces
    slot = 0.36 * pitch * beside
    place = lambda rank, piece: (left + piece * pitch + slot, HEAD + rank * ROW, pitch - slot - 8, CELL)  # noqa: E731
    yield label(f"{key}sent", right, HEAD - 12, "sent", ink=MUTED)
    for piece in range(num_pieces):
        words = (f"piece {piece}", f"{piece}") if num_pieces > 1 else "the whole tensor"
        yield box(f"{key}piece{piece}", place(0, piece)[0], HEAD - 22, pitch - slot - 8, 20, "none", words, ink=MUTED)
    came = {(move.target, move.piece): before[move.source][move.piece] for move in moves}
    for rank, row in enumerate(held):
        y, following = HEAD + rank * ROW, (rank + 1) % len(held)
        yield rank_box(key, rank, x + LOOP, y)
        if num_pieces > 1:  # a ring
            down = [(x + LOOP + 26, y + CELL), (x + LOOP + 26, y + ROW)]
            back = [(x + LOOP, y + 22), (x + 6, y + 22), (x + 6, HEAD + 22), (x + LOOP, HEAD + 22)]
            fact = f"Rank {rank} sends to rank {following}"
            yield arrow(f"{key}to{following}", down if following else back, MUTED, fact=fact)
        sent, total = sent_bytes(steps[: now + 1], rank), sent_bytes(steps, rank)
        text = f"{sent:,} of {total:,} B" if scale == 1 else bytes_text(sent * scale)
        fact = f"Rank {rank} has sent {sent:,} of {total:,} bytes"
        fact = fact if scale == 1 else f"Rank {rank} has sent {bytes_text(sent * scale)}"
        yield label(f"{key}sent{rank}", right, y + 12, text)
        yield box(f"{key}all{rank}", right, y + 26, unit * total, 12, FRAME_FILL, edge=FRAME, fact=fact)
        yield box(f"{key}bar{rank}", right, y + 26, unit * sent, 12, MUTED)
        for piece, has in enumerate(row):
            own, arrived, ways, fact = before[rank][piece], came.get((rank, piece)), [], f"Rank {rank}, piece {piece}:"
            if has and own and arrived and steps[now].adds:
                ways = [f"+ {numbers_text(own.values)} = {numbers_text(has.values)}"]
                fact += f" {numbers_text(arrived.values)} + {numbers_text(own.values)} ="
            yield from _piece(f"{key}{rank}.{piece}", place(rank, piece), has, piece, key, fact, ways * beside)
    under_way = {move.token: move for move in steps[now + 1].moves} if part else {}
    latest = {move.token: move for step in steps[: now + 1] for move in step.moves}
    for token, first in {move.token: move for step in reversed(steps) for move in step.moves}.items():
        move = latest.get(token, first)
        rank, fact = move.source, f"Rank {move.source} sends this first:"
        if token in latest:
            rank, fact = move.target, f"This came from rank {move.source}:"
        where, has = place(rank, move.piece), held[rank][move.piece]
        if token in under_way:
            where = _between(where, place(under_way[token].target, under_way[token].piece), part)
        if beside:
            where, has = (where[0] - slot, where[1] + 6, slot - 4, CELL - 12), before[move.source][move.piece]
        edge = dict(edge=INK, edge_width=2.5) if beside or (rank, move.piece) in came else {}
        yield from _piece(f"{key}token{token}", where, has, move.piece, key, fact, [], **edge)


def _between(start: Place, end: Place, part: float) -> Place:
    x, y = (start[side] + (end[side] - start[side]) * part for side in (0, 1))
    return x, y, *start[2:]


def _piece(
    key: str, place: Place, has: Held | None, piece: int, tag: str, fact: str, ways: list[str], **look
) -> list[Mark]:
    if has is None:
        return [box(key, *place, "none", edge=FRAME, dashed=True, fact=f"{fact} nothing")]
    values, parts = numbers_text(has.values), [(rank, piece) for rank in has.ranks]
    fact = f"{fact} {values}, data of rank{'s' * (len(parts) > 1)} {', '.join(map(str, has.ranks))}"
    return cell(key, place, [*ways, values], parts, fact, tag, **look)
