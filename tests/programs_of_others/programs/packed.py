"""Sequences of several lengths, packed one behind the other: no padding is computed, attention stays within each, cu_seqlens say where."""

import torch
import torch.nn.functional as F
from torch import nn

VOCAB, WIDTH, HEADS = 8000, 256, 4


class Packed(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.places = nn.Embedding(VOCAB, WIDTH), nn.Embedding(512, WIDTH)
        self.qkv, self.out, self.head = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, VOCAB)

    def forward(self, tokens, lengths):
        ends = F.pad(lengths.cumsum(0), (1, 0))
        document = torch.repeat_interleave(torch.arange(len(lengths), device=tokens.device), lengths)
        place = torch.arange(len(tokens), device=tokens.device) - ends[document]
        x = self.embed(tokens) + self.places(place)
        q, k, v = self.qkv(x).view(-1, 3, HEADS, WIDTH // HEADS).permute(1, 2, 0, 3)
        parts = [
            F.scaled_dot_product_attention(q[:, a:b], k[:, a:b], v[:, a:b], is_causal=True)
            for a, b in zip(ends[:-1].tolist(), ends[1:].tolist())
        ]
        return self.head(x + self.out(torch.cat(parts, 1).transpose(0, 1).reshape(-1, WIDTH)))


generator = torch.Generator().manual_seed(0)
model = Packed().cuda()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
for step in range(5):
    lengths = torch.randint(50, 512, (16,), generator=generator)
    padded = torch.zeros(16, int(lengths.max()), dtype=torch.int64)
    for row, length in enumerate(lengths.tolist()):
        padded[row, :length] = torch.randint(1, VOCAB, (length,), generator=generator)
    padded = padded.cuda()
    mask = padded != 0
    lengths = mask.sum(1)
    tokens = padded[mask]
    logits = model(tokens, lengths)
    targets = tokens.roll(-1)
    targets[lengths.cumsum(0) - 1] = -100
    loss = F.cross_entropy(logits, targets, ignore_index=-100, reduction="sum") / (targets != -100).sum()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    print(f"{step}: {tokens.numel()} tokens, {loss.item():.3f}")
