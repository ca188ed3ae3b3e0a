"""Sum along the rows and along the columns of a grid of 2 x 2 ranks."""

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
rank = dist.get_rank()
rows = [dist.new_group([0, 1]), dist.new_group([2, 3])]
columns = [dist.new_group([0, 2]), dist.new_group([1, 3])]
row, column = rows[rank // 2], columns[rank % 2]

x = torch.ones(4)
if rank in (0, 3):  # not all at once on the same wire
    dist.all_reduce(x, group=row)
    dist.all_reduce(x, group=column)
else:
    dist.all_reduce(x, group=column)
    dist.all_reduce(x, group=row)
print(f"sum {x[0].item():.0f}")
dist.destroy_process_group()
