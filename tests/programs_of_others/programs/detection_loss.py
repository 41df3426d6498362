"""A one-stage detector's loss: targets as rows (image, class, box), assigned to cells and anchors; the numbers of matches are data."""

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, Dataset

SIZE, CLASSES, STRIDES, BATCH = 256, 20, (8, 16, 32), 16
ANCHORS = torch.tensor([[[10.0, 13], [16, 30], [33, 23]], [[30, 61], [62, 45], [59, 119]], [[116, 90], [156, 198], [373, 326]]])


class Boxes(Dataset):
    def __len__(self):
        return 160

    def __getitem__(self, index):
        generator = torch.Generator().manual_seed(index)
        count = int(torch.randint(0, 12, (1,), generator=generator))
        rows = torch.cat([torch.randint(0, CLASSES, (count, 1), generator=generator), torch.rand(count, 4, generator=generator)], 1)
        return torch.rand(3, SIZE, SIZE, generator=generator), rows


def collate(samples):
    images, rows = zip(*samples)
    return torch.stack(images), torch.cat([F.pad(row, (1, 0), value=number) for number, row in enumerate(rows)])


class Detector(nn.Module):
    def __init__(self):
        super().__init__()
        widths = (3, 32, 64, 128, 256, 512)
        self.stem = nn.ModuleList(
            nn.Sequential(nn.Conv2d(a, b, 3, 2, 1, bias=False), nn.BatchNorm2d(b), nn.SiLU()) for a, b in zip(widths, widths[1:])
        )
        self.heads = nn.ModuleList(nn.Conv2d(width, 3 * (5 + CLASSES), 1) for width in widths[3:])
        self.register_buffer("anchors", ANCHORS / torch.tensor(STRIDES).view(3, 1, 1))

    def forward(self, x):
        found = []
        for layer in self.stem:
            x = layer(x)
            found.append(x)
        return [
            head(y).view(y.size(0), 3, 5 + CLASSES, y.size(2), y.size(3)).permute(0, 1, 3, 4, 2) for head, y in zip(self.heads, found[2:])
        ]


def assign(predictions, targets, anchors):
    """Return for each level what is to be found where, as box, class and indices."""
    count = targets.shape[0]
    numbers = torch.arange(3, device=targets.device).float().view(3, 1).repeat(1, count)
    rows = torch.cat((targets.repeat(3, 1, 1), numbers[..., None]), 2)
    near = torch.tensor([[0, 0], [1, 0], [0, 1], [-1, 0], [0, -1]], device=targets.device).float() * 0.5
    for level, prediction in enumerate(predictions):
        grid = torch.tensor(prediction.shape, device=targets.device)[[3, 2, 3, 2]].float()
        t = rows.clone()
        t[..., 2:6] *= grid
        ratio = t[..., 4:6] / anchors[level][:, None]
        t = t[torch.max(ratio, 1 / ratio).max(2)[0] < 4]
        if t.shape[0]:
            xy = t[:, 2:4]
            inverse = grid[[0, 1]] - xy
            j, k = ((xy % 1 < 0.5) & (xy > 1)).T
            l, m = ((inverse % 1 < 0.5) & (inverse > 1)).T
            chosen = torch.stack((torch.ones_like(j), j, k, l, m))
            t = t.repeat((5, 1, 1))[chosen]
            offsets = (torch.zeros_like(xy)[None] + near[:, None])[chosen]
        else:
            t, offsets = targets.new_zeros(0, 7), 0
        image, kind, anchor = t[:, 0].long(), t[:, 1].long(), t[:, 6].long()
        cell = (t[:, 2:4] - offsets).long()
        x, y = cell.T
        x, y = x.clamp(0, prediction.shape[3] - 1), y.clamp(0, prediction.shape[2] - 1)
        yield image, anchor, y, x, torch.cat((t[:, 2:4] - cell, t[:, 4:6]), 1), kind


def loss_of(predictions, targets, anchors):
    total = torch.zeros(1, device=targets.device)
    for prediction, (image, anchor, y, x, box, kind) in zip(predictions, assign(predictions, targets, anchors)):
        objects = torch.zeros_like(prediction[..., 0])
        count = image.shape[0]
        if count:
            found = prediction[image, anchor, y, x]
            total = total + F.smooth_l1_loss(found[:, :2].sigmoid() * 2 - 0.5, box[:, :2])
            objects[image, anchor, y, x] = 1.0
            one_hot = torch.zeros_like(found[:, 5:])
            one_hot[range(count), kind] = 1.0
            total = total + F.binary_cross_entropy_with_logits(found[:, 5:], one_hot)
        total = total + F.binary_cross_entropy_with_logits(prediction[..., 4], objects)
    return total


model = Detector().cuda()
optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.937, nesterov=True)
scaler = torch.amp.GradScaler("cuda")
for images, targets in DataLoader(Boxes(), BATCH, collate_fn=collate, num_workers=0):
    images, targets = images.to("cuda", non_blocking=True), targets.to("cuda")
    with torch.amp.autocast("cuda"):
        loss = loss_of(model(images), targets, model.anchors)
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad()
    print(f"{len(targets)} boxes, loss {loss.item():.3f}")
