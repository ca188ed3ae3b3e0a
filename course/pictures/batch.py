"""Draw data parallelism: which rank sees which rows, what is the same on every replica, and when gradients travel.

Ranks go down, time goes right. What only one rank has is tinted and says whose it is; what all have alike is pale.
"""

from collections.abc import Hashable, Sequence
from typing import NamedTuple

from course.pictures.layout_table import bytes_text
from course.pictures.scene import WIDTH, Mark, Scene, Table, box, heading, label, legend
from course.pictures.style import BACKWARD, DP, FRAME, FRAME_FILL, MUTED, tint, tints
from labkit.cuts import BatchCut
from labkit.sizes import counted

LEFT, RIGHT = 84.0, WIDTH - 120.0  # where the ranks' names end, and where the box of the all-reduce begins
GAP, AVERAGE = 12.0, WIDTH - RIGHT - 2


def draw_batch(cut: BatchCut) -> Scene:
    """Draw how the rows of a batch are dealt to the ranks, and by each rank to its micro-batches."""
    d, m, size = cut.dp_size, cut.num_micro_batches, counted(cut.micro_batch_size, "row")
    says = f"A rank sees {size} at a time. A tint is a rank."
    top, lane, step = 118.0, min(56.0, max(26.0, 320 / d)), (RIGHT - LEFT) / m
    marks = heading("head", 0, 0, f"batch of {cut.batch_size}, d = {d}, m = {m}", says)
    marks += [label("batch", 0, 65, "batch", bold=True), *_names(d, top, lane), _average(d, RIGHT, top, lane)]
    for number in range(m):
        x, name = LEFT + number * step, f"micro-batch {number}"
        marks.append(label(f"name{number}", x, top - 14, name, bold=m < 7, size=13 if m < 7 else 11))
        for rank, fill in enumerate(tints(DP, d)):
            text, key = rows_text(cut.rows(rank, number)), f"{rank}.{number}"
            look = dict(edge=FRAME, tags=(f"rank{rank}", f"rows{key}"), lights=(f"rows{key}",), same=key)
            piece = (RIGHT - LEFT - GAP) / (d * m)
            place = LEFT + (rank * m + number) * piece, 52, piece, 26
            marks.append(box(f"dealt{key}", *place, fill, text, fact=f"rows {text} of the batch", radius=0, **look))
            fact = f"rank {rank} sees them in {name}: one backward of {size}"
            place = x, top + rank * lane, step - min(GAP, 0.15 * step), lane - 6
            marks.append(box(f"rows{key}", *place, fill, text, fact=fact, **look))
    rows = [[str(r), *(rows_text(cut.rows(r, number)) for number in range(m))] for r in range(d)]
    table = Table(["rank", *(f"micro-batch {number}" for number in range(m))], rows, "The rows that each rank sees.")
    return Scene(f"Batch of {cut.batch_size} on {counted(d, 'rank')}", says, marks, top + d * lane, table=table)


def draw_replicas(cut: BatchCut) -> Scene:
    """Draw what each rank has in the course of a step, from its rows to its new weights."""
    d, top, lane, step = cut.dp_size, 80.0, 62.0, (RIGHT - LEFT) / 6
    says = "Tinted: each rank has its own. Pale: the same on every rank."
    own = [f"of rank {rank}" for rank in range(d)]
    columns = {
        "rows": ([rows_text(cut.rows_of_replica(rank)) for rank in range(d)], "different rows on every rank"),
        "model": (["whole"] * d, "the whole model, the same on every rank"),
        "loss": (own, "the mean over this rank's rows"),
        "gradients": (own, "those of this rank's loss"),
        "averages": (["the mean"] * d, "the mean of all ranks' gradients, the same on every rank"),
        "new weights": (["whole"] * d, "the same update of the same weights, so the same on every rank"),
    }
    marks = heading("head", 0, 0, f"data parallel, d = {d}", says)
    marks += [*_names(d, top, lane), _average(d, LEFT + 4 * step, top, lane)]
    for number, (name, (texts, fact)) in enumerate(columns.items()):
        x, alike = LEFT + number * step + (AVERAGE + GAP) * (number > 3), texts[0] in ("whole", "the mean")
        marks.append(label(name, x, top - 14, name, bold=True))
        for rank, fill in enumerate([FRAME_FILL] * d if alike else tints(DP, d)):
            tags = f"rank{rank}", *([f"all.{number}"] if alike else [])
            look = dict(edge=FRAME, fact=f"rank {rank}, {name}: {fact}", tags=tags, lights=tags[-1:])
            marks.append(box(f"{name}{rank}", x, top + rank * lane, step - GAP, lane - 8, fill, texts[rank], **look))
    rows = [[str(rank), *(texts[rank] for texts, _ in columns.values())] for rank in range(d)]
    return Scene(
        f"Data parallel on {counted(d, 'rank')}", says, marks, top + d * lane, table=Table(["rank", *columns], rows)
    )


class Gradient(NamedTuple):
    """A parameter's gradient: its bucket, and how many messages the rank has started when it has taken note of it."""

    name: str
    num_bytes: int
    bucket: Hashable
    num_sent: int


def bucket_steps(gradients: Sequence[Gradient], source: str = "simulated") -> list[Scene]:
    """Draw buckets that fill in backward, one scene after each gradient, and one after the last message.

    ``gradients`` are in the order in which they are computed. Buckets leave in the order of their first gradients.
    """
    return [_buckets(gradients, done, source) for done in range(len(gradients) + 2)]


def _buckets(gradients: Sequence[Gradient], done: int, source: str) -> Scene:
    """Draw the state after ``done`` gradients; one more is after the wait for all messages."""
    n, marks, rows = len(gradients), [], []
    buckets = list(dict.fromkeys(each.bucket for each in gradients))
    # The gradient that each message follows; n: all of them.
    after = [next((i for i, each in enumerate(gradients) if each.num_sent > b), n) for b in range(len(buckets))]
    by_bucket = sorted(range(n), key=lambda i: buckets.index(gradients[i].bucket))
    step, column, top = (WIDTH - LEFT) / n, (WIDTH - LEFT) / (n + 1), 176.0
    for b, bucket in enumerate(buckets):
        size = bytes_text(sum(each.num_bytes for each in gradients if each.bucket == bucket))
        places = [place for place, i in enumerate(by_bucket) if gradients[i].bucket == bucket]
        look = dict(edge=DP, tags=(f"bucket{b}",), lights=(f"bucket{b}",))
        place = WIDTH - step * (places[-1] + 1), 112, step * len(places) - 6, 44
        marks.append(box(f"bucket{b}", *place, "#ffffff", edge_width=2, fact=f"bucket {b}: {size}", **look))
        if after[b] < done:
            begin, end = min(after[b] + 1, n), min(done + 0.5, n + 1)
            place = LEFT + column * begin, top + 30 + 27 * b, column * (end - begin) - 2, 23
            texts = f"all-reduce of bucket {b}, {size}", f"all-reduce {b}", str(b)
            cause = f"after {gradients[after[b]].name}" if after[b] < n else "when all gradients are there"
            fact = f"all-reduce of bucket {b}, {size}: starts {cause}; the rank waits for it when backward has ended"
            marks.append(box(f"message{b}", *place, tint(DP, 0.34), texts, fact=fact, means="sent", **look))
    for i, each in enumerate(gradients):
        b, x, size = buckets.index(each.bucket), WIDTH - step * (by_bucket.index(i) + 1), bytes_text(each.num_bytes)
        state, fill, y, look = "not computed yet", FRAME_FILL, 62, dict(edge=FRAME, tags=(f"bucket{b}",))
        if i < done:
            state, fill, y = "this rank's, not sent yet", BACKWARD, 118
            marks.append(box(f"model.{i}", x + 5, 62, step - 16, 32, FRAME_FILL, each.name, **look))
            marks.append(box(f"backward.{i}", LEFT + column * i, top, column - 2, 23, BACKWARD, each.name, **look))
        if after[b] < done:
            state, fill = ("sent", tint(DP, 0.34)) if done <= n else ("the average of all ranks", tint(DP, 0.78))
        look |= dict(lights=look["tags"], fact=f"gradient of {each.name}, {size}: {state}", means=state)
        marks.append(box(f"grad.{i}", x + 5, y, step - 16, 32, fill, each.name, **look))
        rows.append([each.name, size, str(b), state])
    says = (
        f"{min(done, n)} of {n} gradients are there, {sum(i < done for i in after)} of {len(buckets)} messages started"
    )
    if done > n:
        marks.append(box("wait", LEFT + column * n, top, column - 2, 23, "#ffffff", "wait", edge=MUTED, dashed=True))
        says = f"backward has ended, and all {len(buckets)} averages are there"
    title, bottom = "Gradients fill buckets, the last layer's first", top + 30 + 27 * len(buckets)
    words = dict(model=78, buckets=134, backward=top + 12, messages=top + 42)
    marks += [label(f"row.{word}", 0, y, word, size=12) for word, y in words.items()]
    marks += heading("head", 0, 0, title, f"{says} ({source}; in order, without a clock)")
    table = Table(["gradient of", "size", "bucket", "state"], rows)
    return Scene(title, says, marks + legend(marks, LEFT, bottom + 14), bottom + 28, table=table)


def _names(num_ranks: int, top: float, lane: float) -> list[Mark]:
    """Name the ranks; each name lights what its rank has."""
    places = ((rank, f"rank{rank}", top + (rank + 0.5) * lane - 3) for rank in range(num_ranks))
    return [label(f"name.{tag}", 0, y, f"rank {rank}", fact=f"rank {rank}", lights=(tag,)) for rank, tag, y in places]


def _average(num_ranks: int, x: float, top: float, lane: float) -> Mark:
    """Return one all-reduce over all ranks; a rank alone has nothing to send."""
    text, fact = "all-reduce:\nthe mean\nof all ranks'\ngradients", "one all-reduce: every rank gets the mean of all"
    if num_ranks == 1:
        text, fact = "nothing to send", "a rank alone has all gradients"
    place = x, top, AVERAGE, num_ranks * lane - 8
    return box("average", *place, "#ffffff", text, edge=FRAME if num_ranks == 1 else DP, edge_width=2.5, fact=fact)


def rows_text(rows: range) -> str:
    """Write the first and the last of some rows.

    >>> rows_text(range(32, 64)), rows_text(range(5, 6))
    ('32-63', '5')
    """
    return f"{rows[0]}-{rows[-1]}" if len(rows) > 1 else str(rows[0])
