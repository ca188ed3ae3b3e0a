"""An exercise of notebook 05: a training loop with PyTorch's DDP that accumulates, and reads each sample once."""

from collections import Counter
from contextlib import nullcontext

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, DistributedSampler

from course.exercises.on_ranks import Conduct, whole_numbers
from course.exercises.parallel_objects import ObjectExercise, numbers_in
from labkit.sizes import counted


def my_ddp_loop(model, data, num_epochs, num_micro_batches, lr):
    parallel = DistributedDataParallel(model)
    sampler = DistributedSampler(data)
    loader = DataLoader(data, batch_size=2, sampler=sampler)
    optimizer = torch.optim.SGD(parallel.parameters(), lr=lr)
    for epoch in range(num_epochs):
        sampler.set_epoch(epoch)  # the next order
        for number, x in enumerate(loader, 1):
            updates = number % num_micro_batches == 0
            with nullcontext() if updates else parallel.no_sync():  # forward and backward
                loss = parallel(x).square().mean() / num_micro_batches
                loss.backward()
            if updates:
                optimizer.step()
                optimizer.zero_grad()
    return model


class SmallModel(nn.Sequential):
    """Two layers in float64; it notes how many rows it gets at a time, and who calls it."""

    def __init__(self):
        super().__init__(nn.Linear(2, 3), nn.Linear(3, 1))
        self.num_rows: set[int] = set()
        self.callers: set[str] = set()
        for seed, parameter in enumerate(self.parameters()):
            parameter.data = whole_numbers(tuple(parameter.shape), seed=540 + seed).cpu().double() / 8

    def forward(self, x):
        self.num_rows.add(len(x))
        is_wrapped = getattr(DistributedDataParallel, "_active_ddp_module", None) is not None
        self.callers.add("the wrapper" if is_wrapped else "the loop itself")
        return super().forward(x)

    def __repr__(self) -> str:
        return "model"


class Samples(Dataset):
    """A data set of samples [2], which notes the numbers of those that are read."""

    def __init__(self, num_samples: int):
        self.rows = whole_numbers((num_samples, 2), seed=550).cpu().double() / 4
        self.read: list[int] = []

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, number: int) -> torch.Tensor:
        self.read.append(int(number))
        return self.rows[number]

    def __repr__(self) -> str:
        return f"{len(self)} samples"


def loop_inputs(num_samples: int, num_epochs: int, num_micro_batches: int):
    """Return a model and a data set, alike on all ranks, the numbers of epochs and micro-batches, a learning rate."""
    return SmallModel(), Samples(num_samples), num_epochs, num_micro_batches, 0.25


def facts_of_training(trained, model, data, *_):
    """Return what was read, how many rows at a time, and the weights at the end."""
    trained = getattr(trained, "module", trained)
    if not isinstance(trained, nn.Module):
        return f"a {type(trained).__name__}"
    everybodys = [[] for _ in range(dist.get_world_size())]
    dist.all_gather_object(everybodys, data.read)
    times = Counter(Counter(number for read in everybodys for number in read).values())
    return {
        "how often the ranks together read a sample": [
            f"{counted(number, 'sample')} {counted(n, 'time')}" for n, number in sorted(times.items())
        ],
        "numbers of the samples that it read": data.read,
        "rows at a time": sorted(model.num_rows),
        "who calls the model": sorted(model.callers),
        "weights": {name: numbers_in(parameter) for name, parameter in trained.named_parameters()},
    }


def one_message_per_update(log: Conduct, model, data, num_epochs, num_micro_batches, lr) -> str | None:
    num_batches = num_epochs * -(-len(data) // (2 * dist.get_world_size()))
    num_updates = num_batches // num_micro_batches
    num_messages = sum(record.operation == "all_reduce" for record in log.records)
    if num_messages <= num_updates:
        return None
    return (
        f"It calls {counted(num_messages, 'all-reduce')} in {counted(num_updates, 'update')}, and one for each is "
        "enough. All micro-batches but the last of an update belong under `parallel.no_sync()`: the forward as well as "
        "the backward, because DDP decides in the forward whether it will send."
    )


ddp_loop = ObjectExercise(
    "ddp_loop",
    my_ddp_loop,
    notebook="05",
    cases=[(2, 24, 3, 2), (3, 23, 2, 4)],
    inputs=loop_inputs,
    measure=facts_of_training,
    kind="the trained model",
    rule=one_message_per_update,
    may_change=("model", "data"),
    facts={
        "how often the ranks together read a sample": "Each epoch deals every sample to one rank, and a few to two "
        "where the ranks do not divide their number: `DistributedSampler(data)` does that, with its own defaults.",
        "numbers of the samples that it read": "The ranks should read what `DistributedSampler(data)` gives them, with "
        "its own defaults: `DataLoader(data, batch_size=2, sampler=sampler)`, and `sampler.set_epoch(epoch)` at the "
        "start of each epoch.",
        "rows at a time": "A micro-batch has 2 samples: `DataLoader(data, batch_size=2, sampler=sampler)`.",
        "who calls the model": "The loop should call the wrapper, `parallel(x)`, and the wrapper calls the model.",
        "weights": "The right samples were read, and the weights went somewhere else. Look at what happens once for "
        "each micro-batch (forward, a loss divided by their number, backward) and once for each update (a backward "
        "that sends, the step, then zero_grad).",
    },
    errors={
        "mutually exclusive with shuffle": "A loader that has a sampler does not shuffle by itself: the sampler does. "
        "Leave `shuffle=True` out.",
        "no attribute 'no_sync'": "`no_sync` is a method of the wrapper, `parallel.no_sync()`: the model has none.",
    },
    hints=[
        "Wrap the model once: `parallel = DistributedDataParallel(model)`. Call `parallel(x)`, not `model(x)`: DDP "
        "sends for what went through it alone.",
        "`sampler = DistributedSampler(data)` and `DataLoader(data, batch_size=2, sampler=sampler)`. At the start of "
        "each epoch: `sampler.set_epoch(epoch)`, or all epochs have one order.",
        "Count the micro-batches from 1. Those whose number is not a multiple of `num_micro_batches` run forward and "
        "backward in `with parallel.no_sync():`.",
        "The loss of an update is the mean over its micro-batches: divide each loss by their number. After the last "
        "backward of an update: `optimizer.step()`, then `optimizer.zero_grad()`.",
    ],
    if_stuck="a rank with fewer updates than the others: each must read equally many samples, and call backward "
    "equally often.",
)


def loop_wrongly(
    model, data, num_epochs, num_micro_batches, lr, *, sampler=DistributedSampler, set_epoch="epoch", batch_size=2,
    divide=lambda m, rows: m, waits=lambda number, m: number % m, steps=lambda number, m: number % m == 0,
    clears="after the step", calls="wrapper", lr_for=lambda lr: lr, first_epoch=0, drop_last=False,
):  # fmt: skip
    """Do what `my_ddp_loop` does, with one thing wrong."""
    parallel, dealt = DistributedDataParallel(model), sampler(data)
    loader = DataLoader(data, batch_size=batch_size, sampler=dealt, drop_last=drop_last)
    optimizer = torch.optim.SGD(parallel.parameters(), lr=lr_for(lr))
    for epoch in range(num_epochs):
        if set_epoch == "epoch":
            dealt.set_epoch(epoch + first_epoch)
        if clears == "epoch":
            optimizer.zero_grad()
        for number, x in enumerate(loader, 1):
            if set_epoch == "too late":
                dealt.set_epoch(epoch)
            if clears == "each":
                optimizer.zero_grad()
            with parallel.no_sync() if waits(number, num_micro_batches) else nullcontext():
                out = (parallel if calls == "wrapper" else model)(x)
                (out.square().mean() / divide(num_micro_batches, len(x))).backward()
            if clears == "before the step" and steps(number, num_micro_batches):
                optimizer.zero_grad()
            if steps(number, num_micro_batches):
                optimizer.step()
            if clears == "after the step" and steps(number, num_micro_batches):
                optimizer.zero_grad()
    return model


def all_in_order(data):
    return DistributedSampler(data, num_replicas=1, rank=0, shuffle=False)


def of_rank(data, **options):
    return DistributedSampler(data, num_replicas=dist.get_world_size(), rank=dist.get_rank(), **options)


LEFT_OUT = (
    "`drop_last=True` leaves samples out where the ranks do not divide their number. By default a few are read twice "
    "instead, and here that is asked for."
)
NOT_DEALT = (
    "Every rank reads the whole data set. A `DistributedSampler` deals it out: `DataLoader(..., sampler=sampler)`."
)
ddp_loop.mistakes_of(
    loop_wrongly,
    (
        dict(set_epoch="never"),
        "All epochs have the order of the first. The sampler shuffles by its seed and by the epoch, which you must "
        "tell it: `sampler.set_epoch(epoch)`, at the start of each.",
    ),
    (
        dict(set_epoch="too late"),
        "`set_epoch` came too late: the order of an epoch is drawn when the loop over the loader begins. Call it "
        "before that loop, not in it.",
    ),
    (dict(sampler=all_in_order), NOT_DEALT),
    (
        dict(sampler=lambda data: of_rank(data, shuffle=False)),
        "The samples come in their own order. `DistributedSampler(data)` shuffles, if you let it.",
    ),
    (dict(sampler=lambda data: of_rank(data, drop_last=True)), LEFT_OUT),
    (dict(sampler=lambda data: of_rank(data, drop_last=True), drop_last=True), LEFT_OUT),
    (
        dict(first_epoch=1),
        "You counted the epochs from 1, so this is the order of the epochs after those that the check has: count from "
        "0.",
    ),
    (
        dict(sampler=lambda data: of_rank(data, seed=dist.get_rank())),
        "Each rank has an epoch or a seed of its own, so each deals from an order of its own: some samples are read "
        "twice, others never. Both are the same on all ranks.",
    ),
    (
        dict(sampler=lambda data: DistributedSampler(data, dist.get_world_size(), 0)),
        "Every rank reads the samples of rank 0. Leave `rank` out, and the sampler asks torch.distributed.",
    ),
    (dict(batch_size=1), "A loader without `batch_size` gives one sample at a time. A micro-batch has 2."),
    (
        dict(divide=lambda m, rows: 1),
        "The gradients of an update's micro-batches were added up. You need their mean: divide each loss by "
        "`num_micro_batches`.",
    ),
    (
        dict(divide=lambda m, rows: m * rows),
        "You divided by the samples, too. `mean()` has done that already: divide by the number of micro-batches alone.",
    ),
    (
        dict(divide=lambda m, rows: m * dist.get_world_size()),
        "You divided by the number of ranks, too. DDP averages over the ranks by itself.",
    ),
    (
        dict(clears="never"),
        "Gradients of earlier updates are still in `.grad`: call `optimizer.zero_grad()` once for each update.",
    ),
    (
        dict(clears="epoch"),
        "`zero_grad` runs once in an epoch, so the second update has the gradients of the first, too. Call it once for "
        "each update.",
    ),
    (
        dict(clears="each"),
        "`zero_grad` runs for each micro-batch, so only the last one counts. Call it once for each update.",
    ),
    (
        dict(clears="before the step"),
        "These are the weights from the start. Either the optimizer never steps, or `zero_grad` came before `step`, so "
        "that it saw no gradient.",
    ),
    (
        dict(steps=lambda number, m: True),
        "The optimizer steps after each micro-batch. An update uses all of its micro-batches, with one set of weights.",
    ),
    (
        dict(steps=lambda number, m: True, divide=lambda m, rows: 1, waits=lambda number, m: False),
        "Nothing is accumulated: each micro-batch sends, and the optimizer steps after it. An update uses "
        "`num_micro_batches` of them, with one set of weights.",
    ),
    (
        dict(steps=lambda number, m: number % m == 1, waits=lambda number, m: number % m != 1),
        "The first micro-batch of an update is taken for its last: it sends, and the optimizer steps after it. Did you "
        "count from 0? `enumerate(loader, 1)` counts from 1.",
    ),
    (
        dict(steps=lambda number, m: number % m == 1),
        "The optimizer steps after the first micro-batch of an update, before its last has come.",
    ),
    (
        dict(waits=lambda number, m: True),
        "Nothing was sent: even the last micro-batch of each update ran under `no_sync`, so each rank has trained "
        "a model of its own.",
    ),
    (
        dict(waits=lambda number, m: number % m != 1),
        "The first micro-batch of an update sends, and the others wait. It must be the other way round: the last sends "
        "the sum of all.",
    ),
    (
        dict(calls="model"),
        "You called the model, and not the wrapper. DDP prepares its messages in the wrapper's forward: around it "
        "nothing is sent and nothing is raised, and each rank trains a model of its own.",
    ),
    (
        dict(lr_for=lambda lr: lr * dist.get_world_size()),
        "The learning rate was multiplied by the number of ranks. Some do so when a batch grows, but here it is given.",
    ),
)


@ddp_loop.mistake("The loop stopped after one epoch: is the return, or a break, inside it?")
def one_epoch(model, data, num_epochs, num_micro_batches, lr):
    return my_ddp_loop(model, data, 1, num_micro_batches, lr)


@ddp_loop.mistake(
    "All micro-batches of an update went through the model at once. The gradients are the same, but accumulating is "
    "for batches that do not fit: 2 samples at a time."
)
def one_large_batch(model, data, num_epochs, num_micro_batches, lr):
    return loop_wrongly(
        model, data, num_epochs, num_micro_batches, lr, batch_size=2 * num_micro_batches,
        divide=lambda m, rows: 1, waits=lambda number, m: False, steps=lambda number, m: True,
    )  # fmt: skip
