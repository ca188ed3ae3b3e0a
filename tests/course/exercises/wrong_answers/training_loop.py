"""Answers to exercise 3 of data parallel, a whole training loop."""

import torch
import torch.distributed as dist


def loss_of(x, weight):
    return (x @ weight).square().mean()


def gradient_of_step(weight, batches, clear=True, divide=True, num_ranks=None):
    """The lines that the answers share: backward for each micro-batch, one all-reduce, the mean."""
    if clear:
        weight.grad = None
    for x in batches:
        (loss_of(x, weight) / (len(batches) if divide else 1)).backward()
    dist.all_reduce(weight.grad)
    weight.grad /= dist.get_world_size() if num_ranks is None else num_ranks


def loop(weight, steps, lr, **options):
    for batches in steps:
        gradient_of_step(weight, batches, **options)
        with torch.no_grad():
            weight -= lr * weight.grad
    return weight


def never_clears(weight, steps, lr):
    return loop(weight, steps, lr, clear=False)


def clears_once(weight, steps, lr):
    weight.grad = None
    return loop(weight, steps, lr, clear=False)


def clears_after_the_step(weight, steps, lr):
    for batches in steps:
        gradient_of_step(weight, batches, clear=False)
        with torch.no_grad():
            weight -= lr * weight.grad
        weight.grad = None
    return weight


def micro_batches_not_averaged(weight, steps, lr):
    return loop(weight, steps, lr, divide=False)


def ranks_not_averaged(weight, steps, lr):
    return loop(weight, steps, lr, num_ranks=1)


def message_for_each_micro_batch(weight, steps, lr):
    for batches in steps:
        weight.grad = None
        for x in batches:
            (loss_of(x, weight) / len(batches)).backward()
            dist.all_reduce(weight.grad)
            weight.grad /= dist.get_world_size()
        with torch.no_grad():
            weight -= lr * weight.grad
    return weight


def clears_before_each_micro_batch(weight, steps, lr):
    for batches in steps:
        for x in batches:
            weight.grad = None
            (loss_of(x, weight) / len(batches)).backward()
        dist.all_reduce(weight.grad)
        with torch.no_grad():
            weight -= lr * weight.grad / dist.get_world_size()
    return weight


def update_makes_a_new_tensor(weight, steps, lr):
    for batches in steps:
        gradient_of_step(weight, batches)
        weight = weight - lr * weight.grad
    return weight


def update_under_autograd(weight, steps, lr):
    for batches in steps:
        gradient_of_step(weight, batches)
        weight -= lr * weight.grad
    return weight


def uphill(weight, steps, lr):
    return loop(weight, steps, -lr)


def no_messages(weight, steps, lr):
    for batches in steps:
        weight.grad = None
        (sum(loss_of(x, weight) for x in batches) / len(batches)).backward()
        weight.data -= lr * weight.grad
    return weight


def returns_nothing(weight, steps, lr):
    loop(weight, steps, lr)


def loop_on_a_copy(weight, steps, lr):
    weight = weight.detach().clone()
    for batches in steps:
        weight.requires_grad_()
        loss = torch.stack([loss_of(x, weight) for x in batches]).mean()
        (gradient,) = torch.autograd.grad(loss, weight)
        dist.all_reduce(gradient)
        weight = weight.detach() - lr * gradient / dist.get_world_size()
    return weight


def training_loop_1(weight: torch.Tensor, steps: list, lr: float):
    for micro_batches in steps:
        for x in micro_batches:
            loss = (x @ weight).square().mean() / len(micro_batches)
            loss.backward()
        gradient = weight.grad.clone()
        dist.all_reduce(gradient)
        gradient /= dist.get_world_size()
        with torch.no_grad():
            weight -= lr * gradient
    return weight


def training_loop_2(weight: torch.Tensor, steps: list, lr: float):
    for micro_batches in steps:
        weight.grad = None
        for x in micro_batches:
            (x @ weight).square().mean().backward()
        dist.all_reduce(weight.grad)
        with torch.no_grad():
            weight -= lr * weight.grad / dist.get_world_size()
    return weight


def training_loop_3(weight: torch.Tensor, steps: list, lr: float):
    for micro_batches in steps:
        weight.grad = None
        for x in micro_batches:
            ((x @ weight).square().mean() / len(micro_batches)).backward()
        dist.all_reduce(weight.grad)
        weight.data -= lr * weight.grad
    return weight


def training_loop_4(weight: torch.Tensor, steps: list, lr: float):
    for micro_batches in steps:
        weight.grad = None
        for x in micro_batches:
            ((x @ weight).square().mean() / len(micro_batches)).backward()
            dist.all_reduce(weight.grad)
        with torch.no_grad():
            weight -= lr * weight.grad / dist.get_world_size()
    return weight


def training_loop_5(weight: torch.Tensor, steps: list, lr: float):
    for micro_batches in steps:
        weight.grad = None
        for x in micro_batches:
            loss = (x @ weight).square().mean() / len(micro_batches)
            loss.backward()
        dist.all_reduce(weight.grad)
        weight -= lr * weight.grad / dist.get_world_size()
    return weight


def training_loop_6(weight: torch.Tensor, steps: list, lr: float):
    for micro_batches in steps:
        for x in micro_batches:
            weight.grad = None
            loss = (x @ weight).square().mean() / len(micro_batches)
            loss.backward()
        dist.all_reduce(weight.grad)
        weight.grad /= dist.get_world_size()
        with torch.no_grad():
            weight -= lr * weight.grad
    return weight


def divided_by_steps(weight, steps, lr):
    for micro_batches in steps:
        weight.grad = None
        for x in micro_batches:
            ((x @ weight).square().mean() / len(steps)).backward()
        dist.all_reduce(weight.grad)
        with torch.no_grad():
            weight -= lr * weight.grad / dist.get_world_size()
    return weight


def divided_by_rows_too(weight, steps, lr):
    for micro_batches in steps:
        weight.grad = None
        for x in micro_batches:
            ((x @ weight).square().mean() / len(micro_batches) / len(x)).backward()
        dist.all_reduce(weight.grad)
        with torch.no_grad():
            weight -= lr * weight.grad / dist.get_world_size()
    return weight


WRONG = [
    ("training_loop", never_clears, "the gradient is never cleared"),
    ("training_loop", clears_once, "the gradient is cleared only once"),
    ("training_loop", micro_batches_not_averaged, "not divided by the micro-batches"),
    ("training_loop", ranks_not_averaged, "not divided by the ranks"),
    ("training_loop", message_for_each_micro_batch, "an all-reduce for each micro-batch"),
    ("training_loop", clears_before_each_micro_batch, "only the last micro-batch counts"),
    ("training_loop", update_makes_a_new_tensor, "the new weight has no gradient"),
    ("training_loop", update_under_autograd, "updates a leaf under autograd"),
    ("training_loop", uphill, "the update goes uphill"),
    ("training_loop", no_messages, "nothing is sent"),
    ("training_loop", returns_nothing, "returns nothing"),
    ("training_loop", divided_by_steps, "divided by the steps, not by the micro-batches"),
    ("training_loop", divided_by_rows_too, "the mean over rows is divided by the rows once more"),
    ("training_loop", training_loop_1, "gradient never cleared"),
    ("training_loop", training_loop_2, "not divided by micro-batches"),
    ("training_loop", training_loop_3, "not divided by ranks"),
    ("training_loop", training_loop_4, "all-reduce after every micro-batch"),
    ("training_loop", training_loop_5, "in-place update without no_grad raises"),
    ("training_loop", training_loop_6, "clears before every micro-batch"),
]

RIGHT = [("training_loop", loop_on_a_copy), ("training_loop", clears_after_the_step)]
