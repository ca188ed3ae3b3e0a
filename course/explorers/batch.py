"""Choose the batch, the replicas and the micro-batches: which rank sees which rows, and what that costs in messages."""

from course.explorers.base import Explorer, Parts
from course.explorers.control import slider
from course.pictures.batch import BatchCut, draw_batch
from course.pictures.style import bytes_text
from course.sizing.ring import bus_factor
from course.table import Table
from labkit.sizes import counted

BATCH_SIZES = (8, 16, 32, 64, 96, 128, 192, 256, 512, 1024)
GRADIENT_BYTES = 4 * 4 * (1024 * 1024 + 1024)  # the notebook's model in float32: four linear layers of width 1024


class batch_explorer(Explorer):
    """Show the rows of a batch, with a control for each size that deals them out; ``shown`` is a cut of the batch."""

    table = (
        ("batch_size", slider, "batch B", BATCH_SIZES, 128),
        ("dp_size", slider, "replicas d", range(1, 17), 4),
        ("num_micro_batches", slider, "micro-batches m", range(1, 9), 1),
    )

    def _fit(self, choice) -> BatchCut:
        return BatchCut(*choice)

    def _parts(self) -> Parts:
        (whole, d, m), b = self.choice, self.shown.micro_batch_size
        rows, sent = counted(b, "row"), bus_factor("all_reduce", d) * GRADIENT_BYTES
        seen = f"{counted(m * b, 'row')} of {whole}"
        message = f"all gradients once, {bytes_text(GRADIENT_BYTES)}; on a ring each rank sends {bytes_text(sent)}"
        message += f" (without no_sync {bytes_text(m * sent)})" if m > 1 else ""
        facts = {
            "each rank": f"{counted(m, 'backward')} of {rows}: activations of {rows} at a time",
            "a row counts": f"1/{b} in its micro-batch · 1/{m} in its rank · 1/{d} in the average = 1/{whole}",
            "sent in a step": message if d > 1 else "nothing",
        }
        says = f"Each of {d} ranks sees {seen} in a step" if d > 1 else f"One rank sees {seen}"
        table = Table((), [*facts.items()], "for four layers of width 1024, in float32")
        return Parts([draw_batch(self.shown)], says, table)
