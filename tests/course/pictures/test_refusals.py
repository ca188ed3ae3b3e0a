"""What cannot be drawn is refused by name: a call, and what its error says."""

import re

import pytest

from course.pictures.batch import BatchCut
from course.pictures.curves import draw_losses
from course.pictures.fully_sharded import draw_cluster
from course.pictures.roofline import draw_roofline
from course.pictures.runs import draw_runs
from course.pictures.scene import Scene, label
from course.pictures.sharding import draw_stride
from course.pictures.trade import draw_trade
from course.pictures.transformer import draw_embedding
from course.sizing import DGX_H100, Plan, operations
from course.sizing.runs import LLAMA_70B

CALLED = (
    BatchCut, Scene, draw_cluster, draw_embedding, draw_losses, draw_roofline, draw_runs, draw_stride, draw_trade, label
)  # fmt: skip
OPERATIONS = operations(Plan(LLAMA_70B, 4, 1, 4, fused_attention=True, recompute="none"))
KNOWN = {each.__name__: each for each in CALLED} | {"DGX_H100": DGX_H100, "OPERATIONS": OPERATIONS}
REFUSED = {
    "BatchCut(128, 3, 1)": "= 3 does not divide batch_size=128: use batch_size 126 or 129",
    "BatchCut(4, 4, 2)": "dp_size=4 * num_micro_batches=2 = 8 does not divide batch_size=4: use batch_size 8",
    "BatchCut(0, 1, 1)": "batch_size=0 must be at least 1",
    "BatchCut(8, 1, -1)": "num_micro_batches=-1 must be at least 1",
    "BatchCut(8.0, 1, 1)": "batch_size=8.0 must be a whole number",
    "Scene('', '', [label('k', 0, 0, 'a'), label('k', 0, 0, 'b')], 10)": "two marks have the key 'k'",
    "draw_cluster(32, 4)": "does not divide",
    "draw_cluster(32, 24)": "does not divide",
    "draw_embedding(9, 4, [0, -1])": "token -1 ",  # row 11 is there, but only as padding
    "draw_embedding(9, 4, [0, 9])": "token 9 ",
    "draw_embedding(9, 4, [0, 11])": "vocab_size=9: use 0 to 8",
    "draw_losses({str(i): [1.0] for i in range(5)})": "5 curves on each other cannot be told apart: give 4 or fewer",
    "draw_roofline([], DGX_H100)": "draw_roofline got no operations",
    "draw_roofline(OPERATIONS, DGX_H100, {'norm': 1.0})": "seconds has no time of 'q, k and v: column-parallel'",
    "draw_runs([])": "draw_runs got no runs",
    "draw_stride(12, 4, 2)": "tp_size=4 * stride=2 = 8 does not divide output_size=12",
    "draw_stride(16, 2, 1)": "matrices=3 does not divide output_size=16",
    "draw_trade({})": "no schedules: name one or more",
}


@pytest.mark.parametrize("call", REFUSED)
def test_it_is_refused_by_name(call):
    with pytest.raises(ValueError, match=re.escape(REFUSED[call])):
        eval(call, dict(KNOWN))
