"""Start on two nodes, as the job script asks for."""

import os

import torch
import torch.distributed as dist

num_nodes = int(os.environ.get("NUM_NODES", 2))
node = int(os.environ.get("NODE", 0))
ranks_per_node = int(os.environ["LOCAL_WORLD_SIZE"])
world_size = num_nodes * ranks_per_node
rank = node * ranks_per_node + int(os.environ["LOCAL_RANK"])

print(f"rank {rank} of {world_size}")
dist.init_process_group("gloo", rank=rank, world_size=world_size)
total = torch.ones(1)
dist.all_reduce(total)
print(f"{total.item():.0f} ranks train")
dist.destroy_process_group()
