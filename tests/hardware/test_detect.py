"""This machine's GPUs as GPUs to plan for."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from memplan.hardware.catalog import find_gpu
from memplan.hardware.detect import spec_of, visible_devices
from memplan.hardware.nvml import NvmlDevice, NvmlMachine
from memplan.hardware.torch_install import TorchBuild
from tests.hardware.nvml_driver import A100, GB10, GIB, MIB, MIG, MIG_PARENT, T4, Driver, no_driver
from tests.standin.conftest import torch_build
from tests.standin.machine import machine, uuid_of

__all__ = ["torch_build"]


def test_a_card_of_the_catalogue_offers_what_the_catalogue_says(driver: Driver):
    """NVML's total is the chip's; programs get less, as measured for a T4 (DESIGN section 9)."""
    (card,) = driver.see(T4).gpus

    uuid = "GPU-7474aaaa-1111-2222-3333-444455556666"
    assert card == find_gpu("t4").model_copy(update={"origin": "found on this machine", "uuid": uuid})


def test_what_others_hold_is_not_free(driver: Driver):
    """Five GiB of somebody else's, on a GPU that offers 81153.75 MiB."""
    (card,) = driver.see(A100.replace("5920 0", f"5920 {5 * GIB}")).gpus

    assert card.others_used_bytes == 5 * GIB
    assert card.free_memory_bytes == find_gpu("a100-80").total_memory_bytes - 5 * GIB
    assert "5.00 GiB in use by others now" in card.origin


def test_a_full_card_has_nothing_left(driver: Driver):
    """Others can hold more than a program could ever have: the total that NVML tells is larger."""
    (card,) = driver.see(T4.replace("106127360 0", f"106127360 {15360 * MIB - 269484032}")).gpus

    assert card.others_used_bytes == card.total_memory_bytes
    assert card.free_memory_bytes == 0


def test_two_unlike_cards_are_two_cards(driver: Driver):
    """In the driver's order."""
    seen = driver.see(A100 + T4)

    assert [card.name for card in seen.gpus] == ["NVIDIA A100-SXM4-80GB", "Tesla T4"]


def test_a_card_cut_into_instances_is_its_instances(driver: Driver):
    """No program can have the whole of it; an instance offers what NVML or the catalogue tells, whichever is less."""
    seen = driver.see(MIG + T4)  # a GPU that is not cut counts first

    assert [card.name for card in seen.gpus] == ["Tesla T4", "NVIDIA A100-SXM4-80GB MIG 3g.40gb", "NVIDIA A100-SXM4-80GB MIG 1g.10gb"]
    assert [(card.multiprocessors, card.compute_capability) for card in seen.gpus] == [(40, (7, 5)), (42, (8, 0)), (14, (8, 0))]
    assert [card.others_used_bytes for card in seen.gpus] == [0, 5 * GIB, 0]
    assert seen.gpus[2].total_memory_bytes <= 10_200_547_328


def test_wsl_is_planned_as_any_machine(driver: Driver):
    """The second memory call answers 999 there; the first one's figures do."""
    (card,) = driver.see(f"refuse nvmlDeviceGetMemoryInfo_v2 999\n{T4}").gpus

    assert card.total_memory_bytes == find_gpu("t4").total_memory_bytes
    assert not card.unified_memory


@pytest.mark.parametrize("code", [3, 4, 15])
def test_a_card_is_planned_for_whatever_one_call_refuses(driver: Driver, code: int):
    """Not supported, no permission, lost: where the driver does not tell a fact, the catalogue does."""
    calls = ["UUID", "MemoryInfo", "CudaComputeCapability", "ComputeRunningProcesses_v3", "MigMode"]

    whole, nameless, *seen = driver.see_each([T4, *(f"refuse nvmlDeviceGet{call} {code}\n{T4}" for call in ["Name", *calls])])

    assert [each.gpus for each in seen[1:]] == [whole.gpus] * (len(calls) - 1)
    assert seen[0].gpus == [whole.gpus[0].model_copy(update={"uuid": None})]
    assert [(card.name, card.compute_capability, card.unified_memory) for card in nameless.gpus] == [("GPU 0", (7, 5), False)]


def test_a_card_without_a_name_is_its_number(driver: Driver):
    """The second GPU, refused its name."""
    assert [card.name for card in driver.see(f"refuse nvmlDeviceGetName 4 1\n{T4}{A100}").gpus] == ["Tesla T4", "GPU 1"]


def test_a_known_card_that_tells_no_memory_is_taken_as_the_catalogue_has_it(driver: Driver):
    """And says so. That it shares the host's memory does not follow."""
    (card,) = driver.see(T4.replace("memory 16106127360 0 269484032\n", "")).gpus

    assert card.total_memory_bytes == find_gpu("t4").total_memory_bytes
    assert "the catalogue's is taken" in card.origin
    assert not card.unified_memory


def test_a_card_that_nothing_is_known_of_is_an_error_with_the_reason(driver: Driver):
    """No name in the catalogue, no memory from the driver: there is nothing to plan for."""
    seen = driver.see("gpu NVIDIA Thor\ncapability 11 0\n")

    assert seen.error == "the driver lists 1 GPU(s) but tells no memory size (memory: Not Supported; UUID: Not Supported)"
    assert 'gpu="a100-80"' in (seen.hint or "")


def test_one_card_that_tells_nothing_does_not_hide_the_other(driver: Driver):
    """A GPU that fell off the bus beside one that is well."""
    seen = driver.see(f"refuse nvmlDeviceGetHandleByIndex_v2 15 0\n{A100}{T4}")

    assert [card.name for card in seen.gpus] == ["Tesla T4"]


# One name, two sizes


def device(**changes: object) -> NvmlDevice:
    whole = NvmlDevice(0, "GPU-1", "Tesla T4", 15360 * MIB, 0, (7, 5))
    return replace(whole, **changes)  # type: ignore[arg-type]


@pytest.mark.parametrize(("name", "total_mib"), [("NVIDIA GeForce RTX 3080", 12288), ("NVIDIA GeForce RTX 4060 Ti", 8188)])
def test_a_card_of_another_size_is_not_the_catalogues(name: str, total_mib: int):
    """The RTX 3080 was sold with 10 and with 12 GB under one name, the RTX 4060 Ti with 16 and with 8."""
    card = spec_of(device(name=name, total_memory_bytes=total_mib * MIB, compute_capability=(8, 6)))

    assert card is not None
    assert card.total_memory_bytes <= total_mib * MIB
    assert card.total_memory_bytes > 0.95 * total_mib * MIB
    assert (card.multiprocessors, card.marketing_gb) == (None, None)


def test_a_card_with_ecc_offers_no_more_than_the_driver_tells():
    """An RTX A6000 with ECC on has 46068 MiB of its 49140."""
    card = spec_of(device(name="NVIDIA RTX A6000", total_memory_bytes=46068 * MIB))

    assert card is not None
    assert card.total_memory_bytes <= 46068 * MIB
    assert card.multiprocessors == 84


def test_a_card_outside_the_catalogue_offers_what_the_driver_does_not_keep(driver: Driver):
    """An RTX 3070 of 8192 MiB, of which the driver keeps 225: no program can have those."""
    (card,) = driver.see(f"gpu NVIDIA GeForce RTX 3070\nmemory {8192 * MIB} 0 {225 * MIB}\ncapability 8 6\n").gpus

    assert card.total_memory_bytes == (8192 - 225) * MIB
    assert (card.name, card.compute_capability, card.multiprocessors) == ("NVIDIA GeForce RTX 3070", (8, 6), None)


# Unified memory


def meminfo_of(folder: Path, *lines: str) -> Path:
    path = folder / "meminfo"
    path.write_text("".join(f"{line}\n" for line in lines))
    return path


def test_unified_memory_is_the_hosts(driver: Driver, tmp_path: Path):
    """GB10: NVML supports neither memory call; a third of what the host has is in use, by whatever program."""
    meminfo = meminfo_of(
        tmp_path, "MemTotal:       127600748 kB", "MemFree: 1 kB", "MemAvailable:    85067165 kB", "HugePages_Total: 0", ""
    )

    (card,) = driver.see(GB10, meminfo=meminfo).gpus

    assert (card.name, card.unified_memory, card.compute_capability, card.multiprocessors) == ("NVIDIA GB10", True, (12, 1), 48)
    assert card.total_memory_bytes == 127_600_748 * 1024
    assert card.free_memory_bytes == 85_067_165 * 1024
    assert "unified memory" in card.origin


def test_unified_memory_without_what_is_available_is_the_total(driver: Driver, tmp_path: Path):
    """Kernels before 3.14 do not say MemAvailable."""
    (card,) = driver.see(GB10, meminfo=meminfo_of(tmp_path, "MemTotal: 1024 kB")).gpus

    assert (card.total_memory_bytes, card.others_used_bytes) == (MIB, 0)


@pytest.mark.parametrize("lines", [None, [], ["MemTotal: lots", "gar\tbage"]])
def test_unified_memory_of_a_host_that_says_nothing_is_the_catalogues(driver: Driver, tmp_path: Path, lines: list[str] | None):
    """No /proc/meminfo, an empty one, one without figures."""
    meminfo = tmp_path / "none" if lines is None else meminfo_of(tmp_path, *lines)

    (card,) = driver.see(GB10, meminfo=meminfo).gpus

    assert card.total_memory_bytes == find_gpu("gb10").total_memory_bytes
    assert card.unified_memory


# No GPU


@pytest.mark.parametrize(
    ("machine", "environment", "error"),
    [
        ("", {}, "the NVIDIA driver answers, but this machine has no GPU"),
        (T4 + A100, {"CUDA_VISIBLE_DEVICES": ""}, "CUDA_VISIBLE_DEVICES='' hides all 2 GPU(s) of this machine"),
        (T4, {"CUDA_VISIBLE_DEVICES": "-1"}, "CUDA_VISIBLE_DEVICES='-1' hides all 1 GPU(s) of this machine"),
    ],
)
def test_no_card_is_an_error_that_says_why(driver: Driver, machine: str, environment: dict[str, str], error: str):
    """And a GPU can be named instead."""
    seen = driver.see(machine, **environment)

    assert (seen.gpus, seen.error) == ([], error)
    assert 'gpu="a100-80"' in (seen.hint or "")


def test_a_card_set_to_instances_that_has_none_is_not_blamed_on_a_variable(driver: Driver):
    """CUDA_VISIBLE_DEVICES is not set: MIG mode is what leaves no GPU."""
    seen = driver.see(MIG_PARENT)

    assert seen.gpus == []
    assert "CUDA_VISIBLE_DEVICES" not in (seen.error or "")
    assert "MIG" in (seen.error or "")
    assert driver.see(MIG_PARENT, CUDA_VISIBLE_DEVICES="0").error == seen.error


def test_no_driver_is_no_card(tmp_path: Path):
    """As on any laptop."""
    seen = no_driver(tmp_path).see(T4)

    assert seen.gpus == []
    assert "no NVIDIA driver" in (seen.error or "")


# CUDA_VISIBLE_DEVICES

THREE = NvmlMachine(
    "580",
    (
        device(index=0, uuid="GPU-aa11"),
        device(index=1, uuid="GPU-aa22"),
        device(index=2, uuid="GPU-bb33"),
    ),
)
CUT = NvmlMachine(
    "580",
    (
        device(index=0, uuid="GPU-aa11", mig_enabled=True),
        device(index=0, uuid="MIG-1f", is_mig=True, parent_index=0),
        device(index=1, uuid="MIG-2f", is_mig=True, parent_index=0),
        device(index=1, uuid="GPU-bb33"),
    ),
)


@pytest.mark.parametrize(
    ("variable", "visible"),
    [
        (None, "aa11 aa22 bb33"),
        ("0", "aa11"),
        ("1,0", "aa22 aa11"),
        (" 2 , 1 ", "bb33 aa22"),
        ("", ""),
        ("-1", ""),
        ("NoDevFiles", ""),
        ("0,-1,1", "aa11"),
        ("0,3,1", "aa11"),
        ("1,,0", "aa22"),
        ("GPU-aa22", "aa22"),
        ("GPU-bb", "bb33"),
        ("GPU-bb33,GPU-aa11", "bb33 aa11"),
        ("GPU-aa", ""),
        ("GPU-bb,GPU-aa,GPU-aa11", "bb33"),
        ("GPU-cc", ""),
        ("aa11", ""),
    ],
)
def test_the_variable_chooses_and_orders_the_cards(variable: str | None, visible: str):
    """As NVIDIA's CUDA programming guide says (5.2.1.1): the list ends at the first entry that names no GPU, or no single one."""
    assert [each.uuid for each in visible_devices(THREE, variable)] == [f"GPU-{uuid}" for uuid in visible.split()]


@pytest.mark.parametrize("variable", ["0,0", "1,0,1", "GPU-aa11,GPU-aa11", "GPU-aa11,GPU-bb33,GPU-aa11"])
def test_a_card_that_stands_twice_leaves_none(variable: str):
    """CUDA finds no device then (torch.cuda._parse_visible_devices: a repeated ordinal or id results in the empty set)."""
    assert visible_devices(THREE, variable) == []


@pytest.mark.parametrize(
    ("variable", "from_570", "before"),
    [
        (None, "GPU-bb33 MIG-1f MIG-2f", "MIG-1f"),
        ("0", "GPU-bb33", "GPU-bb33"),
        ("1", "MIG-1f", "MIG-1f"),
        ("0,1", "GPU-bb33 MIG-1f", "MIG-1f"),
        ("2", "", ""),
        ("MIG-2f", "MIG-2f", "MIG-2f"),
        ("MIG-2f,MIG-1f", "MIG-2f MIG-1f", "MIG-2f"),
        ("GPU-bb33", "GPU-bb33", "GPU-bb33"),
        ("GPU-bb33,MIG-2f", "GPU-bb33 MIG-2f", "MIG-2f"),
        ("GPU-aa11", "MIG-1f", "MIG-1f"),
        ("1,MIG-1f", "", ""),
        ("MIG-3f", "", ""),
    ],
)
def test_instances_are_chosen_by_uuid_or_by_the_number_of_their_card(variable: str | None, from_570: str, before: str):
    """A GPU in MIG mode is its first instance, and counts behind the others; before R570 one instance hides all other devices."""
    drivers = {"580.95.05": from_570, "570.26": from_570, "560.35.03": before, "535": before}

    seen = {version: visible_devices(replace(CUT, driver_version=version), variable) for version in drivers}

    assert {version: " ".join(each.uuid or "" for each in devices) for version, devices in seen.items()} == drivers


@pytest.mark.parametrize("driver_version", ["580", "535", None])
@pytest.mark.parametrize(("variable", "visible"), [("0", "MIG-1f"), ("1", "MIG-3f")])
def test_where_all_cards_are_cut_a_number_is_a_cards(driver_version: str | None, variable: str, visible: str):
    """The first instance of each."""
    first = CUT.devices[:3]
    second = (
        device(index=1, uuid="GPU-bb33", mig_enabled=True),
        device(index=0, uuid="MIG-3f", is_mig=True, parent_index=1),
        device(index=1, uuid="MIG-4f", is_mig=True, parent_index=1),
    )

    assert [each.uuid for each in visible_devices(NvmlMachine(driver_version, first + second), variable)] == [visible]


def test_a_card_without_an_instance_is_none():
    """In MIG mode, and not cut: neither its number nor its UUID names anything."""
    machine = NvmlMachine("580", (device(index=0, uuid="GPU-aa11", mig_enabled=True), device(index=1, uuid="GPU-bb33")))

    assert [visible_devices(machine, variable) for variable in ("1", "GPU-aa11")] == [[], []]
    assert visible_devices(machine, "0") == [machine.devices[1]]


def test_of_instances_that_are_alike_cuda_is_asked(torch_build: TorchBuild, driver: Driver):
    """Two of one size: CUDA shows the second (its UUID is that of the simulated GPU), whatever its driver's rules are."""
    seen_by_cuda = uuid_of(0).replace("GPU-", "MIG-")
    instance = "mig {slot} NVIDIA A100-SXM4-80GB MIG 1g.10gb\nuuid {uuid}\nmemory 10200547328 0 39845888\n"
    other = "MIG-11111010-1111-2222-3333-444455556666"
    text = MIG_PARENT + instance.format(slot=0, uuid=other) + instance.format(slot=1, uuid=seen_by_cuda)
    environment = machine(torch_build, driver, "a100-80")

    with_cuda = driver.see(text, **{name: value for name, value in environment.items() if name != "NVML_MACHINE"})
    without = driver.see(text)

    assert [card.uuid for card in with_cuda.gpus] == [seen_by_cuda]
    assert [card.uuid for card in without.gpus] == [other, seen_by_cuda]


@given(st.text(alphabet="0123456789-+, .GPUMIGab²٣", max_size=12) | st.text(max_size=12))
@example("²")
@example("9" * 5000)
def test_any_variable_leaves_cards_of_the_machine(variable: str):
    """Whatever stands in it: each GPU at most once, none from elsewhere, never a crash."""
    chosen = visible_devices(THREE, variable)

    assert [each for each in THREE.devices if each in chosen] == sorted(chosen, key=lambda each: each.index)


def test_the_variable_is_read_from_the_environment(driver: Driver):
    """Of the process that asks, in the order that it gives."""
    seen = driver.see(T4 + A100, CUDA_VISIBLE_DEVICES="GPU-a100,0")

    assert [card.name for card in seen.gpus] == ["NVIDIA A100-SXM4-80GB", "Tesla T4"]
