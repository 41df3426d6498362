"""L-BFGS on an image: the closure is called until it converges, and stops when the numbers say so."""

import torch
from torch import nn

features = (
    nn.Sequential(nn.Conv2d(3, 32, 3, padding=1), nn.ReLU(), nn.Conv2d(32, 64, 3, 2, 1), nn.ReLU()).cuda().eval().requires_grad_(False)
)
content, style = torch.rand(1, 3, 256, 256).cuda(), torch.rand(1, 3, 256, 256).cuda()


def gram(x):
    x = x.flatten(2)
    return x @ x.transpose(1, 2) / x.numel()


wanted, wanted_style = features(content), gram(features(style))
image = content.clone().requires_grad_(True)
optimizer = torch.optim.LBFGS([image], lr=1.0, max_iter=10, history_size=20, line_search_fn="strong_wolfe")
for step in range(4):

    def closure():
        with torch.no_grad():
            image.clamp_(0, 1)
        optimizer.zero_grad()
        found = features(image)
        loss = (found - wanted).square().mean() + 1e4 * (gram(found) - wanted_style).square().sum()
        loss.backward()
        return loss

    print(step, optimizer.step(closure).item())
