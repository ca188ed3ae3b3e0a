"""Dropout draws the same masks where tensors are replicated, and different masks where they are sharded."""

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F

from labkit.groups import init_groups
from labkit.launch import launch
from labkit.layout import ParallelLayout
from labkit.tensor_parallel import ShardedDropout, seed_replicas
from labkit.tensor_parallel.dropout import local_random_stream


def masks(layout):
    """The masks of this rank for a replicated and for a sharded tensor, and the same masks when recomputed."""
    groups = init_groups(layout)
    torch.manual_seed(7)
    seed_replicas(7, groups)
    dropout = ShardedDropout(0.5, groups.tp)

    def both(x):
        seen.append((F.dropout(x, 0.5).ne(0), dropout(x).ne(0)))
        return dropout(x) * x

    seen = []
    x = torch.ones(64, requires_grad=True)
    torch.utils.checkpoint.checkpoint(both, x, use_reentrant=False).sum().backward()
    groups.close()
    first, again = seen
    assert all(torch.equal(a, b) for a, b in zip(first, again)), "recomputation drew other masks"
    return first


def test_dropout_masks(on_ranks):
    """Same where replicated, different where sharded, different in each replica, replayed by recomputation."""
    layout = ParallelLayout(4, tp_size=2)  # tensor groups 0 1 and 2 3, which are two data replicas
    replicated, sharded = zip(*on_ranks(masks, layout, world_size=4))
    assert torch.equal(replicated[0], replicated[1]) and torch.equal(replicated[2], replicated[3])
    assert not torch.equal(replicated[0], replicated[2])
    different = {tuple(mask.tolist()) for mask in sharded}
    assert len(different) == 4


def test_a_local_random_stream_leaves_the_common_one_as_if_one_number_was_drawn(on_ranks):
    def draw(how_many):
        torch.manual_seed(9)
        with local_random_stream(dist.group.WORLD, torch.device("cpu")):
            local = torch.rand(how_many)
        common = torch.rand(3)
        torch.manual_seed(9)
        torch.randint(1 << 40, ())
        return local[0].item(), common.tolist(), torch.rand(3).tolist()

    ranks = on_ranks(draw, 5, world_size=4) + on_ranks(draw, 50, world_size=4)
    assert len({local for local, _, _ in ranks}) == 4  # the same ranks draw the same, however much
    assert all(common == expected == ranks[0][1] for _, common, expected in ranks)


def test_dropout_keeps_the_mean_and_is_off_outside_training(on_ranks):
    def measure():
        dropout = ShardedDropout(0.25, dist.group.WORLD)
        x = torch.ones(100_000)
        return dropout(x).mean().item(), torch.equal(dropout.eval()(x), x)

    for mean, unchanged in on_ranks(measure, world_size=4):
        assert mean == pytest.approx(1.0, abs=0.02)
        assert unchanged


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_dropout_is_replayed_on_a_gpu():
    torch.cuda.set_device(0)
    assert launch(masks_on_gpu, world_size=1) == [True]


def masks_on_gpu():
    seen, dropout = [], ShardedDropout(0.5, dist.group.WORLD)

    def drop(x):
        y = dropout(x)
        seen.append(y.ne(0))
        return y * x

    x = torch.ones(64, device="cuda", requires_grad=True)
    torch.utils.checkpoint.checkpoint(drop, x, use_reentrant=False).sum().backward()
    return torch.equal(*seen)
