"""Accelerate's loop: prepare, accumulate, gather_for_metrics, a progress that only the main process shows."""

import torch
from accelerate import Accelerator
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

accelerator = Accelerator(gradient_accumulation_steps=2)
model = nn.Sequential(nn.Linear(512, 2048), nn.ReLU(), nn.Linear(2048, 2048), nn.ReLU(), nn.Linear(2048, 10))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)
data = TensorDataset(torch.randn(1024, 512), torch.randint(0, 10, (1024,)))
model, optimizer, loader, schedule = accelerator.prepare(model, optimizer, DataLoader(data, 64, shuffle=True), schedule)
for epoch in range(2):
    right = seen = 0
    for x, y in loader:
        with accelerator.accumulate(model):
            logits = model(x)
            loss = nn.functional.cross_entropy(logits, y)
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
        guesses, truth = accelerator.gather_for_metrics((logits.argmax(-1), y))
        right += (guesses == truth).sum().item()
        seen += len(truth)
    accelerator.print(f"{epoch}: {right / seen:.3f}")
