"""The exercises of notebook 05: averaging gradients, buckets, a training loop, and replicas with unequal rows.

The replicas are the whole world. The functions named my_... are the solutions; those with a leading underscore make
the typical mistakes.
"""

import torch
import torch.distributed as dist

from course.exercises.base import Mistake
from course.exercises.on_ranks import RankExercise, only
from course.exercises.row_parallel import whole_numbers
from labkit.communication import CommunicationLog
from labkit.groups import local_device

SOME_RANKS_ONLY = "a collective that only some ranks call, or not equally often. All ranks must call it."

# -- average ------------------------------------------------------------------------------------------------------


def my_average(gradients):
    averages = []
    for gradient in gradients:
        total = gradient.clone()
        dist.all_reduce(total)  # in place: the sum over all ranks
        averages.append(total / dist.get_world_size())
    return averages


def gradient_inputs(*sizes: tuple[int, ...]):
    """On each rank other gradients of these shapes."""
    return ([4 * whole_numbers(size, seed=10 * dist.get_rank() + i) for i, size in enumerate(sizes)],)


def _sum_only(gradients):
    return [_total(gradient) for gradient in gradients]


def _divided_only(gradients):
    return [gradient / dist.get_world_size() for gradient in gradients]


def _divided_twice(gradients):
    return [_total(gradient / dist.get_world_size()) / dist.get_world_size() for gradient in gradients]


def _by_number_of_gradients(gradients):
    return [_total(gradient) / len(gradients) for gradient in gradients]


def _returned_too_early(gradients):
    return my_average(gradients)[:1]


def _mean_of_elements(gradients):
    return [average.mean() for average in my_average(gradients)]


def _largest(gradients):
    return [_total(gradient, dist.ReduceOp.MAX) / dist.get_world_size() for gradient in gradients]


def _what_all_reduce_returns(gradients):
    return [dist.all_reduce(gradient.clone()) for gradient in gradients]


average = RankExercise(
    "average",
    my_average,
    cases=[(2, (2,), (2, 2), (1,)), (4, (3,), (1,), (1, 2))],
    inputs=gradient_inputs,
    rule=only("all_reduce"),
    mistakes=[
        Mistake(
            _sum_only,
            "These are the sums over the ranks. Each rank's loss is a mean over its own rows, so the loss of all rows "
            "is the mean of the losses: divide by the number of ranks.",
        ),
        Mistake(_divided_only, "You divided, but nothing was added up: these are still this rank's own gradients."),
        Mistake(_divided_twice, "You divided twice, before and after the sum: all came out too small by the ranks."),
        Mistake(
            _by_number_of_gradients,
            "You divided by the number of gradients in the list. Divide by the number of replicas: "
            "dist.get_world_size().",
        ),
        Mistake(_returned_too_early, "Only the first gradient came back. Is the return inside the loop?"),
        Mistake(
            _mean_of_elements,
            "You took the mean over a gradient's own elements. The average is over the ranks, element by element.",
        ),
        Mistake(
            _what_all_reduce_returns,
            "dist.all_reduce returns None. The sum is in the tensor that you gave it: divide that.",
        ),
        Mistake(_largest, "You reduced with MAX. The gradient of a mean of losses is the mean of their gradients."),
    ],
    hints=[
        "`dist.all_reduce(gradient)` adds up all ranks' tensors, in place. It returns None.",
        "The sum has `dist.get_world_size()` terms.",
        "Not every gloo can do ReduceOp.AVG: sum, then divide. (Or divide first, so that the sum cannot overflow.)",
    ],
    if_stuck=SOME_RANKS_ONLY,
)

# -- buckets ------------------------------------------------------------------------------------------------------


def my_bucketed_average(gradients, bucket_size):
    averages, bucket = [], []
    for number, gradient in enumerate(gradients):
        bucket.append(gradient)
        sizes = [each.numel() for each in bucket]
        if sum(sizes) >= bucket_size or number == len(gradients) - 1:
            flat = torch.cat([each.flatten() for each in bucket])
            dist.all_reduce(flat)
            parts = (flat / dist.get_world_size()).split(sizes)
            averages += [part.view_as(each) for part, each in zip(parts, bucket)]
            bucket = []
    return averages


def bucket_inputs(bucket_size: int, *sizes: tuple[int, ...]):
    """On each rank other gradients of these shapes, and when a bucket is full."""
    return *gradient_inputs(*sizes), bucket_size


def _last_bucket_forgotten(gradients, bucket_size):
    """What is left over at the end is never sent."""
    averages = my_bucketed_average(gradients, bucket_size)
    filled = sum(map(len, _full_buckets(gradients, bucket_size)))
    return [*averages[:filled], *gradients[filled:]]


def _last_bucket_lost(gradients, bucket_size):
    averages = my_bucketed_average(gradients, bucket_size)
    return averages[: sum(map(len, _full_buckets(gradients, bucket_size)))]


def _left_flat(gradients, bucket_size):
    return [average.flatten() for average in my_bucketed_average(gradients, bucket_size)]


def _whole_buckets_returned(gradients, bucket_size):
    averages = iter(my_bucketed_average(gradients, bucket_size))
    full = _full_buckets(gradients, bucket_size)
    buckets = full + ([gradients[sum(map(len, full)) :]] if sum(map(len, full)) < len(gradients) else [])
    return [torch.cat([next(averages).flatten() for _ in bucket]) for bucket in buckets]


def _bucket_not_emptied(gradients, bucket_size):
    """After the first full bucket every gradient is a bucket's last, and all before it come back again."""
    averages, filled = my_bucketed_average(gradients, bucket_size), 0
    result = []
    for number, gradient in enumerate(gradients):
        filled += gradient.numel()
        if filled >= bucket_size or number == len(gradients) - 1:
            result += averages[: number + 1]
    return result


def _sum_of_buckets(gradients, bucket_size):
    return [average * dist.get_world_size() for average in my_bucketed_average(gradients, bucket_size)]


def _one_message_a_bucket(log: CommunicationLog, gradients, bucket_size) -> str | None:
    if complaint := only("all_reduce")(log):
        return complaint
    full = _full_buckets(gradients, bucket_size)
    wanted = len(full) + (sum(map(len, full)) < len(gradients))
    if len(log) == wanted:
        return None
    sizes = [gradient.numel() for gradient in gradients]
    return (
        f"It sends {len(log)} message{'s' * (len(log) != 1)}. Gradients of {sizes} numbers, in buckets that are full "
        f"at {bucket_size}, are {wanted}."
    )


def _full_buckets(gradients, bucket_size) -> list[list]:
    """The buckets that got full, without what is left over."""
    buckets: list[list] = [[]]
    for gradient in gradients:
        buckets[-1].append(gradient)
        if sum(each.numel() for each in buckets[-1]) >= bucket_size:
            buckets.append([])
    return buckets[:-1]


bucketed_average = RankExercise(
    "bucketed_average",
    my_bucketed_average,
    cases=[(2, 4, (2,), (2, 2), (1,)), (4, 3, (3,), (1,), (1, 2), (2,), (1,)), (2, 4, (2,), (2, 1))],
    inputs=bucket_inputs,
    rule=_one_message_a_bucket,
    mistakes=[
        Mistake(
            _last_bucket_forgotten,
            "The last bucket was never full, and so never sent: its gradients are still this rank's own. The end of "
            "the list closes the bucket too.",
        ),
        Mistake(_last_bucket_lost, "The gradients of the last bucket are missing: it was never full. Send it anyway."),
        Mistake(_left_flat, "The numbers are right, but flat. Give each gradient its own shape back: view_as."),
        Mistake(
            _whole_buckets_returned,
            "You returned the buckets. Cut each into its gradients again: `flat.split(sizes)`, then view_as.",
        ),
        Mistake(_bucket_not_emptied, "The bucket was not emptied after it was sent: its gradients come back again."),
        Mistake(_sum_of_buckets, "These are sums over the ranks. Divide by the number of ranks."),
    ],
    hints=[
        "Collect gradients in a list. It is full when `sum(g.numel() for g in bucket) >= bucket_size`.",
        "`torch.cat([g.flatten() for g in bucket])` is one tensor: one all-reduce for all of them.",
        "`flat.split(sizes)` cuts it again, with the list of the sizes; `part.view_as(gradient)` gives the shape back.",
        "What about a bucket that is not full when the list ends?",
    ],
    if_stuck=SOME_RANKS_ONLY,
)

# -- a training loop ----------------------------------------------------------------------------------------------


def my_train(weight, steps, lr):
    for micro_batches in steps:
        weight.grad = torch.zeros_like(weight)  # as optimizer.zero_grad() does
        for x in micro_batches:
            loss = (x @ weight).square().mean() / len(micro_batches)
            loss.backward()  # adds to weight.grad
        dist.all_reduce(weight.grad)
        weight.grad /= dist.get_world_size()
        with torch.no_grad():
            weight -= lr * weight.grad
    return weight


def training_inputs(num_steps: int, num_micro_batches: int):
    """The weight [2], the same on every rank; for each step the rank's own micro-batches [2, 2]; the learning rate."""
    weight = torch.tensor([8.0, -4.0], device=local_device(), requires_grad=True)
    seeds = iter(range(100 * dist.get_rank(), 100 * dist.get_rank() + 100))
    steps = [[whole_numbers((2, 2), next(seeds)) for _ in range(num_micro_batches)] for _ in range(num_steps)]
    return weight, steps, 1 / 64


def _train(weight, steps, lr, *, zero="step", mean=True, reduce=True, average=True):
    """`my_train` with one thing wrong."""
    for micro_batches in steps:
        if zero == "step":
            weight.grad = torch.zeros_like(weight)
        for x in micro_batches:
            if zero == "micro-batch":
                weight.grad = torch.zeros_like(weight)
            loss = (x @ weight).square().mean()
            (loss / len(micro_batches) if mean else loss).backward()
        if reduce:
            dist.all_reduce(weight.grad)
        if average:
            weight.grad /= dist.get_world_size()
        if zero == "before the update":
            weight.grad = torch.zeros_like(weight)
        with torch.no_grad():
            weight -= lr * weight.grad
    return weight


def _no_zero_grad(weight, steps, lr):
    return _train(weight, steps, lr, zero="never")


def _zero_grad_each_micro_batch(weight, steps, lr):
    return _train(weight, steps, lr, zero="micro-batch")


def _zero_grad_before_the_update(weight, steps, lr):
    return _train(weight, steps, lr, zero="before the update")


def _losses_not_divided(weight, steps, lr):
    return _train(weight, steps, lr, mean=False)


def _not_reduced(weight, steps, lr):
    return _train(weight, steps, lr, reduce=False, average=False)


def _not_averaged(weight, steps, lr):
    return _train(weight, steps, lr, average=False)


def _step_each_micro_batch(weight, steps, lr):
    return my_train(weight, [[x] for micro_batches in steps for x in micro_batches], lr)


def _one_message_a_step(log: CommunicationLog, weight, steps, lr) -> str | None:
    if complaint := only("all_reduce")(log):
        return complaint
    if len(log) == len(steps):
        return None
    return f"It calls {len(log)} all-reduces in {len(steps)} steps. One a step is enough: add up locally first."


train = RankExercise(
    "train",
    my_train,
    cases=[(2, 1, 1), (4, 2, 2)],
    inputs=training_inputs,
    rule=_one_message_a_step,
    mistakes=[
        Mistake(
            _no_zero_grad,
            "The gradients of the steps before are still in weight.grad, because backward adds. Empty it at the start "
            "of each step.",
        ),
        Mistake(
            _zero_grad_each_micro_batch,
            "You empty weight.grad for every micro-batch, so only the last one counts. Empty it once a step.",
        ),
        Mistake(
            _zero_grad_before_the_update, "weight.grad was emptied before the update could use it: nothing is learned."
        ),
        Mistake(
            _losses_not_divided,
            "The gradients of the micro-batches were added up, and their mean is wanted: divide each loss by their "
            "number.",
        ),
        Mistake(_not_reduced, "Each rank learned from its own rows only, and now the replicas differ."),
        Mistake(_not_averaged, "The gradients were added up over the ranks, but not divided by their number."),
        Mistake(
            _step_each_micro_batch,
            "You update after each micro-batch. One step uses all of them, with one weight.",
        ),
    ],
    hints=[
        "One step: empty `weight.grad`, a backward for each micro-batch, one all-reduce, the update.",
        "`loss.backward()` adds to `weight.grad`. To empty it: `weight.grad = None`, or zeros.",
        "The loss of the step is the mean over its micro-batches and over the ranks: two divisions.",
        "The update: `with torch.no_grad(): weight -= lr * weight.grad`",
    ],
    if_stuck=SOME_RANKS_ONLY,
)

# -- unequal rows -------------------------------------------------------------------------------------------------


def my_unequal_average(gradient, num_rows):
    total = gradient * num_rows  # the gradient of the sum over this rank's rows
    count = torch.tensor(float(num_rows), device=gradient.device)
    dist.all_reduce(total)
    dist.all_reduce(count)
    return total / count


def unequal_inputs(*rows_of_ranks: int):
    """On each rank the gradient [3] of the mean over its rows, and how many rows it has."""
    rank = dist.get_rank()
    gradient = 4 * whole_numbers((3,), seed=rank)
    return gradient if rows_of_ranks[rank] else torch.zeros_like(gradient), rows_of_ranks[rank]


def _plain_average(gradient, num_rows):
    return _total(gradient) / dist.get_world_size()


def _plain_sum(gradient, num_rows):
    return _total(gradient)


def _sum_over_rows(gradient, num_rows):
    return _total(gradient * num_rows)


def _divided_by_ranks(gradient, num_rows):
    return _total(gradient * num_rows) / dist.get_world_size()


def _divided_by_own_rows(gradient, num_rows):
    return _total(gradient * num_rows) / max(num_rows, 1)


def _sum_divided_by_all_rows(gradient, num_rows):
    return _total(gradient) / _total(torch.tensor(float(num_rows), device=gradient.device))


unequal_average = RankExercise(
    "unequal_average",
    my_unequal_average,
    cases=[(2, 1, 3), (4, 3, 3, 2, 2), (4, 4, 4, 1, 0)],
    inputs=unequal_inputs,
    rule=only("all_reduce"),
    mistakes=[
        Mistake(
            _plain_average,
            "This is the mean of the ranks' means: a row on a rank with few rows counts more than the others. Right "
            "only where all have equally many.",
        ),
        Mistake(
            _plain_sum, "This is the sum of the ranks' means: too large, and rows count unequally. Weight by rows."
        ),
        Mistake(
            _sum_over_rows,
            "This is the gradient of the sum over all rows. The mean is wanted: divide by the number of rows of all "
            "ranks.",
        ),
        Mistake(
            _divided_by_ranks,
            "You weighted by rows, then divided by the number of ranks. Divide by the number of all rows.",
        ),
        Mistake(
            _divided_by_own_rows,
            "You divided by this rank's rows, so every rank has another gradient. Divide by the rows of all ranks.",
        ),
        Mistake(
            _sum_divided_by_all_rows,
            "You divided by all rows, but the gradients are of means: multiply each by its rank's rows first.",
        ),
    ],
    hints=[
        "Mean over all rows = (sum over all rows) / (number of all rows). Both sums run over the ranks.",
        "`gradient` is of a mean over `num_rows` rows. Of their sum it is `gradient * num_rows`.",
        "The number of all rows: put `num_rows` into a tensor and all-reduce it.",
    ],
    if_stuck=SOME_RANKS_ONLY,
)


def _total(tensor: torch.Tensor, op=dist.ReduceOp.SUM) -> torch.Tensor:
    """The sum of all ranks' tensors, which stay as they are."""
    total = tensor.clone()
    dist.all_reduce(total, op)
    return total
