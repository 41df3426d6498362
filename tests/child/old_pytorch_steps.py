"""A small program that every PyTorch from 2.1 on runs: a convolution, a transformer layer and AdamW, in fp32."""

import torch
from torch import nn
from torch.nn import functional


class Layer(nn.Module):
    """Attention and two linear layers, each normalised first and added to what came in."""

    def __init__(self, width, heads):
        super().__init__()
        self.heads = heads
        self.attention_norm, self.norm = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.output = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, width, bias=False)
        self.up, self.down = nn.Linear(width, 4 * width, bias=False), nn.Linear(4 * width, width, bias=False)

    def forward(self, x):
        batch, tokens, width = x.shape
        query, key, value = self.qkv(self.attention_norm(x)).view(batch, tokens, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        gathered = functional.scaled_dot_product_attention(query, key, value)
        x = x + self.output(gathered.transpose(1, 2).reshape(batch, tokens, width))
        return x + self.down(functional.gelu(self.up(self.norm(x))))


def build(device, batch=64, width=512, heads=8):
    patches = nn.Conv2d(3, width, 8, stride=8, bias=False).to(device)
    layer = Layer(width, heads).to(device)
    update = torch.optim.AdamW([*patches.parameters(), *layer.parameters()])
    images = torch.randn(batch, 3, 128, 128, device=device)

    def step():
        layer(patches(images).flatten(2).transpose(1, 2)).square().mean().backward()
        update.step()
        update.zero_grad()

    return step


if __name__ == "__main__":
    train = build("cuda")
    for _ in range(10):
        train()
