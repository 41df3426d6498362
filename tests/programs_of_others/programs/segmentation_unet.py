"""A U-Net for segmentation with a void class, a loss on the pixels that count, Dice, channels_last and a validation pass each epoch."""

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


def twice(inner, outer):
    return nn.Sequential(
        nn.Conv2d(inner, outer, 3, padding=1),
        nn.BatchNorm2d(outer),
        nn.ReLU(inplace=True),
        nn.Conv2d(outer, outer, 3, padding=1),
        nn.BatchNorm2d(outer),
        nn.ReLU(inplace=True),
    )


class UNet(nn.Module):
    def __init__(self, widths=(32, 64, 128), classes=21):
        super().__init__()
        self.down = nn.ModuleList(twice(a, b) for a, b in zip((3, *widths), widths))
        self.up = nn.ModuleList(nn.ConvTranspose2d(b, a, 2, stride=2) for a, b in zip(widths, widths[1:]))
        self.joined = nn.ModuleList(twice(2 * a, a) for a in widths[:-1])
        self.head = nn.Conv2d(widths[0], classes, 1)

    def forward(self, x):
        kept = []
        for level in self.down[:-1]:
            x = level(x)
            kept.append(x)
            x = F.max_pool2d(x, 2)
        x = self.down[-1](x)
        for up, joined, skip in zip(reversed(self.up), reversed(self.joined), reversed(kept)):
            x = joined(torch.cat([up(x), skip], 1))
        return self.head(x)


images = torch.randn(64, 3, 128, 128)
masks = torch.randint(0, 21, (64, 128, 128))
masks[:, :32] = 255  # a quarter of each is void
train, held_out = DataLoader(TensorDataset(images, masks), batch_size=16, shuffle=True), DataLoader(TensorDataset(images, masks), 16)
model = UNet().cuda().to(memory_format=torch.channels_last)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9, weight_decay=1e-4)
schedule = torch.optim.lr_scheduler.PolynomialLR(optimizer, total_iters=100)
for epoch in range(2):
    model.train()
    for image, mask in train:
        image, mask = image.cuda(non_blocking=True).to(memory_format=torch.channels_last), mask.cuda(non_blocking=True)
        logits = model(image)
        counts = mask != 255
        pixels = logits.permute(0, 2, 3, 1)[counts]
        truth = mask[counts]
        loss = F.cross_entropy(pixels, truth)
        for number in torch.unique(truth).tolist():
            loss = loss + 0.01 * (1 - pixels.softmax(-1)[:, number][truth == number].mean())
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        optimizer.step()
        schedule.step()
    model.eval()
    confusion = torch.zeros(21, 21, dtype=torch.int64, device="cuda")
    with torch.no_grad():
        for image, mask in held_out:
            predicted = model(image.cuda()).argmax(1)
            mask = mask.cuda()
            valid = mask < 21
            confusion += torch.bincount(21 * mask[valid] + predicted[valid], minlength=441).reshape(21, 21)
    iou = confusion.diag() / (confusion.sum(0) + confusion.sum(1) - confusion.diag()).clamp(min=1)
    print(f"epoch {epoch}: mIoU {iou.mean().item():.3f}")
