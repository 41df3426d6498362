"""A language model of 1.3 billion parameters, sharded over all GPUs: `torchrun --nproc-per-node 8 train.py`."""

import argparse
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard


class Block(nn.Module):
    """One layer: attention and a feed-forward network, each beside what it gets."""

    def __init__(self, width: int, num_heads: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.norms = nn.ModuleList([nn.LayerNorm(width) for _ in range(2)])
        self.heads, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.feed_forward = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return the states of the tokens, of the same shape."""
        heads = self.heads(self.norms[0](hidden)).unflatten(-1, (3, self.num_heads, -1)).permute(2, 0, 3, 1, 4)
        attended = nn.functional.scaled_dot_product_attention(*heads, is_causal=True)
        hidden = hidden + self.out(attended.transpose(1, 2).flatten(2))
        return hidden + self.feed_forward(self.norms[1](hidden))


class Model(nn.Module):
    """24 layers of 2048, a vocabulary of 50,304."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(50_304, 2048)
        self.layers = nn.ModuleList([Block(2048, 16) for _ in range(24)])
        self.head = nn.Linear(2048, 50_304, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return the loss of guessing each next token."""
        hidden = self.tokens(tokens)
        for layer in self.layers:
            hidden = layer(hidden)
        return nn.functional.cross_entropy(self.head(hidden[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())


parser = argparse.ArgumentParser()
parser.add_argument("--batch", type=int, default=2)
options = parser.parse_args()

dist.init_process_group("nccl")
torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
with torch.device("meta"):
    model = Model()
precision = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
for layer in model.layers:
    fully_shard(layer, mp_policy=precision)
fully_shard(model, mp_policy=precision)
model.to_empty(device="cuda")
update = torch.optim.AdamW(model.parameters())
for _ in range(3):
    model(torch.randint(50_304, (options.batch, 2048), device="cuda")).backward()
    update.step()
    update.zero_grad()
dist.destroy_process_group()
