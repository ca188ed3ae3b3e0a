"""Records the collectives of ranks, and looks for what NCCL would not forgive.

NCCL matches the collectives of a communicator by their order alone. Where two are swapped on a rank, the run hangs, or
goes on with wrong numbers if their sizes agree. Kernels of several communicators may wait in one queue of a GPU, so
the orders of all ranks must agree across communicators, too. A pipeline's messages are `labkit.schedules.check`'s.
"""

from collections import Counter, defaultdict
from contextlib import ExitStack, contextmanager
from graphlib import CycleError, TopologicalSorter
from itertools import groupby, pairwise
from threading import get_ident
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch.utils._pytree import tree_leaves

from labkit import groups
from labkit.c10d import OPERATIONS
from labkit.data_parallel import DataParallel


@contextmanager
def recorded():
    """Yield a list of this rank's calls in the block: thread, group and its ranks, operation and sizes, splits.

    Groups made inside are those of NCCL, where more kinds have their own. Buckets are small, so that some leave early.
    """
    calls, groups_to_make = [], groups.groups_to_make

    def recording(operation, method):
        def call(group, *args, **kwargs):
            if operation in ("send", "recv") and args[-1]:  # a pipeline's, which has tags
                return method(group, *args, **kwargs)
            tensors = [x for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)]
            sizes, splits = [f"{str(x.dtype)[6:]} {list(x.shape)}" for x in tensors], ()
            if operation == "all_to_all":  # of output, input, and how each is split: rows differ from rank to rank
                sizes = [f"{str(x.dtype)[6:]} {list(x.shape[1:])}" for x in tensors]
                even = [[len(x) // group.size()] * group.size() for x in tensors]
                splits = [list(given or same) for given, same in zip(args[2:4], even)]
            if operation in ("gather", "scatter"):  # of objects: one rank has tensors for all
                sizes = []
            name, ranks = group.group_name, tuple(dist.get_process_group_ranks(group))
            calls.append((get_ident(), (name, ranks), " ".join([operation, *sizes]), splits))
            return method(group, *args, **kwargs)

        return call

    with ExitStack() as stack:
        for operation, (_, _, methods) in OPERATIONS.items():
            for name in methods:
                if method := getattr(dist.ProcessGroup, name, None):
                    stack.enter_context(patch.object(dist.ProcessGroup, name, recording(operation, method)))
        of_nccl = patch.object(groups, "groups_to_make", lambda layout, size, _: groups_to_make(layout, size, True))
        stack.enter_context(of_nccl)
        stack.enter_context(patch.dict(DataParallel.__init__.__kwdefaults__, bucket_bytes=2000))
        yield calls


def check_order(ranks):
    """Check what all ranks of a world have recorded."""
    by_group, before = defaultdict(dict), TopologicalSorter()
    for rank, calls in enumerate(ranks):
        count, nodes = Counter(), defaultdict(list)
        for thread, group, what, splits in calls:
            by_group[group].setdefault(rank, []).append((thread, what, splits))
            nodes[thread].append((count[group], what, *group))
            count[group] += 1
        for earlier, later in (pair for of_thread in nodes.values() for pair in pairwise(of_thread)):
            before.add(later, earlier)
    for (name, members), of_ranks in by_group.items():
        where = f"group {name} of ranks {members}"
        assert sorted(of_ranks) == sorted(members), f"{where} is used by ranks {[*of_ranks]}"
        for threads in ([thread for thread, *_ in calls] for calls in of_ranks.values()):  # one may hand it over
            assert len(set(threads)) == len([*groupby(threads)]), f"two threads use {where} in turns"
        lengths = {len(calls) for calls in of_ranks.values()}
        assert len(lengths) == 1, f"calls of {where}: {lengths}"
        for number, calls in enumerate(zip(*(of_ranks[rank] for rank in members))):
            found = {what for _, what, _ in calls}
            assert len(found) == 1, f"call {number} of {where}: {found}"
            if "all_to_all" in calls[0][1]:
                recv, send = zip(*(splits for *_, splits in calls))  # [ranks, ranks] each
                assert [*zip(*recv)] == [*map(tuple, send)], f"call {number} of {where}: {recv} of {send}"
    try:
        before.prepare()
    except CycleError as error:
        raise AssertionError(f"ranks wait for each other in a circle: {error.args[1]}") from None
