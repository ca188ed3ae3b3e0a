"""A pipeline on real ranks gives the gradients of one process, for any schedule; what does not fit is refused."""

import re
import time
from collections import Counter
from functools import partial
from itertools import pairwise
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import nn

from course.measure.paced import PacedStage
from course.sizing import simulate
from course.timeline import measured
from labkit import pipeline
from labkit.data_parallel import DataParallel, FullyShardedDataParallel
from labkit.groups import ProcessGroups, group_of_one, init_groups
from labkit.launch import RankFailed, launch
from labkit.layout import ParallelLayout
from labkit.pipeline.worker import Stage
from labkit.placement import placements
from labkit.schedules import FORWARD, dualpipe_v, gpipe, interleaved, one_f_one_b, zero_bubble
from labkit.shape import GPT
from labkit.tensor_parallel import shard_like
from labkit.timeline.trace import Trace
from labtrain.model import ParallelGPT
from tests.support.pipelines import assert_same, even, every_schedule, mean_square, model_chunks, parity, run_stage
from tests.support.schedules import KINDS, schedule_of


@pytest.mark.parametrize(("p", "sizes"), [(1, [3]), (2, [1, 4]), (4, [3, 8])])
def test_gradients_of_one_process(on_ranks, p, sizes):
    """With fewer micro-batches than stages, a multiple of them, and some left over."""
    on_ranks(parity, *(schedule for m in sizes for schedule in every_schedule(p, m)), world_size=p)


def test_ranks_that_take_micro_batches_in_orders_of_their_own(on_ranks):
    lines = ("F0 F1 F2 F3 B2 B0 B1 B3", "F2 F0 F3 F1 B0 B3 B2 B1", "F3 F2 F1 F0 B3 B2 B0 B1")
    on_ranks(partial(parity, schedule_of(*lines, m=4)), world_size=3)


def test_halves_of_backward_put_off_to_the_end(on_ranks):
    lines = ("F0 F1 B1 B0 W0 W1", "F1 F0 B1 B0 W1 W0")
    on_ranks(partial(parity, schedule_of(*lines, m=2, kinds=tuple(KINDS.values())), rows=even), world_size=2)


# -- a GPT ----------------------------------------------------------------------------------------------------------

SHAPE = GPT(num_layers=4, hidden_size=8, seq_length=6, vocab_size=13, num_attention_heads=2)
BATCH = 8


def gpt_parity(schedule, layout, steps=1, **options):
    """The GPT in stages, over tensor- and data-parallel ranks too, against the whole model on one process."""
    with init_groups(layout) as groups:
        where = {"dtype": torch.float64}
        local = [
            ParallelGPT(
                SHAPE,
                groups.tp,
                stage=schedule.stage_of(groups.coords.pp, chunk),
                num_stages=schedule.num_stages,
                **options,
                **where,
            )
            for chunk in range(schedule.num_chunks)
        ]
        whole = ParallelGPT(SHAPE, group_of_one(), **where)
        tied = [chunk.embedding.weight for chunk in local if hasattr(chunk, "embedding")]
        replicas = [DataParallel(chunk, groups.dp) for chunk in local]
        for step in range(steps):
            tokens = torch.randint(0, SHAPE.vocab_size, (BATCH, SHAPE.seq_length + 1), generator=seeded(step))
            inputs, targets = tokens[:, :-1], tokens[:, 1:]
            expected = whole.loss(whole(inputs), targets).mean()
            expected.backward()
            own_rows = slice(groups.coords.dp, None, layout.dp_size)
            split = [rows[own_rows].chunk(schedule.num_micro_batches) for rows in (inputs, targets)]
            loss = step_of_gpt(schedule, local, replicas, tied, groups, *split, sync=step == steps - 1)
        if loss is not None:
            mean = loss.clone()
            dist.all_reduce(mean, group=groups.dp)
            torch.testing.assert_close(mean / layout.dp_size, expected.detach(), rtol=1e-12, atol=1e-12)
        wanted = dict(whole.named_parameters())
        for chunk in local:
            placed = placements(chunk)
            for name, parameter in chunk.named_parameters():
                shard = shard_like(wanted[name].grad, placed[name])
                assert_same(parameter.grad, shard, f"{schedule.name}, {name}")


def seeded(seed):
    return torch.Generator().manual_seed(seed)


def step_of_gpt(schedule, chunks, replicas, tied, groups: ProcessGroups, inputs, targets, sync):
    """The gradients add up over steps; the last sends them to the other replicas."""

    def loss(logits, target):
        return chunks[-1].loss(logits, target).mean()

    options = {"loss": loss, "tied": tied, "activation_spec": chunks[0].activation_spec(inputs[0])}
    with replicas[0].no_sync(), replicas[-1].no_sync():
        total = pipeline.run(schedule, chunks, groups, inputs, targets=targets, **options)
    if sync:
        for replica in replicas:
            replica.sync_gradients()
    return total


TIED = [gpipe(1, 4), interleaved(2, 4, 2), one_f_one_b(4, 4), zero_bubble(2, 4), dualpipe_v(2, 4)]


@pytest.mark.parametrize("schedule", TIED, ids=lambda schedule: f"{schedule.pp_size} {schedule.name}")
def test_a_gpt_in_stages_with_its_embedding_tied(on_ranks, schedule):
    p = schedule.pp_size
    on_ranks(gpt_parity, schedule, ParallelLayout(p, pp_size=p), 2, world_size=p)


def last_stage_ends_last(line):
    """Gradients of one rank's two stages that share an embedding, averaged over two replicas, and of the whole."""
    schedule = schedule_of(line, m=1, num_chunks=2, kinds=tuple(KINDS.values()))
    with init_groups(ParallelLayout(2)) as groups:
        where = {"dtype": torch.float64, "num_stages": 2}
        first = ParallelGPT(SHAPE, groups.tp, stage=0, **where)
        chunks = [first, ParallelGPT(SHAPE, groups.tp, stage=1, first=first, **where)]
        whole = ParallelGPT(SHAPE, group_of_one(), dtype=torch.float64)
        tokens = torch.randint(0, SHAPE.vocab_size, (2, SHAPE.seq_length + 1), generator=seeded(0))
        whole.loss(whole(tokens[:, :-1]), tokens[:, 1:]).mean().backward()
        rows = tokens[groups.coords.dp :][:1]
        replicas = [DataParallel(chunk, groups.dp) for chunk in chunks]
        options = {"targets": [rows[:, 1:]], "loss": lambda logits, target: first.loss(logits, target).mean()}
        pipeline.run(schedule, replicas, groups, [rows[:, :-1]], average=True, **options)
        wanted = dict(whole.named_parameters())
        for name, parameter in (pair for chunk in chunks for pair in chunk.named_parameters()):
            assert_same(parameter.grad, wanted.pop(name).grad, name)
        assert not wanted


def test_a_shared_embedding_is_averaged_when_both_its_stages_are_done(on_ranks):
    for line in ("F0 F0.1 B0.1 B0 W0 W0.1", "F0 F0.1 B0.1 W0.1 B0 W0"):
        on_ranks(last_stage_ends_last, line)


def tied_in_the_middle():
    with init_groups(ParallelLayout(3, pp_size=3)) as groups:
        odd = schedule_of("F0 B0", "F0 B0", "F0 B0", m=1, stages=[[1], [0], [2]])
        pipeline.run(odd, [nn.Linear(2, 2)], groups, [torch.ones(1, 2)], loss=mean_square, tied=[nn.Parameter()])


def test_a_tied_weight_of_ranks_without_a_group_is_refused():
    said = "the tied stages of 'own' live on ranks [1, 2]: place the first on rank 0, and the last on rank 0 or 2"
    with pytest.raises(RankFailed, match=re.escape(said)):
        launch(tied_in_the_middle, world_size=3)


def test_a_gpt_in_stages_beside_tensor_and_data_parallel_ranks(on_ranks):
    layout = ParallelLayout(8, tp_size=2, pp_size=2, order="tp-pp-dp")
    options = {"sequence_parallel": True, "recompute": "full"}
    on_ranks(partial(gpt_parity, zero_bubble(2, 4), layout, **options), world_size=8)


# -- what a rank does -----------------------------------------------------------------------------------------------


def traced(schedule, make_chunk, m):
    with init_groups(ParallelLayout(schedule.pp_size, pp_size=schedule.pp_size)) as groups:
        return spans_of_second_step(groups, schedule, make_chunk, m)


def spans_of_second_step(groups, schedule, make_chunk, m):
    trace = Trace(groups.coords.pp)
    chunks = [make_chunk() for _ in range(schedule.num_chunks)]
    step = partial(pipeline.run, schedule, chunks, groups, torch.ones(2 * m, 4).chunk(m), loss=mean_square)
    step()  # in a process's first backward torch imports a second's worth of itself
    dist.barrier()
    step(trace=trace)
    return trace.spans()


@pytest.mark.parametrize("schedule", every_schedule(4, 6), ids=lambda schedule: schedule.name)
def test_a_trace_has_each_op_in_the_order_of_the_schedule(on_ranks, schedule):
    for rank, spans in enumerate(on_ranks(traced, schedule, partial(nn.Linear, 4, 4), 6, world_size=4)):
        assert all(one.end <= other.start for one, other in pairwise(spans))
        assert all(span.rank == rank for span in spans)
        ops = [(span.kind, span.label, span.op) for span in spans if span.kind != "wait"]
        assert ops == [(op.kind, str(op), op) for op in schedule.ranks[rank]]
        waits = [(span.label, span.op) for span in spans if span.kind == "wait"]
        elsewhere = [op for op in schedule.ranks[rank] if any(who != rank for who, _ in schedule.needs(rank, op))]
        assert waits == [(f"for {op}", op) for op in elsewhere]


def test_paced_stages_take_about_the_time_that_is_predicted(on_ranks):
    schedule = zero_bubble(4, 4)
    predicted = simulate(schedule, 0.020, 0.040).makespan_seconds
    stage = partial(PacedStage, 0.020, 0.040)
    times = (measured(on_ranks(traced, schedule, stage, 4, world_size=4), "paced") for _ in range(3))
    ratios = [timeline.makespan_seconds / predicted for timeline in times]
    assert 1 <= min(ratios) < 1.5  # of several, one that nothing else disturbed


# -- what goes wrong ------------------------------------------------------------------------------------------------

INPUTS = list(torch.zeros(4, 2, 4))


@pytest.mark.parametrize(
    ("schedule", "given", "said"),
    [
        (one_f_one_b(3, 4), {}, "'1F1B' is for 3 ranks, but pp_size=2"),
        (interleaved(2, 4, 2), {}, "1 chunks for a schedule of num_chunks=2"),
        (
            zero_bubble(2, 4),
            {"reduce_every_micro_batch": True},
            "computes weights' gradients after layers were freed, or their gradients",
        ),
        (one_f_one_b(2, 5), {}, "4 inputs for a schedule of num_micro_batches=5"),
        (one_f_one_b(2, 4), {"targets": INPUTS[:3]}, "3 targets for a schedule of num_micro_batches=4"),
        (one_f_one_b(2, 4), {"inputs": [*INPUTS[:3], INPUTS[3][:0]]}, "micro-batch 3 of 4 has no rows"),
        (
            one_f_one_b(2, 2),
            {"inputs": [INPUTS[0], torch.zeros(2, 3)]},
            r"micro-batch 1 is float32 \[2, 3\], micro-batch 0 is float32 \[2, 4\]: they may differ only in the",
        ),
        (one_f_one_b(2, 2), {"inputs": [INPUTS[0], INPUTS[1].double()]}, r"micro-batch 1 is float64 \[2, 4\]"),
        (
            one_f_one_b(2, 2),
            {"inputs": [rows.long() for rows in INPUTS[:2]]},
            r"inputs are torch.int64, and stages send floats: .* activation_spec=\(dtype, shape\)",
        ),
        (
            one_f_one_b(2, 4),
            {"activation_spec": (torch.int64, (2, 4))},
            r"activation_spec=\(torch.int64, \(2, 4\)\) must be of floats",
        ),
        (schedule_of("F0 F1 B0 B1", "F0 B0 F1", m=2), {"inputs": INPUTS[:2]}, "rank 1 lacks B1"),
        (
            schedule_of("F0 B0 F1 B1", "F0 F1 B0 B1", m=2),
            {"inputs": INPUTS[:2]},
            "deadlock in 'own': rank 0 waits at B0 for B0 of rank 1; rank 1 waits at F1 for F1 of rank 0: move an op",
        ),
        (schedule_of("F0 B0", "B0 F0", m=1), {"inputs": INPUTS[:1]}, "rank 1 has B0 before F0, whose result it needs"),
    ],
)
def test_sizes_that_do_not_fit_are_refused_before_anything_is_sent(on_ranks, schedule, given, said):
    def refused():
        options = {"inputs": INPUTS, "loss": mean_square} | given
        with init_groups(ParallelLayout(2, pp_size=2)) as groups:
            if groups.coords.pp == 0:  # alone: had it sent or received anything, it would wait
                with pytest.raises(ValueError, match=said):
                    pipeline.run(schedule, [nn.Linear(4, 4)], groups, **options)

    on_ranks(refused)


def test_a_schedule_that_needs_layers_after_they_were_freed_is_refused(on_ranks):
    def refused():
        with init_groups(ParallelLayout(2, pp_size=2)) as groups:
            model = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4))
            chunks = [FullyShardedDataParallel(model, groups.dp, units=model)]
            with pytest.raises(
                ValueError, match="use reduce_every_micro_batch=False and reshard_after_forward=False, or a different"
            ):
                pipeline.run(zero_bubble(2, 4), chunks, groups, INPUTS, loss=mean_square)

    on_ranks(refused)


def test_a_rank_can_run_again_after_a_refusal(on_ranks):
    """Nothing of a refused step is left behind in the world."""

    def twice():
        groups = init_groups(ParallelLayout(2, pp_size=2))
        chunks = [nn.Linear(4, 4)]
        with pytest.raises(ValueError, match="3 inputs"):
            pipeline.run(gpipe(2, 4), chunks, groups, INPUTS[:3], loss=mean_square)
        return pipeline.run(gpipe(2, 4), chunks, groups, INPUTS, loss=mean_square)

    none, loss = on_ranks(twice)
    assert none is None
    assert loss > 0


class Raises(nn.Linear):
    def forward(self, x):
        raise FloatingPointError("this stage is broken")


@pytest.mark.usefixtures("no_rank_is_left")
def test_a_stage_that_raises_is_reported_as_any_rank_is():
    def stage_of_rank(rank):
        return Raises(4, 4) if rank == 2 else nn.Linear(4, 4)

    start = time.monotonic()
    with pytest.raises(RankFailed, match="rank 2 of 4 raised FloatingPointError: this stage is broken") as failed:
        launch(run_stage, one_f_one_b(4, 4), stage_of_rank, world_size=4)
    assert time.monotonic() - start < 10
    assert re.search(r"rank 1: waits in recv from rank 2 \(.*\) for B0", str(failed.value))
    assert re.search(r"rank 3: waits in recv from rank 2 \(.*\) for F0", str(failed.value))


# -- gradients are averaged during the last backward ---------------------------------------------------------------


def sent_during(schedule):
    """The op in which each all-reduce of the replicas' gradients started, and the op that was this chunk's last."""
    torch.manual_seed(0)
    layout = ParallelLayout(4, pp_size=2)
    events, now, all_reduce, do = [], [None], dist.all_reduce, Stage.do
    with init_groups(layout) as groups:

        def noted(tensor, *args, group=None, **options):
            if group is groups.dp:
                events.append(now[0])
            return all_reduce(tensor, *args, group=group, **options)

        def noted_do(stage, op, arrived):
            now[0] = str(op)
            result = do(stage, op, arrived)
            now[0] = None
            return result

        whole = model_chunks(schedule.num_stages, square=True)
        numbers = [schedule.stage_of(groups.coords.pp, chunk) for chunk in range(schedule.num_chunks)]
        chunks = [DataParallel(whole[number], groups.dp, bucket_bytes=0) for number in numbers]
        num_buckets = [len(list(chunk.parameters())) for chunk in chunks]
        x = torch.randn(4, 2, 6)
        with patch.object(dist, "all_reduce", noted), patch.object(Stage, "do", noted_do):
            pipeline.run(schedule, chunks, groups, x.unbind(), loss=mean_square, average=True)
        ops = [op for op in schedule.ranks[groups.coords.pp] if op.kind != FORWARD]
        last = [str(next(op for op in reversed(ops) if op.chunk == chunk)) for chunk in range(schedule.num_chunks)]
    return Counter(events), Counter(dict(zip(last, num_buckets)))


@pytest.mark.parametrize("schedule", [one_f_one_b(2, 4), interleaved(2, 4, 2), zero_bubble(2, 4)], ids=lambda s: s.name)
def test_gradients_leave_during_the_last_backward(on_ranks, schedule):
    """Each in a bucket of its own: all are sent inside the op that completes them, none before or after."""
    for sent, wanted in on_ranks(sent_during, schedule, world_size=4):
        assert sent == wanted
