"""A training with a configuration of its own, which no layout of memplan's knows."""

import sys
from pathlib import Path

import torch
from ruamel.yaml import YAML
from torch import nn

config = YAML(typ="safe").load(Path(sys.argv[1]))
batch_size, length = config["data"]["batch_size"], config["data"]["length"]
layer = nn.TransformerEncoderLayer(512, 8, 2048, batch_first=True, activation="gelu")
model = nn.Sequential(nn.Embedding(32_000, 512), nn.TransformerEncoder(layer, 6), nn.Linear(512, 10)).cuda()
optimizer = torch.optim.AdamW(model.parameters())
for _ in range(config["trainer"]["max_steps"]):
    for _ in range(config["trainer"]["accumulate"]):
        tokens = torch.randint(32_000, (batch_size, length)).cuda()
        labels = torch.randint(10, (batch_size,)).cuda()
        loss = nn.functional.cross_entropy(model(tokens).mean(dim=1), labels) / config["trainer"]["accumulate"]
        loss.backward()
    optimizer.step()
    optimizer.zero_grad()
