"""Started by torchrun: DDP or FSDP2 on every rank, a distributed sampler, a mean of the loss over the ranks, checkpoints by rank 0."""

import os
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

dist.init_process_group("nccl")
rank, local_rank = dist.get_rank(), int(os.environ["LOCAL_RANK"])
torch.cuda.set_device(local_rank)
model = nn.Sequential(*[nn.Sequential(nn.Linear(1024, 1024), nn.ReLU()) for _ in range(8)], nn.Linear(1024, 16)).cuda()
if sys.argv[1] == "ddp":
    model = DistributedDataParallel(model, device_ids=[local_rank])
else:
    for layer in model:
        fully_shard(layer)
    fully_shard(model)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
data = TensorDataset(torch.randn(1024, 1024), torch.randint(0, 16, (1024,)))
sampler = DistributedSampler(data)
for epoch in range(2):
    sampler.set_epoch(epoch)
    for x, y in DataLoader(data, batch_size=128, sampler=sampler):
        loss = nn.functional.cross_entropy(model(x.cuda()), y.cuda())
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        shown = loss.detach().clone()
        dist.all_reduce(shown)
        if rank == 0:
            print(f"{epoch}: {shown.item() / dist.get_world_size():.3f}")
    if rank == 0:
        torch.save(model.state_dict(), "checkpoint.pt")
    dist.barrier()
dist.destroy_process_group()
