"""Draw data parallelism: which rank sees which rows, what is the same on every replica, and when gradients travel."""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from course.pictures.parts import own_box, rank_names, titled
from course.pictures.scene import WIDTH, Look, Mark, Scene, box, label
from course.pictures.style import BACKWARD, DP, FRAME, FRAME_FILL, MUTED, bytes_text, tint, tint_means, tints
from course.sizing.ring import bus_factor
from course.table import Table
from labkit.partition import multiples_near, rows_of_replica
from labkit.sizes import check_size, counted, does_not_divide, either

LEFT, RIGHT, TOP = 84.0, WIDTH - 120.0, 118.0  # right of the ranks' names, where the all-reduce begins, above the ranks
GAP, AVERAGE = 12.0, WIDTH - RIGHT - 2


@dataclass(frozen=True)
class BatchCut:
    """A batch of ``batch_size`` rows on ``dp_size`` replicas: each has consecutive rows, in ``num_micro_batches``.

    >>> cut = BatchCut(batch_size=8, dp_size=2, num_micro_batches=2)
    >>> [list(cut.rows(1, micro_batch)) for micro_batch in (0, 1)]
    [[4, 5], [6, 7]]
    """

    batch_size: int
    dp_size: int = 1
    num_micro_batches: int = 1

    def __post_init__(self):
        b, d, m = (check_size(name, value) for name, value in vars(self).items())
        if b % (d * m):
            fault = does_not_divide("batch_size", b, dp_size=d, num_micro_batches=m)
            raise ValueError(f"{fault}: use batch_size {either(multiples_near(b, d * m))}")

    @property
    def micro_batch_size(self) -> int:
        """How many rows a replica sees at once: B / (d m)."""
        return self.batch_size // (self.dp_size * self.num_micro_batches)

    def rows(self, dp_rank: int, micro_batch: int) -> range:
        """Return the rows of the batch that a replica sees in one of its micro-batches."""
        own, size = rows_of_replica(self.batch_size, self.dp_size, dp_rank), self.micro_batch_size
        return own[micro_batch * size : (micro_batch + 1) * size]


def draw_batch(cut: BatchCut) -> Scene:
    """Draw how the rows of a batch are dealt to the ranks, and by each rank to its micro-batches."""
    d, m, size = cut.dp_size, cut.num_micro_batches, counted(cut.micro_batch_size, "row")
    lane, step, piece = min(56.0, max(26.0, 320 / d)), (RIGHT - LEFT) / m, (RIGHT - LEFT - GAP) / (d * m)
    names, rows = [f"micro-batch {number}" for number in range(m)], [[str(rank)] for rank in range(d)]
    marks = [label("batch", 0, 65, "batch", bold=True), _average(d, RIGHT, TOP, lane)]
    marks += rank_names(d, TOP + lane / 2 - 3, lane)
    for number, name in enumerate(names):
        x = LEFT + number * step
        marks.append(label(f"name{number}", x, TOP - 14, name, bold=m < 7, size=13 if m < 7 else 11))
        for rank, fill in enumerate(tints(DP, d)):
            text, key = rows_text(cut.rows(rank, number)), f"{rank}.{number}"
            look = Look(edge=FRAME, tags=(f"rank{rank}", f"rows{key}"), lights=(f"rows{key}",), same=key)
            place = LEFT + (rank * m + number) * piece, 52, piece, 26
            marks.append(box(f"dealt{key}", *place, fill, text, fact=f"rows {text} of the batch", radius=0, **look))
            fact = f"rank {rank} sees them in {name}: one backward of {size}"
            place = x, TOP + rank * lane, step - min(GAP, 0.15 * step), lane - 6
            marks.append(box(f"rows{key}", *place, fill, text, fact=fact, **look))
            rows[rank].append(text)
    says, table = f"A rank sees {size} at a time. {tint_means(d)}.", Table(["rank", *names], rows)
    return titled(f"Batch of {cut.batch_size}, d = {d}, m = {m}", says, marks, table, says)


def draw_replicas(cut: BatchCut) -> Scene:
    """Draw what each rank has in the course of a step, from its rows to its new weights."""
    d, top, lane, step = cut.dp_size, 80.0, 62.0, (RIGHT - LEFT) / 6
    own = [f"of rank {rank}" for rank in range(d)]
    rows = [rows_text(rows_of_replica(cut.batch_size, d, rank)) for rank in range(d)]
    columns = {
        "rows": (rows, "different rows on every rank"),
        "model": (["whole"] * d, "the whole model, the same on every rank"),
        "loss": (own, "the mean over this rank's rows"),
        "gradients": (own, "those of this rank's loss"),
        "averages": (["the mean"] * d, "the mean of all ranks' gradients, the same on every rank"),
        "new weights": (["whole"] * d, "the same update of the same weights, so the same on every rank"),
    }
    marks = [*rank_names(d, top + lane / 2 - 3, lane), _average(d, LEFT + 4 * step, top, lane)]
    for number, (name, (texts, fact)) in enumerate(columns.items()):
        x, alike = LEFT + number * step + (AVERAGE + GAP) * (number > 3), texts[0] in ("whole", "the mean")
        marks.append(label(name, x, top - 14, name, bold=True))
        for rank, fill in enumerate([FRAME_FILL] * d if alike else tints(DP, d)):
            look = dict(tags=(f"rank{rank}", f"all.{number}"), lights=(f"all.{number}",)) if alike else {}
            place = x, top + rank * lane, step - GAP, lane - 8
            marks.append(own_box(f"{name}{rank}", rank, place, fill, texts[rank], f"{name}, {fact}", **look))
    rows = [[str(rank), *(texts[rank] for texts, _ in columns.values())] for rank in range(d)]
    says = "Tinted: each rank has its own. Pale: the same on every rank."
    return titled(f"Data parallel on {counted(d, 'rank')}", says, marks, Table(["rank", *columns], rows), says)


class Gradient(NamedTuple):
    """A parameter's gradient: its bucket, and how many messages the rank has started once this gradient is noted."""

    name: str
    num_bytes: int
    bucket: Hashable
    num_sent: int


def bucket_steps(gradients: Sequence[Gradient], source: str = "simulated", dp_size: int = 4) -> list[Scene]:
    """Draw buckets that fill in backward on one of ``dp_size`` ranks: a scene after each gradient, and a last one.

    A reader can follow each gradient.

    ``gradients`` are in the order in which they are computed. Buckets leave in the order of their first gradients.
    """
    return [_buckets(gradients, done, source, dp_size) for done in range(len(gradients) + 2)]


def _buckets(gradients: Sequence[Gradient], done: int, source: str, dp_size: int) -> Scene:
    """Draw the state after ``done`` gradients; one more than there are means after the wait for all messages."""
    n, top, rows = len(gradients), 176.0, []
    buckets = list(dict.fromkeys(each.bucket for each in gradients))
    # The gradient that each message follows; n: all of them.
    after = [next((i for i, each in enumerate(gradients) if each.num_sent > b), n) for b in range(len(buckets))]
    by_bucket = sorted(range(n), key=lambda i: buckets.index(gradients[i].bucket))
    step, column, sent = (WIDTH - LEFT) / n, (WIDTH - LEFT) / (n + 1), tint(DP, 0.34)
    words = dict(model=78, buckets=134, backward=top + 12, messages=top + 42)
    marks = [label(f"name.{word}", 0, y, word, bold=True) for word, y in words.items()]
    journeys = {"": "Click a gradient or a bucket to follow it."}
    for b, bucket in enumerate(buckets):
        size = bytes_text(sum(each.num_bytes for each in gradients if each.bucket == bucket))
        places = [place for place, i in enumerate(by_bucket) if gradients[i].bucket == bucket]
        place = WIDTH - step * (places[-1] + 1), 112, step * len(places) - 6, 44
        tags = f"bucket{b}", *(f"grad{i}" for i, each in enumerate(gradients) if each.bucket == bucket)
        look: dict[str, Any] = dict(together=f"bucket{b}", tags=tags)
        cause = f"after {gradients[after[b]].name}" if after[b] < n else "when all gradients are there"
        journeys[f"bucket{b}"] = f"bucket {b}, {size}: its all-reduce starts {cause}"
        fact = f"bucket {b}: {size}"
        marks.append(box(f"bucket{b}", *place, "#ffffff", edge=DP, edge_width=2, fact=fact, **look))
        if after[b] < done:
            begin, end = min(after[b] + 1, n), min(done + 0.5, n + 1)
            place = LEFT + column * begin, top + 30 + 27 * b, column * (end - begin) - 2, 23
            texts = f"all-reduce of bucket {b}, {size}", f"all-reduce {b}", str(b)
            fact = f"{texts[0]}: starts {cause}; the rank waits for it when backward has ended"
            marks.append(box(f"message{b}", *place, sent, texts, edge=DP, fact=fact, means="sent", **look))
    for i, each in enumerate(gradients):
        b, x, size = buckets.index(each.bucket), WIDTH - step * (by_bucket.index(i) + 1), bytes_text(each.num_bytes)
        look: dict[str, Any] = dict(edge=FRAME, tags=(f"grad{i}", f"bucket{b}"), lights=(f"bucket{b}",))
        share = bytes_text(each.num_bytes * bus_factor("all_reduce", dp_size))
        journeys[f"grad{i}"] = (
            f"gradient of {each.name}, {size}: number {i + 1} of {n} in backward, "
            f"on each of {dp_size} ranks for its own rows; it travels in {journeys[f'bucket{b}']}; "
            f"each rank sends {share} of it on a ring; then all have the mean."
        )
        state, fill, y = ("not computed yet", FRAME_FILL, 62)
        if i < done:
            state, fill, y = "this rank's, not sent yet", BACKWARD, 118
            marks.append(box(f"model.{i}", x + 5, 62, step - 16, 32, FRAME_FILL, each.name, **look))
            marks.append(box(f"backward.{i}", LEFT + column * i, top, column - 2, 23, BACKWARD, each.name, **look))
        if after[b] < done:
            state, fill = ("sent", sent) if done <= n else ("the average of all ranks", tint(DP, 0.78))
        fact = f"gradient of {each.name}, {size}: {state}"
        marks.append(box(f"grad.{i}", x + 5, y, step - 16, 32, fill, each.name, fact=fact, means=state, **look))
        rows.append([each.name, size, str(b), state])
    started = sum(i < done for i in after)
    says = f"{min(done, n)} of {n} gradients are there, {started} of {len(buckets)} messages started"
    if done > n:
        marks.append(box("wait", LEFT + column * n, top, column - 2, 23, "#ffffff", "wait", edge=MUTED, dashed=True))
        says = f"backward has ended, and all {len(buckets)} averages are there"
    title, below = "Gradients fill buckets, the last layer's first", f"{says} ({source}; in order, without a clock)"
    table = Table(["gradient of", "size", "bucket", "state"], rows)
    scene = titled(title, says, marks, table, below, top + 20 + 27 * len(buckets), LEFT)
    return replace(scene, journeys=journeys)


def _average(num_ranks: int, x: float, top: float, lane: float) -> Mark:
    """Return one all-reduce over all ranks; a rank alone has nothing to send."""
    text, edge = "all-reduce:\nthe mean\nof all ranks'\ngradients", DP
    fact, place = "one all-reduce: every rank gets the mean of all", (x, top, AVERAGE, num_ranks * lane - 8)
    if num_ranks == 1:
        text, edge, fact = "nothing to send", FRAME, "a rank alone has all gradients"
    return box("average", *place, "#ffffff", text, edge=edge, edge_width=2.5, fact=fact)


def rows_text(rows: range) -> str:
    """Write the first and the last of some rows.

    >>> rows_text(range(32, 64)), rows_text(range(5, 6))
    ('32-63', '5')
    """
    return f"{rows[0]}-{rows[-1]}" if len(rows) > 1 else str(rows[0])
