"""
Programs that fill a dataset with a cache on disk, each in a process of its own.

    python -m tests.data.fill whole|killed|limited CACHE_FILE [NUM_SAMPLES]
"""

from __future__ import annotations

import os
import resource
import signal
import sys
from collections.abc import Sequence

import torch

from memplan.data import DeviceCachedDataset
from memplan.errors import MemplanError

SAMPLE = 32 * 1024
"""Elements of a sample of 128 KiB: 512 of them are a chunk."""


class Numbers(Sequence[torch.Tensor]):
    """Samples that tell their index; one of them may do something first."""

    def __init__(self, num_samples: int, killed_at: int | None) -> None:
        self.num_samples, self._killed_at, self.num_reads = num_samples, killed_at, 0

    def __len__(self) -> int:
        return self.num_samples

    def __getitem__(self, index: int) -> torch.Tensor:  # type: ignore[override]
        if not 0 <= index < self.num_samples:
            raise IndexError(index)
        self.num_reads += 1
        if index == self._killed_at:
            os.kill(os.getpid(), signal.SIGKILL)
        return torch.full((SAMPLE,), float(index))


def main(how: str, cache_file: str, num_samples: str = "1100") -> int:
    """Fill; tell an error as memplan's command does."""
    if how == "limited":
        resource.setrlimit(resource.RLIMIT_FSIZE, (2**20, 2**20))
    dataset = Numbers(int(num_samples), int(num_samples) - 10 if how == "killed" else None)
    try:
        cached = DeviceCachedDataset(dataset, "cpu", cache_file=cache_file, fingerprint="numbers")
    except MemplanError as error:
        print(error.message)
        return error.exit_code
    print(len(cached), int(cached[-1][0]), dataset.num_reads)
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
