"""A whole machine that is not there: its GPUs for CUDA (the simulated GPU), for NVML (the tests' own driver), and what others hold."""

from __future__ import annotations

import os
import struct
from collections.abc import Mapping
from pathlib import Path

from memplan.hardware.catalog import catalog_gpus, find_gpu
from memplan.hardware.gpu import GpuSpec
from memplan.hardware.torch_install import TorchBuild
from memplan.standin.build import build
from memplan.standin.launch import gpu_description
from tests.hardware.nvml_driver import Driver

CONTEXT_BYTES = 300 * 2**20
"""Of each process on such a GPU; not what an estimate takes it for."""

SLOT = struct.Struct("iiQ")
"""A process, the number of its GPU, and bytes: Slot of csrc/card.h."""


def uuid_of(card: int) -> str:
    """The UUID of GPU number *card* on the bus, as csrc/card.c has it."""
    digits = (b"memplan standin"[:15] + bytes([card])).hex()
    return f"GPU-{digits[:8]}-{digits[8:12]}-{digits[12:16]}-{digits[16:20]}-{digits[20:]}"


def machine(
    torch_build: TorchBuild, driver: Driver, *names: str, busy: Mapping[int, int] | None = None, refused: str = "", utilization: int = 0
) -> dict[str, str]:
    """
    Return the environment of a machine with these GPUs of the catalogue, in the order of the bus.

    *busy*: bytes that this process, as another program, holds of a GPU, by the GPU's number. *refused*: statements for NVML.
    """
    folder = build(torch_build)
    specs = [find_gpu(name) for name in names]
    text = f"driver 580.95.05\ncuda 13000\n{refused}" + "".join(_for_nvml(spec, number, utilization) for number, spec in enumerate(specs))
    environment = driver.environment(text)
    account = Path(environment["NVML_MACHINE"]).with_suffix(".account")
    account.write_bytes(b"".join(SLOT.pack(os.getpid(), card, held) for card, held in (busy or {}).items()).ljust(64 * SLOT.size, b"\0"))
    cache = driver.folder / "cache" / "memplan"  # what is learnt of this machine is nothing for plans of the real one
    cache.mkdir(parents=True, exist_ok=True)
    if not (cache / folder.name).exists():
        (cache / folder.name).symlink_to(folder)
    return environment | {
        "XDG_CACHE_HOME": str(cache.parent),
        "LD_PRELOAD": f"{folder / 'libstandin.so'}:{folder / 'libnvrtc.so'}",
        "LD_LIBRARY_PATH": f"{driver.folder}:{folder}",
        "MEMPLAN_CARD": "\n".join(gpu_description(spec, CONTEXT_BYTES) for spec in specs),
        "MEMPLAN_ACCOUNT": str(account),
        "PYTHONHASHSEED": "0",
    }


def _for_nvml(spec: GpuSpec, number: int, utilization: int) -> str:
    total = next(
        card.nvml_total_bytes for card in catalog_gpus() if card.spec.name == spec.name and card.spec.marketing_gb == spec.marketing_gb
    )
    major, minor = spec.compute_capability or (8, 0)
    return (
        f"gpu {spec.name}\nuuid {uuid_of(number)}\nmemory {total or spec.total_memory_bytes} 0 0\ncapability {major} {minor}\n"
        f"mig_mode 0\nutilization {utilization}\n"
    )
