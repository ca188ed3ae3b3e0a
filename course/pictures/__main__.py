"""Write the figures of the README and the notebooks: ``python -m course.pictures pics``.

Each picture is one line in ``FIGURES``: the name of its file, and the call that draws it.
"""

import sys
from pathlib import Path

from course.measure import operations
from course.measure.flow import trace_flow
from course.measure.utilisation import predict_step
from course.pictures.batch import BatchCut, draw_replicas
from course.pictures.collectives import draw_flows
from course.pictures.context_parallel import ring_steps
from course.pictures.experts import routing_steps
from course.pictures.fully_sharded import draw_moments
from course.pictures.layout import draw_layout
from course.pictures.runs import draw_runs
from course.pictures.sharding import draw_cut
from course.pictures.standstill import draw_questions
from course.pictures.three_axes import draw_holdings
from course.pictures.timeline import draw_timelines
from course.pictures.transformer import draw_embedding, draw_pair, draw_transformer_layer
from course.pictures.utilisation import draw_steps
from course.sizing import Plan, moments, simulate
from course.sizing.flow import numbered, row_and_column
from course.sizing.linear_cut import LinearCut
from course.sizing.routing import drawn_logits, route
from course.sizing.runs import LLAMA_8B
from labkit.layout import ParallelLayout
from labkit.schedules import gpipe, zero_bubble_v
from labtrain.command_line import run_command


def four_collectives():
    """Run the four collectives that training is made of on real ranks."""
    return {
        "reduce-scatter": trace_flow(operations.reduce_scatter, numbered(4)),
        "all-gather": trace_flow(operations.all_gather, numbered(4, 2)),
        "all-reduce": trace_flow(operations.all_reduce, numbered(4)),
        "all-to-all": trace_flow(operations.all_to_all, row_and_column(4)),
    }


def first_and_last_schedule():
    """Draw notebook 07's first and last schedule on one scale; the notebook asks about others, and other sizes."""
    schedules = [gpipe(3, 5), zero_bubble_v(3, 5)]
    return draw_timelines([simulate(each) for each in schedules], [each.name for each in schedules], in_flight=True)


def tuned_step():
    """Predict one step of notebook 12's 8 ranks after its cures; the notebook asks for the step before them."""
    plan = Plan(LLAMA_8B, 8, 16, pp_size=8, num_chunks=2, recompute="none", fused_attention=True)
    return draw_steps([predict_step(plan)], ["16 micro-batches, interleaved"])


FIGURES = {
    "group_layout": lambda: draw_layout(ParallelLayout(16, tp_size=2, pp_size=4), gpus_per_node=8),
    "collectives": lambda: draw_flows(four_collectives()),  # by real ranks
    "column_parallel": lambda: draw_cut(LinearCut("column", 1024, 512, tp_size=2)),
    "row_parallel": lambda: draw_cut(LinearCut("row", 1024, 512, tp_size=2)),
    "vocabulary_parallel": lambda: draw_embedding(10, 4, [0, 3, 9])[-1],
    "data_parallel": lambda: draw_replicas(BatchCut(128, dp_size=4)),
    "tensor_parallel": draw_transformer_layer,
    "pair": lambda: draw_pair(2)[-1],
    "sequence_parallel": lambda: draw_transformer_layer(2, sequence_parallel=True),
    "pipeline_schedules": first_and_last_schedule,
    "utilisation": tuned_step,
    "three_axes": lambda: draw_holdings(ParallelLayout(8, tp_size=2, pp_size=2), num_layers=4, batch_size=16),
    "context_parallel": lambda: ring_steps(4)[1],
    "fully_sharded": lambda: draw_moments(moments([2**22] * 4, 4), 3 * 2**22, "Four layers on four ranks, predicted"),
    "planning": draw_runs,
    "standstill": draw_questions,
    "experts": lambda: routing_steps(route(drawn_logits(4, 4, 8), top_k=2))[3],
}


def write_figures(folder: Path) -> list[Path]:
    """Draw every figure into ``folder`` as SVG, and return the files' paths."""
    folder.mkdir(parents=True, exist_ok=True)
    paths = [folder / f"{name}.svg" for name in FIGURES]
    for path in paths:
        path.write_text(FIGURES[path.stem]().svg() + "\n")
    return paths


def main(folder: str = "pics") -> None:
    for path in write_figures(Path(folder)):
        print(path)


if __name__ == "__main__":
    run_command(main, *sys.argv[1:2])
