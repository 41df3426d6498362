"""What the device answers to each attribute that CUDA has: what a real GPU says, or that it does not know."""

from __future__ import annotations

import json
import re

import pytest

from memplan.hardware.torch_install import TorchBuild
from tests.standin.calls import on_device
from tests.standin.conftest import torch_build

__all__ = ["torch_build"]

NUMBERS = range(1, 160)
"""All of CUdevice_attribute in CUDA 13.1 (its last is 148), and some that do not exist."""


def attributes_of(torch_build: TorchBuild, gpu: str) -> dict[int, int]:
    """Ask the runtime and the driver, which have to agree, for every number; those that are an error leave their place alone."""
    told = on_device(
        torch_build,
        f"""
found = {{}}
for number in {NUMBERS!r}:
    by_runtime, by_driver = c_int(-77), c_int(-77)
    codes = cuda.cudaDeviceGetAttribute(byref(by_runtime), number, 0), driver.cuDeviceGetAttribute(byref(by_driver), number, 0)
    assert codes in ((0, 0), (1, 1)), (number, codes)
    assert by_runtime.value == by_driver.value
    assert (by_runtime.value == -77) == (codes[0] == 1)
    if codes[0] == 0:
        found[number] = by_runtime.value
print(json.dumps(found))
""",
        gpu=gpu,
    )
    return {int(number): value for number, value in json.loads(told).items()}


def listed(text: str) -> dict[int, int]:
    return {int(number): int(value) for number, value in re.findall(r"(\d+):(-?\d+)", text)}


TEXTURES = """
21:131072 22:131072 23:65536 24:16384 25:16384 26:16384 27:32768 28:32768 29:2048 42:32768 43:2048 45:32768 46:32768 47:8192 48:8192
49:32768 52:32768 53:32768 54:2046 55:32768 56:131072 57:65536 58:16384 59:16384 60:16384 61:32768 62:2048 63:32768 64:32768 65:2048
66:32768 67:32768 68:2046 70:131072 71:65000 72:2097120 73:32768 74:32768
"""

# What PyCUDA printed on a Tesla P100-PCIE-16GB (public notebook on the inviscid Burgers' equation), without the address on its bus.
P100 = listed(f"""
1:1024 2:1024 3:1024 4:64 5:2147483647 6:65535 7:65535 8:49152 9:65536 10:32 11:2147483647 12:65536 13:1328500 14:512 15:1 16:56 17:0 18:0
19:1 20:0 30:512 31:1 32:1 35:0 36:715000 37:4096 38:4194304 39:2048 40:2 41:1 51:32 69:134217728 75:6 76:0 77:16384 78:1 79:1 80:1
81:65536 82:65536 83:1 84:0 85:0 {TEXTURES}
""")

# What CuPy for CUDA 13 printed on an NVIDIA GB10 (public lecture notes), without the address on its bus.
GB10 = listed(f"""
1:1024 2:1024 3:1024 4:64 5:2147483647 6:65535 7:65535 8:49152 9:65536 10:32 11:2147483647 12:65536 13:2418000 14:512 15:1 16:48 17:0 18:1
19:1 20:0 30:512 31:1 32:0 35:0 36:8533000 37:256 38:25165824 39:1536 40:1 41:1 51:32 69:268435456 77:32768 78:1 79:1 80:1 81:102400
82:65536 83:1 84:0 85:0 86:1 87:64 88:1 89:1 90:1 91:1 92:0 93:0 94:0 95:1 96:1 97:101376 98:0 99:1 100:1 101:0 106:24 111:1024 112:1
113:0 114:1 115:1 116:0 117:1 118:100 119:1 {TEXTURES}
""")


@pytest.mark.parametrize(("gpu", "printed"), [("p100", P100), ("gb10", GB10)], ids=["P100", "GB10"])
def test_a_card_says_what_the_real_one_said(torch_build: TorchBuild, gpu: str, printed: dict[int, int]) -> None:
    """Every attribute that was printed on it."""
    found = attributes_of(torch_build, gpu)

    assert {number: found.get(number) for number in printed} == printed


INTEGRATED, ECC, ENGINES, HOST_ATOMICS, RATIO, PAGEABLE, COOPERATIVE = 18, 32, 40, 86, 87, 88, 95
L2, OPTIN, PERSISTING, POOLS, RDMA, CLUSTERS, DOMAINS, FABRIC, MULTICAST = 38, 97, 108, 115, 116, 120, 126, 128, 132


@pytest.mark.parametrize(
    ("gpu", "expected"),
    [
        (
            "t4",
            {ECC: 1, RATIO: 32, ENGINES: 3, OPTIN: 64 << 10, PERSISTING: 0, RDMA: 1, CLUSTERS: 0, DOMAINS: 1, MULTICAST: 0, L2: 4 << 20},
        ),
        # 30 of 40 MiB can be set aside (CUDA C++ programming guide, "L2 set-aside")
        (
            "a100-80",
            {ECC: 1, RATIO: 2, ENGINES: 3, OPTIN: 163 << 10, PERSISTING: 30 << 20, RDMA: 1, CLUSTERS: 0, MULTICAST: 0, L2: 40 << 20},
        ),
        ("h100", {ECC: 1, RATIO: 2, ENGINES: 3, OPTIN: 227 << 10, RDMA: 1, CLUSTERS: 1, DOMAINS: 4, MULTICAST: 1, L2: 50 << 20}),
        ("h200", {PERSISTING: 39_321_600, CLUSTERS: 1, MULTICAST: 1, L2: 60 << 20}),  # 37.5 MiB, as printed on one
        ("rtx4090", {ECC: 0, RATIO: 64, ENGINES: 2, PERSISTING: 51_904_512, RDMA: 0, CLUSTERS: 0, MULTICAST: 0, L2: 72 << 20}),
    ],
)
def test_features_are_those_of_the_capability(torch_build: TorchBuild, gpu: str, expected: dict[int, int]) -> None:
    """And what every GPU in an x86 machine has: memory of its own, that the host's atomics and pageable memory do not reach."""
    found = attributes_of(torch_build, gpu)

    assert {number: found[number] for number in expected} == expected
    assert [found[number] for number in (INTEGRATED, HOST_ATOMICS, PAGEABLE, FABRIC)] == [0, 0, 0, 0]
    assert [found[number] for number in (41, 83, COOPERATIVE, 102, POOLS)] == [1, 1, 1, 1, 1]  # addresses, managed and virtual memory


def test_what_is_not_known_is_an_error(torch_build: TorchBuild) -> None:
    """Of an A100: Vulkan, the numbers of its maker, what depends on the driver's kind; numbers that CUDA does not have."""
    found = attributes_of(torch_build, "a100-80")

    assert not found.keys() & {113, 118, 121, 124, 129, 131, 138, 139, 140, *range(141, 147), 148, *range(149, 160)}
    assert len(found) > 120


@pytest.mark.parametrize("gpu", ["t4", "v100-16", "a10", "l4", "rtx3060", "rtx4060", "b200", "rtx5090"])
def test_what_triton_asks_before_its_first_kernel_is_known(torch_build: TorchBuild, gpu: str) -> None:
    """Clocks, bus and the rest of its driver.c's getDeviceProperties: of no GPU an error."""
    found = attributes_of(torch_build, gpu)

    assert all(found[number] > 1 for number in (10, 12, 13, 16, 36, 37, 38, 81, 97))


@pytest.mark.heavy
def test_properties_and_attributes_agree(torch_build: TorchBuild) -> None:
    """As the runtime fills struct cudaDeviceProp, PyTorch's view of it says the same of the L2 cache and of who shares the memory."""
    for gpu in ("gb10", "h200"):
        found = attributes_of(torch_build, gpu)
        told = on_device(
            torch_build,
            "import torch; card = torch.cuda.get_device_properties(0)\n"
            "print(json.dumps([card.L2_cache_size, card.is_integrated, card.multi_processor_count]))",
            gpu=gpu,
        )
        assert json.loads(told) == [found[L2], found[INTEGRATED], found[16]]
