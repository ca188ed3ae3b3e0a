"""Every rank cuts its shard from the same master weight, and the shards together are the whole again."""

import copy
import pickle

import cloudpickle
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from labkit.groups import group_of_one
from labkit.placement import Placement, placements
from labkit.tensor_parallel import (
    ColumnParallelLinear,
    RowParallelLinear,
    VocabParallelEmbedding,
    local_shard,
    shard_like,
    unshard,
)
from tests.labkit.tensor_parallel.conftest import randoms


def test_the_master_weight_does_not_depend_on_the_number_of_ranks(on_ranks):
    def masters():
        torch.manual_seed(3)
        options = {"keep_master_weight_for_test": True}
        layers = [kind(8, 12, dist.group.WORLD, **options) for kind in (ColumnParallelLinear, RowParallelLinear)]
        return [layer.master_weight for layer in (*layers, VocabParallelEmbedding(10, 4, dist.group.WORLD, **options))]

    alone = on_ranks(masters, world_size=1)[0]
    for rank in on_ranks(masters, world_size=4):
        assert all(torch.equal(got, expected) for got, expected in zip(rank, alone))
    torch.manual_seed(3)
    assert torch.equal(alone[0], nn.init.xavier_normal_(torch.empty(12, 8)))


def test_seeds_that_differ_are_reported_on_every_rank(on_ranks):
    def make():
        torch.manual_seed(dist.get_rank())
        for kind, *sizes in (ColumnParallelLinear, 4, 6), (RowParallelLinear, 6, 4), (VocabParallelEmbedding, 5, 2):
            with pytest.raises(ValueError, match=r"drew different weights of shape .* set the same seed on all of "):
                kind(*sizes, dist.group.WORLD)

    on_ranks(make, world_size=3)


def test_weights_that_no_seed_decides_need_none(on_ranks):
    def make():
        torch.manual_seed(dist.get_rank())
        ColumnParallelLinear(4, 4, dist.group.WORLD, init_method=nn.init.zeros_)

    on_ranks(make)


def test_stride_gives_each_rank_its_part_of_each_fused_matrix(on_ranks):
    def first_rows():
        fused = torch.arange(12.0).unsqueeze(1)  # Q is rows 0-3, K 4-7, V 8-11
        return local_shard(fused, dist.group.WORLD, 0, stride=3).squeeze(1).tolist()

    assert on_ranks(first_rows, world_size=2) == [[0, 1, 4, 5, 8, 9], [2, 3, 6, 7, 10, 11]]
    assert on_ranks(first_rows, world_size=1) == [list(range(12))]


def layers_of_every_kind(group):
    torch.default_generator.manual_seed(6)
    options = {"keep_master_weight_for_test": True, "dtype": torch.float64}
    return [
        ColumnParallelLinear(5, 36, group, **options),
        ColumnParallelLinear(5, 36, group, stride=3, **options),
        RowParallelLinear(36, 5, group, **options),
        RowParallelLinear(36, 5, group, stride=3, **options),
        VocabParallelEmbedding(10, 3, group, **options),  # 10 words: rows of padding on 3 ranks
        VocabParallelEmbedding(2, 3, group, **options),  # on 3 ranks, one has nothing but padding
    ]


def gather_and_cut(group):
    """What is gathered is the master weight, and the master cut again is the shard; for gradients and biases too."""
    for layer in layers_of_every_kind(group):
        weight, master = layer.weight, layer.master_weight
        placement = placements(layer)["weight"]
        unsharded = unshard(weight, placement)
        assert torch.equal(unsharded, master)
        assert torch.equal(shard_like(master, placement), weight)
        gradient = master * 3
        weight.grad = shard_like(gradient, placement)
        assert weight.grad.shape == weight.shape
        assert torch.equal(unshard(weight.grad, placement), gradient)
    column, fused, row, *_ = layers_of_every_kind(group)
    (values,) = randoms((36,), dtype=torch.float64)
    for layer in (column, fused):  # the bias is cut as the weight's rows are
        placement = placements(layer)["bias"]
        layer.bias.data = shard_like(values, placement)
        assert torch.equal(layer.bias, local_shard(values, group, 0, layer.stride))
        assert torch.equal(unshard(layer.bias, placement), values)
    placement = placements(row)["bias"]
    assert placement == Placement(copy_groups=(group,))
    assert unshard(row.bias, placement) is row.bias
    assert shard_like(row.bias, placement) is row.bias


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_unshard_and_shard_like(on_ranks, world_size):
    on_ranks(lambda: gather_and_cut(dist.group.WORLD), world_size=world_size)


def test_gathering_in_a_group_of_one_needs_no_world():
    gather_and_cut(group_of_one())


def test_parameters_say_how_they_are_cut(on_ranks):
    def shards():
        layers = layers_of_every_kind(dist.group.WORLD)
        of_layers = [shard for layer in layers for shard in placements(layer)["weight"].shards]
        assert all(shard.group is dist.group.WORLD for shard in of_layers)
        facts = [(shard.dim, shard.unsharded_size, shard.stride) for shard in of_layers]
        return facts

    of_layers = on_ranks(shards)[0]
    assert of_layers == [(0, 36, 1), (0, 36, 3), (1, 36, 1), (1, 36, 3), (0, 10, 1), (0, 2, 1)]
    assert placements(nn.Linear(2, 2)) == {"weight": Placement(), "bias": Placement()}


def assigned(layer):
    layer.load_state_dict({name: tensor.clone() for name, tensor in layer.state_dict().items()}, assign=True)
    return layer


def swapped(layer):
    torch.__future__.set_swap_module_params_on_conversion(True)
    try:
        return layer.half()
    finally:
        torch.__future__.set_swap_module_params_on_conversion(False)


def fully_sharded(layer):
    from torch.distributed.fsdp import fully_shard

    return fully_shard(layer, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))


REPLACED = {
    "load_state_dict(assign=True)": assigned,
    "to_empty": lambda layer: layer.to("meta").to_empty(device="cpu"),
    "deepcopy": lambda layer: copy.deepcopy(layer, {id(layer.group): layer.group}),
    "a new parameter": lambda layer: setattr(layer, "weight", nn.Parameter(layer.weight.detach().clone())) or layer,
    "swapped tensors": swapped,
    "fully_shard": fully_sharded,
}


@pytest.mark.parametrize("how", REPLACED)
def test_a_layer_knows_how_it_is_cut_when_its_parameters_are_replaced(on_ranks, how):
    def replace():
        for layer in layers_of_every_kind(dist.group.WORLD):
            before, old = placements(layer), layer.weight
            assert before["weight"].shards
            changed = REPLACED[how](layer)
            assert how == "swapped tensors" or changed.weight is not old
            assert placements(changed) == before
            assert placements(nn.Sequential(changed)) == {f"0.{name}": placement for name, placement in before.items()}

    on_ranks(replace)


@pytest.mark.parametrize("parametrized", [nn.utils.parametrizations.weight_norm, nn.utils.weight_norm])
@pytest.mark.filterwarnings("ignore:.*weight_norm:FutureWarning")
def test_a_parameter_that_is_cut_cannot_be_taken_away(parametrized):
    layer = RowParallelLinear(4, 4, group_of_one())
    with pytest.raises(ValueError, match=r"RowParallelLinear no longer has its parameter 'weight', .*: do not use"):
        placements(nn.Sequential(parametrized(layer)))


@pytest.mark.parametrize("attempt", [copy.deepcopy, pickle.dumps, cloudpickle.dumps])
def test_a_layer_with_its_group_cannot_be_sent_and_says_what_can(attempt):
    with pytest.raises(
        ValueError, match=r"a process group .* cannot be copied.* use its state_dict\(\), or .*, \{id\(group\)"
    ):
        attempt(ColumnParallelLinear(4, 4, group_of_one()))
