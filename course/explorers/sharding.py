"""Choose the sizes of Y = XA + b, the cut and t: the shards, what a rank holds, and what the ranks send."""

from collections import namedtuple

from course.explorers.base import Explorer, facts_html, says_html
from course.explorers.choice import buttons, checkbox, slider
from course.pictures.layout_table import bytes_text
from course.pictures.linear_cut import CUTS, LinearCut, Message
from course.pictures.scene import Scene
from course.pictures.sharding import draw_cut
from course.sizing.ring import bus_factor

SIZES = (64, 128, 256, 512, 1000, 1024, 2048, 4096, 8192)
WHOLE_MEANS = {"column": "gather_output=True", "row": "input_is_parallel=False"}
Choice = namedtuple("Choice", "cut input_size output_size tp_size batch_size")


def shard_explorer(
    cut: str = "column", input_size: int = 1024, output_size: int = 512, tp_size: int = 2, batch_size: int = 256
) -> "ShardExplorer":
    """Show a cut of a linear layer, with a control for everything that decides it; ValueError if it does not fit."""
    return ShardExplorer(Choice(cut, input_size, output_size, tp_size, batch_size))


class ShardExplorer(Explorer):
    """Controls, a picture and what is sent; ``shown`` is a cut of A."""

    function, choice_type = "shard_explorer", Choice

    def __init__(self, choice: Choice):
        self.cut = buttons("cut A by", CUTS, choice.cut)
        self.input_size = slider("in", SIZES, choice.input_size)
        self.output_size = slider("out", SIZES, choice.output_size)
        self.tp_size = slider("tensor t", range(1, 17), choice.tp_size)
        self.batch_size = slider("batch", SIZES, choice.batch_size)
        self.dealt = checkbox("deal the shards to the ranks", False)
        self.whole = checkbox("X and Y whole on every rank", False)
        super().__init__(others=[self.dealt, self.whole])

    def _fit(self, choice: Choice) -> LinearCut:
        return LinearCut(*choice)

    def _parts(self) -> tuple[Scene, str, str]:
        cut, whole = self.shown, bool(self.whole.value)
        part = f"{len(cut.part_of(0))} {'columns' if cut.cut == 'column' else 'rows'} of A"
        says = f"Each of {cut.tp_size} ranks has {part}" if cut.tp_size > 1 else f"One rank has all {part}"
        sent = zip(("sent forward", "sent backward"), cut.messages(whole))
        facts = {when: "".join(_says(cut, each) for each in messages) or "nothing" for when, messages in sent}
        ends = f"with {WHOLE_MEANS[cut.cut]}" if whole else "with shards left as they are"
        return draw_cut(cut, bool(self.dealt.value)), says_html(says), facts_html(f"in float32, {ends}", facts)


def _says(cut: LinearCut, message: Message) -> str:
    """Say what is sent, how large it is, and what each rank sends if the collective is a ring."""
    sent = bytes_text(message.size_bytes() * bus_factor(message.operation, cut.tp_size))
    what = f"{message.operation.replace('_', '-')} of {message.tensor} {[*message.shape]}"
    return f"{what}, {bytes_text(message.size_bytes())}; on a ring each rank sends {sent}"
