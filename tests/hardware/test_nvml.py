"""What the driver says, field by field: asked of a real libnvidia-ml.so.1 (`nvml_library.c`) in processes of their own."""

from __future__ import annotations

from itertools import combinations
from pathlib import Path
from typing import Any

import pytest

from tests.hardware.nvml_driver import A100, GIB, MIB, MIG, T4, Driver, build_driver, no_driver

BUSY_T4 = f"driver 580.95.05\n{T4.replace('106127360 0', f'106127360 {3 * GIB}')}process 4711 {2 * GIB}\nprocess 4712 {GIB}\n"

NO_PERMISSION, NOT_SUPPORTED, GPU_IS_LOST = 4, 3, 15

# What a refused call takes away. The second version of the memory call has the first to fall back to.
FIELDS_OF = {
    "nvmlSystemGetDriverVersion": [],
    "nvmlDeviceGetName": ["name"],
    "nvmlDeviceGetUUID": ["uuid"],
    "nvmlDeviceGetMemoryInfo": [],
    "nvmlDeviceGetCudaComputeCapability": ["compute_capability"],
    "nvmlDeviceGetComputeRunningProcesses_v3": ["processes"],
    "nvmlDeviceGetMigMode": [],
    "nvmlDeviceGetUtilizationRates": ["utilization_percent"],
}


def without_notes(device: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in device.items() if name != "notes"}


def refusing(machine: str, *calls: str, code: int) -> str:
    return "".join(f"refuse {call} {code}\n" for call in calls) + machine


def test_a_card_is_read_whole(driver: Driver):
    """Everything a driver tells, and nothing to note."""
    told = {
        "index": 0,
        "uuid": "GPU-7474aaaa-1111-2222-3333-444455556666",
        "name": "Tesla T4",
        "total_memory_bytes": 15360 * MIB,
        "used_memory_bytes": 3 * GIB,  # without the 257 MiB that the driver keeps for itself
        "compute_capability": [7, 5],
        "is_mig": False,
        "parent_index": None,
        "mig_enabled": False,
        "processes": [{"pid": 4711, "used_memory_bytes": 2 * GIB}, {"pid": 4712, "used_memory_bytes": GIB}],
        "notes": [],
    }

    seen = driver.see(BUSY_T4)

    assert seen.machine is not None
    assert seen.machine["driver_version"] == "580.95.05"
    assert [{name: device[name] for name in told} for device in seen.devices] == [told]


def test_cards_come_in_the_drivers_order(driver: Driver):
    """Of the PCI bus, whatever they are."""
    seen = driver.see(T4 + A100 + T4)

    assert [(device["index"], device["name"]) for device in seen.devices] == [
        (0, "Tesla T4"),
        (1, "NVIDIA A100-SXM4-80GB"),
        (2, "Tesla T4"),
    ]


def test_a_card_that_is_cut_into_instances_comes_before_them(driver: Driver):
    """Empty numbers between them are passed over, and their capability is their GPU's: NVML tells it of no instance."""
    card, *instances = driver.see(MIG).devices

    assert (card["mig_enabled"], card["is_mig"]) == (True, False)
    assert [(each["is_mig"], each["parent_index"], each["compute_capability"]) for each in instances] == [(True, 0, [8, 0])] * 2
    assert [each["index"] for each in instances] == [1, 5]
    assert [each["name"] for each in instances] == ["NVIDIA A100-SXM4-80GB MIG 3g.40gb", "NVIDIA A100-SXM4-80GB MIG 1g.10gb"]
    assert [each["used_memory_bytes"] for each in instances] == [5 * GIB, 0]
    assert instances[0]["processes"] == [{"pid": 77, "used_memory_bytes": 5 * GIB}]


def test_wsl_has_memory_by_the_first_version_of_the_call_only(driver: Driver):
    """The second answers 999 there, and what a process holds is not told. The first counts the driver's 257 MiB as used."""
    (device,) = driver.see(refusing(T4 + "process 9 -\n", "nvmlDeviceGetMemoryInfo_v2", code=999)).devices

    assert device["total_memory_bytes"] == 15360 * MIB
    assert device["used_memory_bytes"] == 257 * MIB
    assert device["processes"] == [{"pid": 9, "used_memory_bytes": None}]
    assert device["notes"] == []


@pytest.mark.parametrize("code", [NO_PERMISSION, NOT_SUPPORTED, GPU_IS_LOST])
def test_a_refused_call_loses_its_own_field_only(driver: Driver, code: int):
    """Each call in turn; the field is None, a note says why."""
    whole, *seen = driver.see_each([BUSY_T4, *(refusing(BUSY_T4, call, code=code) for call in FIELDS_OF)])
    expected = [without_notes(whole.devices[0]) | dict.fromkeys(fields) for fields in FIELDS_OF.values()]

    assert [without_notes(each.devices[0]) for each in seen] == expected
    assert [len(each.devices[0]["notes"]) for each in seen] == [len(fields) for fields in FIELDS_OF.values()]


@pytest.mark.parametrize(("code", "why"), [(NO_PERMISSION, "Insufficient Permissions"), (29, "error number 29")])
def test_a_note_says_what_was_asked_and_what_came_back(driver: Driver, code: int, why: str):
    """In nvidia-ml-py's words, or the driver's own for a code that nvidia-ml-py does not know."""
    machine = refusing(T4, "nvmlDeviceGetMemoryInfo", "nvmlDeviceGetMemoryInfo_v2", code=code)
    (device,) = driver.see(machine).devices

    assert (device["total_memory_bytes"], device["used_memory_bytes"]) == (None, None)
    assert device["notes"] == [f"memory: {why}"]


def test_calls_refused_together_are_no_crash(driver: Driver):
    """Every pair of calls and all of them at once, on a machine with a whole GPU and one that is cut up."""
    calls = [
        *FIELDS_OF,
        "nvmlDeviceGetMemoryInfo_v2",
        "nvmlDeviceGetHandleByIndex_v2",
        "nvmlDeviceGetMaxMigDeviceCount",
        "nvmlDeviceGetMigDeviceHandleByIndex",
    ]
    together = [*combinations(calls, 2), calls]

    seen = driver.see_each([refusing(T4 + MIG, *refused, code=GPU_IS_LOST) for refused in together])

    assert len(seen) == len(together)
    assert all(each.gpus or each.error for each in seen)


def test_a_gpu_that_fell_off_the_bus_hides_no_other(driver: Driver):
    """It is listed with its number and the reason, and the others as ever."""
    lost, healthy = driver.see(f"refuse nvmlDeviceGetHandleByIndex_v2 {GPU_IS_LOST} 0\n{T4}{A100}").devices

    assert (lost["index"], lost["name"], lost["notes"]) == (0, None, ["handle: GPU is lost"])
    assert (healthy["index"], healthy["name"]) == (1, "NVIDIA A100-SXM4-80GB")


@pytest.mark.parametrize("code", [NO_PERMISSION, NOT_SUPPORTED, GPU_IS_LOST])
def test_a_session_that_does_not_close_takes_nothing_away(driver: Driver, code: int):
    """Everything has been read by then."""
    seen = driver.see(refusing(T4, "nvmlShutdown", code=code))

    assert [device["name"] for device in seen.devices] == ["Tesla T4"]


def test_the_session_is_closed_behind_the_question(driver: Driver):
    """A refused question closes it too: a session that stays open is a program on the GPU for as long as memplan runs."""
    script = """
import pynvml
from memplan.errors import MissingError
from memplan.hardware.nvml import read_machine
try:
    read_machine()
except MissingError:
    pass
pynvml.nvmlDeviceGetCount()
"""
    for machine in (T4, refusing(T4, "nvmlDeviceGetCount_v2", code=NO_PERMISSION)):
        run = driver.run("-c", script, machine=machine)

        assert "NVMLError_Uninitialized" in run.stderr


def test_no_driver_is_said_with_what_else_to_plan_for(tmp_path: Path):
    """No library: the GPU can be named instead."""
    seen = no_driver(tmp_path).see(T4)

    assert (seen.machine, seen.error) == (None, "no NVIDIA driver answers on this machine (NVML Shared Library Not Found)")
    assert "gpu_memory=24" in (seen.hint or "")


@pytest.mark.parametrize(
    ("call", "code", "error"),
    [
        ("nvmlInitWithFlags", 9, "no NVIDIA driver answers on this machine (Driver Not Loaded)"),
        ("nvmlInitWithFlags", 18, "no NVIDIA driver answers on this machine (RM has detected an NVML/RM version mismatch.)"),
        ("nvmlDeviceGetCount_v2", 4, "the NVIDIA driver does not list its GPUs (device count: Insufficient Permissions)"),
    ],
)
def test_a_driver_that_answers_nothing_is_an_error_with_its_reason(driver: Driver, call: str, code: int, error: str):
    """Library without kernel module, an update without a reboot, a container without rights."""
    seen = driver.see(refusing(T4, call, code=code))

    assert seen.error == error
    assert "gpu_memory=24" in (seen.hint or "")


def test_a_machine_without_gpus_is_read_as_such(driver: Driver):
    """A driver of a machine whose GPU was taken out."""
    told = driver.see("driver 580.95.05\ncuda 13010\n").machine

    assert told == {"driver_version": "580.95.05", "devices": [], "cuda_version": "13.1"}


def test_a_driver_before_510_tells_memory_by_the_first_version_of_the_call(tmp_path: Path):
    """The second version's symbol is not there."""
    old = build_driver(tmp_path, without=["nvmlDeviceGetMemoryInfo_v2"])

    (device,) = old.see(T4).devices

    assert (device["total_memory_bytes"], device["used_memory_bytes"]) == (15360 * MIB, 257 * MIB)


def test_a_driver_without_the_newest_process_list_is_read_all_the_same(tmp_path: Path):
    """Drivers before 510 have the list's second version only; nvidia-ml-py answers that with an error of its own kind."""
    old = build_driver(tmp_path, without=["nvmlDeviceGetMemoryInfo_v2", "nvmlDeviceGetComputeRunningProcesses_v3"])

    (device,) = old.see(BUSY_T4).devices

    assert (device["name"], device["total_memory_bytes"]) == ("Tesla T4", 15360 * MIB)
    assert device["processes"] in (None, [{"pid": 4711, "used_memory_bytes": 2 * GIB}, {"pid": 4712, "used_memory_bytes": GIB}])


def test_a_name_that_is_no_text_is_no_crash(driver: Driver):
    """Drivers 555.85 and 555.99 answered WSL with bytes that are no UTF-8 (wookayin/gpustat issue 170)."""
    (device,) = driver.see(T4.replace("gpu Tesla T4", "gpu \udcf8\udc95A")).devices

    assert device["total_memory_bytes"] == 15360 * MIB
    assert device["compute_capability"] == [7, 5]
