"""The same training with habits that cost something: each line with one says which."""

import sys
from pathlib import Path

import torch
from ruamel.yaml import YAML
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

ACCUMULATION = 2

batch_size = YAML(typ="safe").load(Path(sys.argv[1]))["data"]["batch_size"] // 2  # batch-size-overridden
samples = TensorDataset(torch.zeros(5 * batch_size, 64), torch.zeros(5 * batch_size, dtype=torch.long))
loader = DataLoader(samples, batch_size=batch_size)
evaluated = TensorDataset(torch.zeros(4096, 64), torch.zeros(4096, dtype=torch.long))
held_out = DataLoader(evaluated, batch_size=4096)
model = nn.Sequential(nn.Linear(64, 2048), nn.GELU(), nn.Linear(2048, 2048), nn.GELU(), nn.Linear(2048, 10)).cuda()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
scaler = torch.amp.GradScaler("cuda")


def loss_of(rows: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Return the loss of a batch."""
    with torch.autocast("cuda", dtype=torch.float16):  # precision
        rows = rows.cuda(non_blocking=True)  # non-blocking-unpinned
        return nn.functional.cross_entropy(model(rows), labels.cuda())  # evaluation-with-gradient


for _ in range(3):
    model.train()
    optimizer.zero_grad(set_to_none=False)  # dropped-accumulation
    for number, (rows, labels) in enumerate(loader, start=1):
        loss = loss_of(rows, labels) / ACCUMULATION
        scaler.scale(loss).backward()
        if number % ACCUMULATION == 0:
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)  # clip-before-unscale
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad(set_to_none=False)  # set-to-none
            torch.cuda.empty_cache()  # empty-cache
            print(loss.item())  # item-in-loop
    model.eval()
    total = sum(loss_of(rows, labels).detach() for rows, labels in held_out)
    print(float(total))
