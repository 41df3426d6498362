"""Losses that factorize matrices: a whitening by Cholesky, a spectral penalty by SVD, a covariance by eigh, solves, FFTs."""

import torch
from torch import nn

model = nn.Sequential(nn.Linear(256, 512), nn.GELU(), nn.Linear(512, 256)).cuda()
optimizer = torch.optim.Adam(model.parameters())
for step in range(4):
    y = model(torch.randn(1024, 256, device="cuda"))
    y = y - y.mean(0)
    covariance = y.T @ y / len(y) + 0.1 * torch.eye(256, device="cuda")
    factor = torch.linalg.cholesky(covariance)
    white = torch.linalg.solve_triangular(factor, y.T, upper=False).T
    spectrum = torch.linalg.svdvals(model[0].weight)
    values = torch.linalg.eigvalsh(covariance)
    solved = torch.linalg.solve(covariance, y.T).T
    directions = torch.linalg.qr(y)[0]
    waves = torch.fft.rfft2(y.view(1024, 16, 16)).abs()
    loss = white.square().mean() + spectrum.max() + values.log().mean() + solved.square().mean() + directions.sum() + waves.mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    print(step, loss.item())
