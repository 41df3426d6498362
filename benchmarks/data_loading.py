"""
How fast batches of images come, beside a plain DataLoader with 0, 2 and 4 workers.

    python benchmarks/data_loading.py [ROUNDS] [NUM_SAMPLES]

The samples are images of 3 x 224 x 224 and a label. Reading one is what is usual after decoding: bytes in memory become floats and are
normalized. Each loader gives an epoch of shuffled batches of 32 on the GPU (without one: on the CPU), and each batch is summed, so that it
has arrived. The loaders run turn by turn, ROUNDS times (5), so that a machine that slows down slows all of them; the medians are shown, and
their ratio to the DataLoader without workers. Workers stay alive between epochs, and memory is pinned where there is a GPU.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
import warnings
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from memplan.data import DeviceCachedDataset, DeviceLoader

BATCH_SIZE = 32
WORKERS = (0, 2, 4)
FILLING = "filling a DeviceCachedDataset, once"


class Images(Dataset[tuple[Tensor, int]]):
    """Decoded images, kept as bytes."""

    def __init__(self, num_samples: int) -> None:
        self._bytes = torch.randint(256, (num_samples, 224, 224, 3), dtype=torch.uint8)
        self._mean, self._std = torch.tensor([0.485, 0.456, 0.406]), torch.tensor([0.229, 0.224, 0.225])

    def __len__(self) -> int:
        """Return the number of images."""
        return len(self._bytes)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        """Return an image as normalized floats, and its label."""
        image = self._bytes[index].float().div(255)
        return (image - self._mean).div(self._std).permute(2, 0, 1).contiguous(), index % 1000


def seconds_of_epoch(loader: Iterable[Any], device: torch.device) -> float:
    """Return how long an epoch of *loader* takes, until every batch is on *device* and was read there."""
    start = time.perf_counter()
    total = torch.zeros((), device=device)
    for images, labels in loader:
        total += images.to(device, non_blocking=True).sum(dtype=torch.float32) + labels.to(device, non_blocking=True).sum()
    total.item()
    return time.perf_counter() - start


def seconds_of_filling(dataset: Images, device: torch.device) -> float:
    """Return how long it takes until all samples are on *device*."""
    start = time.perf_counter()
    cached = DeviceCachedDataset(dataset, device, progress=False)
    cached[-1][0].sum().item()
    return time.perf_counter() - start


def loaders(dataset: Images, device: torch.device) -> dict[str, Iterable[Any]]:
    """Return the loaders by name."""
    pins = device.type == "cuda"
    found: dict[str, Iterable[Any]] = {}
    for workers in WORKERS:
        name = f"DataLoader, {workers} workers" + (", pinned memory" if pins else "")
        found[name] = DataLoader(dataset, BATCH_SIZE, shuffle=True, num_workers=workers, persistent_workers=workers > 0, pin_memory=pins)
    cached = DeviceCachedDataset(dataset, device, progress=False)
    half = DeviceCachedDataset(dataset, device, dtype=torch.bfloat16, progress=False)
    found["DeviceLoader, float32"] = DeviceLoader(cached, BATCH_SIZE, shuffle=True)
    found["DeviceLoader, bfloat16"] = DeviceLoader(half, BATCH_SIZE, shuffle=True)
    return found


def measure(dataset: Images, device: torch.device, rounds: int) -> dict[str, list[float]]:
    """Return the seconds of each epoch of each loader, and of filling; the first, in which workers start, does not count."""
    found = loaders(dataset, device)
    runs: dict[str, Callable[[], float]] = {name: lambda loader=loader: seconds_of_epoch(loader, device) for name, loader in found.items()}  # type: ignore[misc]
    runs[FILLING] = lambda: seconds_of_filling(dataset, device)
    for run in runs.values():
        run()
    seconds: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(rounds):
        for name, run in runs.items():
            seconds[name].append(run())
    return seconds


def main(rounds: int = 5, num_samples: int = 512) -> None:
    """Print a table, and the same as one line of JSON."""
    torch.manual_seed(0)
    warnings.filterwarnings("ignore", "This DataLoader will create 4 worker processes")  # of machines with fewer processors
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    where = torch.cuda.get_device_name() if device.type == "cuda" else f"CPU, {torch.get_num_threads()} threads"
    seconds = measure(Images(num_samples), device, rounds)
    base = statistics.median(next(iter(seconds.values())))
    print(f"{num_samples} images of 3 x 224 x 224 in batches of {BATCH_SIZE}; {where}; PyTorch {torch.__version__}\n")
    print(f"{'loader':36} {'samples a second':>16} {'of 0 workers':>13} {'fastest to slowest':>20}")
    for name, runs in seconds.items():
        median = statistics.median(runs)
        print(f"{name:36} {num_samples / median:16,.0f} {base / median:12.2f}x {min(runs):9.3f} to {max(runs):.3f} s")
    ratios = {name: base / statistics.median(runs) for name, runs in seconds.items()}
    print(json.dumps({"device": where, "torch": torch.__version__, "ratio_to_0_workers": ratios}))


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
