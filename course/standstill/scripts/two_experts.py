"""Train two experts; a rank computes those that its tokens ask for."""

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(0)
shared = torch.nn.Linear(4, 4)
experts = torch.nn.ModuleList([torch.nn.Linear(4, 4), torch.nn.Linear(4, 4)])
for parameter in [*shared.parameters(), *experts.parameters()]:
    parameter.register_post_accumulate_grad_hook(lambda p: dist.all_reduce(p.grad))  # as soon as it is there

chosen = [0, 1] if rank != 1 else [1]  # what a router would say
x = shared(torch.ones(2, 4))
sum(experts[number](x) for number in chosen).square().mean().backward()

print("gradients are summed")
norms = [torch.empty(1) for _ in range(dist.get_world_size())]
dist.all_gather(norms, shared.bias.grad.norm().reshape(1))
print(f"norm {norms[0].item():.3f}")
dist.destroy_process_group()
