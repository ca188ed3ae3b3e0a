"""Draw the parts of a transformer on a tensor group: a layer, the pair of linear layers in it, and the embedding.

Ranks go down, the computation goes right. Source: arXiv 1909.08053, figures 3 and 4; arXiv 2205.05198, figure 5.
"""

from collections.abc import Sequence
from itertools import pairwise, product

from course.pictures.parts import own_box, rank_names, titled
from course.pictures.scene import WIDTH, Look, Scene, arrow, box, label
from course.pictures.style import BACKWARD, CP, FRAME, FRAME_FILL, INK, MUTED, TP, tints
from course.table import Table
from labkit.partition import chunks_of_rank

NAME, BAR, TOP, ROW = 64.0, 26.0, 76.0, 46.0  # pixels: "rank 0"; where ranks meet; above the ranks; one rank
ATTENTION = {"Q K V": "column layer: its heads", "heads": "attention", "out": "row layer: its part of the sum"}
MLP = {"up": "column layer: its columns", "GeLU": "GeLU of its columns", "down": "row layer: its part of the sum"}
LAYER = [("norm", "LayerNorm"), ("f", "attention begins"), *ATTENTION.items(), ("g", "attention ends")]
LAYER += [("drop +", "dropout and residual sum"), ("norm", "LayerNorm"), ("f", "the MLP begins"), *MLP.items()]
LAYER += [("g", "the MLP ends"), ("drop +", "dropout and residual sum")]
"""The parts of a layer, and what they are; the ranks meet in f and g."""
MESSAGES = {"f": ("nothing", "all-reduce"), "g": ("all-reduce", "nothing")}
SEQUENCE_MESSAGES = {"f": ("all-gather", "reduce-scatter"), "g": ("reduce-scatter", "all-gather")}
"""The messages forward and backward where a pair of linear layers begins and ends."""
PAIR = {"X": "all of X", "f": "", "D": "X, its part", "A": "its columns of A", "H": "its columns of XA"}
PAIR |= {"G": "its columns of GeLU(XA)", "B": "its rows of B", "P": "its part of Z", "g": "", "Z": "all of Z"}
PAIR_STEPS = {  # what happens in each step, by the boxes that it goes through
    "": "Every rank has all of X, its columns of A and its rows of B.",
    "XAH": "Forward: X times its columns of A gives each rank its columns of XA. No message.",
    "HG": "GeLU works on each element alone, so on each rank's columns. No message.",
    "GBP": "Times its rows of B, they give each rank a part of Z, as large as Z. No message.",
    "PZ": "An all-reduce adds up the parts: every rank has all of Z.",
    "ZP": "Backward: each part of a sum has the gradient of the sum, and every rank has that. No message.",
    "PBG": "Each rank computes the gradients of its rows of B and of its columns. No message.",
    "GH": "The backward of GeLU works on each element alone, too. No message.",
    "HAD": "Each rank computes the gradient of its columns of A, and its part of dX. No message.",
    "DX": "An all-reduce adds up the parts of dX, because every rank used X.",
}


def draw_transformer_layer(tp_size: int = 2, sequence_parallel: bool = False) -> Scene:
    """Draw one layer: a row of boxes for each rank, and a bar over all rows for each message."""
    title, inside, around = f"A transformer layer, t = {tp_size}", "cut by columns, heads, rows", "same on every rank"
    says = "Two pairs of layers are cut, and each sends one all-reduce forward and one backward."
    messages, fills = MESSAGES, {inside: tints(TP, tp_size), around: [FRAME_FILL] * tp_size}
    if sequence_parallel:
        title, messages, around = f"{title}, with sequence parallelism", SEQUENCE_MESSAGES, "cut by tokens"
        says = "The rest is cut by tokens. An all-gather and a reduce-scatter do the work of each all-reduce."
        fills[around] = tints(CP, tp_size)
    bottom, rows, x = TOP + ROW * tp_size, [], NAME
    marks = rank_names(tp_size, TOP + 21, ROW)
    for number, (name, what) in enumerate(LAYER):
        width = BAR if name in messages else 69.0
        if name in messages:
            place, fact = (x, TOP, width, bottom - TOP - 3), "{}: {} forward, {} backward".format(what, *messages[name])
            marks.append(box(f"bar{number}", *place, "#ffffff", edge=INK, edge_width=2, fact=fact))
            for message, y in zip(messages[name], (TOP - 14, bottom + 12)):
                ink, key = MUTED if message == "nothing" else INK, f"{'forward' if y < TOP else 'backward'}{number}"
                marks.append(label(key, x + width / 2, y, message, anchor="middle", ink=ink, bold=ink == INK))
            rows.append((what, "", *messages[name]))
        else:
            cut, fact = (around, f"{what}, {around}") if name in ("norm", "drop +") else (inside, what)
            for rank, fill in enumerate(fills[cut]):
                place = x, TOP + ROW * rank, width, ROW - 3
                marks.append(own_box(f"part{number}.{rank}", rank, place, fill, name, fact, means=cut))
            rows.append((what, cut, "", ""))
        x += width + 5
    below, table = "Messages: forward above, backward below.", Table(("part", "cut", "forward", "backward"), rows)
    return titled(title, says, marks, table, below, bottom + 18)


def draw_pair(tp_size: int = 2) -> list[Scene]:
    """Draw the steps of Z = GeLU(XA) B, with A cut by columns and B by rows: forward, then backward."""
    ratio = 4 / tp_size  # of A's columns on a rank to X's columns
    unit = min(60.0, (WIDTH - NAME - 2 * BAR - 9 * 24 - 2) / (5 + 3 * ratio))  # pixels: the columns of X
    widths = {name: BAR if name in "fg" else unit * ratio if name in "AHG" else unit for name in PAIR}
    lefts = {name: NAME + sum([*widths.values()][:i]) + 24 * i for i, name in enumerate(PAIR)}
    row, heights, fills = max(1, ratio) * unit + 18, {"A": unit, "B": unit * ratio}, tints(TP, tp_size)
    names = rank_names(tp_size, TOP + row / 2 - 4, row)
    table = Table(("", "what happens"), [(f"step {i}", says) for i, says in enumerate(PAIR_STEPS.values(), 1)])
    scenes, seen, gradients = [], set("XAB"), set()
    title = f"Z = GeLU(XA) B, a column and a row layer, t = {tp_size}"
    for number, (path, says) in enumerate(PAIR_STEPS.items()):
        seen, gradients = seen | set(path), gradients | set(path if number > 4 else "")
        marks = [*names]
        for bar, step in {"f": "DX", "g": "PZ"}.items():
            fact, word = "{} forward, {} backward".format(*MESSAGES[bar]), "all-reduce" * (path == step)
            look = Look(edge=INK if word else FRAME, edge_width=4 if word else 1, fact=fact)
            marks.append(box(bar, lefts[bar], TOP, BAR, row * tp_size - 8, "#ffffff", **look))
            marks.append(label(f"{bar}.word", lefts[bar] + BAR / 2, TOP - 14, word, anchor="middle", bold=True))
        for (rank, who), name in product(enumerate(names), filter(seen.__contains__, PAIR)):
            fill, means = (FRAME_FILL, "whole on every rank") if name in "XZ" else (fills[rank], "one rank's part")
            text = {"D": "X", "H": "XA", "G": "GeLU", "P": "Z"}.get(name, name) + f"_{rank}" * (name in "DAHBP")
            fact, height = PAIR[name], heights.get(name, unit / 2)
            if name in gradients:
                fill, means, text, fact = BACKWARD, "gradient", f"d{text}", f"the gradient of {fact}"
            place = lefts[name], who.y - height / 2, widths[name], height
            marks.append(own_box(f"{name}.{rank}", rank, place, fill, text, fact, means=means, radius=0))
        for (rank, who), (a, b) in product(enumerate(names), pairwise(path)):
            ends = lefts[a] + widths[a] * (number < 5), lefts[b] + widths[b] * (number > 4)
            marks.append(arrow(f"arrow{a}{b}.{rank}", [(x, who.y) for x in ends], INK))
        scenes.append(titled(title, says, marks, table))
    return scenes


def draw_embedding(vocab_size: int, tp_size: int, tokens: Sequence[int]) -> list[Scene]:
    """Draw the steps of a vocabulary-parallel embedding: who has which rows, who answers for each token, the sum.

    Raises:
        ValueError: a token is not in the vocabulary.
    """
    for token in tokens:
        if not 0 <= token < vocab_size:
            raise ValueError(f"token {token} is outside vocab_size={vocab_size}: use 0 to {vocab_size - 1}")
    rows = -(-vocab_size // tp_size)  # on a rank; the last are padding if tp_size does not divide
    owned = [chunks_of_rank(rows * tp_size, tp_size, rank)[0] for rank in range(tp_size)]
    owners = [next(rank for rank, own in enumerate(owned) if token in own) for token in tokens]
    wide, fills, high = (WIDTH - 250) / len(tokens), tints(TP, tp_size), ROW - 6
    lines = [(f"{token}", f"rank {owner}", f"{token - owned[owner].start}") for token, owner in zip(tokens, owners)]
    caption = f"{vocab_size} rows are padded to {rows * tp_size}." if rows * tp_size > vocab_size else ""
    table = Table(("token id", "answers", "row there"), lines, caption)
    marks, scenes = rank_names(tp_size, TOP + 20, ROW), []
    for rank, own in enumerate(owned):
        first, last = own.start, min(own.stop, vocab_size) - 1
        ids = "padding" if first > last else f"id {first}" if first == last else f"ids {first} to {last}"
        place = NAME, TOP + ROW * rank, 165, high
        marks.append(own_box(f"shard{rank}", rank, place, fills[rank], ids, f"the vectors of {ids}"))
    for number, (token, owner) in enumerate(zip(tokens, owners)):
        text, fact = (f"id {token}", str(token)), f"Token {token}: rank {owner} has its vector"
        place = 250 + number * wide, TOP - 38, wide - 6, 28
        marks.append(box(f"token{number}", *place, FRAME_FILL, text, f"token{number}", edge=FRAME, fact=fact))
    steps = (
        f"Each rank has the vectors of {rows} token ids. Every rank sees all tokens.",
        "Each rank looks up the ids that it has, and gives zeros for the others.",
        "An all-reduce adds up: one vector, and zeros. Every rank has the vector of every token.",
    )
    for step, says in enumerate(steps):
        cells = []
        for rank, (number, token) in product(range(tp_size) if step else (), enumerate(tokens)):
            has, place = step == 2 or rank == owners[number], (250 + number * wide, TOP + ROW * rank, wide - 6, high)
            fill, text = (fills[owners[number]], ("vector", "v")) if has else ("#ffffff", ("zeros", "0"))
            fact = f"Rank {rank}: {'the vector of' if has else 'zeros for'} token {token}"
            cells.append(box(f"cell{rank}.{number}", *place, fill, text, f"token{number}", edge=FRAME, fact=fact))
        scenes.append(titled(f"An embedding, vocabulary of {vocab_size}, t = {tp_size}", says, [*marks, *cells], table))
    return scenes
