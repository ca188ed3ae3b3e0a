"""Evaluate on 10 samples, and gather the scores of all ranks."""

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
rank, world_size = dist.get_rank(), dist.get_world_size()

samples = torch.arange(10.0)
scores = samples.chunk(world_size)[rank].square()
everything = [torch.empty_like(scores) for _ in range(world_size)]
dist.all_gather(everything, scores)
print(f"mean score {torch.cat(everything).mean():.1f}")
dist.destroy_process_group()
