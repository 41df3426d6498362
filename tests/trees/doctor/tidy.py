"""A training of a classifier with nothing to find in it: bf16, pinned batches, an evaluation under no_grad, whole accumulations."""

import sys
from pathlib import Path

import torch
from ruamel.yaml import YAML
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

ACCUMULATION = 2

batch_size = YAML(typ="safe").load(Path(sys.argv[1]))["data"]["batch_size"]
samples = TensorDataset(torch.zeros(4 * batch_size, 64), torch.zeros(4 * batch_size, dtype=torch.long))
loader = DataLoader(samples, batch_size=batch_size, pin_memory=True, drop_last=True)
evaluated = TensorDataset(torch.zeros(4096, 64), torch.zeros(4096, dtype=torch.long))
held_out = DataLoader(evaluated, batch_size=4096, pin_memory=True)
model = nn.Sequential(nn.Linear(64, 2048), nn.GELU(), nn.Linear(2048, 2048), nn.GELU(), nn.Linear(2048, 10)).cuda()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)


def loss_of(rows: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Return the loss of a batch."""
    with torch.autocast("cuda", dtype=torch.bfloat16):
        return nn.functional.cross_entropy(model(rows.cuda(non_blocking=True)), labels.cuda(non_blocking=True))


for _ in range(3):
    model.train()
    for number, (rows, labels) in enumerate(loader, start=1):
        (loss_of(rows, labels) / ACCUMULATION).backward()
        if number % ACCUMULATION == 0:
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
    model.eval()
    with torch.no_grad():
        total = sum(loss_of(rows, labels) for rows, labels in held_out)
    print(float(total))
