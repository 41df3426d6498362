"""What a report says of a GPU: as a driver tells it, and without what it does not tell."""

from __future__ import annotations

from pathlib import Path

import pytest

from memplan.hardware.catalog import find_gpu
from memplan.hardware.device_report import report_of
from memplan.hardware.precisions import precision_support
from tests.hardware.nvml_driver import A100, T4, Driver, build_driver

SEE = """
import sys
from memplan.hardware.detect import detect_gpus
from memplan.hardware.device_report import report_of
for gpu in detect_gpus():
    print("; ".join(f"{name} {text}" for name, text in report_of(gpu).facts))
"""

TWO_A100 = f"""driver 580.95.05
cuda 13000
{A100}clocks 210 1410 1593 1593
ecc 1
nvlinks 12
peers 0
{A100.replace("GPU-a100bbbb", "GPU-a100cccc")}clocks 1410 1410 1593 1593
ecc 0
nvlinks 12
peers 5
"""


def test_all_that_the_driver_tells_is_told(driver: Driver) -> None:
    """Two A100: one idle with ECC, that reads the other's memory; the other, that may not."""
    first, second = driver.run("-c", SEE, machine=TWO_A100).stdout.splitlines()

    precisions = "fp16 native, bf16 native, tf32 native, fp8 none"
    common = f"memory 79.25 GiB for programs; driver 580.95.05 (CUDA 13.0); capability 8.0; precisions {precisions}"
    memory = "memory clock 1593 MHz now, 1593 at most"
    links = "MIG off; NVLink 12 links active"
    assert first == f"{common}; SM clock 210 MHz now, 1410 at most; {memory}; ECC on; {links}; P2P reads the memory of 1 other GPU"
    assert second == f"{common}; SM clock 1410 MHz now, 1410 at most; {memory}; ECC off; {links}; P2P reads the memory of 0 other GPUs"


def test_what_a_driver_does_not_tell_is_left_out(driver: Driver) -> None:
    """A T4 that says nothing of clocks, ECC and links."""
    told = driver.run("-c", SEE, machine=f"driver 580.95.05\n{T4}").stdout

    assert told == (
        "memory 14.75 GiB for programs; driver 580.95.05; capability 7.5; precisions fp16 native, bf16 emulated, tf32 none, fp8 none\n"
    )


def test_a_driver_that_is_older_than_a_call_hides_nothing_else(tmp_path: Path) -> None:
    """Without the calls for clocks and P2P the rest is told."""
    older = build_driver(tmp_path, without=["nvmlDeviceGetMaxClockInfo", "nvmlDeviceGetP2PStatus"])

    first = older.run("-c", SEE, machine=TWO_A100).stdout.splitlines()[0]

    assert "SM clock 210 MHz now, ? at most" in first
    assert first.endswith("ECC on; MIG off; NVLink 12 links active")


def test_a_gpu_of_the_catalogue_has_no_driver() -> None:
    """Nothing is asked of this machine."""
    report = report_of(find_gpu("h100"))

    assert (report.driver_version, report.sm_clock_mhz, report.num_peers) == (None, None, None)
    assert report.precisions == {"fp16": "native", "bf16": "native", "tf32": "native", "fp8": "native"}


@pytest.mark.parametrize(
    ("gpu", "support"),
    [
        ("v100-16", "native emulated none none"),
        ("t4", "native emulated none none"),
        ("a100-80", "native native native none"),
        ("rtx4090", "native native native native"),
    ],
)
def test_precisions_follow_the_compute_capability(gpu: str, support: str) -> None:
    """fp16, bf16, TF32 and fp8, as NVIDIA's programming guide has them."""
    capability = find_gpu(gpu).compute_capability

    assert capability is not None
    assert " ".join(precision_support(capability).values()) == support
