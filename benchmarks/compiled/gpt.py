"""Three steps of a GPT-2 of 124 million parameters in bf16 autocast, compiled by Inductor in its default mode."""

import sys

import torch
from torch import nn
from torch.nn import functional

WIDTH, HEADS, LAYERS, TOKENS, BATCH = 768, 12, 12, 1024, 4
VOCABULARY = int(sys.argv[1]) if len(sys.argv) > 1 else 50304


class Block(nn.Module):
    """Attention and a feed-forward network, each behind a layer norm."""

    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(2))
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return *x* with both added."""
        parts = self.qkv(self.norms[0](x)).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        mixed = functional.scaled_dot_product_attention(*parts, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        return x + self.down(functional.gelu(self.up(self.norms[1](x))))


class Gpt(nn.Module):
    """The model, whose head has the weights of its embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(TOKENS, WIDTH)
        self.blocks = nn.Sequential(*(Block() for _ in range(LAYERS)))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.head.weight = self.words.weight

    def forward(self, words: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """Return the loss."""
        x = self.words(words) + self.places.weight
        return functional.cross_entropy(self.head(self.norm(self.blocks(x))).flatten(0, 1), targets.flatten())


model = Gpt().cuda()
optimizer = torch.optim.AdamW(model.parameters(), fused=True)
compiled = torch.compile(model)
for _ in range(3):
    words, targets = (torch.randint(VOCABULARY, (BATCH, TOKENS)).cuda() for _ in range(2))
    with torch.autocast("cuda", dtype=torch.bfloat16):
        loss = compiled(words, targets)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
print(torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved())
