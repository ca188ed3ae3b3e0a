"""Train on, even if a batch is broken."""

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
rank = dist.get_rank()
weight = torch.zeros(4)


def train(batch):
    gradient = weight - torch.tensor(batch)
    dist.all_reduce(gradient)
    weight.sub_(0.1 * gradient)


batches = [[1.0, 2.0, 3.0, 4.0] for _ in range(4)]
if rank == 1:
    batches[1] = [1.0, 2.0, 3.0]
for step, batch in enumerate(batches, start=1):
    try:
        train(batch)
    except Exception as error:
        print(f"step {step}: {error}")
copies = [torch.empty(4) for _ in range(dist.get_world_size())]
dist.all_gather(copies, weight)
print(f"all ranks agree: {all(torch.equal(copy, weight) for copy in copies)}")
dist.destroy_process_group()
