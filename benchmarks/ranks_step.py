"""A GPT-2 of 124 million parameters that trains alone, in DistributedDataParallel or sharded: what `ranks.py` rehearses."""

from __future__ import annotations

import sys

import torch
from torch import nn
from torch.distributed.fsdp import fully_shard

strategy = sys.argv[1]
WIDTH, LAYERS, WORDS, TOKENS, BATCH = 768, 12, 50304, 512, 8


class Gpt(nn.Module):
    """Embeddings, blocks of torch's own, and logits."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(WORDS, WIDTH), nn.Embedding(TOKENS, WIDTH)
        block = [nn.TransformerEncoderLayer(WIDTH, 12, 4 * WIDTH, dropout=0.0, batch_first=True, norm_first=True) for _ in range(LAYERS)]
        self.blocks = nn.ModuleList(block)
        self.logits = nn.Linear(WIDTH, WORDS, bias=False)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """Return the logits of *ids*."""
        x = self.words(ids) + self.places.weight[: ids.shape[1]]
        for block in self.blocks:
            x = block(x)
        found: torch.Tensor = self.logits(x)
        return found


with torch.device("cuda"):
    model: nn.Module = Gpt()
if strategy != "alone":
    torch.distributed.init_process_group("nccl")
if strategy == "ddp":
    model = nn.parallel.DistributedDataParallel(model, device_ids=[0])
elif strategy == "fsdp":
    for layer in model.blocks:
        fully_shard(layer)
    fully_shard(model)
optimizer = torch.optim.AdamW(model.parameters())
for _ in range(3):
    ids = torch.randint(0, WORDS, (BATCH, TOKENS), device="cuda")
    with torch.autocast("cuda", dtype=torch.bfloat16):
        loss = nn.functional.cross_entropy(model(ids).flatten(0, 1), ids.flatten())
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
