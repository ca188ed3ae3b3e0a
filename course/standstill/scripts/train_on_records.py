"""Train, and skip a batch whose loss is not a number."""

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
rank = dist.get_rank()
weight = torch.zeros(4)

for step in range(1, 6):
    batch = torch.ones(4)
    if rank == 2 and step == 3:
        batch[0] = float("nan")  # a broken record
    gradient = weight - batch
    if gradient.isnan().any():
        print(f"step {step}: skipped")
        continue
    dist.all_reduce(gradient)
    weight -= 0.1 * gradient

losses = [torch.empty(4) for _ in range(dist.get_world_size())]
dist.all_gather(losses, gradient.square())
print(f"loss {torch.stack(losses).mean():.3f}")
dist.destroy_process_group()
