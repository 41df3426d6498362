"""A classifier of timm, as its name says: autocast, channels last, labels smoothed, an average of the weights, a validation."""

import copy
import sys

import timm
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

name, batch, dtype = sys.argv[1], int(sys.argv[2]), getattr(torch, sys.argv[3])


class Images(Dataset):
    def __len__(self):
        return batch * 4

    def __getitem__(self, index):
        generator = torch.Generator().manual_seed(index)
        return torch.randn(3, 224, 224, generator=generator), int(torch.randint(0, 1000, (1,), generator=generator))


model = timm.create_model(name, num_classes=1000).cuda().to(memory_format=torch.channels_last)
average = copy.deepcopy(model).eval()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
scaler = torch.amp.GradScaler("cuda", enabled=dtype == torch.float16)
loss_of = nn.CrossEntropyLoss(label_smoothing=0.1)
for epoch in range(2):
    model.train()
    for images, labels in DataLoader(Images(), batch, num_workers=2, pin_memory=True):
        images = images.cuda(non_blocking=True).to(memory_format=torch.channels_last)
        labels = labels.cuda(non_blocking=True)
        with torch.autocast("cuda", dtype=dtype, enabled=dtype != torch.float32):
            loss = loss_of(model(images), labels)
        optimizer.zero_grad()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        with torch.no_grad():
            for ours, theirs in zip(average.parameters(), model.parameters()):
                ours.lerp_(theirs, 0.01)
    with torch.no_grad():
        right = 0
        for images, labels in DataLoader(Images(), batch, num_workers=2, pin_memory=True):
            with torch.autocast("cuda", dtype=dtype, enabled=dtype != torch.float32):
                right += (average(images.cuda().to(memory_format=torch.channels_last)).argmax(1) == labels.cuda()).sum().item()
    print(epoch, loss.item(), right)
