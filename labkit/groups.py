"""Makes a layout's process groups, once each, in a world that `launch` or torchrun has started.

The *world* is all processes of a job; each of them is a *rank*. A *process group* is some of them,
which take part in the same collectives. A *backend* carries the messages: gloo between CPUs, NCCL
between GPUs.
"""

import copyreg
import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from labkit.device import count_gpus
from labkit.layout import AXES, EXPERT_AXES, Coords, ParallelLayout
from labkit.sizes import ranks_text

AXES_OF_GROUP = {axis: (axis,) for axis in (*AXES, *EXPERT_AXES)}
AXES_OF_GROUP |= {"dp_cp": ("dp", "cp"), "tp_ep": ("expert_tp", "ep")}
"""The grid axes of each kind of group.

The ranks of a ``dp_cp`` group all have the same dense weights. The ranks of a ``tp_ep`` group
together have all experts of their layers.
"""
_SHARDS = ("shard", "expert_shard")
_NON_MEMBER: Any = dist.GroupMember.NON_GROUP_MEMBER
_NAMES = (*AXES_OF_GROUP, "embedding", *_SHARDS, "replicate", "expert_replicate")
# Not in torch's group_desc, which names a group in reports, if another kind shares the group
_DERIVED = (*EXPERT_AXES, "dp_cp", "tp_ep", *_SHARDS)


@dataclass(eq=False, repr=False)
class ProcessGroups:
    """The groups of one rank, and its place in the layout.

    Each process group has its ranks in the layout's order. Kinds with the same ranks share their
    groups, and a group of all ranks is the world itself.

    The first and the last rank of a pipeline may both have the embedding, if it is tied: they add
    up its gradients in ``embedding``. On the ranks between it is
    ``dist.GroupMember.NON_GROUP_MEMBER``, with which collectives warn and do nothing (None would
    mean the world).

    A ``shard`` group divides one copy of the weights; a ``replicate`` group has the same shard of
    each copy. Unless `init_groups` got a ``shard_size``, there is one copy: ``shard`` has the ranks
    of ``dp_cp``, ``expert_shard`` those of ``expert_dp``, and the replicate groups are None.
    """

    layout: ParallelLayout
    rank: int
    tp: dist.ProcessGroup
    cp: dist.ProcessGroup
    dp: dist.ProcessGroup
    pp: dist.ProcessGroup
    expert_tp: dist.ProcessGroup
    ep: dist.ProcessGroup
    expert_dp: dist.ProcessGroup
    dp_cp: dist.ProcessGroup
    tp_ep: dist.ProcessGroup
    embedding: dist.ProcessGroup
    shard: dist.ProcessGroup
    expert_shard: dist.ProcessGroup
    replicate: dist.ProcessGroup | None = None
    expert_replicate: dist.ProcessGroup | None = None
    # By kind, and whether it leads to a higher rank; with NCCL only
    _channels: dict[tuple[str, bool], dist.ProcessGroup] = field(default_factory=dict)
    _connected: set[tuple[str, int, int]] = field(default_factory=set)  # kind, sender, receiver
    _mesh: DeviceMesh | None = None

    @property
    def coords(self) -> Coords:
        """This rank's coordinate on each dense axis: ``coords.tp``, ``coords.cp``, ``coords.dp``,
        ``coords.pp``.
        """
        return self.layout.coords(self.rank)

    def channel(self, kind: str, sender: int, receiver: int) -> dist.ProcessGroup:
        """Return the group for messages of one kind ("forward", "backward") between two ranks of
        the pipeline.

        Sender and receiver are ranks within ``pp``. Gloo tells messages apart by tags, so the
        channel is ``pp`` itself. NCCL has no tags: each kind and direction has its own process
        group, in which torch makes a communicator and a stream for each pair of ranks. So a receive
        posted early does not block the others.
        """
        return self._channels.get((kind, sender < receiver), self.pp)

    def connect(self, kind: str, sender: int, receiver: int) -> None:
        """Connect the two ranks of a channel, unless that has been done.

        All ranks of the pipeline call this, in the same order.

        NCCL connects two ranks at their first message in a direction, and blocks the first rank
        until the second comes. Receives posted early would deadlock, so each pair is connected
        beforehand.
        """
        if not self.has_channels or sender == receiver:
            return
        if (kind, sender, receiver) in self._connected:
            return
        self._connected.add((kind, sender, receiver))
        first_message = torch.zeros(1, device=local_device())
        group = self.channel(kind, sender, receiver)
        if self.coords.pp == sender:
            dist.send(first_message, group=group, group_dst=receiver)
        elif self.coords.pp == receiver:
            dist.recv(first_message, group=group, group_src=sender)

    @property
    def has_channels(self) -> bool:
        """Whether messages have channels of their own, as NCCL needs: in a channel, a message waits
        for the one before.
        """
        return bool(self._channels)

    def device_mesh(self) -> DeviceMesh:
        """Return the same groups, not copies, as a DeviceMesh with named dims, slowest first, as
        FSDP2 takes one.

        DTensor caches a mesh by its shape for the life of the process: once it has used these
        groups, keep them.
        """
        if self._mesh is None:
            axes = self.layout.axes[::-1]
            sizes = [self.layout.size(axis) for axis in axes]
            ranks = torch.arange(self.layout.world_size).reshape(sizes)
            groups = [getattr(self, axis) for axis in axes]
            device_type = local_device().type
            self._mesh = DeviceMesh.from_group(groups, device_type, ranks, mesh_dim_names=axes)
        return self._mesh

    def made(self) -> list[dist.ProcessGroup]:
        """Return the groups that this rank is in, each once, in the order in which they
        were made.
        """
        named = [vars(self).get(name) for name in _NAMES]
        groups = [group for group in (*named, *self._channels.values()) if group]
        return list(dict.fromkeys(group for group in groups if group != _NON_MEMBER))

    def close(self) -> None:
        """Destroy all groups but the world. Every rank calls this, once no rank uses them any more.

        Drop your own references too, and the mesh: torch ends a group's threads when its last
        reference goes.
        """
        self._mesh = None
        groups = self.made()
        for name in _NAMES:
            vars(self).pop(name, None)
        self._channels.clear()
        if not dist.is_initialized():
            return  # the world was destroyed first, and its groups with it
        if local_device().type == "cuda":
            torch.cuda.synchronize()  # the last messages may still be in flight
        for group in reversed(groups):
            if group is not dist.group.WORLD:  # whoever made the world ends it
                dist.destroy_process_group(group)

    def __repr__(self) -> str:
        closed = "" if "tp" in vars(self) else ", closed"
        return f"ProcessGroups(rank={self.rank}, coords={self.coords}{closed})"

    def __enter__(self) -> "ProcessGroups":
        return self

    def __exit__(self, error_type, *_) -> None:
        if error_type is None or local_device().type == "cpu":
            # Not after an error on a GPU: synchronizing might wait forever for a message
            self.close()

    if not TYPE_CHECKING:  # else a type checker would accept any attribute

        def __getattr__(self, name):  # called only if the attribute is missing, as after close()
            fault = f"ProcessGroups has no {name!r}"
            if name in _NAMES:
                fault += ": these groups are closed, make new ones with init_groups(layout)"
            raise AttributeError(fault)


def init_groups(layout: ParallelLayout, shard_size: int | None = None) -> ProcessGroups:
    """Make the layout's process groups, each once. Every rank calls this, with the same layout.

    With a ``shard_size``, for hybrid sharding, each ``dp_cp`` group is split into ``shard`` groups
    of that size, and ``replicate`` groups join the ranks with the same shard; each ``expert_dp``
    group is split into as many.

    Raises:
        ValueError: no world is up, its size is not the layout's, or the shard size does not fit.
            Nothing has been made.
    """
    if not dist.is_initialized():
        raise ValueError(
            "no world is up: call init_groups inside a function given to labkit.launch.launch(), "
            "or after torch.distributed.init_process_group()"
        )
    running = dist.get_world_size()
    wanted = layout.world_size
    if running != wanted:
        way_out = f"start {wanted} ranks, or make the layout with world_size={running}"
        raise ValueError(
            f"the layout has world_size={wanted} but {running} ranks are running: {way_out}"
        )
    has_nccl = "nccl" in dist.get_backend_config()
    made = {}
    for kinds, rank_lists in groups_to_make(layout, shard_size, has_nccl).items():
        named = [kind for kind in kinds if kind not in _DERIVED] or kinds
        # A group of all ranks is the world itself. But shards have groups of their own: with NCCL
        # their collectives run beside those of layers (see groups_to_make).
        is_world = len(rank_lists[0]) == wanted and kinds[0] not in _SHARDS
        group = dist.group.WORLD if is_world else _make_groups(named, rank_lists)
        made |= dict.fromkeys(kinds, group)
    if has_nccl:
        _connect_now([dist.group.WORLD, *made.values()])
    channels = _make_channels(layout) if has_nccl else {}
    if "gloo" in dist.get_backend_config():
        # A barrier. Gloo connects eagerly: if a rank closed now, a peer that is still connecting
        # would fail.
        dist.all_reduce(torch.zeros(1))
    return ProcessGroups(layout, dist.get_rank(), **made, _channels=channels)


def groups_to_make(
    layout: ParallelLayout, shard_size: int | None = None, has_nccl: bool = False
) -> dict[tuple[str, ...], list[list[int]]]:
    """Return the lists of ranks of all groups, by the kinds that share them.

    NCCL runs the collectives of a group one after the other. FSDP's all-gathers and reductions run
    while layers compute, so with NCCL they get groups of their own: no layer or router waits for
    them.
    """
    kinds = {name: layout.groups(*axes) for name, axes in AXES_OF_GROUP.items()}
    # The first and the last rank of each pipeline, or the only one
    kinds["embedding"] = [list(dict.fromkeys([ranks[0], ranks[-1]])) for ranks in kinds["pp"]]
    kinds["shard"] = kinds["dp_cp"]
    kinds["expert_shard"] = kinds["expert_dp"]
    if shard_size and shard_size != layout.dp_size * layout.cp_size:
        kinds["shard"], kinds["replicate"] = layout.shard_groups(shard_size)
        expert_groups = layout.shard_groups(shard_size, experts=True)
        kinds["expert_shard"], kinds["expert_replicate"] = expert_groups
    separate = {name for name in _SHARDS if has_nccl and len(kinds[name][0]) > 1}
    # Kinds with the same lists of ranks share one group. Separate kinds share only with each other.
    shared: dict[tuple, list[str]] = {}
    for name, rank_lists in kinds.items():
        key = (name in separate, *map(tuple, rank_lists))
        shared.setdefault(key, []).append(name)
    return {tuple(names): kinds[names[0]] for names in shared.values()}


def _make_groups(names: Sequence[str], rank_lists: list[list[int]]) -> dist.ProcessGroup:
    """Make the groups, and return the one that this rank is in, or NON_GROUP_MEMBER; deadlock
    reports show the ``names``.

    Every rank makes every group, in the same order. (With ``use_local_synchronization`` only the
    members would, but groups made a second time that way fail to connect.)
    """
    kind = "/".join(names)
    local_group = _NON_MEMBER
    for ranks in rank_lists:
        group: Any = dist.new_group(ranks, group_desc=f"{kind} {ranks_text(ranks)}")
        if group != _NON_MEMBER:
            local_group = group
    return local_group


def _connect_now(groups: Sequence[dist.ProcessGroup | None]) -> None:
    """Let NCCL connect the ranks of each group now.

    All ranks call this, with their groups in the same order.

    NCCL makes a communicator at a group's first use, and has no time-out for a member that does not
    come. From here on a missing member is met in a collective, which has one. (Given a
    ``device_id``, torch would connect a group at once, but then messages would share its
    communicator with collectives.)
    """
    for group in dict.fromkeys(groups):
        if group not in (None, _NON_MEMBER) and dist.get_world_size(group) > 1:
            dist.all_reduce(torch.zeros(1, device=local_device()), group=group)


def _make_channels(layout: ParallelLayout) -> dict[tuple[str, bool], dist.ProcessGroup]:
    """Make a group for each kind and direction of pipeline messages."""
    if layout.pp_size == 1:
        return {}
    # Both directions: with several chunks on a rank, activations also go from a higher rank to a
    # lower one, and gradients the other way.
    keys = [(kind, upwards) for kind in ("forward", "backward") for upwards in (False, True)]
    return {key: _make_groups([f"pp {key[0]}"], layout.groups("pp")) for key in keys}


def _refuse_to_copy(group: dist.ProcessGroup):
    raise ValueError(
        "a process group connects running processes: it cannot be copied or pickled, nor can a "
        "layer that has it. For a layer use its state_dict(), or let the copy share the group: "
        "copy.deepcopy(layer, {id(group): group})"
    )


# copy and pickle call it for a group; torch itself registers nothing.
copyreg.pickle(dist.ProcessGroup, _refuse_to_copy)


def group_of_one() -> dist.ProcessGroup:
    """Return a group for a single process without a world: layers keep their whole weights and send
    nothing.
    """
    # torch's stub knows the other constructor only.
    return dist.ProcessGroup(0, 1)  # pyright: ignore[reportCallIssue]


def groups_of_one() -> ProcessGroups:
    """Return the groups of a single process without a world: each of them is one `group_of_one`."""
    group = group_of_one()
    by_name: Any = dict.fromkeys(_NAMES[:-2], group)  # all but the replicate groups
    return ProcessGroups(ParallelLayout(1), 0, **by_name)


def local_device() -> torch.device:
    """Return the device of this rank's tensors: its GPU if the world uses NCCL,
    otherwise the CPU.
    """
    if not dist.is_initialized() or "cuda:nccl" not in dist.get_backend_config():
        return torch.device("cpu")
    num_gpus = count_gpus()
    if not num_gpus:  # a backend for tests, with NCCL's rules, in a world of CPU ranks
        return torch.device("cpu")
    return torch.device("cuda", local_rank() % num_gpus)  # a rank may see only its own


def local_rank() -> int:
    """Return this rank's number on its node; its number in the world if nobody says which node it
    is on.
    """
    return int(os.environ.get("LOCAL_RANK", dist.get_rank()))
