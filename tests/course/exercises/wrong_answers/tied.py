"""Answers to exercise 3 of three axes, one embedding on two stages."""

import torch
import torch.distributed as dist


def ends(num_stages):
    return dist.new_group(sorted({0, num_stages - 1}))


def only_the_ends_make_the_group(gradient, num_stages):
    if gradient is None:
        return None
    dist.all_reduce(gradient, group=ends(num_stages))
    return gradient


def average_of_both(gradient, num_stages):
    group = ends(num_stages)
    if gradient is not None:
        dist.all_reduce(gradient, group=group)
        return gradient / 2


def everybody_sends_zeros(gradient, num_stages):
    shape = torch.tensor(gradient.shape if gradient is not None else (0, 0))
    dist.broadcast(shape, src=0)
    total = torch.zeros(*shape.tolist()) if gradient is None else gradient
    dist.all_reduce(total)
    return total if gradient is not None else None


def middle_ranks_enter_too(gradient, num_stages):
    dist.all_reduce(gradient, group=ends(num_stages))
    return gradient


def group_forgotten_in_the_call(gradient, num_stages):
    ends(num_stages)
    if gradient is not None:
        dist.all_reduce(gradient)
    return gradient


def last_rank_off_by_one(gradient, num_stages):
    group = dist.new_group([0, num_stages])
    if gradient is not None:
        dist.all_reduce(gradient, group=group)
    return gradient


def first_gradient_for_both(gradient, num_stages):
    group = ends(num_stages)
    if gradient is not None:
        dist.broadcast(gradient, src=0, group=group)
    return gradient


def only_the_first_gets_the_sum(gradient, num_stages):
    group = ends(num_stages)
    if gradient is not None:
        gradient = gradient.clone()
        dist.reduce(gradient, dst=0, group=group)
    return gradient


def no_messages(gradient, num_stages):
    return gradient


def zeros_between(gradient, num_stages):
    group = ends(num_stages)
    if gradient is None:
        return torch.zeros(1)
    dist.all_reduce(gradient, group=group)
    return gradient


def tied_by_gathering(gradient, num_stages):
    group = ends(num_stages)
    if gradient is None or num_stages == 1:
        return gradient
    both = [torch.empty_like(gradient) for _ in range(2)]
    dist.all_gather(both, gradient, group=group)
    return both[0] + both[1]


def tied_1(gradient: torch.Tensor | None, num_stages: int):
    group = dist.new_group([0, num_stages - 1])
    if gradient is None:
        return None
    dist.all_reduce(gradient, group=group)
    return gradient / 2


def tied_2(gradient: torch.Tensor | None, num_stages: int):
    ends = dist.new_group([0, num_stages - 1])
    if gradient is not None:
        dist.broadcast(gradient, src=0, group=ends)
    return gradient


def tied_3(gradient: torch.Tensor | None, num_stages: int):
    group = dist.new_group([0, num_stages - 1])
    dist.all_reduce(gradient, group=group)
    return gradient


def tied_4(gradient: torch.Tensor | None, num_stages: int):
    group = dist.new_group([0, num_stages])
    if dist.get_rank() in (0, num_stages):
        dist.all_reduce(gradient, group=group)
    return gradient


def tied_by_messages_between_the_ends(gradient, num_stages):
    if gradient is None:
        return None
    other, peer = torch.empty_like(gradient), num_stages - 1 - dist.get_rank()
    messages = [dist.P2POp(dist.isend, gradient, peer), dist.P2POp(dist.irecv, other, peer)]
    for work in dist.batch_isend_irecv(messages):
        work.wait()
    return gradient + other


def tied_by_enumeration(gradient, num_stages):
    middle = [[rank] for rank in range(1, num_stages - 1)]
    group, _ = dist.new_subgroups_by_enumeration([[0, num_stages - 1], *middle])
    if gradient is not None:
        dist.all_reduce(gradient, group=group)
    return gradient


def tied_by_members_alone(gradient, num_stages):
    if gradient is not None:
        group = dist.new_group([0, num_stages - 1], use_local_synchronization=True)
        dist.all_reduce(gradient, group=group)
    return gradient


def tied_and_cleaned_up(gradient, num_stages):
    group = dist.new_group([0, num_stages - 1])
    if gradient is not None:
        dist.all_reduce(gradient, group=group)
        dist.destroy_process_group(group)
    return gradient


WRONG = [
    ("tied", only_the_ends_make_the_group, "middle ranks skip new_group"),
    ("tied", average_of_both, "the mean instead of the sum"),
    ("tied", everybody_sends_zeros, "middle ranks take part with zeros"),
    ("tied", middle_ranks_enter_too, "middle ranks have nothing to add"),
    ("tied", group_forgotten_in_the_call, "the group is not passed on"),
    ("tied", last_rank_off_by_one, "the last rank is num_stages - 1"),
    ("tied", first_gradient_for_both, "copies the first gradient, adds nothing"),
    ("tied", only_the_first_gets_the_sum, "the last stage keeps its own"),
    ("tied", no_messages, "nothing is sent"),
    ("tied", zeros_between, "returns zeros instead of None"),
    ("tied", tied_1, "averages the two parts"),
    ("tied", tied_2, "broadcasts the first, adds nothing"),
    ("tied", tied_3, "ranks between call all_reduce with None"),
    ("tied", tied_4, "last rank off by one"),
]

RIGHT = [
    ("tied", tied_by_gathering),
    ("tied", tied_by_messages_between_the_ends),
    ("tied", tied_by_enumeration),
    ("tied", tied_by_members_alone),
    ("tied", tied_and_cleaned_up),
]
