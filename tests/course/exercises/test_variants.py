"""Variants of solutions: what they are called, and that pretended ranks compute what real ones do."""

import torch
import torch.distributed as dist

from course.exercises import collectives, column_parallel, context_parallel, data_parallel, tensor_parallel, three_axes
from course.exercises.group_layout import rank_to_coordinates
from course.exercises.planning import state_bytes
from course.exercises.pretend import PretendedRanks
from course.exercises.values import same
from course.exercises.variants import variants


def said_of(exercise, function) -> str:
    return " ".join(exercise.verdict(function).text.split())


def test_an_answer_that_is_the_solution_with_one_change_is_told_which():
    def bits_of_both(rank, tp_size, dp_size):
        return rank % tp_size, rank // tp_size % (dp_size + 1), rank // (tp_size * dp_size)

    def with_all_replicas(num_parameters, t, p, d, sharded_optimizer):
        return num_parameters / t * p * (18 if not sharded_optimizer else 6 + 12 / d)

    change = "In all cases your answers are those of the right function with one change:"
    assert change not in said_of(rank_to_coordinates, bits_of_both)
    assert f"{change} `(num_parameters / t) * p`" not in said_of(state_bytes, with_all_replicas)
    assert change in said_of(state_bytes, with_all_replicas)


def gathers_the_largest(x):
    pieces = list(x.chunk(dist.get_world_size()))
    out = torch.empty_like(pieces[0])
    dist.reduce_scatter(out, pieces, dist.ReduceOp.MAX)
    parts = [torch.empty_like(out) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, out)
    return torch.cat(parts)


def first_shard(x, weight, bias):
    n = dist.get_world_size()
    y = torch.nn.functional.linear(x, weight.chunk(n)[0], bias.chunk(n)[0])
    shards = [torch.empty_like(y) for _ in range(n)]
    dist.all_gather(shards, y)
    return torch.cat(shards, -1)


def test_on_ranks_too(launches_on_kept_ranks):
    assert "one change: `ReduceOp.MAX` in place of `ReduceOp.SUM`." in said_of(
        collectives.all_reduce_from_halves, gathers_the_largest
    )
    assert "one change: rank 0's part on every rank." in said_of(column_parallel.column_forward, first_shard)


def test_pretended_ranks_answer_as_real_ones(launches_on_kept_ranks):
    for exercise in (
        *(collectives.all_reduce_from_halves, collectives.ring_all_reduce, data_parallel.bucketed_average),
        *(tensor_parallel.gather_backward, context_parallel.ring_forward, three_axes.tied),
    ):
        case = exercise.cases[-1]
        [real] = [exercise._reference((exercise.solution_function,), case)]
        pretended = PretendedRanks(case[0]).run(lambda rank, e=exercise, c=case: e.solution_function(*e.inputs(*c[1:])))
        assert same(pretended, [rank.answers[0] for rank in real]), exercise.name


def test_a_pretended_rank_that_fails_frees_the_others():
    def fails_on_rank_one(rank):
        if rank == 1:
            raise KeyError("lost")
        dist.all_reduce(torch.ones(2))

    found = PretendedRanks(3).run(fails_on_rank_one)
    assert "KeyError" in found[1].message and "no rank can go on" in found[0].message


def test_every_variant_is_a_different_function():
    for exercise in (rank_to_coordinates, column_parallel.column_forward, three_axes.norm):
        made = variants(exercise.solution_function)
        assert len(made) > 5 and all(variant.said for variant in made)
