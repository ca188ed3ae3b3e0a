"""Train on data that is read from a disk."""

import time

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
rank = dist.get_rank()
weight = torch.zeros(4)


def read(step):
    if rank == 1:
        time.sleep(1.2)  # its disk is busy
    return torch.full((4,), float(step))


for step in range(1, 7):
    gradient = weight - read(step)
    dist.all_reduce(gradient)
    weight -= 0.1 * gradient
print(f"weight {weight[0]:.2f}")
dist.destroy_process_group()
