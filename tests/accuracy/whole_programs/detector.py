"""Faster R-CNN or Mask R-CNN of torchvision: images of several sizes, as many boxes as the data say, proposals as many as survive."""

import sys

import torch
from torch.utils.data import DataLoader, Dataset
from torchvision.models import detection


class Scenes(Dataset):
    def __len__(self):
        return 16

    def __getitem__(self, index):
        generator = torch.Generator().manual_seed(index)
        height, width, count = (int(torch.randint(low, high, (1,), generator=generator)) for low, high in ((300, 500), (300, 500), (1, 9)))
        corners = torch.rand(count, 2, generator=generator) * 200
        boxes = torch.cat([corners, corners + 20 + 80 * torch.rand(count, 2, generator=generator)], 1)
        labels = torch.randint(1, 21, (count,), generator=generator)
        masks = torch.zeros(count, height, width, dtype=torch.uint8)
        for mask, (left, top, right, bottom) in zip(masks, boxes.long().tolist()):
            mask[top:bottom, left:right] = 1
        return torch.rand(3, height, width, generator=generator), {"boxes": boxes, "labels": labels, "masks": masks}


model = getattr(detection, sys.argv[1])(weights=None, weights_backbone=None, num_classes=21, min_size=480, max_size=640).cuda()
optimizer = torch.optim.SGD([each for each in model.parameters() if each.requires_grad], lr=0.001, momentum=0.9)
for epoch in range(2):
    model.train()
    for images, targets in DataLoader(Scenes(), 4, collate_fn=lambda samples: tuple(zip(*samples))):
        losses = model([image.cuda() for image in images], [{key: value.cuda() for key, value in each.items()} for each in targets])
        loss = sum(losses.values())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    print(epoch, loss.item())
