"""Draw a mixture of experts: tokens on their way to their experts and back, and the loads of experts in training."""

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from course.pictures.parts import Place, titled
from course.pictures.scene import WIDTH, Mark, Scene, box, label, line
from course.pictures.style import FRAME, FRAME_FILL, INK, MUTED, rank_color
from course.sizing.routing import Copy, Routed
from course.table import Table

LEFT, ROOM = 58.0, 340.0  # pixels: right of names, and for a rank's tokens
EXPERTS, LANE, LANES = 420.0, 24.0, 498.0  # where an expert's name stands, how high its lane is, where its rows begin
WIDEST, TOP, BETWEEN = 46.0, 92.0, 10.0  # the widest copy; above all, and between
MOST_IN_A_LINE = 16  # copies of a rank's tokens
BARS, BETWEEN_PANELS = 200.0, 24.0  # pixels: the highest bar; from panel to panel

STEPS = (
    ("1 choose", "Each token chooses its experts: a copy for each"),
    ("2 sort", "Each rank sorts its copies by expert"),
    ("3 send", "An all-to-all takes each copy to the rank of its expert; there they lie by sender"),
    ("4 compute", "Each rank sorts what it got by expert, and its experts compute: a row is an expert's load"),
    ("5 return", "The same all-to-all the other way: each copy is back on the rank of its token"),
    ("6 weigh", "The outputs of each token are added up, weighted by their probabilities (the widths)"),
)


def routing_steps(routed: Routed, names: Sequence[Sequence[str]] | None = None) -> list[Scene]:
    """Draw how the tokens of all ranks travel to their experts and back, in six steps.

    ``names`` are those of the tokens, [ranks][tokens]; by default, letters with the rank's number.
    """
    names = names or [
        [f"{chr(97 + token)}{rank}" for token in range(len(own))] for rank, own in enumerate(routed.experts)
    ]
    return [_step(_Ground(routed, names), number) for number in range(len(STEPS))]


class _Ground:
    """Where what lies: a block for each rank, with its tokens on the left and a lane for each expert on the right."""

    def __init__(self, routed: Routed, names: Sequence[Sequence[str]]):
        self.routed, self.names = routed, names
        most = max(len(routed.sent(rank)) for rank in range(routed.ep_size))
        self.line = min(most, MOST_IN_A_LINE)
        self.num_lines = math.ceil(most / self.line)
        self.left = min(WIDEST, ROOM / self.line)
        self.right = min(WIDEST, (WIDTH - LANES) / max(1, *routed.loads))
        self.block = max(self.num_lines, routed.num_own) * LANE + BETWEEN

    def top(self, rank: int) -> float:
        return TOP + rank * self.block

    def among_tokens(self, rank: int, number: int) -> Place:
        down, right = divmod(number, self.line)
        return LEFT + right * self.left, self.top(rank) + down * LANE, self.left - 2, LANE - 6

    def among_experts(self, rank: int, down: float, right: int) -> Place:
        return LANES + right * self.right, self.top(rank) + down * LANE, self.right - 1, LANE - 6

    def places(self, number: int) -> dict[Copy, Place]:
        """Return where each copy is after a step."""
        routed, found = self.routed, {}
        for rank in range(routed.ep_size):
            own = [each for each in routed.copies if each.rank == rank]
            if number in (0, 5):
                found |= {each: self.among_tokens(rank, at) for at, each in enumerate(own)}
            elif number in (1, 4):
                found |= {each: self.among_tokens(rank, at) for at, each in enumerate(routed.sent(rank))}
            elif number == 2:
                longest, received = max(1, *routed.loads), routed.received(rank)
                middle = (routed.num_own - math.ceil(len(received) / longest)) / 2  # between lanes: not yet an expert's
                for at, each in enumerate(received):
                    down, right = divmod(at, longest)
                    found[each] = self.among_experts(rank, down + middle, right)
            else:
                for expert in range(rank * routed.num_own, (rank + 1) * routed.num_own):
                    there = [each for each in routed.received(rank) if each.expert == expert]
                    lane = expert % routed.num_own
                    found |= {each: self.among_experts(rank, lane, at) for at, each in enumerate(there)}
        if number == 5:
            found |= self.weighed()
        return found

    def weighed(self) -> dict[Copy, Place]:
        """Return the places of the outputs in their token, as wide as their probabilities."""
        found, x, k = {}, 0.0, len(self.routed.experts[0][0])
        for each in self.routed.copies:
            left, y, _, high = self.among_tokens(each.rank, each.token * k)
            x, wide = left if each.place == 0 else x, max(0.5, each.prob * (k * self.left - 4))
            found[each], x = (x, y, wide, high), x + wide
        return found


def _step(ground: _Ground, number: int) -> Scene:
    routed, names, (title, says) = ground.routed, ground.names, STEPS[number]
    marks = [*_grounds(ground)]
    for each, place in ground.places(number).items():
        name = names[each.rank][each.token]
        fact = f"{name} of rank {each.rank}, for expert {each.expert}, probability {each.prob:.2f}"
        token = f"t{each.rank}.{each.token}"
        look = dict[str, Any](fact=fact, tags=(token, f"e{each.expert}"), lights=(token,), edge=INK, radius=2)
        texts = f"{name}→{each.expert}", name, str(each.expert) * (number < 2), ""
        if number == 5:
            texts = f"{name} {each.prob:.2f}", f"{each.prob:.2f}", ""
        key = f"c{each.rank}.{each.token}.{each.place}"
        marks.append(box(key, *place, rank_color(each.rank), texts, size=12, **look))
    table = Table(*_tables(routed, names)[number])
    return titled(title, says, marks, table, says, TOP + routed.ep_size * ground.block)


def _grounds(ground: _Ground) -> Iterator[Mark]:
    """Yield what stays: the ranks, the frames of their tokens, the lanes of the experts, and the even load."""
    routed, num_own = ground.routed, ground.routed.num_own
    yield label("tokens", LEFT, TOP - 22, "tokens", bold=True)
    yield label("experts", EXPERTS, TOP - 22, "experts", bold=True)
    for rank in range(routed.ep_size):
        y, high = ground.top(rank), ground.num_lines * LANE
        look = dict[str, Any](edge=FRAME, radius=3)
        yield box(f"rank{rank}", 0, y - 3, LEFT - 6, 27, rank_color(rank), f"rank {rank}", size=12)
        yield box(f"own{rank}", LEFT - 3, y - 3, ground.line * ground.left + 4, high, FRAME_FILL, **look)
        for lane in range(num_own):
            expert = rank * num_own + lane
            load = routed.loads[expert]
            fact = f"Expert {expert}, on rank {rank}, computes {load} of {len(routed.copies)} copies"
            place = LANES - 3, y - 3 + lane * LANE, WIDTH - LANES + 3, LANE
            own = dict[str, Any](tags=(f"lane{expert}",), lights=(f"e{expert}",), fact=fact)
            yield box(f"lane{expert}", *place, FRAME_FILL, **look, **own)
            text = f"expert {expert}"
            yield label(
                f"name{expert}", EXPERTS, y + lane * LANE + LANE / 2 - 2, text, fact=fact, lights=(f"e{expert}",)
            )
    x, bottom = LANES + routed.mean_load * ground.right, ground.top(routed.ep_size - 1) + ground.block - BETWEEN
    yield line("even", [(x, TOP - 8), (x, bottom)], INK, 1.5, dashed=True, fact=f"even: {routed.mean_load:g} for each")
    yield label("even.word", x, TOP - 18, "if even", anchor="middle", ink=MUTED, size=12)


def _tables(routed: Routed, names: Sequence[Sequence[str]]) -> list[tuple[Sequence[str], list[list[str]]]]:
    """Return the heads and rows of each step's table."""
    ranks, experts = range(routed.ep_size), range(routed.num_experts)
    chosen, returned = [], []
    for rank in ranks:
        own = [[each for each in routed.copies if each[:2] == (rank, token)] for token in range(len(names[rank]))]
        said = [f"{name} → {', '.join(str(e.expert) for e in each)}" for name, each in zip(names[rank], own)]
        chosen.append([str(rank), "; ".join(said)])
        sums = [" + ".join(f"{e.prob:.2f} · {e.expert}" for e in each) for each in own]
        returned.append([str(rank), "; ".join(f"{name} = {each}" for name, each in zip(names[rank], sums))])
    sorts = [[str(rank), _list(routed.sent(rank), names)] for rank in ranks]
    sends = [[str(rank), *map(str, row), str(sum(each[rank] for each in routed.rows))]
             for rank, row in zip(ranks, routed.rows)]  # fmt: skip
    loads = [[str(e), str(e // routed.num_own), str(routed.loads[e])] for e in experts]
    to = "rank", *(f"to rank {rank}" for rank in ranks), "gets"
    return [
        (("rank", "chooses"), chosen), (("rank", "sends"), sorts), (to, sends), (("expert", "on rank", "load"), loads),
        (("rank", "gets back"), sorts), (("rank", "outputs of experts, weighted"), returned),
    ]  # fmt: skip


def _list(copies: Sequence[Copy], names: Sequence[Sequence[str]]) -> str:
    return ", ".join(f"{names[each.rank][each.token]}→{each.expert}" for each in copies)


def draw_loads(loads: Mapping[str, Sequence[float]], ep_size: int, most: float, title: str) -> Scene:
    """Draw a panel for each way of balancing: a bar for each expert, its load over the mean, from 0 to ``most``."""
    wide, marks, rows, says = WIDTH / len(loads), [], [], []
    for panel, (name, own) in enumerate(loads.items()):
        x, pitch = panel * wide, (wide - BETWEEN_PANELS) / len(own)
        says.append(f"{name}: at most {max(own):.1f} times the mean")
        marks.append(label(f"name{panel}", x, TOP - 34, name, bold=True))
        marks.append(label(f"most{panel}", x, TOP - 14, f"at most {max(own):.1f} times the mean", ink=MUTED, size=12))
        y = TOP + BARS - BARS / most
        marks.append(line(f"even{panel}", [(x, y), (x + wide - BETWEEN_PANELS, y)], INK, dashed=True, fact="the mean"))
        for expert, load in enumerate(own):
            rank, high = expert * ep_size // len(own), BARS * load / most
            fact = f"{name}: expert {expert}, on rank {rank}, {load:.2f} times the mean load"
            at, look = x + expert * pitch, dict[str, Any](edge=FRAME, radius=0, fact=fact, means=f"on rank {rank}")
            marks.append(
                box(f"bar{panel}.{expert}", at + 1, TOP + BARS - high, pitch - 2, high, rank_color(rank), **look)
            )
            marks.append(label(f"e{panel}.{expert}", at + pitch / 2, TOP + BARS + 12, str(expert), anchor="middle"))
        rows.append([name, *(f"{load:.2f}" for load in own)])
    heads = "", *(f"expert {expert}" for expert in range(len(rows[0]) - 1))
    table = Table(heads, rows, "Times the mean load.")
    return titled(title, "; ".join(says), marks, table, "The dashed line is the mean.", TOP + BARS + 22)
