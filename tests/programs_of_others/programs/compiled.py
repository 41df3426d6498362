"""torch.compile on a residual network of linear layers, fused AdamW, a validation of another batch size."""

import torch
from torch import nn


class Residual(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm, self.inner, self.outer = nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x):
        return x + self.outer(nn.functional.gelu(self.inner(self.norm(x))))


model = nn.Sequential(*[Residual(512) for _ in range(2)]).cuda()
compiled = torch.compile(model)
optimizer = torch.optim.AdamW(model.parameters(), fused=True)
for step in range(4):
    x = torch.randn(2048, 512, device="cuda")
    with torch.autocast("cuda", dtype=torch.bfloat16):
        loss = compiled(x).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    print(step, loss.item())
