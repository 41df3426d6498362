"""A training that is planned through its own command: a network of two layers, its batch from a file or from the command line."""

import json
import sys
from pathlib import Path

import torch
from torch import nn


def main(batch_size: int, accumulate: int, num_samples: int, features: int) -> None:
    """Train for a few optimizer steps; the last samples that fill no batch are left out."""
    assert batch_size != 3, "a batch of 3 is odd"
    model = nn.Sequential(nn.Linear(features, 2 * features), nn.ReLU(), nn.Linear(2 * features, features)).cuda()
    optimizer = torch.optim.AdamW(model.parameters())
    data = torch.randn(1, 64, features).expand(num_samples, 64, features)
    for step in range(4):
        for _ in range(accumulate):
            batch = data[:batch_size].cuda()
            model(batch).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        print(f"step {step}")


if __name__ == "__main__":
    if sys.argv[1].endswith(".json"):
        configuration = json.loads(Path(sys.argv[1]).read_text())
        main(configuration["batch_size"], configuration["accumulate"], 100_000, 1024)
    else:
        main(*map(int, sys.argv[1:]))


def build(device: str, batch: int = 8, features: int = 1024, accumulation: int = 1):
    """Make the same step for a rehearsal of a function."""
    model = nn.Sequential(nn.Linear(features, 2 * features), nn.ReLU(), nn.Linear(2 * features, features)).to(device)
    optimizer = torch.optim.AdamW(model.parameters())

    def step() -> None:
        for _ in range(accumulation):
            model(torch.randn(batch, 64, features, device=device)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    return step
