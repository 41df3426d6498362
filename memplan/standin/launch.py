"""Running a Python program on the simulated GPU: in a process of its own, with the device's libraries in front of CUDA's."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from memplan.hardware.catalog import least_memory_of_kind
from memplan.hardware.gpu import UNLIMITED_BYTES, GpuSpec
from memplan.standin.build import NVRTC, RUNTIME


def environment_for(
    gpus: Sequence[GpuSpec], libraries: Path, *, context_bytes: int = 0, inherited: Mapping[str, str] = os.environ
) -> dict[str, str]:
    """Return the environment in which a program finds *gpus*: its libraries first, and nothing random that changes the order of frees."""
    preload = [*_preloaded(libraries), *inherited.get("LD_PRELOAD", "").split(":")]
    path = [str(libraries), *inherited.get("LD_LIBRARY_PATH", "").split(":")]
    return dict(inherited) | {
        **on_gpus(gpus, context_bytes=context_bytes),
        "LD_PRELOAD": ":".join(filter(None, preload)),
        "LD_LIBRARY_PATH": ":".join(filter(None, path)),
        # autocast's cache of casts is freed in the order of its hashes, which are addresses
        "PYTHONHASHSEED": "0",
        # libgomp's threads spin where they wait for work, and take the processor from what runs beside: two at once took as long as in turn
        "OMP_WAIT_POLICY": inherited.get("OMP_WAIT_POLICY", "PASSIVE"),
        "MEMPLAN_ACCOUNT": "",  # a rehearsal has its GPU for itself
    }


def on_gpus(gpus: Sequence[GpuSpec], *, context_bytes: int) -> dict[str, str]:
    """Return the variables by which a process finds *gpus*, counted in that order whichever is fastest."""
    are_alike = len(set(gpus)) == 1
    endless = [gpu for gpu in gpus if gpu.total_memory_bytes >= UNLIMITED_BYTES]
    return {
        "MEMPLAN_MOST_WORKSPACE": str(min(map(least_memory_of_kind, endless))) if endless else "",
        "MEMPLAN_CARD": "\n".join(gpu_description(gpu, context_bytes) for gpu in gpus),
        "CUDA_VISIBLE_DEVICES": ",".join(map(str, range(len(gpus)))),
        **({} if are_alike else {"CUDA_DEVICE_ORDER": "PCI_BUS_ID"}),
    }


def _preloaded(libraries: Path) -> list[str]:
    """
    Return what LD_PRELOAD says of the libraries: their paths, or their names where a path has a blank.

    LD_PRELOAD is split at blanks and colons and knows no quotes; a name is searched in LD_LIBRARY_PATH, which may have blanks (ld.so(8)).
    """
    has_blank = " " in str(libraries)
    return [name if has_blank else str(libraries / name) for name in (RUNTIME, NVRTC)]


def caches_in(folder: Path, *, inherited: Mapping[str, str] = os.environ) -> dict[str, str]:
    """
    Return the variables that put into *folder* what PyTorch would keep in the home of a user who has none that can be written.

    That is Triton's cache: without one it runs no kernel (`FileCacheManager` in triton/runtime/cache.py of 3.7). Others do without.
    """
    home = os.path.expanduser("~")  # noqa: PTH111  (Path.home raises where there is none)
    has_home = home.startswith("/") and os.access(home, os.W_OK)
    is_chosen = "TRITON_CACHE_DIR" in inherited or "TRITON_HOME" in inherited
    return {} if has_home or is_chosen else {"TRITON_CACHE_DIR": str(folder / "triton")}


def own_caches(folder: Path) -> dict[str, str]:
    """
    Return the variables that have what is compiled kept in folders below *folder*, so that each rehearsal compiles its own; make those.

    With what an earlier run has left in Triton's, Inductor's and PyTorch's caches a compiled program takes another peak than on its first
    start, and a kernel that was compiled for the simulated GPU is not for a real one to find.
    """
    names = {"TRITON_CACHE_DIR": "triton", "TORCHINDUCTOR_CACHE_DIR": "inductor", "PYTORCH_KERNEL_CACHE_PATH": "kernels"}
    for name in names.values():
        (folder / name).mkdir(parents=True, exist_ok=True)  # PyTorch warns of a cache for kernels that is not there
    named = {variable: str(folder / name) for variable, name in names.items()}
    return named | {"MEMPLAN_CACHES": json.dumps(named)}  # for a program that names others (child/cold_caches.py)


def gpu_description(gpu: GpuSpec, context_bytes: int) -> str:
    """Return *gpu* as the device reads it."""
    (major, minor), multiprocessors = gpu.kind
    threads = gpu.threads_per_multiprocessor
    return f"{major} {minor} {multiprocessors} {threads} {gpu.total_memory_bytes} {context_bytes} {gpu.name}"


_BOOT = """
import ctypes, os, signal, sys
signal.pthread_sigmask(signal.SIG_UNBLOCK, signal.valid_signals())  # whoever starts this may be waiting for some
libc = ctypes.CDLL(None)
libc.personality(0x0040000)  # ADDR_NO_RANDOMIZE: the same addresses on every run
if sys.argv[1] == "with us":
    libc.prctl(1, 9)         # PR_SET_PDEATHSIG: end when memplan does
elif os.fork():
    os._exit(0)              # nobody waits for it
try:
    with open("/proc/self/oom_score_adj", "w") as file:
        file.write("1000")   # when the host's memory runs out, this process goes, not its parent
except OSError:
    pass                     # some containers forbid it
os.execv(sys.argv[2], sys.argv[2:])
"""


def command_for(words: Sequence[str], *, outlives_us: bool = False) -> list[str]:
    """
    Return what starts the program *words*, a path and arguments, where nothing random decides an address; it becomes what it starts.

    It ends with this process, unless it *outlives_us*.
    """
    return [sys.executable, "-I", "-S", "-c", _BOOT, "by itself" if outlives_us else "with us", *words]
