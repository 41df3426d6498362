"""
Pose estimation: a residual network and three deconvolutions give a heatmap for each joint of a person (Xiao et al. 2018, "Simple baselines
for human pose estimation and tracking", https://arxiv.org/abs/1804.06208). Plain PyTorch, with the sizes of ResNet-50.

Plan it with `memplan --gpu rtx3060 --pin size=224 pose.py:build`. What memplan varies are the arguments of `build`.
"""

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional

JOINTS = 17
"""Those of COCO."""


class Bottleneck(nn.Module):
    """A block of ResNet-50: to a quarter of its channels, 3×3, and back, beside a shortcut."""

    def __init__(self, channels: int, width: int, stride: int) -> None:
        super().__init__()
        self.branch = nn.Sequential(
            *convolution(channels, width, 1),
            nn.ReLU(inplace=True),
            *convolution(width, width, 3, stride),
            nn.ReLU(inplace=True),
            *convolution(width, 4 * width, 1),
        )
        is_same = stride == 1 and channels == 4 * width
        self.shortcut = nn.Identity() if is_same else nn.Sequential(*convolution(channels, 4 * width, 1, stride))

    def forward(self, x: Tensor) -> Tensor:
        """Return what both make of *x*."""
        return functional.relu(self.branch(x) + self.shortcut(x), inplace=True)


def convolution(channels: int, width: int, kernel: int, stride: int = 1) -> tuple[nn.Module, nn.Module]:
    """Return a convolution that keeps the sides (but for its stride), and its normalization."""
    return nn.Conv2d(channels, width, kernel, stride, padding=kernel // 2, bias=False), nn.BatchNorm2d(width)


def pose_network() -> nn.Sequential:
    """Return the network: images of any side that is a multiple of 32, heatmaps of a quarter of it."""
    layers: list[nn.Module] = [*convolution(3, 64, 7, 2), nn.ReLU(inplace=True), nn.MaxPool2d(3, 2, padding=1)]
    channels = 64
    for width, blocks in ((64, 3), (128, 4), (256, 6), (512, 3)):
        for block in range(blocks):
            layers.append(Bottleneck(channels, width, stride=2 if width > 64 and block == 0 else 1))
            channels = 4 * width
    for _ in range(3):
        layers += [nn.ConvTranspose2d(channels, 256, 4, 2, padding=1, bias=False), nn.BatchNorm2d(256), nn.ReLU(inplace=True)]
        channels = 256
    return nn.Sequential(*layers, nn.Conv2d(channels, JOINTS, 1))


def build(device: str, batch: int = 32, size: int = 256, accumulation: int = 1) -> Callable[[], None]:
    """Return what runs one step: images of *size* × *size*, mixed precision in fp16, Adam."""
    model = pose_network().to(device)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    scaler = torch.amp.GradScaler(device)

    def step() -> None:
        for _ in range(accumulation):
            images = torch.rand(batch, 3, size, size, device=device)
            heatmaps = torch.rand(batch, JOINTS, size // 4, size // 4, device=device)
            with torch.autocast(device, dtype=torch.float16):
                loss = functional.mse_loss(model(images), heatmaps) / accumulation
            scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()

    return step
