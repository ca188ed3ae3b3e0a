"""Process groups on real ranks, and on worlds that are only pretended (torch's fake backend)."""

import os
import random
import time
from contextlib import suppress

import pytest
import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from course.nccl_rules import Under
from labkit.groups import AXES_OF_GROUP, groups_of_one, groups_to_make, init_groups, local_device
from labkit.launch import Deadlock, RankFailed, launch
from labkit.layout import ParallelLayout

LAYOUTS = [
    ParallelLayout(2, tp_size=2),
    ParallelLayout(2, pp_size=2),
    ParallelLayout(4, tp_size=2, pp_size=2),
    ParallelLayout(4, pp_size=4),
    ParallelLayout(8, tp_size=2, pp_size=2),
    ParallelLayout(8, tp_size=2, pp_size=2, order="tp-pp-dp"),
    ParallelLayout(8, tp_size=2, pp_size=2, cp_size=2, order="cp-pp-tp-dp"),
    ParallelLayout(8, pp_size=4, order="pp-dp-tp"),
    ParallelLayout(8, tp_size=2, cp_size=2, ep_size=4, expert_tp_size=1),
]


def sums_and_coords(layout):
    """What one rank finds: the sum of the ranks in each of its groups, and its place."""
    with init_groups(layout) as groups:
        sums = {}
        for name in [*AXES_OF_GROUP, *(["embedding"] if is_at_an_end(groups) else [])]:
            rank = torch.tensor([float(groups.rank), 1.0])
            dist.all_reduce(rank, group=getattr(groups, name))
            sums[name] = rank.tolist()
        return sums, groups.coords, local_device().type


def embedding_groups(layout):
    """The first and the last rank of each pipeline: one, where they are the same."""
    return [sorted({pipeline[0], pipeline[-1]}) for pipeline in layout.groups("pp")]


def is_at_an_end(groups):
    return groups.coords.pp in (0, groups.layout.pp_size - 1)


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: f"{layout.world_size} {layout.order} {layout.pp_size}")
def test_an_all_reduce_of_ranks_gives_each_group_s_sum(on_ranks, layout):
    answers = on_ranks(sums_and_coords, layout, world_size=layout.world_size)
    for rank, (sums, coords, device) in enumerate(answers):
        members = {name: layout.group_of(rank, *axes) for name, axes in AXES_OF_GROUP.items()}
        members.update(("embedding", group) for group in embedding_groups(layout) if rank in group)
        assert sums == {name: [sum(group), len(group)] for name, group in members.items()}
        assert coords == layout.coords(rank)
        assert device == "cpu"


def threads_and_descriptors(settle_seconds=0.0):
    time.sleep(settle_seconds)  # the kernel lists a thread for a moment after it was joined
    return len(os.listdir("/proc/self/task")), len(os.listdir("/proc/self/fd"))


def make_and_close(layout, times, communicate):
    """What a rank has open before and after; without communication, ranks run apart as far as they can."""
    init_groups(layout).close()  # what torch sets up once
    before = threads_and_descriptors(0.2)
    most = 0
    for _ in range(times):
        time.sleep(random.uniform(0, 0 if communicate else 0.02))
        groups = init_groups(layout)
        if communicate:
            groups.device_mesh()
            for name in AXES_OF_GROUP:
                dist.all_reduce(torch.ones(1), group=getattr(groups, name))
        most = max(most, threads_and_descriptors()[0])
        groups.close()
    end = time.monotonic() + 5  # peers of a busy machine close their sockets later; a leak stays
    while (after := threads_and_descriptors(0.1)) != before and time.monotonic() < end:
        pass
    return before, after, most


@pytest.mark.gloo
@pytest.mark.parametrize("communicate", [True, False], ids=["used", "closed at once"])
def test_twenty_times_leave_no_thread_and_no_descriptor(on_ranks, communicate):
    """Closed at once, too: nobody may hang up on a peer that is still connecting."""
    layout = ParallelLayout(4, tp_size=2, pp_size=2)
    for before, after, most in on_ranks(make_and_close, layout, 20, communicate, world_size=4):
        assert after == before
        assert most > before[0]  # the groups did have threads, so this test can see them


def closed_groups():
    groups = init_groups(ParallelLayout(2, tp_size=2))
    groups.close()
    groups.close()
    return repr(groups), groups.tp


def test_closed_groups_say_so():
    with pytest.raises(RankFailed, match=r"no 'tp': these groups are closed, make new ones with init_groups\(layout\)"):
        launch(closed_groups, world_size=2)


def mesh_facts(layout):
    with init_groups(layout) as groups:
        mesh = groups.device_mesh()
        assert groups.device_mesh() is mesh
        assert all(mesh.get_group(axis) == getattr(groups, axis) for axis in mesh.mesh_dim_names)
        lines = {axis: mesh[axis].mesh.tolist() for axis in mesh.mesh_dim_names}
        replica = mesh[tuple(axis for axis in mesh.mesh_dim_names if axis != "dp")].mesh.flatten().tolist()
        return lines, replica


@pytest.mark.parametrize("layout", LAYOUTS[4:7], ids=lambda layout: layout.order)
def test_the_device_mesh_has_the_very_same_groups(on_ranks, layout):
    for rank, (lines, replica) in enumerate(on_ranks(mesh_facts, layout, world_size=8)):
        assert lines == {axis: layout.group_of(rank, axis) for axis in layout.axes}
        assert replica == layout.group_of(rank, "tp", "cp", "pp")


@pytest.mark.parametrize(("device", "are_closed"), [("cpu", True), ("cuda", False)])
def test_an_error_is_not_held_up_by_messages_that_a_gpu_waits_for(on_ranks, device, are_closed):
    def fails():
        groups = init_groups(ParallelLayout(4, tp_size=2))
        with pytest.MonkeyPatch.context() as patch, suppress(ArithmeticError), groups:
            patch.setattr("labkit.groups.local_device", lambda: torch.device(device))
            raise ArithmeticError
        return "closed" in repr(groups), groups.close()

    assert on_ranks(fails, world_size=4) == [(are_closed, None)] * 4


def fsdp_step(layout):
    """One step of FSDP2 over the data-parallel groups, each replica on its own batch."""
    from torch.distributed.fsdp import fully_shard

    groups = init_groups(layout)  # left open: DTensor remembers the mesh
    torch.manual_seed(0)
    model = fully_shard(torch.nn.Linear(4, 2, bias=False), mesh=groups.device_mesh()["dp"])
    model(torch.full((1, 4), float(groups.coords.dp))).sum().backward()
    return model.weight.grad.full_tensor().tolist()


def test_fsdp2_runs_on_the_mesh():
    """The mean of the gradients of replicas 0 and 1, whose inputs are 0 and 1, is one half everywhere."""
    assert launch(fsdp_step, ParallelLayout(4, tp_size=2), world_size=4) == [[[0.5] * 4] * 2] * 4


def descriptions():
    with init_groups(ParallelLayout(4, tp_size=2, pp_size=2)) as groups:
        return {name: getattr(groups, name).group_desc for name in AXES_OF_GROUP}


def test_groups_carry_a_name_that_a_report_can_print(on_ranks):
    first = on_ranks(descriptions, world_size=4)[0]
    assert first["tp"] == first["expert_tp"] == first["tp_ep"] == "tp [0, 1]"
    assert first["cp"] == first["dp"] == first["dp_cp"] == "cp/dp [0]"
    assert first["pp"] == "pp/embedding [0, 2]"


def refused(layout):
    with pytest.raises(ValueError) as error:
        init_groups(layout)
    return str(error.value), dist.new_group([0, 1]).group_name  # numbered from 0: no group was made before it


def test_a_layout_of_another_size_is_refused_before_anything_is_made():
    message = "the layout has world_size=8 but 2 ranks are running: start 8 ranks, or make the layout with world_size=2"
    fresh = launch(lambda: dist.new_group([0, 1]).group_name, world_size=2)
    assert launch(refused, ParallelLayout(8), world_size=2) == [(message, name) for name in fresh]


def test_without_a_world_it_says_how_to_get_one():
    with pytest.raises(ValueError, match=r"no world is up: call init_groups inside a function given to .*launch"):
        init_groups(ParallelLayout(8))
    assert local_device() == torch.device("cpu")


# ---- larger worlds than this machine has: torch's fake backend is one rank that believes in the others


@pytest.fixture
def fake_world():
    def start(rank, world_size):
        dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world_size)

    yield start
    if dist.is_initialized():
        dist.destroy_process_group()


@pytest.mark.parametrize("order", ["tp-cp-dp-pp", "tp-pp-dp", "dp-pp-cp-tp"])
@pytest.mark.parametrize(
    ("sizes", "rank"), [((64, 4, 4), 0), ((64, 4, 4), 37), ((512, 8, 8), 255), ((512, 8, 16), 511)]
)
def test_groups_of_a_large_world(fake_world, sizes, rank, order):
    layout = ParallelLayout(*sizes, order=order)
    fake_world(rank, layout.world_size)
    groups = init_groups(layout)
    for name, axes in AXES_OF_GROUP.items():
        ranks = layout.group_of(rank, *axes)
        assert dist.get_process_group_ranks(getattr(groups, name)) == ranks
        assert dist.get_group_rank(getattr(groups, name), rank) == ranks.index(rank)
        assert len(getattr(groups, name).group_desc) < 60
    assert groups.coords == layout.coords(rank)
    assert groups.device_mesh().get_coordinate() == tuple(groups.coords._asdict()[axis] for axis in layout.axes[::-1])
    ends = [group for group in embedding_groups(layout) if rank in group]
    if is_at_an_end(groups):
        assert [dist.get_process_group_ranks(groups.embedding)] == ends
    else:
        assert (groups.embedding, ends) == (dist.GroupMember.NON_GROUP_MEMBER, [])
    groups.close()
    assert len(dist.distributed_c10d._world.pg_map) == 1  # the world itself


def test_a_middle_stage_can_call_the_embedding_group_without_harm(fake_world):
    fake_world(5, 8)
    groups = init_groups(ParallelLayout(8, pp_size=4))  # stages 0,1 2,3 4,5 6,7: rank 5 is in the middle
    value = torch.tensor([5.0])
    with pytest.warns(UserWarning, match="does not belong to the given group"):
        dist.all_reduce(value, group=groups.embedding)
    assert value.tolist() == [5.0]


@pytest.mark.parametrize(
    ("sizes", "experts", "kinds"),
    [  # dp_cp, tp_ep, expert_tp and expert_dp have groups of their own only where the sizes ask for it
        ((64, 4, 4), {}, ["tp expert_tp tp_ep", "cp ep", "dp expert_dp dp_cp", "pp", "embedding"]),
        ((64, 4, 2), {}, ["tp expert_tp tp_ep", "cp ep", "dp expert_dp dp_cp", "pp embedding"]),
        ((64, 4, 4, 2), {}, ["tp expert_tp tp_ep", "cp", "dp", "pp", "ep", "expert_dp dp_cp", "embedding"]),
        (
            (64, 4, 4, 2, "cp-pp-tp-dp"),
            {},
            ["tp expert_tp tp_ep", "cp", "dp", "pp", "ep", "expert_dp dp_cp", "embedding"],
        ),
        (
            (4, 1, 4),
            {},
            ["tp cp dp expert_tp ep expert_dp dp_cp tp_ep", "pp", "embedding"],
        ),  # the ends are not the world
        ((64, 64), {}, ["tp expert_tp tp_ep", "cp dp pp ep expert_dp dp_cp embedding"]),
        ((64,), {}, ["tp cp pp expert_tp ep tp_ep embedding", "dp expert_dp dp_cp"]),
        ((1,), {}, ["tp cp dp pp expert_tp ep expert_dp dp_cp tp_ep embedding"]),
        (
            (64, 4, 2, 2),
            {"ep_size": 4},
            ["tp expert_tp", "cp", "dp", "pp embedding", "ep", "expert_dp", "dp_cp", "tp_ep"],
        ),
        (
            (16, 4),
            {"ep_size": 4, "expert_tp_size": 1},
            ["tp ep tp_ep", "cp pp expert_tp embedding", "dp expert_dp dp_cp"],
        ),
        (
            (16, 2),
            {"ep_size": 8, "expert_tp_size": 2},
            ["tp expert_tp", "cp pp expert_dp embedding", "dp ep dp_cp", "tp_ep"],
        ),
    ],
)
def test_every_rank_makes_every_group_once_in_the_same_order(fake_world, monkeypatch, sizes, experts, kinds):
    """Groups are numbered by how often new_group was called: a rank that skips one waits for ever."""
    layout, calls, real = ParallelLayout(*sizes, **experts), [], dist.new_group
    kinds = [names.split() for names in kinds]
    monkeypatch.setattr(dist, "new_group", lambda ranks, **kwargs: calls[-1].append(ranks) or real(ranks, **kwargs))
    for rank in {0, 21 % layout.world_size, layout.world_size - 1}:
        calls.append([])
        fake_world(rank, layout.world_size)
        groups = init_groups(layout)
        made = [getattr(groups, name) for names in kinds for name in names[:1]]
        for names, group in zip(kinds, made):
            assert [name for name in [*AXES_OF_GROUP, "embedding"] if getattr(groups, name) is group] == names
        groups.close()
        groups.close()
        assert len(dist.distributed_c10d._world.pg_map) == 1  # the world itself, which is never closed
        dist.destroy_process_group()
    first = [names[0] for names in kinds]
    lists = [embedding_groups(layout) if name == "embedding" else layout.groups(*AXES_OF_GROUP[name]) for name in first]
    every = [ranks for groups in lists if len(groups[0]) < layout.world_size for ranks in groups]
    assert all(made == every for made in calls)


def test_gathers_that_run_ahead_hold_up_no_other_messages_on_nccl():
    """Nor do gradients that leave while backward goes on; elsewhere kinds with the same ranks share a group."""
    layout = ParallelLayout(8, tp_size=2, cp_size=4)
    apart = groups_to_make(layout, has_nccl=True)
    assert groups_to_make(layout)["cp", "expert_dp", "dp_cp", "shard", "expert_shard"] == layout.groups("cp")
    assert apart["cp", "expert_dp", "dp_cp"] == apart["shard", "expert_shard"] == layout.groups("cp")
    for other in (
        ParallelLayout(8, tp_size=2),
        ParallelLayout(8, ep_size=8),
        ParallelLayout(8, pp_size=2, ep_size=4),
        ParallelLayout(4, tp_size=2, pp_size=2, expert_tp_size=1),
        ParallelLayout(8, cp_size=2, ep_size=4, order="tp-cp-dp-ep-pp"),
    ):
        separate = {"shard", "expert_shard"}
        for names, groups in groups_to_make(other, has_nccl=True).items():  # a rank alone sends nothing
            assert len(groups[0]) == 1 or separate.issuperset(names) or separate.isdisjoint(names)
    alone = ParallelLayout(8, tp_size=8)
    assert groups_to_make(alone) == groups_to_make(alone, has_nccl=True)


def test_hybrid_shards_of_experts_are_groups_of_their_own_where_the_dense_ones_differ():
    same, other = ParallelLayout(8, cp_size=2), ParallelLayout(8, ep_size=2)
    assert groups_to_make(same, 2, has_nccl=True)["shard", "expert_shard"] == same.groups("cp")
    assert groups_to_make(same, 2)["dp", "replicate", "expert_replicate"] == same.shard_groups(2)[1]
    made = groups_to_make(other, 4)
    assert made["shard",] == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert made["expert_shard",] == [[0, 2], [4, 6], [1, 3], [5, 7]]
    assert made["expert_replicate",] == [[0, 4], [2, 6], [1, 5], [3, 7]]


def test_a_single_process_needs_no_world_for_its_groups():
    groups = groups_of_one()
    assert {getattr(groups, name).size() for name in (*AXES_OF_GROUP, "embedding", "shard")} == {1}
    assert groups.coords == (0, 0, 0, 0)


def a_member_comes_never():
    groups = init_groups(ParallelLayout(4, tp_size=2))
    if groups.rank != 1:
        dist.all_reduce(torch.ones(3), group=groups.tp)


def test_groups_are_connected_when_they_are_made_so_that_nccl_can_time_a_missing_member_out():
    with pytest.raises(Deadlock, match=r"all_reduce number 2 .* of tp \[0, 1\]: rank 0 waits; rank 1 has returned"):
        launch(Under(a_member_comes_never), world_size=4)
