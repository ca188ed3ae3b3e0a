"""Swap the borders of two halves of an image."""

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
rank = dist.get_rank()
peer = 1 - rank

border = torch.full((1024,), float(rank))
received = torch.empty(1024)
dist.send(border, peer)
dist.recv(received, peer)
print(f"border of rank {int(received[0])}")
dist.destroy_process_group()
