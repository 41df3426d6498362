"""A masked autoencoder: three quarters of the patches are left out at random, and the loss is on those."""

import torch
from torch import nn

PATCHES, PATCH, WIDTH, NARROW = 196, 768, 384, 192


class Autoencoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.places = nn.Linear(PATCH, WIDTH), nn.Parameter(torch.zeros(1, PATCHES, WIDTH))
        self.encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(WIDTH, 6, 4 * WIDTH, 0.0, batch_first=True), 4)
        self.narrow, self.mask_token = nn.Linear(WIDTH, NARROW), nn.Parameter(torch.zeros(1, 1, NARROW))
        self.decoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(NARROW, 6, 4 * NARROW, 0.0, batch_first=True), 2)
        self.head = nn.Linear(NARROW, PATCH)

    def forward(self, patches):
        x = self.embed(patches) + self.places
        n, length, width = x.shape
        keep = length // 4
        noise = torch.rand(n, length, device=x.device)
        shuffled = torch.argsort(noise, dim=1)
        restore = torch.argsort(shuffled, dim=1)
        x = torch.gather(x, 1, shuffled[:, :keep].unsqueeze(-1).repeat(1, 1, width))
        mask = torch.ones(n, length, device=x.device)
        mask[:, :keep] = 0
        mask = torch.gather(mask, 1, restore)
        x = self.narrow(self.encoder(x))
        x = torch.cat([x, self.mask_token.repeat(n, length - keep, 1)], 1)
        x = torch.gather(x, 1, restore.unsqueeze(-1).repeat(1, 1, NARROW))
        predicted = self.head(self.decoder(x))
        is_hidden = mask.bool()
        return (predicted[is_hidden] - patches[is_hidden]).square().mean()


model = Autoencoder().cuda()
optimizer = torch.optim.AdamW(model.parameters(), lr=1.5e-4, betas=(0.9, 0.95))
for step in range(5):
    patches = torch.randn(64, PATCHES, PATCH, pin_memory=True).to("cuda", non_blocking=True)
    with torch.autocast("cuda", torch.bfloat16):
        loss = model(patches)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    if not torch.isfinite(loss):
        raise SystemExit("the loss is not finite")
