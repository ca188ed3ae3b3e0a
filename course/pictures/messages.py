"""Draw the messages of a collective on a ring and a tree: pieces that travel from rank to rank, and the bytes sent."""

from collections.abc import Iterable, Mapping, Sequence

from course.pictures.collectives import CELL, GAP, HEAD, NAME, ROW, cell, numbers_text, rank_box
from course.pictures.parts import Place, heading
from course.pictures.scene import WIDTH, Mark, Scene, arrow, box, label
from course.pictures.style import FRAME, FRAME_FILL, INK, MUTED
from course.sizing.messages import Held, Step, on_a_ring, on_a_tree, sent_bytes
from course.table import Table

LOOP, COUNTER = 20.0, 112.0  # pixels: the way back of a ring, and the bytes sent


def ring_steps(start: Sequence[Sequence[float]], operation: str = "all-reduce") -> list[Scene]:
    """Draw an "all-reduce", "reduce-scatter" or "all-gather" on a ring, simulated on every rank's numbers."""
    return message_steps({f"{operation} on a ring (simulated)": on_a_ring(start, operation)})


def tree_and_ring(start: Sequence[Sequence[float]]) -> list[Scene]:
    """Draw an all-reduce on a tree and on a ring side by side, simulated on every rank's numbers."""
    return message_steps({"tree (simulated)": on_a_tree(start), "ring (simulated)": on_a_ring(start, "all-reduce")})


def message_steps(runs: Mapping[str, Sequence[Step]]) -> list[Scene]:
    """Draw runs side by side, a scene after each message; `ring_trace` has the messages that real ranks sent."""
    most = max(sent_bytes(steps, rank) for steps in runs.values() for rank in range(len(steps[0].held)))
    width, scenes, one = (WIDTH + GAP) / len(runs) - GAP, [], len(runs) == 1
    for at in range(max(map(len, runs.values()))):
        marks, rows, says = [], [], []
        for number, (name, steps) in enumerate(runs.items()):
            now, x, key = min(at, len(steps) - 1), number * (width + GAP), f"{number}."
            does = "what arrived was added" if steps[now].adds else "what arrived was kept" if now else "the start"
            text = f"after {now} of {len(steps) - 1} messages: {does}"
            says.append(text if one else f"{name} {text}")
            marks += heading(key, x, 0, name, text)
            marks += _panel(steps, now, key, x, width, (COUNTER - 10) / max(1, most), beside=one)
            for rank, row in enumerate(steps[now].held):
                holds = "; ".join(numbers_text(has.values) if has else "nothing" for has in row)
                rows.append([name, f"rank {rank}", holds, f"{sent_bytes(steps[: now + 1], rank)}"][one:])
        height = max(mark.bottom for mark in marks) + 8
        table = Table(("on a", "rank", "holds, piece by piece", "bytes sent")[one:], rows)
        panels = [] if one else [(number * (width + GAP), 0, width, height) for number in range(len(runs))]
        scenes.append(Scene(" and ".join(runs), "; ".join(says), marks, height, table=table, panels=panels))
    return scenes


def _panel(steps: Sequence[Step], now: int, key: str, x, width, unit: float, beside: bool) -> Iterable[Mark]:
    """Yield what ranks hold, what they sent, and the pieces that travel: ``beside`` a rank's own, or on top of it."""
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
        fact = f"Rank {rank} has sent {sent:,} of {total:,} bytes"
        yield label(f"{key}sent{rank}", right, y + 12, f"{sent:,} of {total:,} B")
        yield box(f"{key}all{rank}", right, y + 26, unit * total, 12, FRAME_FILL, edge=FRAME, fact=fact)
        yield box(f"{key}bar{rank}", right, y + 26, unit * sent, 12, MUTED)
        for piece, has in enumerate(row):
            own, arrived, ways, fact = before[rank][piece], came.get((rank, piece)), [], f"Rank {rank}, piece {piece}:"
            if has and own and arrived and steps[now].adds:
                ways = [f"+ {numbers_text(own.values)} = {numbers_text(has.values)}"]
                fact += f" {numbers_text(arrived.values)} + {numbers_text(own.values)} ="
            yield from _piece(f"{key}{rank}.{piece}", place(rank, piece), has, piece, key, fact, ways * beside)
    latest = {move.token: move for step in steps[: now + 1] for move in step.moves}
    for token, first in {move.token: move for step in reversed(steps) for move in step.moves}.items():
        move = latest.get(token, first)
        rank, fact = move.source, f"Rank {move.source} sends this first:"
        if token in latest:
            rank, fact = move.target, f"This came from rank {move.source}:"
        where, has = place(rank, move.piece), held[rank][move.piece]
        if beside:
            where, has = (where[0] - slot, where[1] + 6, slot - 4, CELL - 12), before[move.source][move.piece]
        edge = dict(edge=INK, edge_width=2.5) if beside or (rank, move.piece) in came else {}
        yield from _piece(f"{key}token{token}", where, has, move.piece, key, fact, [], **edge)


def _piece(
    key: str, place: Place, has: Held | None, piece: int, tag: str, fact: str, ways: list[str], **look
) -> list[Mark]:
    if has is None:
        return [box(key, *place, "none", edge=FRAME, dashed=True, fact=f"{fact} nothing")]
    values, parts = numbers_text(has.values), [(rank, piece) for rank in has.ranks]
    fact = f"{fact} {values}, data of rank{'s' * (len(parts) > 1)} {', '.join(map(str, has.ranks))}"
    return cell(key, place, [*ways, values], parts, fact, tag, **look)
