"""What CUDA's driver counts: the devices that a program started here would see, in CUDA's own order, by UUID.

NVML numbers GPUs along the PCI bus; CUDA puts the fastest first unless CUDA_DEVICE_ORDER=PCI_BUS_ID, and reads CUDA_VISIBLE_DEVICES
itself. So where it matters CUDA is asked, in a process of its own: a driver that has been initialised does not survive a fork.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping

_TIMEOUT_SECONDS = 20.0
"""A driver that has to wake eight GPUs takes some seconds."""

# cuDeviceGetUuid_v2 (CUDA 11.4) tells the UUID of a MIG instance where the first version tells that of its GPU.
_ASK = """
import ctypes, json, sys
cuda = ctypes.CDLL("libcuda.so.1")
def check(code):
    if code: sys.exit(code)
check(cuda.cuInit(0))
count, uuids = ctypes.c_int(), []
check(cuda.cuDeviceGetCount(ctypes.byref(count)))
get_uuid = getattr(cuda, "cuDeviceGetUuid_v2", None) or cuda.cuDeviceGetUuid
for ordinal in range(count.value):
    device, uuid = ctypes.c_int(), (ctypes.c_ubyte * 16)()
    check(cuda.cuDeviceGet(ctypes.byref(device), ordinal))
    check(get_uuid(uuid, device))
    uuids.append(bytes(uuid).hex())
print(json.dumps(uuids))
"""


def cuda_uuids(environment: Mapping[str, str] = os.environ) -> tuple[str, ...] | None:
    """
    Return the UUIDs of the devices that a CUDA program sees in *environment*, in its numbering, as 32 hexadecimal digits.

    None where CUDA's driver is not there or does not answer.
    """
    try:
        asked = subprocess.run(
            [sys.executable, "-I", "-S", "-c", _ASK],
            env=dict(environment),
            capture_output=True,
            text=True,
            check=True,
            timeout=_TIMEOUT_SECONDS,
        )
        found = json.loads(asked.stdout)
    except (OSError, ValueError, subprocess.SubprocessError):
        return None
    return tuple(found)


def digits_of(uuid: str) -> str:
    """Return the 32 digits of a UUID as NVML writes it: GPU-7474aaaa-1111-2222-3333-444455556666."""
    return uuid.partition("-")[2].replace("-", "").lower()
