"""Exercises on real ranks: what the report says of a rank, a deadlock and an error."""

import torch.distributed as dist

from course.exercises import collectives


def test_the_report_names_the_rank_and_where_it_started():
    text = collectives.all_reduce_from_halves.verdict(collectives.unchanged).text
    assert "rank 0 of 4, starting from [0, 1, 2, 3]" in text


def test_good_news_says_on_how_many_ranks():
    text = collectives.all_reduce_from_halves.verdict(collectives.my_all_reduce).text
    assert text.endswith("correct, on 4, 2 and 3 ranks.")


def test_a_stub_that_raises_is_not_attempted():
    def raises(x):
        raise NotImplementedError

    assert collectives.ring_all_reduce.verdict(raises).status == "not attempted"


def test_a_deadlock_becomes_a_report():
    def all_send_first(x):
        rank, world_size = dist.get_rank(), dist.get_world_size()
        dist.send(x, (rank + 1) % world_size)
        dist.recv(x, (rank - 1) % world_size)
        return x

    verdict = collectives.ring_all_reduce.verdict(all_send_first)
    assert verdict.status == "stuck"
    assert "waits in send to rank 1" in verdict.text
    assert "nobody is left to receive" in verdict.text


def test_an_error_on_one_rank_becomes_a_report():
    def fails_on_rank_one(x):
        if dist.get_rank() == 1:
            raise KeyError("lost")
        dist.all_reduce(x)

    verdict = collectives.all_reduce_from_halves.verdict(fails_on_rank_one)
    assert verdict.status == "raised"
    assert "rank 1 of 4 raised KeyError" in verdict.text
    assert 'raise KeyError("lost")' in verdict.text
    assert "course/exercises" not in verdict.text.replace("tests/course/exercises", "")  # only the learner's own lines
