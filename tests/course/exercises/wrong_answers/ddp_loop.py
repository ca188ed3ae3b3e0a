"""Answers to the exercise on a DDP loop, written in full as learners write them."""

from contextlib import nullcontext

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler


def train(parallel, loader, sampler, num_epochs, m, lr, *, call=None):
    """The lines that the answers share: accumulate under no_sync, step, clear."""
    optimizer = torch.optim.SGD(parallel.parameters(), lr=lr)
    for epoch in range(num_epochs):
        if sampler is not None:
            sampler.set_epoch(epoch)
        for i, x in enumerate(loader):
            last = (i + 1) % m == 0
            with nullcontext() if last else parallel.no_sync():
                loss = (call or parallel)(x).square().mean() / m
                loss.backward()
            if last:
                optimizer.step()
                optimizer.zero_grad()
    return parallel.module


def no_sampler(model, data, num_epochs, num_micro_batches, lr):
    loader = DataLoader(data, batch_size=2)
    return train(DDP(model), loader, None, num_epochs, num_micro_batches, lr)


def shuffles_in_the_loader(model, data, num_epochs, num_micro_batches, lr):
    loader = DataLoader(data, batch_size=2, shuffle=True)
    return train(DDP(model), loader, None, num_epochs, num_micro_batches, lr)


def sampler_and_shuffle(model, data, num_epochs, num_micro_batches, lr):
    sampler = DistributedSampler(data)
    loader = DataLoader(data, batch_size=2, sampler=sampler, shuffle=True)
    return train(DDP(model), loader, sampler, num_epochs, num_micro_batches, lr)


def forgets_set_epoch(model, data, num_epochs, num_micro_batches, lr):
    sampler = DistributedSampler(data)
    loader = DataLoader(data, batch_size=2, sampler=sampler)
    return train(DDP(model), loader, None, num_epochs, num_micro_batches, lr)


def counts_epochs_from_1(model, data, num_epochs, num_micro_batches, lr):
    parallel, sampler = DDP(model), DistributedSampler(data)
    loader = DataLoader(data, batch_size=2, sampler=sampler)
    for epoch in range(1, num_epochs + 1):
        sampler.set_epoch(epoch)
        train(parallel, loader, None, 1, num_micro_batches, lr)
    return model


def slices_by_hand(model, data, num_epochs, num_micro_batches, lr):
    mine = torch.utils.data.Subset(data, range(dist.get_rank(), len(data), dist.get_world_size()))
    return train(DDP(model), DataLoader(mine, batch_size=2), None, num_epochs, num_micro_batches, lr)


def drops_the_last_batch(model, data, num_epochs, num_micro_batches, lr):
    sampler = DistributedSampler(data, drop_last=True)
    loader = DataLoader(data, batch_size=2, sampler=sampler, drop_last=True)
    return train(DDP(model), loader, sampler, num_epochs, num_micro_batches, lr)


def batch_size_forgotten(model, data, num_epochs, num_micro_batches, lr):
    sampler = DistributedSampler(data)
    return train(DDP(model), DataLoader(data, sampler=sampler), sampler, num_epochs, num_micro_batches, lr)


def calls_the_model(model, data, num_epochs, num_micro_batches, lr):
    sampler = DistributedSampler(data)
    loader = DataLoader(data, batch_size=2, sampler=sampler)
    return train(DDP(model), loader, sampler, num_epochs, num_micro_batches, lr, call=model)


def mean_forgotten(model, data, num_epochs, num_micro_batches, lr):
    parallel, sampler = DDP(model), DistributedSampler(data)
    loader = DataLoader(data, batch_size=2, sampler=sampler)
    optimizer = torch.optim.SGD(parallel.parameters(), lr=lr)
    for epoch in range(num_epochs):
        sampler.set_epoch(epoch)
        for i, x in enumerate(loader):
            last = (i + 1) % num_micro_batches == 0
            with nullcontext() if last else parallel.no_sync():
                parallel(x).square().mean().backward()
            if last:
                optimizer.step()
                optimizer.zero_grad()
    return model


def counts_micro_batches_from_0(model, data, num_epochs, num_micro_batches, lr):
    parallel, sampler = DDP(model), DistributedSampler(data)
    loader = DataLoader(data, batch_size=2, sampler=sampler)
    optimizer = torch.optim.SGD(parallel.parameters(), lr=lr)
    for epoch in range(num_epochs):
        sampler.set_epoch(epoch)
        for i, x in enumerate(loader):
            last = i % num_micro_batches == 0
            with nullcontext() if last else parallel.no_sync():
                (parallel(x).square().mean() / num_micro_batches).backward()
            if last:
                optimizer.step()
                optimizer.zero_grad()
    return model


def never_accumulates(model, data, num_epochs, num_micro_batches, lr):
    parallel, sampler = DDP(model), DistributedSampler(data)
    optimizer = torch.optim.SGD(parallel.parameters(), lr=lr)
    for epoch in range(num_epochs):
        sampler.set_epoch(epoch)
        for x in DataLoader(data, batch_size=2, sampler=sampler):
            optimizer.zero_grad()
            parallel(x).square().mean().backward()
            optimizer.step()
    return model


def no_sync_around_all(model, data, num_epochs, num_micro_batches, lr):
    parallel, sampler = DDP(model), DistributedSampler(data)
    optimizer = torch.optim.SGD(parallel.parameters(), lr=lr)
    for epoch in range(num_epochs):
        sampler.set_epoch(epoch)
        with parallel.no_sync():
            for i, x in enumerate(DataLoader(data, batch_size=2, sampler=sampler), 1):
                (parallel(x).square().mean() / num_micro_batches).backward()
                if i % num_micro_batches == 0:
                    optimizer.step()
                    optimizer.zero_grad()
    return model


def forward_outside_no_sync(model, data, num_epochs, num_micro_batches, lr):
    parallel, sampler = DDP(model), DistributedSampler(data)
    optimizer = torch.optim.SGD(parallel.parameters(), lr=lr)
    for epoch in range(num_epochs):
        sampler.set_epoch(epoch)
        for i, x in enumerate(DataLoader(data, batch_size=2, sampler=sampler), 1):
            loss = parallel(x).square().mean() / num_micro_batches
            with nullcontext() if i % num_micro_batches == 0 else parallel.no_sync():
                loss.backward()
            if i % num_micro_batches == 0:
                optimizer.step()
                optimizer.zero_grad()
    return model


def without_no_sync(model, data, num_epochs, num_micro_batches, lr):
    parallel, sampler = DDP(model), DistributedSampler(data)
    optimizer = torch.optim.SGD(parallel.parameters(), lr=lr)
    for epoch in range(num_epochs):
        sampler.set_epoch(epoch)
        for i, x in enumerate(DataLoader(data, batch_size=2, sampler=sampler), 1):
            (parallel(x).square().mean() / num_micro_batches).backward()
            if i % num_micro_batches == 0:
                optimizer.step()
                optimizer.zero_grad()
    return model


def averages_once_more(model, data, num_epochs, num_micro_batches, lr):
    parallel, sampler = DDP(model), DistributedSampler(data)
    optimizer = torch.optim.SGD(parallel.parameters(), lr=lr)
    for epoch in range(num_epochs):
        sampler.set_epoch(epoch)
        for i, x in enumerate(DataLoader(data, batch_size=2, sampler=sampler), 1):
            last = i % num_micro_batches == 0
            with nullcontext() if last else parallel.no_sync():
                (parallel(x).square().mean() / num_micro_batches / dist.get_world_size()).backward()
            if last:
                optimizer.step()
                optimizer.zero_grad()
    return model


def clears_at_the_top_of_the_inner_loop(model, data, num_epochs, num_micro_batches, lr):
    parallel, sampler = DDP(model), DistributedSampler(data)
    optimizer = torch.optim.SGD(parallel.parameters(), lr=lr)
    for epoch in range(num_epochs):
        sampler.set_epoch(epoch)
        for i, x in enumerate(DataLoader(data, batch_size=2, sampler=sampler), 1):
            optimizer.zero_grad()
            last = i % num_micro_batches == 0
            with nullcontext() if last else parallel.no_sync():
                (parallel(x).square().mean() / num_micro_batches).backward()
            if last:
                optimizer.step()
    return model


def clears_once_in_an_epoch(model, data, num_epochs, num_micro_batches, lr):
    parallel, sampler = DDP(model), DistributedSampler(data)
    optimizer = torch.optim.SGD(parallel.parameters(), lr=lr)
    for epoch in range(num_epochs):
        sampler.set_epoch(epoch)
        optimizer.zero_grad()
        for i, x in enumerate(DataLoader(data, batch_size=2, sampler=sampler), 1):
            last = i % num_micro_batches == 0
            with nullcontext() if last else parallel.no_sync():
                (parallel(x).square().mean() / num_micro_batches).backward()
            if last:
                optimizer.step()
    return model


def returns_the_loss(model, data, num_epochs, num_micro_batches, lr):
    sampler = DistributedSampler(data)
    loader = DataLoader(data, batch_size=2, sampler=sampler)
    trained = train(DDP(model), loader, sampler, num_epochs, num_micro_batches, lr)
    return trained(data.rows).square().mean()


def returns_nothing(model, data, num_epochs, num_micro_batches, lr):
    sampler = DistributedSampler(data)
    loader = DataLoader(data, batch_size=2, sampler=sampler)
    train(DDP(model), loader, sampler, num_epochs, num_micro_batches, lr)


def returns_the_wrapper(model, data, num_epochs, num_micro_batches, lr):
    parallel, sampler = DDP(model), DistributedSampler(data)
    train(parallel, DataLoader(data, batch_size=2, sampler=sampler), sampler, num_epochs, num_micro_batches, lr)
    return parallel


def in_groups(model, data, num_epochs, num_micro_batches, lr):
    """Takes an update's micro-batches from an iterator."""
    parallel, sampler = DDP(model), DistributedSampler(data, num_replicas=dist.get_world_size(), rank=dist.get_rank())
    optimizer = torch.optim.SGD(model.parameters(), lr)
    loader = DataLoader(data, 2, sampler=sampler)
    for epoch in range(num_epochs):
        sampler.set_epoch(epoch)
        batches = iter(loader)
        for _ in range(len(loader) // num_micro_batches):
            optimizer.zero_grad()
            with parallel.no_sync():
                for _ in range(num_micro_batches - 1):
                    (parallel(next(batches)).pow(2).mean() / num_micro_batches).backward()
            (parallel(next(batches)).pow(2).mean() / num_micro_batches).backward()
            optimizer.step()
    return model


WRONG = [
    ("ddp_loop", no_sampler, "every rank reads everything"),
    ("ddp_loop", shuffles_in_the_loader, "every rank shuffles everything for itself"),
    ("ddp_loop", sampler_and_shuffle, "a sampler and shuffle=True exclude each other"),
    ("ddp_loop", forgets_set_epoch, "all epochs have one order"),
    ("ddp_loop", counts_epochs_from_1, "epochs from 1, and a new optimizer for each"),
    ("ddp_loop", slices_by_hand, "every n-th sample, not shuffled"),
    ("ddp_loop", drops_the_last_batch, "the last samples are left out"),
    ("ddp_loop", batch_size_forgotten, "one sample at a time"),
    ("ddp_loop", calls_the_model, "around the wrapper nothing is sent"),
    ("ddp_loop", mean_forgotten, "not divided by the micro-batches"),
    ("ddp_loop", counts_micro_batches_from_0, "the first micro-batch sends, and steps"),
    ("ddp_loop", never_accumulates, "an update for each micro-batch"),
    ("ddp_loop", no_sync_around_all, "nothing is ever sent"),
    ("ddp_loop", forward_outside_no_sync, "the forward decides, and it is outside"),
    ("ddp_loop", without_no_sync, "a message for each micro-batch"),
    ("ddp_loop", averages_once_more, "divided by the ranks, which DDP does"),
    ("ddp_loop", clears_at_the_top_of_the_inner_loop, "only the last micro-batch counts"),
    ("ddp_loop", clears_once_in_an_epoch, "gradients of the update before stay"),
    ("ddp_loop", returns_the_loss, "returns a loss, not the model"),
    ("ddp_loop", returns_nothing, "returns nothing"),
]

RIGHT = [("ddp_loop", returns_the_wrapper), ("ddp_loop", in_groups)]
