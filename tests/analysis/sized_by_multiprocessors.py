"""A step whose temporary memory is decided by the GPU's number of multiprocessors, as partial sums of some kernels are."""

from collections.abc import Callable

import torch
from torch import nn


def build(device: str, batch: int) -> Callable[[], None]:
    """Return what runs one step."""
    model = nn.Linear(1024, 1024).to(device)
    optimizer = torch.optim.SGD(model.parameters())
    partial_sums = torch.cuda.get_device_properties(device).multi_processor_count * 2**20

    def step() -> None:
        loss = model(torch.randn(batch * 256, 1024, device=device)).square().mean()
        torch.empty(partial_sums, dtype=torch.uint8, device=device)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    return step
