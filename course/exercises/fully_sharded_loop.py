"""An exercise of notebook 14: PyTorch's `fully_shard` in the right order, and an optimizer that sees the shards."""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

from course.exercises.on_ranks import Conduct, RankExercise, whole_numbers
from course.exercises.parallel_objects import New, local
from labkit.data_parallel import FullyShardedDataParallel


def my_fully_shard_loop(model, batches, lr):
    for layer in model.layers:
        fully_shard(layer)
    fully_shard(model)  # the root: what no layer has
    optimizer = torch.optim.SGD(model.parameters(), lr=lr)  # of the new parameters
    for x in batches:
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return [parameter.to_local() for parameter in model.parameters()]


class ScaledLayers(nn.Module):
    """Two linear layers, and a scale that belongs to neither of them."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.empty(4))
        self.layers = nn.ModuleList([nn.Linear(3, 5), nn.Linear(5, 4)])
        for seed, parameter in enumerate(self.parameters()):
            parameter.data = whole_numbers(tuple(parameter.shape), seed=1450 + seed).cpu() / 8

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x * self.scale


def loop_inputs(num_batches: int, num_rows: int):
    """Return a model that is not sharded yet, this rank's batches [rows, 3], and a learning rate."""
    first = 1460 + 10 * dist.get_rank()
    batches = [whole_numbers((num_rows, 3), seed).cpu() / 4 for seed in range(first, first + num_batches)]
    return New(ScaledLayers, "model"), batches, 1 / 8


def gathered_bytes(*modules: nn.Module) -> int:
    """Return the bytes of one message that gathers these modules: `fully_shard` pads dim 0 of each parameter."""
    d = dist.get_world_size()
    parameters = [parameter for module in modules for parameter in module.parameters()]
    rows = [-(-len(parameter) // d) * d for parameter in parameters]
    return sum(num_rows * parameter[0].nbytes for num_rows, parameter in zip(rows, parameters))


def gathers_layer_by_layer(log: Conduct, model, batches, lr) -> str | None:
    """Say so if more than a layer was gathered in one message, or nothing in any."""
    layers = ScaledLayers().layers
    largest = max(gathered_bytes(layer) for layer in layers)
    gathers = [record.message_bytes for record in log.records if record.operation == "all_gather"]
    if gathers and max(gathers) <= largest:
        return None
    if not gathers:
        return "No weights are gathered, so each rank held the whole model all the time. `fully_shard` should gather."
    return (
        f"It gathers {max(gathers)} bytes in one message, and the largest layer has {largest}. Layers that no "
        "`fully_shard` of their own makes units are gathered together, and stay until backward is done, with all "
        "gradients: as much memory as DDP needs, and more. Call it on each of `model.layers`, then on the model."
    )


fully_shard_loop = RankExercise(
    "fully_shard_loop",
    my_fully_shard_loop,
    notebook="14",
    cases=[(2, 3, 4), (3, 2, 5)],  # on 3 ranks, no dim 0 can be divided: the last rank has nothing of some parameters
    inputs=loop_inputs,
    rule=gathers_layer_by_layer,
    may_change=("model",),
    hints=[
        "The order is: each of `model.layers`, then the model, then the optimizer. `fully_shard` puts new parameters "
        "into the modules, so an optimizer that was made before has the old ones.",
        "For each batch: `loss = model(x).square().mean()`, `loss.backward()`, `optimizer.step()`, and "
        "`optimizer.zero_grad()`. There is nothing to send by yourself: gradients are averages over the ranks.",
        "A parameter is a `DTensor` now, and `parameter.to_local()` is this rank's shard: some of its rows, or none. "
        "Its `full_tensor()` would be the whole.",
    ],
    if_stuck="messages of your own: `fully_shard` averages gradients by itself. Or a call of the model, of "
    "`full_tensor()` or of `fully_shard` that only some ranks make.",
)


def shard(model: ScaledLayers) -> None:
    for layer in model.layers:
        fully_shard(layer)
    fully_shard(model)


def loop_wrongly(
    model, batches, lr, *, shard=shard, is_optimizer_first=False, trained=nn.Module.parameters,
    loss_of=lambda y: y.square().mean(), clears=True, steps_at=lambda number, last: True, result=local,
    used=lambda batches: batches, kind=torch.optim.SGD,
):  # fmt: skip
    """Do what `my_fully_shard_loop` does, with one thing wrong."""
    early = kind(trained(model), lr=lr)
    shard(model)
    optimizer = early if is_optimizer_first else kind(trained(model), lr=lr)
    batches = used(batches)
    for number, x in enumerate(batches, 1):
        loss_of(model(x)).backward()
        if steps_at(number, len(batches)):
            optimizer.step()
            if clears:
                optimizer.zero_grad()
    return [result(parameter) for parameter in model.parameters()]


def only_layers(model: ScaledLayers) -> None:
    for layer in model.layers:
        fully_shard(layer)


AS_AT_THE_START = (
    "The weights are as they were at the start. Was the optimizer made before `fully_shard`, which puts new parameters "
    "into the model? Then it has the old ones, and nothing raises an error. Or there is no step; or there are no "
    "gradients when it comes: they were cleared already, or `set_requires_gradient_sync(False)` keeps them from being "
    "sent."
)
WHOLE = (
    "These are whole weights, as `full_tensor()` gives them, or as DDP leaves them, which shards nothing. A rank keeps "
    "its shard: `parameter.to_local()`."
)
NOT_THE_ROOT = (
    "`scale` is no DTensor: it belongs to no layer, and `fully_shard` was not called on the model. So each rank trains "
    "a `scale` of its own, and nothing averages its gradients. Call it on the model as well, after the layers."
)
fully_shard_loop.mistakes_of(
    loop_wrongly,
    (dict(is_optimizer_first=True), AS_AT_THE_START),
    (dict(result=lambda parameter: parameter.full_tensor()), WHOLE),
    (dict(shard=only_layers), NOT_THE_ROOT),
    (
        dict(shard=lambda model: None),
        "Nothing is sharded or averaged: each rank trains the whole model with its own rows. Call `fully_shard` on "
        "each of `model.layers`, then on the model.",
    ),
    (
        dict(clears=False),
        "Each step uses the gradients of the batches before it, too: backward adds. Clear them after the step, with "
        "`optimizer.zero_grad()`.",
    ),
    (
        dict(steps_at=lambda number, last: number == last),
        "There is one step, at the end. Each batch has its own: backward, step, zero_grad.",
    ),
    (
        dict(loss_of=lambda y: y.square().sum()),
        "The loss of a batch is the mean of all its numbers, and not their sum.",
    ),
    (
        dict(loss_of=lambda y: y.square().mean() / dist.get_world_size()),
        "The gradients were divided by the number of ranks twice. `fully_shard` averages them already.",
    ),
    (
        dict(loss_of=lambda y: y.square().mean() * dist.get_world_size()),
        "The gradients are sums over the ranks. `fully_shard` averages them, which is right here: leave them as they "
        "are.",
    ),
    (
        dict(trained=lambda model: model.layers.parameters()),
        "`scale` is as it was at the start: the optimizer has only the layers' parameters. Give it "
        "`model.parameters()`.",
    ),
    (
        dict(trained=lambda model: [model.scale]),
        "Only `scale` is trained. Give the optimizer all of `model.parameters()`.",
    ),
    (dict(kind=torch.optim.AdamW), "This is what AdamW makes of them. The exercise asks for SGD."),
    (dict(kind=torch.optim.Adam), "This is what Adam makes of them. The exercise asks for SGD."),
    (dict(used=lambda batches: batches[:1]), "Only the first batch was used. Each batch is a step."),
    (dict(used=lambda batches: batches[:-1]), "The last batch is missing. Each batch is a step."),
    (dict(used=lambda batches: batches[-1:]), "Only the last batch was used. Each batch is a step."),
)


@fully_shard_loop.mistake(
    "These are flat shards, as labkit's `FullyShardedDataParallel` makes them. The exercise asks for PyTorch's "
    "`fully_shard`, which cuts each parameter along its dim 0."
)
def with_labkit(model, batches, lr):
    world = dist.group.WORLD
    assert world is not None
    sharded = FullyShardedDataParallel(model, world, units=model.layers)
    optimizer = torch.optim.SGD(model.parameters(), lr=lr)
    for x in batches:
        sharded(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return list(model.parameters())
