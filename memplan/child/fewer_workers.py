"""
DataLoaders with as many workers as this machine has processors, each one batch ahead.

On the simulated GPU a step takes no time and a run ends after a few: a program that asks for 16 workers with four batches each would have
64 batches made, most of them for nothing, by processes that wait for one another. The batches, their order and what the program reads of
its DataLoader stay as they are.
"""

from __future__ import annotations

import functools
import os
from typing import Any

from torch.utils.data.dataloader import _MultiProcessingDataLoaderIter


class _WithFewerWorkers:
    """A DataLoader as what iterates over it sees it."""

    def __init__(self, loader: Any, num_workers: int) -> None:
        self._loader = loader
        self.num_workers = num_workers
        self.prefetch_factor = 1

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)


def use_fewer_workers(most: int | None = None) -> None:
    """Begin no more workers for a DataLoader than *most*, by default the processors that this process may use."""
    number = most or len(os.sched_getaffinity(0))
    begin = _MultiProcessingDataLoaderIter.__init__

    @functools.wraps(begin)
    def begun(iterator: Any, loader: Any) -> None:
        begin(iterator, _WithFewerWorkers(loader, min(loader.num_workers, number)))

    setattr(_MultiProcessingDataLoaderIter, "__init__", begun)  # noqa: B010  (a method, as mypy sees it)
