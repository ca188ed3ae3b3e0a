"""Wrong answers to the exercise of notebook 14 on PyTorch's `fully_shard`, and right ones."""

from functools import partial

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import optim
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel as DDP

from labkit.data_parallel import FullyShardedDataParallel


def optimizer_on_top(model, batches, lr):
    optimizer = torch.optim.SGD(model.parameters(), lr=lr)
    for layer in model.layers:
        fully_shard(layer)
    fully_shard(model)
    for x in batches:
        optimizer.zero_grad()
        model(x).pow(2).mean().backward()
        optimizer.step()
    return [p.to_local() for p in model.parameters()]


def parameters_kept(model, batches, lr):
    params = list(model.parameters())
    for layer in model.layers:
        fully_shard(layer)
    fully_shard(model)
    opt = optim.SGD(params, lr)
    for batch in batches:
        loss = (model(batch) ** 2).mean()
        loss.backward()
        opt.step()
        opt.zero_grad(set_to_none=True)
    return [p.to_local().detach() for p in model.parameters()]


def the_model_only(model, batches, lr):
    fully_shard(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=lr)
    for x in batches:
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return [p.to_local() for p in model.parameters()]


def the_model_first(model, batches, lr):
    fully_shard(model)
    for layer in model.layers:
        fully_shard(layer)
    return trained(model, batches, lr)


def the_layers_only(model, batches, lr):
    for layer in model.layers:
        fully_shard(layer)
    return trained(model, batches, lr)


def the_layers_only_guarded(model, batches, lr):
    for layer in model.layers:
        fully_shard(layer)
    optimizer = torch.optim.SGD(model.parameters(), lr=lr)
    for x in batches:
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return [p.to_local() if isinstance(p, DTensor) else p for p in model.parameters()]


def the_list_of_layers(model, batches, lr):
    fully_shard(model.layers)
    fully_shard(model)
    return trained(model, batches, lr)


def every_module(model, batches, lr):
    for module in model.modules():
        fully_shard(module)
    return trained(model, batches, lr)


def the_model_twice(model, batches, lr):
    model = fully_shard(model)
    for layer in model.layers:
        fully_shard(layer)
    model = fully_shard(model)
    return trained(model, batches, lr)


def never_cleared(model, batches, lr):
    sharded(model)
    opt = torch.optim.SGD(model.parameters(), lr=lr)
    for x in batches:
        model(x).square().mean().backward()
        opt.step()
    return shards(model)


def cleared_too_early(model, batches, lr):
    sharded(model)
    opt = torch.optim.SGD(model.parameters(), lr=lr)
    for x in batches:
        loss = model(x).square().mean()
        loss.backward()
        opt.zero_grad()
        opt.step()
    return shards(model)


def no_step(model, batches, lr):
    sharded(model)
    opt = torch.optim.SGD(model.parameters(), lr=lr)
    for x in batches:
        opt.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
    return shards(model)


def one_step(model, batches, lr):
    sharded(model)
    opt = torch.optim.SGD(model.parameters(), lr=lr)
    for i, x in enumerate(batches):
        model.set_requires_gradient_sync(i == len(batches) - 1)
        model(x).square().mean().backward()
    opt.step()
    return shards(model)


def averaged_by_hand(model, batches, lr):
    sharded(model)
    opt = torch.optim.SGD(model.parameters(), lr=lr)
    for x in batches:
        loss = model(x).square().mean() / dist.get_world_size()
        loss.backward()
        opt.step()
        opt.zero_grad()
    return shards(model)


def all_reduced_too(model, batches, lr):
    sharded(model)
    opt = torch.optim.SGD(model.parameters(), lr=lr)
    for x in batches:
        model(x).square().mean().backward()
        for p in model.parameters():
            dist.all_reduce(p.grad.to_local())
            p.grad.to_local().div_(dist.get_world_size())
        opt.step()
        opt.zero_grad()
    return shards(model)


def all_reduced_as_they_are(model, batches, lr):
    sharded(model)
    opt = torch.optim.SGD(model.parameters(), lr=lr)
    for x in batches:
        model(x).square().mean().backward()
        for p in model.parameters():
            dist.all_reduce(p.grad)
            p.grad /= dist.get_world_size()
        opt.step()
        opt.zero_grad()
    return shards(model)


def the_sum(model, batches, lr):
    sharded(model)
    opt = torch.optim.SGD(model.parameters(), lr=lr)
    for x in batches:
        out = model(x)
        (out * out).sum().backward()
        opt.step()
        opt.zero_grad()
    return shards(model)


def whole_weights(model, batches, lr):
    trained(sharded(model), batches, lr)
    return [p.full_tensor() for p in model.parameters()]


def the_state_dict(model, batches, lr):
    trained(sharded(model), batches, lr)
    return list(model.state_dict().values())


def dtensors(model, batches, lr):
    trained(sharded(model), batches, lr)
    return list(model.parameters())


def returns_nothing(model, batches, lr):
    sharded(model)
    opt = torch.optim.SGD(model.parameters(), lr=lr)
    for x in batches:
        model(x).square().mean().backward()
        opt.step()
        opt.zero_grad()


def with_ddp(model, batches, lr):
    parallel = DDP(model)
    opt = torch.optim.SGD(parallel.parameters(), lr=lr)
    for x in batches:
        opt.zero_grad()
        parallel(x).square().mean().backward()
        opt.step()
    return list(model.parameters())


def with_labkit(model, batches, lr):
    parallel = FullyShardedDataParallel(model, dist.group.WORLD, units=model.layers)
    opt = torch.optim.SGD(parallel.parameters(), lr=lr)
    for x in batches:
        parallel(x).square().mean().backward()
        opt.step()
        opt.zero_grad()
    return [p.detach() for p in model.parameters()]


def sharded_by_hand(model, batches, lr):
    opt = torch.optim.SGD(model.parameters(), lr=lr)
    for x in batches:
        model(x).square().mean().backward()
        for p in model.parameters():
            dist.all_reduce(p.grad)
            p.grad /= dist.get_world_size()
        opt.step()
        opt.zero_grad()
    n, i = dist.get_world_size(), dist.get_rank()
    chunks = [p.detach().chunk(n) for p in model.parameters()]
    return [c[i] if i < len(c) else c[0][:0] for c in chunks]


def adam(model, batches, lr):
    sharded(model)
    opt = torch.optim.Adam(model.parameters(), lr=lr)
    for x in batches:
        model(x).square().mean().backward()
        opt.step()
        opt.zero_grad()
    return shards(model)


def without_the_scale(model, batches, lr):
    sharded(model)
    opt = torch.optim.SGD([p for layer in model.layers for p in layer.parameters()], lr=lr)
    for x in batches:
        model(x).square().mean().backward()
        opt.step()
        opt.zero_grad()
    return shards(model)


def never_synchronised(model, batches, lr):
    sharded(model)
    model.set_requires_gradient_sync(False)
    opt = torch.optim.SGD(model.parameters(), lr=lr)
    for x in batches:
        model(x).square().mean().backward()
        opt.step()
        opt.zero_grad()
    return shards(model)


def around_the_root(model, batches, lr):
    sharded(model)
    opt = torch.optim.SGD(model.parameters(), lr=lr)
    for x in batches:
        for layer in model.layers:
            x = layer(x)
        (x * model.scale).square().mean().backward()
        opt.step()
        opt.zero_grad()
    return shards(model)


def on_rank_0(model, batches, lr):
    sharded(model)
    if dist.get_rank() == 0:
        return trained_further(model, batches, lr)
    return shards(model)


def sharded(model):
    for layer in model.layers:
        fully_shard(layer)
    return fully_shard(model)


def shards(model):
    return [p.to_local() for p in model.parameters()]


def trained_further(model, batches, lr):
    optimizer = torch.optim.SGD(model.parameters(), lr=lr)
    for x in batches:
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return [p.to_local() for p in model.parameters()]


trained = trained_further


def with_a_mesh(model, batches, lr):
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("dp",))
    shard = partial(fully_shard, mesh=mesh, reshard_after_forward=False)
    for layer in reversed(model.layers):
        shard(layer)
    shard(model)
    opt = optim.SGD(model.parameters(), lr=lr, foreach=False)
    for x in batches:
        opt.zero_grad()
        F.mse_loss(y := model(x), torch.zeros_like(y)).backward()
        opt.step()
    return tuple(p.to_local().detach().clone() for p in model.parameters())


def update_by_hand(model, batches, lr):
    sharded(model)
    for x in batches:
        model(x).square().mean().backward()
        with torch.no_grad():
            for p in model.parameters():
                p -= lr * p.grad
                p.grad = None
    return [p._local_tensor for p in model.parameters()]


def units_in_one_list(model, batches, lr):
    for layer in list(model.layers):
        fully_shard(layer, reshard_after_forward=True)
    model = fully_shard(model, reshard_after_forward=True)
    return trained(model, batches, lr)


WRONG = [
    ("fully_shard_loop", optimizer_on_top, "the optimizer comes first"),
    ("fully_shard_loop", parameters_kept, "the optimizer has a list from before"),
    ("fully_shard_loop", the_model_only, "one unit"),
    ("fully_shard_loop", the_model_first, "from the outside in"),
    ("fully_shard_loop", the_layers_only, "no root"),
    ("fully_shard_loop", the_layers_only_guarded, "no root, and a guard"),
    ("fully_shard_loop", the_list_of_layers, "a ModuleList"),
    ("fully_shard_loop", every_module, "a ModuleList among the modules"),
    ("fully_shard_loop", the_model_twice, "twice"),
    ("fully_shard_loop", never_cleared, "gradients add up"),
    ("fully_shard_loop", cleared_too_early, "cleared before the step"),
    ("fully_shard_loop", no_step, "no step"),
    ("fully_shard_loop", one_step, "one step"),
    ("fully_shard_loop", averaged_by_hand, "divides by d"),
    ("fully_shard_loop", all_reduced_too, "averages shards of different rows"),
    ("fully_shard_loop", all_reduced_as_they_are, "all-reduces DTensors"),
    ("fully_shard_loop", the_sum, "a sum"),
    ("fully_shard_loop", whole_weights, "whole weights"),
    ("fully_shard_loop", the_state_dict, "DTensors of the state dict"),
    ("fully_shard_loop", dtensors, "DTensors"),
    ("fully_shard_loop", returns_nothing, "no return"),
    ("fully_shard_loop", with_ddp, "DDP"),
    ("fully_shard_loop", with_labkit, "labkit's class"),
    ("fully_shard_loop", sharded_by_hand, "cut at the end"),
    ("fully_shard_loop", adam, "Adam"),
    ("fully_shard_loop", without_the_scale, "the root is not trained"),
    ("fully_shard_loop", never_synchronised, "no synchronisation"),
    ("fully_shard_loop", around_the_root, "around the root"),
    ("fully_shard_loop", on_rank_0, "one rank"),
]

RIGHT = [
    ("fully_shard_loop", with_a_mesh),
    ("fully_shard_loop", update_by_hand),
    ("fully_shard_loop", units_in_one_list),
]
