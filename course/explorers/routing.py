"""Choose tokens, experts and ranks, and how unevenly experts are chosen: loads, and the bytes between ranks."""

from collections.abc import Sequence

from course.explorers.base import Explorer, Parts
from course.explorers.control import menu, slider
from course.pictures.experts import routing_steps
from course.pictures.style import bytes_text
from course.sizing.routing import Routed, drawn_logits, route
from course.table import Table

HIDDEN, NUMBER_BYTES = 4096, 2  # a copy travels as so many numbers, in bfloat16
DRAWN, OWN = "drawn", "yours"
SKEWS = tuple(number / 4 for number in range(13))


class routing_explorer(Explorer):
    """Show tokens on their way to their experts and back; ``shown`` is who chose whom.

    ``router`` may be logits of your own, [ranks][tokens][experts]: then they decide the sizes.
    """

    table = (
        ("router", menu, "router", (DRAWN,), DRAWN),
        ("num_tokens", slider, "tokens of a rank", (2, 4, 8), 4),
        ("num_experts", slider, "experts E", (2, 4, 8, 16), 8),
        ("top_k", slider, "chosen k", (1, 2, 4), 2),
        ("ep_size", slider, "ranks ep", (1, 2, 4, 8), 4),
        ("skew", slider, "skew", SKEWS, 0.0),
    )

    def _in_table(self, router: str | Sequence, num_tokens, num_experts, top_k, ep_size, skew):
        """Keep the reader's own logits, and start with their sizes."""
        if router == OWN:
            raise ValueError(f"router={router!r} has no logits: give them as [ranks][tokens][experts], or {DRAWN!r}")
        if isinstance(router, str):
            self.own = []
            return [router, num_tokens, num_experts, top_k, ep_size, skew]
        self.own = [token for rank in router for token in rank]
        return [OWN, len(router[0]), len(self.own[0]), top_k, len(router), skew]

    def _fit(self, choice) -> Routed:
        router, num_tokens, num_experts, top_k, ep_size, skew = choice
        if router == DRAWN:
            return route(drawn_logits(ep_size, num_tokens, num_experts), top_k, skew)
        if (ep_size * num_tokens, num_experts) != (len(self.own), len(self.own[0])):
            raise ValueError(f"yours is for {len(self.own)} tokens in all, and {len(self.own[0])} experts")
        return route(
            [self.own[start : start + num_tokens] for start in range(0, len(self.own), num_tokens)], top_k, skew
        )

    def _parts(self) -> Parts:
        routed, row_bytes = self.shown, HIDDEN * NUMBER_BYTES
        ranks = range(routed.ep_size)
        gets = [sum(row[rank] for row in routed.rows) for rank in ranks]
        leaves = [sum(row) - row[rank] for rank, row in enumerate(routed.rows)]
        most = max(leaves) * row_bytes
        even = len(routed.copies) / routed.ep_size
        busiest = max(range(routed.num_experts), key=routed.loads.__getitem__)
        says = f"Expert {busiest} computes <b>{routed.loads[busiest] / routed.mean_load:.2f} times</b> the mean load, "
        says += f"the busiest rank <b>{max(gets) / even:.2f} times</b> the mean of all ranks, which wait for it. "
        says += f"A rank sends at most {bytes_text(most)}. Press Play." if most else "Nothing is sent."
        rows = [
            [f"rank {rank}", *("stays" if to == rank else bytes_text(row[to] * row_bytes) for to in ranks),
             bytes_text(leaves[rank] * row_bytes), f"{gets[rank]:,} rows"] for rank, row in enumerate(routed.rows)
        ]  # fmt: skip
        heads = "from", *(f"to rank {rank}" for rank in ranks), "sent in all", "computes"
        caption = f"Bytes of one all-to-all: a copy is {HIDDEN:,} numbers in bfloat16. Two run forward, two backward."
        return Parts(routing_steps(routed), says, Table(heads, rows, caption))
