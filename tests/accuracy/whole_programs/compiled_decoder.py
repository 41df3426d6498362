"""A small decoder under torch.compile, in the mode named: with reduce-overhead it keeps CUDA graphs."""

import sys

import torch
from torch import nn
from torch.nn import functional


class Block(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.heads = heads
        self.norms = nn.ModuleList([nn.LayerNorm(width), nn.LayerNorm(width)])
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x):
        batch, length, width = x.shape
        q, k, v = (each.view(batch, length, self.heads, -1).transpose(1, 2) for each in self.qkv(self.norms[0](x)).chunk(3, -1))
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(batch, length, width)
        x = x + self.out(mixed)
        return x + self.mlp(self.norms[1](x))


class Decoder(nn.Module):
    def __init__(self, width=512, layers=4):
        super().__init__()
        self.tokens, self.places = nn.Embedding(16_000, width), nn.Embedding(512, width)
        self.blocks = nn.ModuleList(Block(width, 8) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 16_000, bias=False)

    def forward(self, ids, targets):
        x = self.tokens(ids) + self.places(torch.arange(ids.shape[1], device=ids.device))
        for block in self.blocks:
            x = block(x)
        return functional.cross_entropy(self.head(self.norm(x)).flatten(0, 1), targets.flatten())


model = Decoder().cuda()
compiled = torch.compile(model, mode=sys.argv[1])
optimizer = torch.optim.AdamW(model.parameters(), fused=True)
for step in range(6):
    ids = torch.randint(0, 16_000, (16, 513)).cuda()
    with torch.autocast("cuda", dtype=torch.bfloat16):
        loss = compiled(ids[:, :-1].contiguous(), ids[:, 1:].contiguous())
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    print(step, loss.item())
