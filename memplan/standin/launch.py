"""Running a Python program on the stand-in device: in a process of its own, with the device's libraries in front of CUDA's."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from memplan.hardware.spec import GpuSpec
from memplan.standin.build import NVRTC, RUNTIME


def environment_for(gpu: GpuSpec, libraries: Path, *, context_bytes: int = 0, inherited: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Return the environment in which a program finds *gpu*: its libraries first, and nothing random that changes the order of frees."""
    preload = [str(libraries / RUNTIME), str(libraries / NVRTC), *inherited.get("LD_PRELOAD", "").split(":")]
    path = [str(libraries), *inherited.get("LD_LIBRARY_PATH", "").split(":")]
    return dict(inherited) | {
        "MEMPLAN_CARD": card_description(gpu, context_bytes),
        "LD_PRELOAD": ":".join(filter(None, preload)),
        "LD_LIBRARY_PATH": ":".join(filter(None, path)),
        # autocast's cache of casts is freed in the order of its hashes, which are addresses
        "PYTHONHASHSEED": "0",
        "CUDA_VISIBLE_DEVICES": "0",
        "MEMPLAN_ACCOUNT": "",  # a rehearsal has its card for itself
    }


def card_description(gpu: GpuSpec, context_bytes: int) -> str:
    """Return *gpu* as the device reads it; a card of which only the size is known is taken for an A100."""
    major, minor = gpu.compute_capability or (8, 0)
    multiprocessors = gpu.multiprocessors or 108
    return f"{major} {minor} {multiprocessors} {gpu.total_memory_bytes} {context_bytes} {gpu.name}"


_BOOT = """
import ctypes, os, sys
libc = ctypes.CDLL(None)
libc.personality(0x0040000)  # ADDR_NO_RANDOMIZE: the same addresses on every run
libc.prctl(1, 9)             # PR_SET_PDEATHSIG: end when memplan does
try:
    with open("/proc/self/oom_score_adj", "w") as file:
        file.write("1000")   # when the host's memory runs out, this process goes, not its parent
except OSError:
    pass                     # some containers forbid it
os.execv(sys.executable, [sys.executable, *sys.argv[1:]])
"""


def command_for(arguments: Sequence[str]) -> list[str]:
    """Return the command that runs Python with *arguments* where nothing random decides an address; it becomes what it starts."""
    return [sys.executable, "-I", "-S", "-c", _BOOT, *arguments]
