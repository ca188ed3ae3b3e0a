"""Let rank 0 prepare the data, while the others wait."""

import time
from datetime import timedelta

import torch
import torch.distributed as dist

dist.init_process_group("gloo", timeout=timedelta(seconds=3))
rank = dist.get_rank()


def prepare():
    for part in range(10):
        time.sleep(1)  # tokenize a file
        print(f"part {part + 1} of 10 is ready")


if rank == 0:
    prepare()
dist.barrier()
total = torch.ones(1)
dist.all_reduce(total)
print(f"{total.item():.0f} ranks train")
dist.destroy_process_group()
