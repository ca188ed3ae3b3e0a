"""What a generator yields on the ranks comes to the caller one value at a time, and its state stays with the ranks."""

import os

import pytest
import torch
import torch.distributed as dist

from course.stream import stream
from labkit.launch import RankFailed, World, launch


def running_sums(start, num_values):
    """Each value needs the one before, and all ranks."""
    total = torch.tensor([float(start)])
    for value in range(num_values):
        total += value + dist.get_rank()
        dist.all_reduce(total)
        yield total.item(), os.getpid()


def by_one_launch(start, num_values):
    return list(running_sums(start, num_values))


def test_values_come_in_order_from_ranks_that_go_on():
    with World(2) as world:
        rows = list(stream(world, running_sums, 1, num_values=4))
    assert len(rows) == 4
    values = [[value for value, _ in row] for row in rows]
    expected = [[value for value, _ in rank] for rank in launch(by_one_launch, 1, 4, world_size=2)]
    assert values == [list(row) for row in zip(*expected)]
    assert len({tuple(pid for _, pid in row) for row in rows}) == 1  # the same two processes all the while


def test_a_value_arrives_before_the_next_is_computed():
    def counted():
        number = 0
        while True:  # nobody could wait for the end of that
            number += 1
            yield number

    with World(2) as world:
        values = stream(world, counted)
        assert [next(values) for _ in range(3)] == [[1, 1], [2, 2], [3, 3]]
        again = stream(world, counted)
        assert next(again) == [1, 1]
        assert world.run(dist.get_rank) == [0, 1]  # the world takes other calls in between
        assert next(again) == [2, 2]


def held(folder):
    """Holds a file on each rank as long as it runs, as a training run holds its checkpoint folder."""
    file = folder / f"held by rank {dist.get_rank()}"
    file.touch()
    try:
        while True:
            yield len(list(folder.iterdir()))
            dist.barrier()
    finally:
        file.unlink()


def test_a_loop_that_is_left_early_frees_what_the_ranks_held(tmp_path):
    with World(2) as world:
        for _ in stream(world, held, tmp_path):
            break
        assert list(tmp_path.iterdir()) == []
        with pytest.raises(ZeroDivisionError):  # noqa: PT012 - as a cell does it
            for _ in stream(world, held, tmp_path):
                raise ZeroDivisionError
        assert list(tmp_path.iterdir()) == []
        assert world.run(dist.get_rank) == [0, 1]  # the world lives on


def test_a_new_stream_ends_the_one_before_and_is_not_ended_by_it(tmp_path):
    def counted():
        yield from range(3)

    with World(2) as world:
        first = stream(world, held, tmp_path)
        next(first)
        second = stream(world, counted)
        assert next(second) == [0, 0]
        assert list(tmp_path.iterdir()) == []
        assert list(first) == []
        first.close()
        assert list(second) == [[1, 1], [2, 2]]


def test_a_stream_that_outlives_its_world_is_silent(tmp_path):
    with World(2) as world:
        values = stream(world, held, tmp_path)
        next(values)
    values.close()


def test_none_is_a_value_and_no_value_is_none():
    def nothing():
        yield None

    def empty():
        return
        yield

    with World(2) as world:
        assert list(stream(world, nothing)) == [[None, None]]
        assert list(stream(world, empty)) == []


def test_ranks_that_end_early_are_named():
    def unequal():
        yield from range(2 - dist.get_rank())

    with (
        World(2) as world,
        pytest.raises(RuntimeError, match=r"unequal has ended on ranks \[1\] but goes on elsewhere"),
    ):
        list(stream(world, unequal))


def test_an_error_is_reported_as_ever():
    def fails():
        yield 1
        raise KeyError("lost")

    with World(2) as world:
        values = stream(world, fails)
        assert next(values) == [1, 1]
        with pytest.raises(RankFailed, match=r"raised KeyError: 'lost'"):
            next(values)


def test_a_function_without_yield_is_refused_before_anything_runs():
    with World(1) as world:
        with pytest.raises(ValueError, match=r"fn=by_one_launch has no yield"):
            next(stream(world, by_one_launch))
        assert world.run(dist.get_world_size) == [1]
