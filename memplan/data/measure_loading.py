"""
How fast a dataset is loaded: the process behind `memplan loader FILE.py:make_dataset`, where that code is run.

    python -c "from memplan.data.measure_loading import main; main()" FILE.py:make_dataset REQUEST RESULT

REQUEST is JSON: the batch size, the numbers of workers to try, and the seconds for each. For each a DataLoader gives batches in random
order; what the first batch of each worker takes, its start included, does not count. Rates, sizes and the workers' memory, or what is
wrong, go as JSON into the file RESULT.
"""

from __future__ import annotations

import json
import re
import sys
import time
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset, RandomSampler

from memplan.data.describe import dataset_of
from memplan.errors import MemplanError, UsageError
from memplan.hardware.host import bytes_of_children

_MARK = "memplan: sample "
_MOST_DRAWN = 2**40
"""Samples that are drawn at most: more than anybody loads."""

_LEAST_BATCHES = 3
"""That are timed, however long they take."""


class _Named(Dataset[Any]):
    """A dataset that says which sample failed."""

    def __init__(self, dataset: Any) -> None:
        self._dataset = dataset

    def __len__(self) -> int:
        return len(self._dataset)

    def __getitem__(self, index: int) -> Any:
        try:
            return self._dataset[index]
        except Exception as error:  # whatever the user's code raises
            raise RuntimeError(f"{_MARK}{index}: {type(error).__name__}: {error}\n") from error


def main() -> None:
    """Measure what the command line names."""
    source, text, result = sys.argv[1:]
    try:
        answer = measured(dataset_of(source), **json.loads(text))
    except MemplanError as error:
        answer = {"error": error.message, "hint": error.hint}
    Path(result).write_text(json.dumps(answer), encoding="utf-8")


def measured(dataset: Any, *, batch_size: int, worker_counts: list[int], seconds: float) -> dict[str, Any]:
    """Return rates and sizes. Raises UsageError for a dataset without a length, a sample that fails, and samples that make no batch."""
    try:
        num_samples = len(dataset)
    except TypeError as error:
        raise UsageError(f"the dataset has no length: {type(dataset).__name__}", hint="name a map-style dataset") from error
    if num_samples == 0:
        raise UsageError("the dataset is empty: it has 0 samples", hint="check its path, its split, and its filters")
    sizes: list[int] = []
    rates = []
    for count in worker_counts:
        try:
            rates.append(_rate(_Named(dataset), min(batch_size, num_samples), count, seconds, sizes))
        except Exception as error:  # whatever a sample, or what puts samples together, raises
            raise _told(error, batch_size) from error
    return {"num_samples": num_samples, "tensor_bytes": sizes, "rates": rates}


def _rate(dataset: Dataset[Any], batch_size: int, num_workers: int, seconds: float, sizes: list[int]) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(0)
    sampler = RandomSampler(dataset, replacement=True, num_samples=_MOST_DRAWN, generator=generator)  # type: ignore[arg-type]  # it has a length
    loader = iter(DataLoader(dataset, batch_size=batch_size, sampler=sampler, num_workers=num_workers))
    for _ in range(max(1, num_workers)):
        batch = next(loader)
    sizes[:] = [tensor.nbytes for tensor in _tensors_in(batch)]
    begin = before = time.perf_counter()
    waits: list[float] = []
    while before < begin + seconds or len(waits) < max(_LEAST_BATCHES, num_workers):
        next(loader)
        now = time.perf_counter()
        waits.append(now - before)
        before = now
    waits.sort()
    return {
        "num_workers": num_workers,
        "samples_per_second": len(waits) * batch_size / (before - begin),
        "longest_wait_seconds": waits[-1],
        "median_wait_seconds": waits[len(waits) // 2],
        "worker_bytes": bytes_of_children(),
    }


def _tensors_in(batch: Any) -> list[torch.Tensor]:
    if isinstance(batch, torch.Tensor):
        return [batch]
    values = batch.values() if isinstance(batch, dict) else batch if isinstance(batch, (list, tuple)) else ()
    return [tensor for value in values for tensor in _tensors_in(value)]


def _told(error: Exception, batch_size: int) -> UsageError:
    """Return *error* as one that names the sample, where it is one's."""
    found = re.search(rf"{_MARK}(\d+: [^\n]*)", str(error))
    if found is not None:
        return UsageError(f"sample {found[1]}", hint=f"read it in Python: `dataset[{found[1].partition(':')[0]}]`")
    said = str(error).strip().splitlines()
    return UsageError(
        f"a batch of {batch_size} samples could not be made: {said[-1] if said else type(error).__name__}",
        hint="samples need the same values and shapes: pad them in the dataset",
    )
