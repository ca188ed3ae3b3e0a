"""Exercises on real ranks: what the report says of a rank, a deadlock and an error."""

import os
import threading

import torch.distributed as dist

from course.exercises import collectives, column_parallel, data_parallel, three_axes


def test_the_report_names_the_rank_and_where_it_started(launches_on_kept_ranks):
    text = collectives.all_reduce_from_halves.verdict(collectives.unchanged).text
    assert "rank 0 of 4, starting from [0, 1, 2, 3]" in text


def test_good_news_says_on_how_many_ranks(launches_on_kept_ranks):
    text = collectives.all_reduce_from_halves.verdict(collectives.my_all_reduce).text
    assert text.endswith("correct, on 4, 2 and 3 ranks.")


def test_a_stub_that_raises_is_not_attempted(launches_on_kept_ranks):
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
    assert "nobody is left to" in verdict.text


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


def test_a_rank_that_ends_by_a_signal_has_its_own_advice():
    """As gloo ends one that gets more than it expects."""

    def gives_up(x):
        if dist.get_rank() == 1:
            os.abort()
        dist.all_reduce(x)

    verdict = collectives.all_reduce_from_halves.verdict(gives_up)
    text = " ".join(verdict.text.split())
    assert verdict.status == "raised" and "was killed by SIGABRT" in text
    assert "gets more or fewer bytes than it expects" in text and "None comes from" not in text


def other_groups_in_the_middle(gradient, num_stages):
    ranks = [0, num_stages - 1] if gradient is not None else [dist.get_rank()]
    group = dist.new_group(ranks)
    if gradient is not None:
        dist.all_reduce(gradient, group=group)
    return gradient


def test_groups_that_not_all_ranks_make_alike_are_named_or_hang():
    """Which of the two depends on who comes first: torch counts the groups that a rank has made."""
    text = " ".join(three_axes.tied.verdict(other_groups_in_the_middle).text.split())
    named = "Not every rank calls `new_group` with the same ranks, in the same order"
    assert named in text or "a group that not all ranks made" in text


def broadcasts_from_itself(x, weight, bias):
    dist.broadcast(x, src=dist.get_rank())
    return x


def test_ranks_that_all_wait_in_one_collective_are_not_told_that_one_is_missing():
    text = " ".join(column_parallel.column_forward.verdict(broadcasts_from_itself).text.split())
    assert "each must name the same rank as the source, `src`" in text and "only some ranks call" not in text


def ends_the_ranks(gradients):
    averages = data_parallel.my_average(gradients)
    dist.destroy_process_group()
    return averages


def test_an_answer_that_ends_the_ranks_is_told_so(launches_on_kept_ranks):
    text = " ".join(data_parallel.average.verdict(ends_the_ranks).text.split())
    assert "the values are right" in text and "It calls destroy_process_group" in text


def test_what_cannot_be_sent_to_the_ranks_is_named():
    lock = threading.Lock()

    def locked(gradients):
        with lock:
            return data_parallel.my_average(gradients)

    verdict = data_parallel.average.verdict(locked)
    assert verdict.status == "wrong" and "lock (a lock), which" not in verdict.text
    assert "cannot be sent to the ranks" in " ".join(verdict.text.split())


def test_what_an_answer_prints_comes_once_for_each_rank(capfd):
    def prints(gradients):
        print("here is", dist.get_rank())
        return data_parallel.my_average(gradients)

    assert data_parallel.average.verdict(prints).status == "passed"
    printed = capfd.readouterr()
    assert (printed.out + printed.err).count("here is 0") == len(data_parallel.average.cases)


def divides_by_rows_too(weight, steps, lr):
    return data_parallel.my_train(weight, steps, lr / 2)


def test_a_mistake_that_fits_one_case_only_is_not_named(launches_on_kept_ranks):
    """With one step of one micro-batch, half of the update is what several mistakes give."""
    text = data_parallel.training_loop.verdict(divides_by_rows_too).text
    assert "usually" not in text


def test_ranks_may_answer_by_a_generator(launches_on_kept_ranks):
    verdict = data_parallel.average.verdict(lambda gradients: (each for each in data_parallel.my_average(gradients)))
    assert verdict.status == "passed", verdict.text
