"""Choose tokens, experts and ranks, and how unevenly experts are chosen: loads, and the bytes between ranks."""

from collections.abc import Sequence

from course.explorers.base import Explorer, Parts
from course.explorers.choice import menu, slider
from course.pictures.experts import routing_steps
from course.pictures.style import bytes_text
from course.sizing.routing import Routed, drawn_logits, route
from course.table import Table

HIDDEN, NUMBER_BYTES = 4096, 2  # a copy travels as so many numbers, in bfloat16
DRAWN, OWN = "drawn", "yours"
SKEWS = tuple(number / 4 for number in range(13))


class routing_explorer(Explorer):
    """Show tokens on their way to their experts and back; ``shown`` is who chose whom.

    ``router`` may be the logits of your own, [ranks][tokens][experts]: then it decides the sizes.
    """

    table = (
        ("num_tokens", slider, "tokens of a rank", (2, 4, 8), 4),
        ("num_experts", slider, "experts E", (2, 4, 8, 16), 8),
        ("top_k", slider, "chosen k", (1, 2, 4), 2),
        ("ep_size", slider, "ranks ep", (1, 2, 4, 8), 4),
        ("skew", slider, "skew", SKEWS, 0.0),
        ("router", menu, "router", (DRAWN,), DRAWN),
    )

    def _in_table(self, num_tokens, num_experts, top_k, ep_size, skew, router: str | Sequence):
        """Keep the reader's own logits, and start with their sizes."""
        self.own = None if isinstance(router, str) else router
        if self.own is None:
            return [num_tokens, num_experts, top_k, ep_size, skew, router]
        return [len(self.own[0]), len(self.own[0][0]), top_k, len(self.own), skew, OWN]

    def _fit(self, choice) -> Routed:
        sizes = choice.ep_size, choice.num_tokens, choice.num_experts
        logits = drawn_logits(*sizes)
        if choice.router == OWN and self.own is not None:
            logits = self.own
            has = len(logits), len(logits[0]), len(logits[0][0])
            if sizes != has:
                what = zip(has, ("ranks", "tokens on each", "experts"))
                raise ValueError(f"yours is for {', '.join(f'{size} {word}' for size, word in what)}")
        return route(logits, choice.top_k, choice.skew)

    def _parts(self) -> Parts:
        routed, row_bytes = self.shown, HIDDEN * NUMBER_BYTES
        ranks = range(routed.ep_size)
        gets = [sum(row[rank] for row in routed.rows) for rank in ranks]
        leaves = [sum(row) - row[rank] for rank, row in enumerate(routed.rows)]
        even = len(routed.copies) / routed.ep_size
        busiest = max(range(routed.num_experts), key=routed.loads.__getitem__)
        says = f"Expert {busiest} computes <b>{routed.loads[busiest] / routed.mean_load:.2f} times</b> the mean load, "
        says += f"the busiest rank <b>{max(gets) / even:.2f} times</b> the mean of all ranks, which wait for it. "
        says += f"A rank sends at most {bytes_text(max(leaves) * row_bytes)}. Press Play."
        rows = [
            [f"rank {rank}", *("stays" if to == rank else bytes_text(row[to] * row_bytes) for to in ranks),
             bytes_text(leaves[rank] * row_bytes), f"{gets[rank]:,} rows"] for rank, row in enumerate(routed.rows)
        ]  # fmt: skip
        heads = "from", *(f"to rank {rank}" for rank in ranks), "sent in all", "computes"
        caption = f"Bytes of one all-to-all: a copy is {HIDDEN:,} numbers in bfloat16. Two run forward, two backward."
        return Parts(routing_steps(routed), says, Table(heads, rows, caption))
