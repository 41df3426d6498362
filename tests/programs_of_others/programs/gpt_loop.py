"""A GPT trained as small teaching repositories do: memory-mapped tokens, autocast, accumulation, clipping, a loss printed every step."""

import math
import sys

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

BLOCK, BATCH, ACCUMULATION, VOCAB, WIDTH, LAYERS, HEADS = 256, 8, 4, 8192, 384, 6, 6


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.before_attention, self.before_mlp = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))

    def forward(self, x):
        b, t, c = x.shape
        q, k, v = (part.view(b, t, HEADS, c // HEADS).transpose(1, 2) for part in self.qkv(self.before_attention(x)).split(c, dim=2))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(y.transpose(1, 2).reshape(b, t, c))
        return x + self.mlp(self.before_mlp(x))


class GPT(nn.Module):
    def __init__(self):
        super().__init__()
        self.tokens, self.places = nn.Embedding(VOCAB, WIDTH), nn.Embedding(BLOCK, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))
        self.last = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCAB, bias=False)
        self.head.weight = self.tokens.weight

    def forward(self, tokens, targets):
        x = self.tokens(tokens) + self.places(torch.arange(tokens.size(1), device=tokens.device))
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.last(x))
        return F.cross_entropy(logits.view(-1, VOCAB), targets.view(-1), ignore_index=-1)


def main():
    rng = np.random.default_rng(0)
    data = rng.integers(0, VOCAB, 100_000).astype(np.uint16)

    def batch():
        starts = torch.randint(len(data) - BLOCK, (BATCH,))
        x = torch.stack([torch.from_numpy(data[i : i + BLOCK].astype(np.int64)) for i in starts])
        y = torch.stack([torch.from_numpy(data[i + 1 : i + 1 + BLOCK].astype(np.int64)) for i in starts])
        return x.pin_memory().to("cuda", non_blocking=True), y.pin_memory().to("cuda", non_blocking=True)

    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}[sys.argv[1]]
    model = GPT().cuda()
    decayed = [p for p in model.parameters() if p.dim() >= 2]
    others = [p for p in model.parameters() if p.dim() < 2]
    groups = [{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=6e-4, betas=(0.9, 0.95), fused=True)
    scaler = torch.amp.GradScaler("cuda", enabled=dtype == torch.float16)
    x, y = batch()
    best = math.inf
    for iteration in range(20):
        for group in optimizer.param_groups:
            group["lr"] = 6e-4 * 0.5 * (1 + math.cos(math.pi * iteration / 20))
        for _ in range(ACCUMULATION):
            with torch.amp.autocast("cuda", dtype=dtype):
                loss = model(x, y) / ACCUMULATION
            x, y = batch()
            scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad(set_to_none=True)
        best = min(best, loss.item() * ACCUMULATION)
        print(f"iter {iteration}: loss {loss.item():.4f}, best {best:.4f}")


main()
