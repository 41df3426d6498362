"""
What a profile has taught of this machine, for the plans after it: the bytes that CUDA and its libraries take beside PyTorch's allocator.

Kept by what they depend on, the GPU, its driver and PyTorch, in `<cache>/calibrations/`. Where nothing was kept, or it cannot be read,
plans take what is usual.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path

from memplan.estimators.rehearsal_cache import write_whole
from memplan.execution.measurement import Measurement
from memplan.hardware.cache_dir import default_cache
from memplan.hardware.gpu import GpuSpec
from memplan.units import GIB

MOST_BYTES = 4 * GIB
"""A context and its libraries have been seen up to 0.7 GiB; cuDNN and NCCL may add as much again."""


def calibrated(gpu: GpuSpec, torch_version: str, cache: Path | None = None) -> GpuSpec:
    """Return *gpu* with what was measured on such a GPU with its driver and this PyTorch, where that is known."""
    path = _path(gpu, torch_version, cache)
    if path is None:
        return gpu
    try:
        kept = json.loads(path.read_text(encoding="utf-8"))
        context = int(kept["context_bytes"]) + int(kept["libraries_bytes"])
    except (OSError, ValueError, KeyError, TypeError, OverflowError):
        return gpu
    if not 0 <= context <= MOST_BYTES:
        return gpu
    return gpu.model_copy(update={"context_bytes": context})


def keep_calibration(gpu: GpuSpec, measured: Sequence[Measurement], cache: Path | None = None) -> bool:
    """
    Keep the largest that *measured* shows of *gpu*; say whether it shows anything, and the cache could be written.

    Only steps that ran to their end count: what ran out of memory has not loaded all of its kernels. What is larger than any context is
    another program's.
    """
    whole = [each for each in measured if each.fits and each.outside_bytes is not None and each.outside_bytes <= MOST_BYTES]
    largest = max(whole, key=lambda each: each.outside_bytes or 0, default=None)
    path = _path(gpu, largest.torch, cache) if largest is not None else None
    if path is None or largest is None:
        return False
    kept = {
        "card": gpu.name,
        "driver": gpu.driver_version,
        "torch": largest.torch,
        "context_bytes": largest.context_bytes,
        "libraries_bytes": largest.libraries_bytes,
    }
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, json.dumps(kept, indent=2).encode())
    except OSError:  # a full disk, a folder of somebody else: the next plan takes what is usual
        return False
    return True


def _path(gpu: GpuSpec, torch_version: str, cache: Path | None) -> Path | None:
    """Return where it is kept; None for a GPU that is not of this machine."""
    if gpu.driver_version is None:
        return None
    key = hashlib.sha256(json.dumps([gpu.name, gpu.driver_version, torch_version]).encode()).hexdigest()[:24]
    return (cache or default_cache()) / "calibrations" / f"{key}.json"
