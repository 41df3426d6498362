"""A contrastive training in stages: each has a file of its own, and is started by itself, as `train.py stage=01_easy_stage`."""

import sys
from pathlib import Path

import torch
from ruamel.yaml import YAML
from torch import nn


def read(name: str) -> dict:
    """Return what a file of the configuration says."""
    return YAML(typ="safe").load(Path(__file__).with_name("conf") / f"{name}.yaml")


config = read("config")
stage = read(f"text_curriculum/{dict(word.split('=') for word in sys.argv[1:])['stage']}")
batch_size, n_negatives, length = config["data"]["batch_size"], stage["data"]["n_negatives"], stage["data"]["length"]
encoder = nn.Sequential(nn.Embedding(1000, 64), nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64)).cuda()
optimizer = torch.optim.AdamW(encoder.parameters())
for _ in range(config["trainer"]["max_steps"]):
    for _ in range(config["trainer"]["accumulate"]):
        # Each anchor has one positive and its own negatives, which are encoded together.
        texts = torch.randint(1000, (batch_size * (2 + n_negatives), length)).cuda()
        anchors, others = encoder(texts).mean(dim=1).split([batch_size, batch_size * (1 + n_negatives)])
        scores = torch.einsum("bd,bnd->bn", anchors, others.view(batch_size, 1 + n_negatives, -1))
        target = torch.zeros(batch_size, dtype=torch.long, device="cuda")
        loss = nn.functional.cross_entropy(scores, target) / config["trainer"]["accumulate"]
        loss.backward()
    optimizer.step()
    optimizer.zero_grad()
