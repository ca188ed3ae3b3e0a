"""Choose the sizes of Y = XA + b, the cut and t: the shards, what a rank holds, and what the ranks send."""

from course.explorers.base import Explorer, Parts
from course.explorers.control import buttons, checkbox, slider
from course.pictures.sharding import draw_cut
from course.pictures.small_product import product_steps, small_cut
from course.pictures.style import bytes_text
from course.sizing.linear_cut import CUTS, LinearCut
from course.sizing.ring import bus_factor
from course.table import Table

SIZES = (64, 128, 256, 512, 1000, 1024, 2048, 4096, 8192)
WHOLE_MEANS = {"column": "gather_output=True", "row": "input_is_parallel=False"}


class shard_explorer(Explorer):
    """Show a cut of a linear layer, with a control for everything that decides it; ``shown`` is a cut of A."""

    table = (
        ("cut", buttons, "cut A by", CUTS, "column"),
        ("input_size", slider, "in", SIZES, 1024),
        ("output_size", slider, "out", SIZES, 512),
        ("tp_size", slider, "tensor t", range(1, 17), 2),
        ("batch_size", slider, "batch", SIZES, 256),
        ("dealt", checkbox, "deal the shards to the ranks", False),
        ("whole", checkbox, "X and Y whole on every rank", False),
        ("numbers", checkbox, "in small integers, step by step", False),
    )
    seconds = 2.0

    def _fit(self, choice) -> LinearCut:
        return small_cut(choice.cut, choice.tp_size) if choice.numbers else LinearCut(*choice[:5])

    def _parts(self) -> Parts:
        cut, whole, numbers = self.shown, self.choice.whole, self.choice.numbers
        for name in ("input_size", "output_size", "batch_size", "dealt"):
            self.controls[name].disabled = numbers
        part = f"{len(cut.part_of(0))} {'columns' if cut.cut == 'column' else 'rows'} of A"
        says = f"Each of {cut.tp_size} ranks has {part}" if cut.tp_size > 1 else f"One rank has all {part}"
        facts = {"sent forward": "nothing", "sent backward": "nothing"}
        for when, messages in zip(facts, cut.messages(whole)):
            for each in messages:
                sent = bytes_text(each.size_bytes() * bus_factor(each.operation, cut.tp_size))
                what = f"{each.operation.replace('_', '-')} of {each.tensor} {[*each.shape]}"
                facts[when] = f"{what}, {bytes_text(each.size_bytes())}; on a ring each rank sends {sent}"
        ends = f"with {WHOLE_MEANS[cut.cut]}" if whole else "with shards left as they are"
        steps = product_steps(cut, whole) if numbers else [draw_cut(cut, self.choice.dealt, whole)]
        return Parts(steps, says, Table((), [*facts.items()], f"in float32, {ends}"))
