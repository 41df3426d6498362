"""WGAN-GP: five critic steps for each of the generator's, a penalty on the gradient of the critic."""

import torch
from torch import nn

LATENT, BATCH, N_CRITIC = 128, 64, 5
generator = nn.Sequential(
    nn.ConvTranspose2d(LATENT, 256, 4, 1, 0),
    nn.BatchNorm2d(256),
    nn.ReLU(),
    nn.ConvTranspose2d(256, 128, 4, 2, 1),
    nn.BatchNorm2d(128),
    nn.ReLU(),
    nn.ConvTranspose2d(128, 64, 4, 2, 1),
    nn.BatchNorm2d(64),
    nn.ReLU(),
    nn.ConvTranspose2d(64, 3, 4, 2, 1),
    nn.Tanh(),
).cuda()
critic = nn.Sequential(
    nn.Conv2d(3, 64, 4, 2, 1),
    nn.LeakyReLU(0.2),
    nn.Conv2d(64, 128, 4, 2, 1),
    nn.LeakyReLU(0.2),
    nn.Conv2d(128, 256, 4, 2, 1),
    nn.LeakyReLU(0.2),
    nn.Conv2d(256, 1, 4, 1, 0),
).cuda()
of_generator = torch.optim.Adam(generator.parameters(), lr=1e-4, betas=(0.0, 0.9))
of_critic = torch.optim.Adam(critic.parameters(), lr=1e-4, betas=(0.0, 0.9))
for iteration in range(20):
    real = torch.rand(BATCH, 3, 32, 32).cuda() * 2 - 1
    fake = generator(torch.randn(BATCH, LATENT, 1, 1, device="cuda")).detach()
    share = torch.rand(BATCH, 1, 1, 1, device="cuda")
    between = (share * real + (1 - share) * fake).requires_grad_(True)
    score = critic(between)
    (gradient,) = torch.autograd.grad(score, between, torch.ones_like(score), create_graph=True)
    penalty = (gradient.flatten(1).norm(2, dim=1) - 1).square().mean()
    loss = critic(fake).mean() - critic(real).mean() + 10 * penalty
    of_critic.zero_grad()
    loss.backward()
    of_critic.step()
    if (iteration + 1) % N_CRITIC == 0:
        of_generator.zero_grad()
        (-critic(generator(torch.randn(BATCH, LATENT, 1, 1, device="cuda"))).mean()).backward()
        of_generator.step()
        print(iteration, loss.item())
