"""The exercises of notebook 05: averaging gradients, buckets, a training loop, and replicas with unequal rows.

The replicas are the whole world.
"""

from collections.abc import Callable

import torch
import torch.distributed as dist

from course.communication import CommunicationLog
from course.exercises.on_ranks import RankExercise, only, summed, whole_numbers
from labkit.groups import local_device
from labkit.sizes import counted

# -- average ------------------------------------------------------------------------------------------------------


def my_average(gradients):
    averages = []
    for gradient in gradients:
        total = gradient.clone()
        dist.all_reduce(total)  # in place: the sum over all ranks
        averages.append(total / dist.get_world_size())
    return averages


def gradient_inputs(*sizes: tuple[int, ...]):
    """Return gradients of these shapes, different ones on each rank."""
    return ([whole_numbers(size, seed=10 * dist.get_rank() + i) for i, size in enumerate(sizes)],)


average = RankExercise(
    "average",
    my_average,
    notebook="05",
    cases=[(4, (2,), (2, 2), (1,)), (3, (3,), (1,), (1, 2))],
    inputs=gradient_inputs,
    rule=only("all_reduce"),
    may_change=("gradients",),
    hints=[
        "`dist.all_reduce(gradient)` adds up all ranks' tensors, in place. It returns None.",
        "The sum has `dist.get_world_size()` terms.",
        "Not every gloo supports ReduceOp.AVG: sum, then divide. (Or divide first: then the sum cannot overflow.)",
    ],
)


def average_wrongly(gradients, each: Callable) -> list:
    """Return ``each(gradient, world_size)`` of this rank's gradients."""
    return [each(gradient, dist.get_world_size()) for gradient in gradients]


average.mistakes_of(
    average_wrongly,
    (
        dict(each=lambda g, n: summed(g)),
        "These are the sums over the ranks. Each rank's loss is a mean over its own rows, so the loss of all rows is "
        "the mean of the losses: divide by the number of ranks.",
    ),
    (dict(each=lambda g, n: g / n), "You divided, but nothing was added up: these are this rank's own gradients."),
    (
        dict(each=lambda g, n: summed(g) / n**2),
        "You divided twice, before and after the sum: every gradient is too small by the number of ranks.",
    ),
    (
        dict(each=lambda g, n: summed(g).mean() / n),
        "You took the mean over a gradient's own elements. The average is over the ranks, element by element.",
    ),
)


average.mistakes_in((None, lambda averages: averages[:1], "Only the first came back. Is the return inside the loop?"))


@average.mistake("You divided by the number of gradients. Divide by the number of replicas: dist.get_world_size().")
def by_number_of_gradients(gradients):
    return [summed(gradient) / len(gradients) for gradient in gradients]


@average.mistake("You reduced with MAX. The gradient of a mean of losses is the mean of their gradients.")
def largest(gradients):
    for gradient in gradients:
        dist.all_reduce(gradient, dist.ReduceOp.MAX)
    return [gradient / dist.get_world_size() for gradient in gradients]


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
    """Return gradients of these shapes, different ones on each rank, and how many numbers fill a bucket."""
    return *gradient_inputs(*sizes), bucket_size


def buckets_of(gradients, bucket_size) -> tuple[list[list], list]:
    """Return the buckets that got full, and the gradients that are left over."""
    full, bucket = [], []
    for gradient in gradients:
        bucket.append(gradient)
        if sum(each.numel() for each in bucket) >= bucket_size:
            full, bucket = [*full, bucket], []
    return full, bucket


def one_message_per_bucket(log: CommunicationLog, gradients, bucket_size) -> str | None:
    full, rest = buckets_of(gradients, bucket_size)
    wanted = [sum(each.numel() for each in bucket) for bucket in [*full, rest] if bucket]
    sent = [record.message_bytes // gradients[0].element_size() for record in log.records]
    if sent == wanted:
        return None
    sizes = [gradient.numel() for gradient in gradients]
    return (
        f"It sends {counted(len(sent), 'message')}, of {sent} numbers. Gradients of {sizes} numbers, in buckets that "
        f"are full at {bucket_size} or more, need {len(wanted)}, of {wanted}."
    )


bucketed_average = RankExercise(
    "bucketed_average",
    my_bucketed_average,
    notebook="05",
    cases=[(4, 4, (2,), (2, 2), (1,)), (3, 3, (3,), (1,), (1, 2), (2,), (1,)), (2, 4, (2,), (2, 1), (4,), (1,))],
    inputs=bucket_inputs,
    rule=only("all_reduce", also=one_message_per_bucket),
    may_change=("gradients",),
    hints=[
        "Collect gradients in a list. It is full when `sum(g.numel() for g in bucket) >= bucket_size`.",
        "`torch.cat([g.flatten() for g in bucket])` is one tensor: one all-reduce for all of them.",
        "`flat.split(sizes)` cuts it again, with the list of the sizes; `part.view_as(gradient)` gives the shape back.",
        "What about a bucket that is not full when the list ends?",
    ],
)


@bucketed_average.mistake("The last bucket was never full, so never sent. The end of the list closes it, too.")
def last_bucket_not_sent(gradients, bucket_size):
    rest = buckets_of(gradients, bucket_size)[1]
    return last_bucket_lost(gradients, bucket_size) + rest


@bucketed_average.mistake("The gradients of the last bucket are missing: it was never full. Send it anyway.")
def last_bucket_lost(gradients, bucket_size):
    rest = buckets_of(gradients, bucket_size)[1]
    return my_bucketed_average(gradients, bucket_size)[: len(gradients) - len(rest)]


@bucketed_average.mistake("The numbers are right, but flat. Give each gradient its own shape back: view_as.")
def left_flat(gradients, bucket_size):
    return [average.flatten() for average in my_bucketed_average(gradients, bucket_size)]


@bucketed_average.mistake("You returned the buckets. Cut each into its gradients: `flat.split(sizes)`, then view_as.")
def whole_buckets(gradients, bucket_size):
    averages = iter(my_bucketed_average(gradients, bucket_size))
    full, rest = buckets_of(gradients, bucket_size)
    return [torch.cat([next(averages).flatten() for _ in bucket]) for bucket in [*full, rest] if bucket]


@bucketed_average.mistake("The bucket was not emptied after it was sent: its gradients come back again.")
def bucket_not_emptied(gradients, bucket_size):
    averages, filled = my_bucketed_average(gradients, bucket_size), 0
    result = []
    for number, gradient in enumerate(gradients):
        filled += gradient.numel()
        if filled >= bucket_size or number == len(gradients) - 1:
            result += averages[: number + 1]
    return result


@bucketed_average.mistake("Each gradient was read from the start of its bucket: move the offset on by `numel()`.")
def offset_stays_0(gradients, bucket_size):
    averages, result = iter(my_bucketed_average(gradients, bucket_size)), []
    full, rest = buckets_of(gradients, bucket_size)
    for bucket in [*full, rest]:
        parts = [next(averages) for _ in bucket]
        result += [torch.cat([each.flatten() for each in parts])[: part.numel()].view_as(part) for part in parts]
    return result


@bucketed_average.mistake("The last bucket, which is not full, was added up and not divided by the number of ranks.")
def rest_not_divided(gradients, bucket_size):
    averages = my_bucketed_average(gradients, bucket_size)
    num_sent_full = len(gradients) - len(buckets_of(gradients, bucket_size)[1])
    return averages[:num_sent_full] + [each * dist.get_world_size() for each in averages[num_sent_full:]]


@bucketed_average.mistake("These are sums over the ranks. Divide by the number of ranks.")
def sums_of_buckets(gradients, bucket_size):
    return [average * dist.get_world_size() for average in my_bucketed_average(gradients, bucket_size)]


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


def training_inputs(num_steps: int, num_micro_batches: int, num_rows: int = 2):
    """Return the weight [2], alike on all ranks; each step's own micro-batches [rows, 2]; a learning rate."""
    weight = torch.tensor([8.0, -4.0], device=local_device(), requires_grad=True)
    seeds = iter(range(100 * dist.get_rank(), 100 * dist.get_rank() + 100))
    steps = [[whole_numbers((num_rows, 2), next(seeds)) for _ in range(num_micro_batches)] for _ in range(num_steps)]
    return weight, steps, 1 / 64


def one_message_per_step(log: CommunicationLog, weight, steps, lr) -> str | None:
    if len(log) == len(steps):
        return None
    return f"It calls {len(log)} all-reduces in {len(steps)} steps. One per step is enough: add up locally first."


training_loop = RankExercise(
    "training_loop",
    my_train,
    notebook="05",
    cases=[(3, 1, 1, 2), (4, 2, 3, 1)],
    inputs=training_inputs,
    rule=only("all_reduce", also=one_message_per_step),
    may_change=("weight",),
    hints=[
        "One step: empty `weight.grad`, a backward for each micro-batch, one all-reduce, the update.",
        "`loss.backward()` adds to `weight.grad`. To empty it: `weight.grad = None`, or zeros.",
        "The loss of the step is the mean over its micro-batches and over the ranks: two divisions.",
        "The update: `with torch.no_grad(): weight -= lr * weight.grad`",
    ],
)


def train_wrongly(
    weight, steps, lr, *, zero="step", divisor=lambda steps, m, rows: m, reduce="step", average=True, autograd=False,
    sign=-1,
):  # fmt: skip
    """Do what `my_train` does, with one thing wrong."""
    for micro_batches in steps:
        if zero == "step":
            weight.grad = torch.zeros_like(weight)
        for x in micro_batches:
            if zero == "micro-batch":
                weight.grad = torch.zeros_like(weight)
            loss = (x @ weight).square().mean()
            (loss / divisor(len(steps), len(micro_batches), len(x))).backward()
            if reduce == "micro-batch":
                dist.all_reduce(weight.grad)
        if reduce == "step":
            dist.all_reduce(weight.grad)
        if average is True:
            weight.grad /= dist.get_world_size()
        if zero == "before the update":
            weight.grad = torch.zeros_like(weight)
        with torch.set_grad_enabled(autograd):
            weight += sign * lr * weight.grad / (dist.get_world_size() if average == "update" else 1)
    return weight


NOT_EMPTIED = "Gradients of earlier steps are still in weight.grad: empty it at the start of each step."
training_loop.mistakes_of(
    train_wrongly,
    (dict(zero="never"), NOT_EMPTIED),
    (dict(zero="never", average="update"), NOT_EMPTIED),
    (dict(zero="micro-batch"), "You empty weight.grad in each micro-batch: only the last counts. Do it once per step."),
    (dict(zero="before the update"), "weight.grad was emptied before the update could use it: nothing is learned."),
    (dict(autograd=True), "The update is not part of the model: do it in `with torch.no_grad():`."),
    (dict(sign=1), "The weight went uphill: subtract lr * gradient."),
    (
        dict(divisor=lambda steps, m, rows: 1),
        "The gradients of the micro-batches were added up. You need their mean: divide each loss by m.",
    ),
    (
        dict(divisor=lambda steps, m, rows: steps),
        "You divided by the number of steps. The mean is over the micro-batches of one step: `len(micro_batches)`.",
    ),
    (
        dict(divisor=lambda steps, m, rows: m * rows),
        "You divided by the rows, too. `mean()` has done that already: divide by the number of micro-batches alone.",
    ),
    (dict(reduce="never", average=False), "Each rank learned from its own rows only, and now the replicas differ."),
    (
        dict(reduce="micro-batch"),
        "The all-reduce is in the loop over the micro-batches: it adds up again what it added up before. Call it once, "
        "after the loop.",
    ),
    (dict(average=False), "The gradients were added up over the ranks, but not divided by their number."),
)


UPDATES_TOO_OFTEN = "You update after each micro-batch. One step uses all of them, with one weight."
training_loop.mistakes_of(
    lambda weight, steps, lr, share: my_train(
        weight, [[x] for micro_batches in steps for x in micro_batches], lr * share
    ),
    (dict(share=1), UPDATES_TOO_OFTEN),
    (dict(share=1 / 3), UPDATES_TOO_OFTEN),
)


@training_loop.mistake(
    "Each rank took steps of its own, one per micro-batch, and the weights were averaged: that is local SGD. The "
    "gradient of a step is that at one weight: add up the gradients, and take one step."
)
def local_steps(weight, steps, lr):
    weight = weight.detach()
    for micro_batches in steps:
        for x in micro_batches:
            weight = weight - lr * gradient_at(weight, x) / len(micro_batches)
        dist.all_reduce(weight)
        weight /= dist.get_world_size()
    return weight


@training_loop.mistake("Every step took its gradient at the first weight. It must be that at the weight so far.")
def at_the_first_weight(weight, steps, lr):
    first = weight.detach()
    total = sum(gradient_at(first, x) / len(micro_batches) for micro_batches in steps for x in micro_batches)
    dist.all_reduce(total)
    return first - lr * total / dist.get_world_size()


def gradient_at(weight, x):
    return 2 / len(x) * x.T @ (x @ weight)


# -- unequal rows -------------------------------------------------------------------------------------------------


def my_unequal_average(gradient, num_rows):
    total = gradient * num_rows  # the gradient of the sum over this rank's rows
    count = torch.tensor(float(num_rows), device=gradient.device)
    dist.all_reduce(total)
    dist.all_reduce(count)
    return total / count


def unequal_inputs(*rows_of_ranks: int):
    """Return the gradient [3] of the mean over this rank's rows, and how many rows it has."""
    rank = dist.get_rank()
    gradient = 4 * whole_numbers((3,), seed=rank)
    return gradient if rows_of_ranks[rank] else torch.zeros_like(gradient), rows_of_ranks[rank]


unequal_average = RankExercise(
    "unequal_average",
    my_unequal_average,
    notebook="05",
    cases=[(3, 1, 3, 4), (4, 3, 3, 2, 2), (4, 4, 4, 1, 0)],
    inputs=unequal_inputs,
    rule=only("all_reduce", "all_gather"),
    may_change=("gradient",),
    hints=[
        "Mean over all rows = (sum over all rows) / (number of all rows). Both sums run over the ranks.",
        "`gradient` is that of a mean over `num_rows` rows. That of their sum is `gradient * num_rows`.",
        "The number of all rows: put `num_rows` into a tensor and all-reduce it.",
    ],
)


def most_rows(rows: int) -> float:
    found = torch.tensor(float(rows))
    dist.all_reduce(found, op=dist.ReduceOp.MAX)
    return found.item()


unequal_average.mistakes_of(
    lambda gradient, num_rows, answer: answer(gradient, num_rows, dist.get_world_size()),
    (
        dict(answer=lambda g, rows, n: summed(g) / n),
        "This is the mean of the ranks' means, in which a row on a rank with few rows counts more than others. It is "
        "right only where all ranks have equally many.",
    ),
    (
        dict(answer=lambda g, rows, n: summed(g) / summed(torch.tensor(float(rows > 0)))),
        "This is the mean of the ranks that have rows. A rank's gradient counts as often as it has rows: multiply it "
        "by its `num_rows`, and divide by all rows.",
    ),
    (dict(answer=lambda g, rows, n: summed(g)), "This is the sum of the ranks' means. Weight by rows, and divide."),
    (dict(answer=lambda g, rows, n: summed(g * rows)), "This is the gradient of a sum over rows: divide by all rows."),
    (dict(answer=lambda g, rows, n: summed(g * rows) / n), "You divided by the number of ranks: divide by all rows."),
    (dict(answer=lambda g, rows, n: summed(g * rows) / max(rows, 1)), "You divided by this rank's rows, not by all."),
    (
        dict(answer=lambda g, rows, n: summed(g) / summed(torch.tensor(float(rows)))),
        "You divided by all rows, but these are gradients of means: multiply each by its `num_rows` first.",
    ),
    (dict(answer=lambda g, rows, n: summed(g * rows) / 10), "You divided by the 10 rows of the example: count them."),
    (dict(answer=lambda g, rows, n: summed(g * rows) / (n * max(rows, 1))), "You divided by n times this rank's rows."),
    (dict(answer=lambda g, rows, n: summed(g * rows) / (n * rows)), "You divided by n times this rank's rows."),
    (dict(answer=lambda g, rows, n: summed(g * rows) / rows), "You divided by this rank's rows, not by all."),
    (
        dict(answer=lambda g, rows, n: summed(g * rows) / (n * most_rows(rows))),
        "You divided by n times the largest number of rows, as if all ranks had that many: count them.",
    ),
    (
        dict(answer=lambda g, rows, n: summed(g / max(rows, 1)) * summed(torch.tensor(float(rows))) / n),
        "The weights are upside down: a rank with more rows counts less. Multiply by num_rows, and divide by all.",
    ),
    (dict(answer=lambda g, rows, n: summed(g / max(rows, 1))), "You divided by num_rows: multiply, and divide by all."),
    (dict(answer=lambda g, rows, n: summed(g) / max(rows, 1)), "Multiply each by its num_rows, then divide by all."),
    (
        dict(answer=lambda g, rows, n: my_unequal_average(g, rows) / n),
        "You divided by the number of all rows, and by that of the ranks as well. The rows are enough.",
    ),
    (
        dict(answer=lambda g, rows, n: g * rows / summed(torch.tensor(float(rows)))),
        "This is the rank's own share of the mean: all-reduce the weighted gradients, too.",
    ),
)
