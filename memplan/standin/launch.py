"""Running a Python program on the stand-in device: in a process of its own, with the device's libraries in front of CUDA's."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Mapping
from pathlib import Path

from memplan.hardware.spec import GpuSpec
from memplan.standin.build import RUNTIME

_ADDR_NO_RANDOMIZE = 0x0040000


def environment_for(gpu: GpuSpec, libraries: Path, *, context_bytes: int = 0, inherited: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Return the environment in which a program finds *gpu*: its libraries first, and nothing random that changes the order of frees."""
    major, minor = gpu.compute_capability or (8, 0)
    multiprocessors = gpu.multiprocessors or 108
    preload = [str(libraries / RUNTIME), *inherited.get("LD_PRELOAD", "").split(":")]
    path = [str(libraries), *inherited.get("LD_LIBRARY_PATH", "").split(":")]
    return dict(inherited) | {
        "MEMPLAN_CARD": f"{major} {minor} {multiprocessors} {gpu.total_memory_bytes} {context_bytes} {gpu.name}",
        "LD_PRELOAD": ":".join(filter(None, preload)),
        "LD_LIBRARY_PATH": ":".join(filter(None, path)),
        # autocast's cache of casts is freed in the order of its hashes, which are addresses
        "PYTHONHASHSEED": "0",
        "CUDA_VISIBLE_DEVICES": "0",
    }


def fix_addresses() -> None:
    """Turn address randomisation off for this process and what it becomes: to be run in the child, before exec."""
    ctypes.CDLL(None).personality(_ADDR_NO_RANDOMIZE)
