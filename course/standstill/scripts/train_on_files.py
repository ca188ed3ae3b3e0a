"""Train on files, which the ranks take in turn."""

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
rank = dist.get_rank()
weight = torch.zeros(4)
files = [torch.full((4,), float(number)) for number in range(8)]

for number, batch in enumerate(files[rank :: dist.get_world_size()], start=1):
    gradient = weight - batch
    dist.all_reduce(gradient)
    weight -= 0.1 * gradient
    print(f"batch {number} done")

print("saving")
shards = [torch.empty(4) for _ in range(dist.get_world_size())]
dist.all_gather(shards, weight)
dist.destroy_process_group()
