"""A machine with several simulated GPUs: each has its own memory and addresses, and each thread its own choice."""

from __future__ import annotations

import pytest

from memplan.hardware.torch_install import TorchBuild
from tests.standin.calls import on_device
from tests.standin.conftest import torch_build

__all__ = ["torch_build"]


def test_each_has_its_own_memory(torch_build: TorchBuild) -> None:
    """What is taken of one is free on the other, wherever it is freed from; addresses say whose they are."""
    on_device(
        torch_build,
        """
def free_bytes(device):
    assert cuda.cudaSetDevice(device) == 0
    left, total = c_size_t(), c_size_t()
    cuda.cudaMemGetInfo(byref(left), byref(total))
    return left.value

class Attributes(ctypes.Structure):
    _fields_ = [("type", c_int), ("device", c_int), ("on_device", c_void_p), ("on_host", c_void_p)]

def device_of(address):
    found = Attributes()
    cuda.cudaPointerGetAttributes(byref(found), c_void_p(address))
    return found.type, found.device

count = c_int()
assert cuda.cudaGetDeviceCount(byref(count)) == 0 and count.value == 3
before = [free_bytes(device) for device in range(3)]
cuda.cudaSetDevice(2)
p = malloc(1 << 30)
cuda.cudaSetDevice(1)
q = malloc(1 << 21)
assert [before[i] - free_bytes(i) for i in range(3)] == [0, 1 << 21, 1 << 30]
assert (device_of(p), device_of(q), device_of(p + 4096)) == ((2, 2), (2, 1), (2, 2))
cuda.cudaSetDevice(0)
write(p, b"far away")
copy(q, p, 8)
assert read(q, 8) == b"far away"
free(p), free(q)
assert [free_bytes(i) for i in range(3)] == before
assert cuda.cudaSetDevice(3) == 101 and cuda.cudaSetDevice(-1) == 101
""",
        num_gpus=3,
    )


def test_a_thread_begins_on_the_first(torch_build: TorchBuild) -> None:
    """As CUDA has it: the choice is the thread's."""
    on_device(
        torch_build,
        """
import threading
def chosen():
    found = c_int(-1)
    cuda.cudaGetDevice(byref(found))
    return found.value
cuda.cudaSetDevice(1)
seen = []
thread = threading.Thread(target=lambda: (seen.append(chosen()), cuda.cudaSetDevice(0)))
thread.start(), thread.join()
assert (seen, chosen()) == ([0], 1)
""",
        num_gpus=2,
    )


def test_virtual_memory_is_of_the_device_that_is_named(torch_build: TorchBuild) -> None:
    """cuMemCreate, which expandable segments are made of, whichever device is chosen."""
    on_device(
        torch_build,
        """
def free_bytes(device):
    cuda.cudaSetDevice(device)
    left, total = c_size_t(), c_size_t()
    cuda.cudaMemGetInfo(byref(left), byref(total))
    return left.value

before = [free_bytes(device) for device in range(2)]
cuda.cudaSetDevice(0)
handle = c_ulonglong()
wanted = (c_int * 8)(1, 0, 1, 1)
assert driver.cuMemCreate(byref(handle), c_size_t(4 << 21), wanted, c_ulonglong(0)) == 0
assert [before[i] - free_bytes(i) for i in range(2)] == [0, 4 << 21]
assert driver.cuMemRelease(handle) == 0
assert [free_bytes(i) for i in range(2)] == before
wanted[3] = 2
assert driver.cuMemCreate(byref(handle), c_size_t(1 << 21), wanted, c_ulonglong(0)) == 101
""",
        num_gpus=2,
    )


def test_nvml_tells_each(torch_build: TorchBuild) -> None:
    """Their number, identifiers that differ, and the memory of the one that is asked for."""
    on_device(
        torch_build,
        """
nvml = ctypes.CDLL("libnvidia-ml.so.1")
count = c_uint()
assert nvml.nvmlDeviceGetCount_v2(byref(count)) == 0 and count.value == 2
handles = [c_void_p(), c_void_p()]
for number, handle in enumerate(handles):
    assert nvml.nvmlDeviceGetHandleByIndex_v2(c_uint(number), byref(handle)) == 0
names = [ctypes.create_string_buffer(96) for _ in handles]
for name, handle in zip(names, handles):
    nvml.nvmlDeviceGetUUID(handle, name, 96)
assert names[0].value != names[1].value
cuda.cudaSetDevice(1)
p = malloc(1 << 30)
used = []
for handle in handles:
    memory = (c_ulonglong * 3)()
    nvml.nvmlDeviceGetMemoryInfo(handle, memory)
    used.append(memory[2])
assert used[1] - used[0] == 1 << 30, used
by_bus = c_void_p()
bus = ctypes.create_string_buffer(32)
cuda.cudaDeviceGetPCIBusId(bus, 32, 1)
assert nvml.nvmlDeviceGetHandleByPciBusId_v2(bus, byref(by_bus)) == 0 and by_bus.value == handles[1].value
assert nvml.nvmlDeviceGetHandleByIndex_v2(c_uint(2), byref(by_bus)) == 2
""",
        num_gpus=2,
    )


@pytest.mark.parametrize(
    ("asked", "seen"),
    [("1", 1), ("0,2", 2), ("1,-1,0", 1), ("4,5,6,7", 3), ("2,3", 2), ("GPU-6f1c2a", 1), ("", 0), ("none", 0)],
)
def test_a_program_that_chooses_among_more_gpus_finds_as_many_as_it_names(torch_build: TorchBuild, asked: str, seen: int) -> None:
    """Its own machine may have more than are simulated; what names no GPU anywhere ends the list, as in CUDA."""
    said = on_device(
        torch_build,
        "count = c_int()\ncuda.cudaGetDeviceCount(byref(count))\nprint(count.value)\n",
        num_gpus=3,
        CUDA_VISIBLE_DEVICES=asked,
    )

    assert int(said) == seen
