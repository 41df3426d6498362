"""A diffusion model of pixels: a U-Net with attention in 2-D, times embedded, an average of the weights, samples at the end."""

import copy
import math

import torch
from torch import nn
from torch.nn import functional as F


class Residual(nn.Module):
    def __init__(self, inner, outer, times):
        super().__init__()
        self.first = nn.Sequential(nn.GroupNorm(8, inner), nn.SiLU(), nn.Conv2d(inner, outer, 3, padding=1))
        self.time = nn.Linear(times, outer)
        self.second = nn.Sequential(nn.GroupNorm(8, outer), nn.SiLU(), nn.Dropout(0.1), nn.Conv2d(outer, outer, 3, padding=1))
        self.skip = nn.Conv2d(inner, outer, 1) if inner != outer else nn.Identity()

    def forward(self, x, t):
        return self.skip(x) + self.second(self.first(x) + self.time(t)[:, :, None, None])


class Attention(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm, self.qkv, self.out = nn.GroupNorm(8, width), nn.Conv2d(width, 3 * width, 1), nn.Conv2d(width, width, 1)

    def forward(self, x):
        batch, width, height, across = x.shape
        q, k, v = (each.view(batch, 4, width // 4, -1).transpose(2, 3) for each in self.qkv(self.norm(x)).chunk(3, 1))
        return x + self.out(F.scaled_dot_product_attention(q, k, v).transpose(2, 3).reshape(batch, width, height, across))


class UNet(nn.Module):
    def __init__(self, width=64):
        super().__init__()
        self.times = nn.Sequential(nn.Linear(width, 4 * width), nn.SiLU(), nn.Linear(4 * width, 4 * width))
        self.begin, self.end = nn.Conv2d(3, width, 3, padding=1), nn.Conv2d(width, 3, 3, padding=1)
        self.down = nn.ModuleList([Residual(width, width, 4 * width), Residual(width, 2 * width, 4 * width)])
        self.middle = nn.ModuleList([Residual(2 * width, 2 * width, 4 * width), Attention(2 * width)])
        self.up = nn.ModuleList([Residual(4 * width, width, 4 * width), Residual(2 * width, width, 4 * width)])
        self.width = width

    def forward(self, x, t):
        angles = t[:, None] * torch.exp(torch.arange(self.width // 2, device=x.device) * (-math.log(10_000) / (self.width // 2)))
        t = self.times(torch.cat([angles.sin(), angles.cos()], 1))
        x = self.begin(x)
        kept = []
        for block in self.down:
            x = block(x, t)
            kept.append(x)
            x = F.avg_pool2d(x, 2)
        x = self.middle[1](self.middle[0](x, t))
        for block in self.up:
            x = block(torch.cat([F.interpolate(x, scale_factor=2), kept.pop()], 1), t)
        return self.end(x)


model = UNet().cuda()
average = copy.deepcopy(model).eval().requires_grad_(False)
optimizer = torch.optim.Adam(model.parameters(), lr=2e-4)
kept = torch.linspace(1, 0.01, 1000, device="cuda")
for step in range(6):
    images = torch.rand(32, 3, 64, 64).cuda() * 2 - 1
    t, noise = torch.randint(0, 1000, (32,), device="cuda"), torch.randn_like(images)
    share = kept[t][:, None, None, None]
    loss = F.mse_loss(model(share.sqrt() * images + (1 - share).sqrt() * noise, t.float()), noise)
    optimizer.zero_grad()
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    for ours, theirs in zip(average.parameters(), model.parameters()):
        ours.lerp_(theirs, 0.001)
    print(step, loss.item())
with torch.no_grad():
    x = torch.randn(64, 3, 64, 64, device="cuda")
    for t in range(999, 0, -100):
        x = x - 0.1 * average(x, torch.full((64,), float(t), device="cuda"))
    print(x.abs().mean().item())
