"""Programs with their data on the simulated GPU, to rehearse."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

import memplan
from memplan.data import DeviceCachedDataset, DeviceLoader


class Images(torch.utils.data.Dataset[Any]):
    """Images with a label and a name."""

    def __init__(self, num_samples: int, size: int) -> None:
        self.num_samples, self.size = num_samples, size

    def __len__(self) -> int:
        return self.num_samples

    def __getitem__(self, index: int) -> Any:
        return torch.zeros(3, self.size, self.size), index, f"image {index}"


def only_kept(device: str, num_samples: int, size: int) -> Callable[[], object]:
    """Keep them, and do nothing more. Fails where the memory is not what the dataset says."""
    cached = DeviceCachedDataset(Images(num_samples, size), device, dtype=torch.bfloat16)
    if torch.cuda.memory_allocated() != cached.device_bytes:
        raise AssertionError(f"{torch.cuda.memory_allocated()} and not {cached.device_bytes}")
    return lambda: None


def trained(device: str, num_samples: int, size: int, batch: int) -> Callable[[], object]:
    """Train on shuffled batches, epoch after epoch."""
    cached = DeviceCachedDataset(Images(num_samples, size), device, dtype=torch.bfloat16)
    loader = DeviceLoader(cached, batch, shuffle=True, drop_last=True)
    model = torch.nn.Linear(3 * size * size, 10, device=device, dtype=torch.bfloat16)
    update = torch.optim.SGD(model.parameters(), lr=0.1)
    batches = (each for _ in range(100) for each in loader)

    def step() -> None:
        images, labels, names = next(batches)
        assert len(names) == len(labels) == batch
        torch.nn.functional.cross_entropy(model(images.flatten(1)), labels).backward()
        update.step()
        update.zero_grad()

    return step


def shuffled(device: str, num_samples: int) -> Callable[[], object]:
    """Keep numbers, and begin an epoch of them."""
    cached = DeviceCachedDataset(range(num_samples), device)
    loader = DeviceLoader(cached, 1, shuffle=True)
    return lambda: next(iter(loader))


def refused(device: str, num_samples: int, size: int, others: int = 0, after_peak: int = 0) -> Callable[[], object]:
    """Ask for too much, beside a training that takes *others*, or that has had a peak before."""
    del device
    if after_peak:
        torch.empty(after_peak, dtype=torch.uint8, device="cuda")
    DeviceCachedDataset(Images(num_samples, size), "cuda", others=others or None)
    return lambda: None


def limited(device: str, num_samples: int, size: int) -> Callable[[], object]:
    """Ask for what is free, but not for this process."""
    torch.cuda.set_per_process_memory_fraction(0.1)
    DeviceCachedDataset(Images(num_samples, size), device)
    return lambda: None


def beside_a_plan(device: str, num_samples: int) -> Callable[[], object]:
    """Ask beside the plan of a training."""
    plan = memplan.plan("built-in", gpu="t4", method="analytic")
    if not plan.fits:
        raise AssertionError("the plan is for this GPU")
    DeviceCachedDataset(Images(num_samples, 224), device, others=plan)
    return lambda: None
