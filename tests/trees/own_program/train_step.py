"""One training step, as a function of its sizes."""

from collections.abc import Callable

import torch
from torch import nn


def build(device: str, batch: int = 8, length: int = 512, accumulation: int = 1) -> Callable[[], None]:
    """Return what runs one step."""
    model = nn.TransformerEncoder(nn.TransformerEncoderLayer(512, 8, 2048, batch_first=True, activation="gelu"), 6).to(device)
    optimizer = torch.optim.AdamW(model.parameters())

    def step() -> None:
        for _ in range(accumulation):
            model(torch.randn(batch, length, 512, device=device)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    return step
