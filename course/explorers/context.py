"""Choose a sequence, the ranks and the heads: who computes what, and what each way of context parallelism sends."""

from course.explorers.base import Explorer, Parts
from course.explorers.control import slider
from course.pictures.context_parallel import draw_triangle
from course.pictures.style import bytes_text
from course.sizing.context import CONTEXT_PARALLEL, attention_messages
from course.table import Table
from labkit.parallel_config import ParallelConfig
from labkit.partition import check_divides
from labkit.shape import GPT
from labkit.sizes import Misfit, counted

HEAD_SIZE = 128
SEQUENCES, RANKS, HEADS = [2**power for power in range(10, 21)], (1, 2, 4, 8, 16), (1, 2, 4, 8, 16, 32, 64, 128)


class context_explorer(Explorer):
    """Show a causal sequence on context ranks, with a control for each size; ``shown`` is one layer of the model."""

    table = (
        ("seq_length", slider, "tokens s", SEQUENCES, 131072),
        ("cp_size", slider, "context c", RANKS, 4),
        ("tp_size", slider, "tensor t", (1, 2, 4, 8), 1),
        ("num_heads", slider, "heads", HEADS, 32),
        ("num_kv_heads", slider, "kv heads", HEADS, 8),
    )

    def _fit(self, choice) -> GPT:
        s, c, t, heads, kv_heads = choice
        check_divides(kv_heads, "num_heads", heads, parts_name="num_kv_heads")
        model = GPT(1, heads * HEAD_SIZE, s, 1, heads, num_query_groups=kv_heads)
        ParallelConfig(1, tp_size=t, cp_size=c).check_model(model)
        return model

    def _worded(self, fault: str) -> str:
        return super()._worded(fault).replace("num query groups", "kv heads").replace("num attention heads", "heads")

    def _parts(self) -> Parts:
        s, c, t, heads, kv_heads = self.choice
        own = f"{counted(heads // t, 'head')} and {counted(kv_heads // t, 'kv head')} of {s // c:,} tokens"
        rows, sums = [], []
        for way in CONTEXT_PARALLEL:
            both = attention_messages(self.shown, way, c, tp_size=t)
            sizes = [sum(message.sent_bytes for message in each) for each in both]
            facts = [" + ".join(str(len(each)) for each in both), *map(bytes_text, sizes)]
            said = bytes_text(sum(sizes))
            try:
                ParallelConfig(1, tp_size=t, cp_size=c, context_parallel=way).check_shards(self.shown)
            except Misfit as misfit:
                facts, said = [self._worded(misfit.fault), "", ""], "does not fit"
            name = way.replace("ulysses", "Ulysses")
            rows.append([name, *facts])
            sums.append(f"{name} <b>{said}</b>")
        caption = f"Sent by one rank, in one layer, for one sequence; head size {HEAD_SIZE}, in bfloat16."
        says = f"Each rank has {own}. It sends in each layer: {', '.join(sums)}."
        return Parts([draw_triangle(s, c)], says, Table(("way", "messages", "forward", "backward"), rows, caption))
